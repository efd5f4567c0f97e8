"""Norms by hand-written GPU kernels, and the conditions for their use.

The kernels are tested against the plain path. They run on NVIDIA GPUs with bfloat16 tensor cores, if Triton is
installed (torch for GPUs includes it): for sketches in any type but float64, for exact norms in 16-bit types, and in
float32 if products may be rounded to TF32. DIVEBATCH_TRITON=0 in the environment disables them.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from shutil import which
from typing import Any

import torch
from torch import Tensor, nn

from divebatch.norms.sketch import Estimate, random_seeds

C_COMPILERS = (os.environ.get("CC", "cc"), "gcc", "clang")
"""C compilers with which Triton may build its launchers."""
AVAILABLE = find_spec("triton") is not None and torch.version.hip is None and any(map(which, C_COMPILERS))
# Of the process: the use of kernels depends on the machine; its environment sets it, and benchmarks switch it off.
ENABLED = AVAILABLE and os.environ.get("DIVEBATCH_TRITON") != "0"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_KERNEL_ENTRIES = 64
"""The most entries of a convolution's kernel: a sketch holds all of them in registers."""
MOST_SAMPLES = 65_535
"""The most samples: each needs one row of programs, and CUDA has no more rows."""
MOST_ENTRIES = 2**31
"""The most entries between the first and the last one of a sample: the kernels count them in 32 bits."""
LEAST_CAPABILITY = (8, 0)
"""The lowest compute capability of an NVIDIA GPU: the first with products of bfloat16 on tensor cores."""


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Enable or disable the kernels in this context, whatever the environment says."""
    global ENABLED
    before, ENABLED = ENABLED, AVAILABLE and on
    try:
        yield
    finally:
        ENABLED = before


def applies(left: Tensor, right: Tensor) -> bool:
    """Return whether the kernels can sketch gradients of `left` with inputs `right`, in the lower type of both."""
    if not ENABLED or not left.is_cuda or not all(_is_within_reach(tensor) for tensor in (left, right)):
        return False
    return bool(_is_capable(left.device.index))


def _is_within_reach(tensor: Tensor) -> bool:
    """Return whether a kernel can read a tensor: not under torch.func, no DTensor, and within the kernels' limits."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if not torch.compiler.is_compiling() and (type(tensor) not in (Tensor, nn.Parameter) or is_wrapped(tensor)):
        return False
    return tensor.dtype in DTYPES and 0 < len(tensor) <= MOST_SAMPLES and _span(tensor) < MOST_ENTRIES


def _span(tensor: Tensor) -> int:
    """Count the entries between the first and last of a sample; in a compiler those of all samples, as an upper bound.

    If asked for a gradient's strides, a compiler copies every gradient to fix its strides.
    """
    if torch.compiler.is_compiling():
        return tensor.numel()
    return sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))


def _is_capable(device_index: int | None) -> bool:
    return torch.cuda.get_device_capability(device_index) >= LEAST_CAPABILITY


def prepare_for_compiler() -> None:
    """Declare to the compiler that a device's capability never changes; loading the compiler takes a second."""
    torch.compiler.assume_constant_result(_is_capable)


def applies_exactly(left: Tensor, right: Tensor) -> bool:
    """Return whether the kernels can compute exact norms; in float32 tensor cores would round them."""
    return min(left.dtype.itemsize, right.dtype.itemsize) == 2 and applies(left, right)


def may_apply(left: Tensor, right: Tensor) -> bool:
    """Return whether the kernels may compute exact norms in float32, since torch may round products to TF32."""
    return left.dtype == right.dtype == torch.float32 and applies(left, right) and _may_round()


def _may_round() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # torch's newer switch makes the older one unreadable
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def conv2d_sq_norms(left: Tensor, right: Tensor, *geometry: Sequence[int], with_bias: bool = False) -> Tensor:
    """Return exact squared norms of the weight gradients of a convolution without groups, (B,).

    `left` (B, P, H, W), `right` (B, C, H', W'); `geometry`: kernel size, stride, zeros before each dimension, dilation.
    """
    from divebatch.norms.triton import kernels  # needs triton, which comes with torch for GPUs

    arguments: Any = (left, right, [*itertools.chain(*geometry)], with_bias)
    if torch.compiler.is_compiling():
        traced: Tensor = kernels.traced_sq_norms(*arguments)
        return traced
    with torch.cuda.device_of(left):
        return kernels.sq_norms(*arguments)


def conv2d_sketch(
    left: Tensor, right: Tensor, *geometry: Sequence[int], seed: Tensor | None = None, with_bias: bool = False
) -> Estimate:
    """Estimate these squared norms, with signs from `seed` (one int64 on the device) or from our own seed."""
    from divebatch.norms.triton import kernels

    seed = random_seeds(1, left.device) if seed is None else seed
    arguments: Any = (left, right, seed, [*itertools.chain(*geometry)], with_bias)
    if torch.compiler.is_compiling():
        sums = kernels.traced_sketch(*arguments)
    else:
        with torch.cuda.device_of(left):
            sums = kernels.sketch(*arguments)
    return Estimate(sums[:, 0], sums[:, 1].square() * 4)


def channel_sums(x: Tensor, dy: Tensor, mean: Tensor, inverse_std: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's gradients of a normalisation layer's weight and bias, (B, C) each. See the kernel."""
    from divebatch.norms.triton import kernels

    with torch.cuda.device_of(x):
        weight, bias = kernels.channel_sums(x, dy, mean, inverse_std).unbind(1)
    return weight, bias


def outer_sq_norms(left: Tensor, right: Tensor, *, with_bias: bool = False) -> Tensor:
    """Return exact ||sum_t left_t right_t^T||^2, (B,), for left (B, T, P) and right (B, T, C).

    With a bias the result includes ||sum_t left_t||^2, since a bias is the weight of an additional input of one.
    """
    return conv2d_sq_norms(_as_image(left), _as_image(right), *ONE_ENTRY, with_bias=with_bias)


def outer_sketch(left: Tensor, right: Tensor, *, seed: Tensor | None = None, with_bias: bool = False) -> Estimate:
    """Estimate ||sum_t left_t right_t^T||^2, (B,), with random signs."""
    return conv2d_sketch(_as_image(left), _as_image(right), *ONE_ENTRY, seed=seed, with_bias=with_bias)


ONE_ENTRY = ((1, 1), (1, 1), (0, 0), (1, 1))
"""The geometry of a convolution that is a linear layer at every position."""


def _as_image(x: Tensor) -> Tensor:
    """Return a view (B, C, T, 1) of (B, T, C)."""
    return x.mT[..., None]
