"""Timetables: policies that measure nothing and count epochs, steps or samples."""

import math
import re
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

from divebatch.checks import require_count, require_positive
from divebatch.errors import ArgumentError
from divebatch.measurement import Decision, Measurement
from divebatch.policies.policy import Capped, Policy, times_first

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
ENTRY = re.compile(r"(\d+(?:\.\d+)?)([KMBT%]?):(\d+)")


@dataclass(frozen=True)
class Fixed(Policy):
    """A constant batch size, as in ordinary mini-batch SGD. This policy costs nothing and has no arguments.

    >>> Fixed().next(Measurement(epoch=1, batch_size=128, dataset_size=50_000)).batch_size
    128
    """

    decides_within_epochs = True

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=seen.batch_size)


@dataclass(frozen=True)
class AdaBatch(Capped):
    """AdaBatch (Devarakonda et al. 2018): a batch size multiplied by a factor every N epochs, up to a cap.

    Two versions exist. The DiveBatch paper does not change the learning rate (`lr_decay=1.0`); the original AdaBatch
    multiplies the rate by 0.75 at each doubling (`lr_decay=0.75`). At the cap neither changes any more. If the wanted
    size exceeds the dataset, the batch is as many whole first batches as fit. The learning rate is then multiplied by
    the size over the wanted size, as in the original.

    >>> AdaBatch(2048, lr_decay=0.75).next(Measurement(epoch=20, batch_size=128, dataset_size=50_000))
    Decision(batch_size=256, lr_factor=0.75, reason='epoch 20: times 2')

    Args:
        max_batch_size: The largest batch, in samples.
        factor: The factor of the batch size at each change, above 1.
        every_epochs: Epochs between two changes.
        lr_decay: The factor of the learning rate at each change.
    """

    epoch_settings = frozenset({"every_epochs"})

    _: KW_ONLY
    factor: float = 2
    every_epochs: int = 20
    lr_decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("every_epochs", self.every_epochs)
        require_positive("lr_decay", self.lr_decay)
        require_positive("factor", self.factor, above=1)

    def next(self, seen: Measurement) -> Decision:
        # At least one more sample: a small factor of a small batch would truncate to no growth at all.
        wanted = min(max(int(seen.batch_size * self.factor), seen.batch_size + 1), self.max_batch_size)
        most, first = seen.known_dataset_size, seen.first_batch_size
        grown = wanted if wanted <= most else most // first * first
        if seen.epoch % self.every_epochs or grown <= seen.batch_size:
            return Decision(batch_size=seen.batch_size)
        reason = f"epoch {seen.epoch}: times {grown / seen.batch_size:g}"
        return Decision(batch_size=grown, lr_factor=self.lr_decay * grown / wanted, reason=reason)


@dataclass(frozen=True)
class PadaDamp(Capped):
    """PadaDamp (Sievert): b0 + rate * step, a linear form of the growth of `AdaDamp`.

    Args:
        max_batch_size: The largest batch, in samples.
        rate: The number of samples by which the batch grows with each step.
    """

    decides_within_epochs = True
    has_many_sizes = True

    _: KW_ONLY
    rate: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("rate", self.rate)

    def next(self, seen: Measurement) -> Decision:
        factor = 1 + self.rate * seen.step / seen.first_batch_size
        return times_first(seen, factor, self.max_batch_size, f"after {seen.step} steps")


@dataclass(frozen=True)
class GeoDamp(Capped):
    """GeoDamp (Sievert): exponential growth, b0 * factor^(epoch // every_epochs).

    Args:
        max_batch_size: The largest batch, in samples.
        factor: The factor of the batch size at each change.
        every_epochs: Epochs between two changes.
    """

    epoch_settings = frozenset({"every_epochs"})

    _: KW_ONLY
    factor: float = 2
    every_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("factor", self.factor)
        require_count("every_epochs", self.every_epochs)

    def next(self, seen: Measurement) -> Decision:
        power = seen.epoch // self.every_epochs
        try:
            factor = float(self.factor) ** power
        except OverflowError:  # the cap applies to a very long run too
            factor = math.inf
        reason = f"epoch {seen.epoch}: {self.factor:g}^{power} times the first batch"
        return times_first(seen, factor, self.max_batch_size, reason)


@dataclass(frozen=True)
class SampleSchedule(Policy):
    """A timetable of batch sizes by samples seen, as in the training of large language models. Resuming is exact.

    >>> SampleSchedule("0:768 250B:1536", sequence_length=2048).entries()
    [(0, 768), (122070312, 1536)]

    Args:
        schedule: Entries "FROM:SIZE": from FROM on the batch size is SIZE, for instance "0:768 250B:1536". FROM counts
            samples or tokens; K, M, B and T stand for 10^3, 10^6, 10^9 and 10^12. "75%:40" starts after three quarters
            of `total_samples`.
        sequence_length: The number of tokens in a sample, if FROM counts tokens.
        total_samples: The number of samples in the whole training, for entries in percent.
    """

    decides_within_epochs = True
    run_settings = frozenset({"total_samples"})

    schedule: str
    _: KW_ONLY
    sequence_length: int = 1
    total_samples: int | None = None

    def __post_init__(self) -> None:
        require_count("sequence_length", self.sequence_length)
        if self.total_samples is not None:
            require_count("total_samples", self.total_samples)
        starts = [start for start, _ in self.entries()]
        if starts[:1] != [0] or any(later <= earlier for earlier, later in pairwise(starts)):
            raise ArgumentError(f"entries must begin at 0 and go upwards, got schedule={self.schedule!r}")

    def entries(self) -> list[tuple[int, int]]:
        """Return (first sample, batch size) of each entry, in whole samples."""
        if not isinstance(self.schedule, str):
            raise ArgumentError(f"entries must look like '0:768 250B:1536', got schedule={self.schedule!r}")
        return [self._entry(text) for text in self.schedule.split()]

    def _entry(self, text: str) -> tuple[int, int]:
        match = ENTRY.fullmatch(text)
        if match is None or int(match[3]) < 1:
            raise ArgumentError(f"entries must look like '0:768 250B:1536', got {text!r} in schedule={self.schedule!r}")
        whole, _, fraction = match[1].partition(".")
        # In whole numbers: as a float, a fraction times a power of ten may miss the sample.
        digits, places = int(whole + fraction), 10 ** len(fraction)
        if match[2] != "%":
            return digits * UNITS[match[2]] // places // self.sequence_length, int(match[3])
        if self.total_samples is None:
            raise ArgumentError(f"{text!r} is a part of the training: pass total_samples=..., its number of samples")
        return digits * self.total_samples // (100 * places), int(match[3])

    def next(self, seen: Measurement) -> Decision:
        start, size = max(entry for entry in self.entries() if entry[0] <= seen.samples)
        reason = f"from sample {start} on" if size != seen.batch_size else ""
        return Decision(batch_size=size, reason=reason, unclamped=size)

    def check_start(self, batch_size: int) -> None:
        first = self.entries()[0][1]
        if batch_size != first:
            raise ArgumentError(f"the schedule starts with batch size {first}, the loader with {batch_size}")
