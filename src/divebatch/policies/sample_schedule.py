"""A timetable in samples or tokens, in the way large language models are trained."""

import re
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

from divebatch.checks import require_count
from divebatch.errors import ArgumentError
from divebatch.measurement import Decision, Measurement
from divebatch.policies.policy import Policy

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
ENTRY = re.compile(r"(\d+(?:\.\d+)?)([KMBT%]?):(\d+)")


@dataclass(frozen=True, slots=True)
class SampleSchedule(Policy):
    """A timetable of batch sizes by the number of samples seen, so that a resumed run goes on exactly.

    >>> SampleSchedule("0:768 250B:1536", sequence_length=2048).entries()
    [(0, 768), (122070312, 1536)]

    Args:
        schedule: Entries "FROM:SIZE": from FROM on the batch size is SIZE, for instance "0:768 250B:1536". FROM counts
            samples, or tokens; K, M, B and T are thousands to millions of millions. "75%:40" is in force from three
            quarters of `total_samples` on.
        sequence_length: How many tokens a sample has, where FROM counts tokens.
        total_samples: Samples of the whole training, for entries in percent.
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
        # In whole numbers: a fraction times a power of ten may, as a float, miss the sample it names.
        digits, places = int(whole + fraction), 10 ** len(fraction)
        if match[2] == "%":
            return digits * self._total(text) // (100 * places), int(match[3])
        return digits * UNITS[match[2]] // places // self.sequence_length, int(match[3])

    def _total(self, text: str) -> int:
        if self.total_samples is None:
            raise ArgumentError(f"{text!r} is a part of the training: pass total_samples=..., its number of samples")
        return self.total_samples

    def reachable(self, seen: Measurement) -> Collection[int]:
        return {size for _, size in self.entries()}

    def next(self, seen: Measurement) -> Decision:
        start, size = max(entry for entry in self.entries() if entry[0] <= seen.samples)
        reason = f"from sample {start} on" if size != seen.batch_size else ""
        return Decision(batch_size=size, reason=reason, unclamped=size)

    def check_start(self, batch_size: int) -> None:
        first = self.entries()[0][1]
        if batch_size != first:
            raise ArgumentError(f"the schedule starts with batch size {first}, the loader with {batch_size}")
