"""How a run uses its device."""

from dataclasses import dataclass

from divebatch.errors import ArgumentError
from divebatch.lab.training.precision import require_precision
from divebatch.norms.meter import MODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Speed, memory and rounding of a run; the method it follows is stated elsewhere.

    `cuda_graphs` lets compiled passes be replayed on a GPU, at the price of some memory. `norms` is the mode of
    per-sample norms where they are measured. `micro_batch_size` is the most samples of one backward pass: larger
    batches are cut up, with BatchNorm's statistics those of the parts.
    """

    precision: str = "fp32"
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = True
    norms: str = "exact"
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        require_precision(self.precision)
        if self.norms not in MODES:
            raise ArgumentError(f"unknown norms {self.norms!r}; known: {', '.join(MODES)}")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ArgumentError(f"micro_batch_size must be at least 1, got {self.micro_batch_size}")
