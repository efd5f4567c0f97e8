"""Number formats (fp32, TF32, bf16) and what else a GPU is told."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from divebatch.errors import ArgumentError

PRECISIONS = ("fp32", "tf32", "bf16")
"""Weights are float32 in all. `tf32` multiplies with ten bits of mantissa on GPUs that can; `bf16` is autocast."""


def require_precision(name: str) -> None:
    """Raise for an unknown one."""
    if name not in PRECISIONS:
        raise ArgumentError(f"unknown precision {name!r}; known: {', '.join(PRECISIONS)}")


@contextmanager
def device_settings(precision: str, device: torch.device) -> Iterator[None]:
    """Inside, a GPU multiplies float32 as `precision` says and tries its convolution kernels once for each shape.

    What was set before is put back.
    """
    require_precision(precision)
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
    cudnn.benchmark = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
