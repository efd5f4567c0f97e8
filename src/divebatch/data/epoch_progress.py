"""One pass over the data."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from divebatch.data.sampler import num_batches
from divebatch.errors import UsageError
from divebatch.ranks import RankShard

MANY_BATCHES = 10_000
"""After so many batches of a stream's first pass it may be endless."""


@dataclass(slots=True)
class EpochProgress:
    """One pass over the data, and how far it has come."""

    epoch: int
    """Counts from 0."""
    batch_size: int
    """The size in force; once the pass has ended, the one it ended with."""
    order: Tensor | Sequence[Any] | None
    """The indices of all its samples; None for a stream, and once the pass has ended."""
    drop_last: bool
    delivery_size: int | None = None
    """Samples of a delivered batch where that is not the batch size."""
    end_at: int | None = None
    """Samples after which the pass ends, where it is a part of a stream."""
    num_batches: int | None = None
    """Batches of the whole pass; None for a stream that does not know."""
    batches: int = 0
    """Batches delivered to the loop, not merely prefetched."""
    samples: int = 0
    """Samples delivered, of all ranks."""
    local_samples: int = field(default=0, compare=False)
    """Samples delivered to this rank by this process; those before a resume are not among them."""
    is_open: bool = True
    """False once its iterator is used up or was left."""
    seconds: float = field(default=0.0, compare=False)
    """From the first request for a batch to the end; a resumed pass counts from its resume. 0 before the end."""
    _begun_at: float = field(default=0.0, compare=False)
    _samples_before: int = field(default=0, compare=False)

    @property
    def samples_left(self) -> int:
        """How many samples are still to be delivered; 0 for a stream."""
        # Counted in samples and not in batches: exact however often the size has changed.
        return 0 if self.order is None else len(self.order) - self.samples

    @property
    def cut_size(self) -> int:
        """Samples of a delivered batch."""
        return self.delivery_size or self.batch_size

    @property
    def is_used_up(self) -> bool:
        """Whether all batches were delivered, even if the loop stopped before the iterator could say so."""
        return self.batches == self.num_batches if self.end_at is None else self.samples >= self.end_at

    @property
    def samples_per_second(self) -> float | None:
        """Speed of loading and training together; None where nothing was timed."""
        return (self.samples - self._samples_before) / self.seconds if self.seconds > 0 else None

    def resize(self, batch_size: int) -> None:
        """Cut what is left with another size. Of a stream some batches may be under way with the old one."""
        self.batch_size, self.num_batches = batch_size, None
        if self.order is not None:
            self.num_batches = self.batches + num_batches(self.samples_left, self.cut_size, drop_last=self.drop_last)
        elif self.end_at is not None:
            self.num_batches = self.batches + max(0, -(-(self.end_at - self.samples) // self.cut_size))

    def begin(self) -> None:
        """The loop asks for its first batch, or for the first after a resume."""
        self._begun_at, self._samples_before = time.perf_counter(), self.samples

    def count(self, shard: RankShard) -> None:
        """A batch is delivered."""
        # Deliveries count and not what workers have prefetched, so a state taken in the loop resumes at the next batch.
        self.batches += 1
        self.samples += shard.num_samples
        self.local_samples += shard.mine

    def end(self) -> None:
        """The loop is through."""
        self.seconds = time.perf_counter() - self._begun_at
        self.order = None  # the next pass draws its own, and two of them need not be held at a time

    def state_dict(self, *, with_order: bool) -> dict[str, Any]:
        """How far it has come; `with_order` where the order cannot be drawn again."""
        return {
            "batch_size": self.batch_size,
            "batches": self.batches,
            "samples": self.samples,
            # The order of a user's own sampler cannot be drawn again; ours follows from seed and epoch.
            "order": list(self.order) if with_order and self.order is not None else None,
        }


def warn_if_endless(current: EpochProgress) -> None:
    """Warn once where a first pass over a stream goes on and on: what is decided at its end would never be."""
    if current.batches == MANY_BATCHES and current.epoch == 0 and current.order is None and not current.num_batches:
        warnings.warn(
            f"{current.batches} batches of this stream were delivered and its end is not known: the batch size is "
            f"decided at the end of an epoch. Where the stream is endless, pass AdaptiveLoader(..., epoch_samples=N), "
            f"or Controller(..., every_steps=N) to decide within it",
            stacklevel=6,  # past the listeners and the loader to the loop
        )


def not_finished(current: EpochProgress | None) -> UsageError:
    """The error for a loop that says its epoch is over."""
    if current is None or current.batches == 0:
        return UsageError("no epoch has ended since the last step(): iterate over the loader to its end first")
    told = f"epoch {current.epoch + 1} has not ended: {current.batches} of {current.num_batches or '?'} batches"
    way_out = (
        ""
        if current.num_batches
        else (
            ". Where the stream is endless, pass AdaptiveLoader(..., epoch_samples=N): an epoch is N samples of it then"
        )
    )
    return UsageError(f"{told} were delivered{way_out}")
