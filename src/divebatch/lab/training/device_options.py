"""How a run uses its device: number formats (fp32, TF32, bf16), the compiler, memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from divebatch.checks import require_choice, require_count
from divebatch.norms.meter import MODES

PRECISIONS = ("fp32", "tf32", "bf16")
"""Weights are float32 in all. `tf32` multiplies with ten bits of mantissa on GPUs that can; `bf16` is autocast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Speed, memory and rounding of a run; the method it follows is stated elsewhere.

    Args:
        precision: "fp32", "tf32" or "bf16"; weights are float32 in all of them.
        channels_last: whether images have that memory format.
        compile: whether full batches go through torch.compile.
        cuda_graphs: whether compiled passes may be recorded and replayed on a GPU, at the price of some memory.
        norms: "exact" or "sketch", the mode of per-sample norms where they are measured.
        micro_batch_size: the most samples of one backward pass; larger batches are cut up, with BatchNorm's statistics
            those of the parts. None: batches go through whole.
    """

    precision: str = "fp32"
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = True
    norms: str = "exact"
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        require_choice("precision", self.precision, PRECISIONS)
        require_choice("norms", self.norms, MODES)
        if self.micro_batch_size is not None:
            require_count("micro_batch_size", self.micro_batch_size)


@contextmanager
def device_settings(precision: str, device: torch.device) -> Iterator[None]:
    """Inside, a GPU multiplies float32 as `precision` says and tries its convolution kernels once for each shape.

    What was set before is put back.
    """
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
        # They are settings of the process: other code in it must find them as it left them.
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
