"""How numbers and gradients are added up over backward passes, on the device until somebody reads the sums."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from divebatch.errors import CheckpointError


def plus(total: Any, more: Any) -> Any:
    """`total + more`, in place once it is a tensor: a recorded pass that is replayed must find the sum there."""
    return total.add_(more) if isinstance(total, Tensor) else total + more


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters whose gradients are added up, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_shapes(what: str, there: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> None:
    """Raise where a checkpoint's tensors are not those of the parameters here."""
    for name in sorted({*there, *here}):
        was, now = (tuple(each[name].shape) if name in each else None for each in (there, here))
        if was != now:
            raise CheckpointError(
                f"the checkpoint's {what} are another model's: parameter '{name}' has shape {was} there and {now} here"
            )


def addend(gradient: Tensor, total: Tensor) -> Tensor:
    """A gradient as it is added to a sum of gradients: dense, in the sum's type, cut off from the graph.

    Mostly it is that already: each needless operation is a microsecond or more, times the parameters, a step.
    """
    gradient = gradient.detach() if gradient.requires_grad else gradient
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient if gradient.dtype == total.dtype else gradient.to(total.dtype)
