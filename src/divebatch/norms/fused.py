"""Norms by hand-written GPU kernels where they apply; the plain path stays, and is what they are tested against.

Off unless the environment says DIVEBATCH_FUSED=1: the kernels are checked by Triton's interpreter and have not been
timed on a GPU yet.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from divebatch.norms.sketch import Estimate, random_seed

AVAILABLE = find_spec("triton") is not None
ENABLED = AVAILABLE and os.environ.get("DIVEBATCH_FUSED") == "1"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FEWEST_POSITIONS = 128
"""With fewer output positions the Gram form of the plain path is less work than the gradient itself."""


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Inside, the kernels are used where they apply, or not at all, whatever the environment says."""
    global ENABLED
    before, ENABLED = ENABLED, AVAILABLE and on
    try:
        yield
    finally:
        ENABLED = before


def applies_exactly(left: Tensor, right: Tensor) -> bool:
    """The same for exact norms: in float32 tensor cores would round what must be exact."""
    return applies(left, right) and left.dtype.itemsize == 2 and left.shape[2:].numel() >= FEWEST_POSITIONS


def applies(left: Tensor, right: Tensor) -> bool:
    """Whether the kernels can take gradients `left` (B, P, H, W) with inputs `right` (B, C, H, W)."""
    if not ENABLED or not left.is_cuda or left.ndim != 4 or left.shape[1] == 1:
        return False
    return left.dtype == right.dtype and left.dtype in DTYPES


def conv2d_sq_norms(left: Tensor, right: Tensor, *geometry: Sequence[int]) -> Tensor:
    """(B,): exact squared norms of the weight gradients of a convolution without groups.

    `geometry`: kernel size, stride, zeros before each dimension, dilation.
    """
    sq_norms: Tensor = _conv2d_sq_norms(left, right, *map(list, geometry))
    return sq_norms


def conv2d_sketch(left: Tensor, right: Tensor, *geometry: Sequence[int]) -> Estimate:
    """Estimates of the same."""
    sums = _conv2d_sketch(left, right, random_seed(left.device), *map(list, geometry))
    return Estimate(sums[:, 0], sums[:, 1].square() * 4)


@torch.library.custom_op("divebatch::conv2d_sketch", mutates_args=())
def _conv2d_sketch(
    left: Tensor,
    right: Tensor,
    seed: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    from divebatch.norms.triton_kernels import conv2d_sketch  # needs triton, which comes with torch for GPUs

    return conv2d_sketch(left, right, seed, kernel_size, stride, padding, dilation)


@_conv2d_sketch.register_fake
def _(left: Tensor, *_: Any) -> Tensor:
    return left.new_empty((left.shape[0], 2), dtype=torch.float32)


@torch.library.custom_op("divebatch::conv2d_sq_norms", mutates_args=())
def _conv2d_sq_norms(
    left: Tensor, right: Tensor, kernel_size: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    from divebatch.norms.triton_kernels import conv2d_sq_norms

    return conv2d_sq_norms(left, right, kernel_size, stride, padding, dilation)


@_conv2d_sq_norms.register_fake
def _(left: Tensor, *_: Any) -> Tensor:
    return left.new_empty((left.shape[0],), dtype=torch.float32)
