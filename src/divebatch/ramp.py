"""The growth of `Auto` as a timetable, for training loops whose data loader cannot be replaced."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from divebatch.checks import require_choice, require_count, require_coupling_power
from divebatch.errors import ArgumentError
from divebatch.policies.auto import growth, power_of, room, step_size

PLACES = 8192
"""The number of equal parts of a training at whose starts the schedule is evaluated."""

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
    "linear": lambda part: 1 - part,
    "constant": lambda part: 1.0,
}
"""Learning rates by name, as functions of the completed fraction of the training."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the training with one batch size.

    Args:
        first_sample: The samples seen before this part.
        batch_size: The batch size, in samples.
        steps: The number of optimizer steps; the last one may have a shorter batch.
        lr_factor: The factor of the schedule's own rate at the start of this part.
    """

    first_sample: int
    batch_size: int
    steps: int
    lr_factor: float


class Ramp:
    """Batch size and rate factor as functions of the samples seen; there is no state, so resuming is exact.

    >>> ramp = Ramp(batch_size=64, max_batch_size=512, schedule="cosine", total_samples=100_000)
    >>> ramp.at(0), ramp.at(70_000)
    ((64, 1.0), (256, 2.0))

    Args:
        batch_size: The first batch size, in samples.
        max_batch_size: The largest batch size, in samples.
        schedule: The learning rate in any unit, as a function of the completed fraction of the training; or "cosine" or
            "linear" for a decay to zero without warm-up, or "constant".
        total_samples: The number of samples in the whole training.
        lr_coupling: How the rate follows the batch size: "sqrt" for Adam-like optimizers and Muon, "linear" for SGD, or
            a power of the batch size.
    """

    def __init__(
        self,
        batch_size: int,
        max_batch_size: int,
        schedule: str | Callable[[float], float],
        total_samples: int,
        *,
        lr_coupling: str | float = "sqrt",
    ) -> None:
        for name, value in (("batch_size", batch_size), ("max_batch_size", max_batch_size)):
            require_count(name, value)
        require_count("total_samples", total_samples)
        if max_batch_size < batch_size:
            raise ArgumentError(f"max_batch_size={max_batch_size} is below batch_size={batch_size}")
        if isinstance(schedule, str):
            require_choice("schedule", schedule, tuple(SCHEDULES))
        if isinstance(lr_coupling, str):
            require_choice("lr_coupling", lr_coupling, ("sqrt", "linear"))
        else:
            require_coupling_power("lr_coupling", lr_coupling)
        self.batch_size, self.max_batch_size, self.total_samples = batch_size, max_batch_size, total_samples
        self._power = power_of(lr_coupling)
        self._course = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
        rates = [self._rate(place / PLACES) for place in range(PLACES + 1)]
        self._highest = max(rates)
        if not self._highest > 0:
            raise ArgumentError("schedule gives no rate above 0")
        self._starts, self._sizes = self._changes(rates)

    def at(self, samples: int) -> tuple[int, float]:
        """Return the batch size of the next step, and its factor of the schedule's own rate."""
        size = self._sizes[bisect_right(self._starts, max(samples, 0)) - 1]
        fallen_to = self._rate(min(1.0, samples / self.total_samples)) / self._highest
        followed = float((size / self.batch_size) ** self._power)
        return size, min(followed, max(1.0, 1 / fallen_to if fallen_to > 0 else math.inf))

    def timetable(self) -> list[Stretch]:
        """Return the parts of the training with constant batch size, in order."""
        found: list[Stretch] = []
        samples = 0
        while samples < self.total_samples:
            size, factor = self.at(samples)
            later = [start for start in self._starts if start > samples]
            end = min(later[0] if later else self.total_samples, self.total_samples)
            steps = math.ceil((end - samples) / size)
            found.append(Stretch(samples, size, steps, factor))
            samples += steps * size
        return found

    def samples_before(self, step: int) -> int:
        """Return the samples seen before optimizer step `step`, counted from 0, if all steps follow the timetable."""
        for each in self.timetable():
            if step < each.steps:
                return each.first_sample + step * each.batch_size
            step -= each.steps
        return self.total_samples

    @property
    def steps(self) -> int:
        """The number of optimizer steps in the whole training."""
        return sum(each.steps for each in self.timetable())

    def _rate(self, part: float) -> float:
        rate = float(self._course(part))
        if not 0 <= rate < math.inf:
            raise ArgumentError(f"schedule({part:.4g}) must be a rate from 0 up, got {rate!r}")
        return rate

    def _changes(self, rates: list[float]) -> tuple[list[int], list[int]]:
        """Return the starts of the sizes, and the sizes, which only grow."""
        starts, sizes, highest = [0], [self.batch_size], 0.0
        for place, rate in enumerate(rates[:-1]):
            highest = max(highest, rate)
            samples = math.ceil(place * self.total_samples / PLACES)
            fallen_to = rate / highest if highest else 1.0
            most = min(self.max_batch_size, room(samples, self.total_samples))
            size = step_size(self.batch_size, growth(fallen_to, samples / self.total_samples), most)
            if size > sizes[-1]:
                starts.append(samples)
                sizes.append(size)
        return starts, sizes
