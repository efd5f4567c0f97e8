"""How numbers and gradients are added up over backward passes, on the device until somebody reads the sums."""

from typing import Any

from torch import Tensor


def plus(total: Any, more: Any) -> Any:
    """`total + more`, in place once it is a tensor: a recorded pass that is replayed must find the sum there."""
    return total.add_(more) if isinstance(total, Tensor) else total + more


def addend(gradient: Tensor, total: Tensor) -> Tensor:
    """A gradient as it is added to a sum of gradients: dense, in the sum's type, cut off from the graph.

    Mostly it is that already: each needless operation is a microsecond or more, times the parameters, a step.
    """
    gradient = gradient.detach() if gradient.requires_grad else gradient
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient if gradient.dtype == total.dtype else gradient.to(total.dtype)
