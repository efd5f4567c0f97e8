"""Sums of numbers and gradients over backward passes, kept on the device until they are read."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by their size in bytes."""


def plus(total: Any, more: Any) -> Any:
    """Return `total + more`, in place once `total` is a tensor, since replays of a recorded pass add to that tensor."""
    return total.add_(more) if isinstance(total, Tensor) else total + more


def are_finite(tensors: Sequence[Tensor]) -> Tensor | bool:
    """Return whether all entries of all tensors are finite, as a boolean tensor if they are on a device."""
    # The largest entry, not the root of squares, which can overflow by itself.
    dense = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors]
    largest = torch.stack(torch._foreach_norm(dense, torch.inf))
    return all(map(math.isfinite, largest.tolist())) if is_at_hand(largest) else largest.isfinite().all()


def is_at_hand(tensor: Tensor) -> bool:
    """Return whether reading the tensor waits for no device. Python's numbers then take a tenth of the time."""
    return tensor.is_cpu


def zero_unless(is_true: Any, number: Any) -> Any:
    """Return the number, or 0: tensors if the truth is on a device, else plain numbers."""
    if isinstance(is_true, Tensor):
        return torch.where(is_true, number, 0.0)
    return number if is_true else 0.0


def kept(tensors: Sequence[Tensor], keep: Tensor) -> list[Tensor]:
    """Return the tensors, or zeros of their shapes if `keep`, a boolean tensor on the device, is false."""
    # As integers: NaN times zero is NaN, but the bits of NaN times zero are those of 0.0.
    plain = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    bits = [each.view(_OF_SIZE[each.element_size()]) for each in plain]
    # Without reading `keep`, which would wait for the device, and with one operator for all.
    products = torch._foreach_mul(bits, keep.to(bits[0].dtype)) if bits else ()
    found = [product.view(each.dtype) for product, each in zip(products, plain, strict=True)]
    whole = zip(found, tensors, strict=True)
    return [torch.view_as_complex(each) if tensor.is_complex() else each for each, tensor in whole]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients are added up, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def addend(gradient: Tensor, total: Tensor) -> Tensor:
    """Return a gradient in the form for a sum of gradients: dense, of the sum's type, detached from the graph.

    Most gradients need no change, and each needless operation costs a microsecond or more per parameter and step.
    """
    gradient = gradient.detach() if gradient.requires_grad else gradient
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient if gradient.dtype == total.dtype else gradient.to(total.dtype)
