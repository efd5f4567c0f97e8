"""Sums of numbers and gradients over backward passes, on the device until they are read."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes."""


def plus(total: Any, more: Any) -> Any:
    """Return `total + more`, in place once it is a tensor: a recorded pass that is replayed must find the sum there."""
    return total.add_(more) if isinstance(total, Tensor) else total + more


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Tell whether no entry of any tensor is NaN or infinite: a single truth, on the device."""
    # The largest entry and not the root of squares, which can be too large for a float by itself.
    dense = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors]
    return torch.stack(torch._foreach_norm(dense, torch.inf)).isfinite().all()


def kept(tensors: Sequence[Tensor], keep: Tensor) -> list[Tensor]:
    """Return the tensors, or zeros in their place where `keep`, a single truth on the device, is false."""
    # As whole numbers: NaN times zero is NaN, but the bits of NaN times zero are those of 0.0.
    plain = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    bits = [each.view(_OF_SIZE[each.element_size()]) for each in plain]
    # Without reading `keep`, which would wait for the device, and by one operator for all.
    products = torch._foreach_mul(bits, keep.to(bits[0].dtype)) if bits else ()
    found = [product.view(each.dtype) for product, each in zip(products, plain, strict=True)]
    whole = zip(found, tensors, strict=True)
    return [torch.view_as_complex(each) if tensor.is_complex() else each for each, tensor in whole]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients are added up, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def addend(gradient: Tensor, total: Tensor) -> Tensor:
    """Return a gradient as it is added to a sum of gradients: dense, in the sum's type, cut off from the graph.

    Mostly it is that already: each needless operation is a microsecond or more, times the parameters, a step.
    """
    gradient = gradient.detach() if gradient.requires_grad else gradient
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient if gradient.dtype == total.dtype else gradient.to(total.dtype)
