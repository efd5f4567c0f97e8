"""One trip through the data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Pass:
    """One trip through the data, and how far it has come."""

    epoch: int
    """From 0."""
    batch_size: int
    """In force; the one it ended with where it has ended."""
    order: Tensor | Sequence[Any] | None
    num_batches: int | None
    """In the whole pass; None for a stream."""
    batches: int = 0
    """Delivered to the loop, not merely prefetched."""
    samples: int = 0
    local_samples: int = field(default=0, compare=False)
    """Of them on this rank, in this life."""
    is_open: bool = True
    """False once its iterator is used up or was left."""
    seconds: float = field(default=0.0, compare=False)
    """From the first request for a batch to the end, where it has ended; a resumed pass counts from its resume."""
    samples_before: int = field(default=0, compare=False)
    """Delivered in an earlier life."""

    @property
    def left(self) -> Tensor | Sequence[Any] | None:
        """The samples that are still to be delivered; None for a stream, which does not know."""
        return None if self.order is None else self.order[self.samples :]

    @property
    def samples_left(self) -> int:
        """How many those are; 0 for a stream."""
        return 0 if self.order is None else len(self.order) - self.samples

    @property
    def is_used_up(self) -> bool:
        """All batches delivered, even if the loop stopped before the iterator could say so."""
        return self.batches == self.num_batches

    @property
    def samples_per_second(self) -> float | None:
        """Loading and training together; None where nothing was timed."""
        return (self.samples - self.samples_before) / self.seconds if self.seconds > 0 else None

    def state_dict(self, *, with_order: bool) -> dict[str, Any]:
        """How far it has come; `with_order` where the order cannot be drawn again from (seed, epoch)."""
        return {
            "batch_size": self.batch_size,
            "batches": self.batches,
            "samples": self.samples,
            "order": list(self.order) if with_order and self.order is not None else None,
        }


def why_not_finished(current: Pass | None) -> str:
    """For a loop that says its epoch is over."""
    if current is None or current.batches == 0:
        return "no epoch has ended since the last step(): iterate over the loader to its end first"
    total = current.num_batches or "?"
    return f"epoch {current.epoch + 1} has not ended: {current.batches} of {total} batches were delivered"
