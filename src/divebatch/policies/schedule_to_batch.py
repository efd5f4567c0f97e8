"""Grow the batch where the schedule would have let the learning rate fall (Smith et al. 2018; Seesaw 2025)."""

import math
from dataclasses import dataclass

from divebatch.checks import require_count
from divebatch.errors import UsageError
from divebatch.measurement import Decision, Measurement
from divebatch.policies.bounds import Bounds, require_start_under_cap
from divebatch.policies.confidence import decided
from divebatch.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class ScheduleToBatch(Policy):
    """The first batch size over the schedule's own course, relative to its start; works with every torch scheduler.

    The course counts from the schedule's first value, so a warm-up within it delays all growth until the rate has come
    down to that value again.
    """

    decides_within_epochs = True
    has_many_sizes = True

    max_batch_size: int

    def __post_init__(self) -> None:
        require_count("max_batch_size", self.max_batch_size)

    def next(self, seen: Measurement) -> Decision:
        """b0 / (lr_schedule / lr_0), never below b0."""
        course = seen.lr_schedule_ratio
        if course is None:
            raise UsageError(f"{type(self).__name__} needs the schedule's course, and the measurement has none")
        wanted = seen.start / course if course > 0 else math.nan if math.isnan(course) else math.inf
        bounds = Bounds(min(seen.start, self.max_batch_size), self.max_batch_size)
        # 0.1 -> 0.02 must give 5 times the batch, not one sample less for a rounding error.
        wanted = round(wanted, 6) if math.isfinite(wanted) else wanted
        return decided(seen, wanted, bounds, monotone=False, reason=f"the schedule stands at {course:g} of its start")

    def check_start(self, batch_size: int) -> None:
        """Raise if the first batch is above the cap."""
        require_start_under_cap(batch_size, self.max_batch_size)


@dataclass(frozen=True, slots=True)
class Smith(ScheduleToBatch):
    """For SGD: where the schedule divides the learning rate by k, the batch grows by k and the rate stays.

    lr / b is always that of the schedule with the first batch, so at the cap the rest of the decay goes into the
    learning rate. That is the linear coupling, which must be chosen with it.

    >>> seen = Measurement(epoch=1, batch_size=128, first_batch_size=128, dataset_size=50_000, lr_schedule_ratio=0.2)
    >>> Smith(4096).next(seen).batch_size
    640
    """

    lr_coupling = "linear"


@dataclass(frozen=True, slots=True)
class Seesaw(ScheduleToBatch):
    """For Adam-like optimizers: where the rate would fall by k, it falls by sqrt(k) and the batch grows by k.

    That is the square-root coupling, which must be chosen with it.
    """

    lr_coupling = "sqrt"
