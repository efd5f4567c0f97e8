"""Norms by hand-written GPU kernels where they apply; the plain path stays, and is what they are tested against.

They are used on NVIDIA GPUs with tensor cores for bfloat16, where Triton is installed (it comes with torch for GPUs):
for sketches in any type, and for exact norms in 16-bit types. DIVEBATCH_TRITON=0 in the environment switches them off.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from divebatch.norms.sketch import Estimate, random_seeds

AVAILABLE = find_spec("triton") is not None and torch.version.hip is None
ENABLED = AVAILABLE and os.environ.get("DIVEBATCH_TRITON") != "0"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_KERNEL_ENTRIES = 64
"""Of a convolution's kernel: a sketch holds all of them in registers."""
LEAST_CAPABILITY = (8, 0)
"""Of an NVIDIA GPU: the first with products of bfloat16 on tensor cores."""


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Inside, the kernels are used where they apply, or not at all, whatever the environment says."""
    global ENABLED
    before, ENABLED = ENABLED, AVAILABLE and on
    try:
        yield
    finally:
        ENABLED = before


def applies(left: Tensor, right: Tensor) -> bool:
    """Whether the kernels can sketch gradients of `left` with inputs `right`: of a batch, of one type, on a GPU."""
    if not ENABLED or not left.is_cuda or left.dtype != right.dtype or left.dtype not in DTYPES:
        return False
    return bool(_is_capable(left.device.index))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_capable(device_index: int | None) -> bool:
    return torch.cuda.get_device_capability(device_index) >= LEAST_CAPABILITY


def applies_exactly(left: Tensor, right: Tensor) -> bool:
    """The same for exact norms: in float32 tensor cores would round what must be exact."""
    return applies(left, right) and left.dtype.itemsize == 2


def may_apply(left: Tensor, right: Tensor) -> bool:
    """Whether they are worth a try for exact norms in float32, where the user lets torch round products to TF32."""
    return torch.get_float32_matmul_precision() != "highest" and applies(left, right)


def conv2d_sq_norms(left: Tensor, right: Tensor, *geometry: Sequence[int], with_bias: bool = False) -> Tensor:
    """(B,): exact squared norms of the weight gradients of a convolution without groups.

    `left` (B, P, H, W), `right` (B, C, H', W'); `geometry`: kernel size, stride, zeros before each dimension, dilation.
    """
    from divebatch.norms import triton_kernels  # needs triton, which comes with torch for GPUs

    run: Any = triton_kernels.traced_sq_norms if torch.compiler.is_compiling() else triton_kernels.sq_norms
    sq_norms: Tensor = run(left, right, *map(list, geometry), with_bias)
    return sq_norms


def conv2d_sketch(
    left: Tensor, right: Tensor, *geometry: Sequence[int], seed: Tensor | None = None, with_bias: bool = False
) -> Estimate:
    """Estimates of the same, with signs by `seed` (one int64 on the device) or by one of our own."""
    from divebatch.norms import triton_kernels

    seed = random_seeds(1, left.device) if seed is None else seed
    run: Any = triton_kernels.traced_sketch if torch.compiler.is_compiling() else triton_kernels.sketch
    sums: Tensor = run(left, right, seed, *map(list, geometry), with_bias)
    return Estimate(sums[:, 0], sums[:, 1].square() * 4)


def channel_sums(x: Tensor, dy: Tensor, mean: Tensor, inverse_std: Tensor) -> tuple[Tensor, Tensor]:
    """(B, C) each: what a normalisation layer's weight and bias get from each sample. See the kernel."""
    from divebatch.norms import triton_kernels

    weight, bias = triton_kernels.channel_sums(x, dy, mean, inverse_std).unbind(1)
    return weight, bias


def outer_sq_norms(left: Tensor, right: Tensor, *, with_bias: bool = False) -> Tensor:
    """(B,): ||sum_t left_t right_t^T||^2, exact, of left (B, T, P) and right (B, T, C).

    With a bias ||sum_t left_t||^2 is in it: a bias is the weight of one more input, which is always one.
    """
    return conv2d_sq_norms(_as_image(left), _as_image(right), *ONE_ENTRY, with_bias=with_bias)


def outer_sketch(left: Tensor, right: Tensor, *, seed: Tensor | None = None, with_bias: bool = False) -> Estimate:
    """Estimates of the same."""
    return conv2d_sketch(_as_image(left), _as_image(right), *ONE_ENTRY, seed=seed, with_bias=with_bias)


ONE_ENTRY = ((1, 1), (1, 1), (0, 0), (1, 1))
"""Geometry of a convolution that is a linear layer on every position."""


def _as_image(x: Tensor) -> Tensor:
    """(B, T, C) -> (B, C, T, 1): a view."""
    return x.mT[..., None]
