"""How a run uses its device."""

from dataclasses import dataclass

from divebatch.checks import require_choice, require_count
from divebatch.lab.training.precision import require_precision
from divebatch.norms.meter import MODES


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
        require_precision(self.precision)
        require_choice("norms", self.norms, MODES)
        if self.micro_batch_size is not None:
            require_count("micro_batch_size", self.micro_batch_size)
