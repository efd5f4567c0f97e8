"""Grow the batch where the schedule would have let the learning rate fall (Smith et al. 2018; Seesaw 2025)."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from divebatch.errors import UsageError
from divebatch.measurement import Decision, Measurement
from divebatch.policies.bounds import Capped
from divebatch.policies.confidence import decided


@dataclass(frozen=True, slots=True)
class ScheduleToBatch(Capped):
    """The first batch size over the schedule's own rate, relative to its highest; works with every torch scheduler.

    During a warm-up the rate is the highest so far, so that growth begins where the rate begins to fall.
    """

    decides_within_epochs = True
    has_many_sizes = True

    def reachable(self, seen: Measurement) -> Collection[int]:
        return self.bounds.sizes(at_least=seen.first_batch_size)

    def next(self, seen: Measurement) -> Decision:
        """Return b0 / (lr_schedule / its highest), never below b0."""
        fallen_to = seen.lr_schedule_ratio
        if fallen_to is None:
            raise UsageError(f"{type(self).__name__} needs the schedule's own rate, and the measurement has none")
        wanted = math.nan if math.isnan(fallen_to) else math.inf
        if fallen_to > 0:
            wanted = seen.first_batch_size / fallen_to
        # 0.1 -> 0.02 must give 5 times the batch, not one sample less for a rounding error.
        wanted = round(wanted, 6) if math.isfinite(wanted) else wanted
        reason = f"the schedule stands at {fallen_to:g} of its highest rate"
        return decided(seen, wanted, self.bounds, at_least=seen.first_batch_size, reason=reason)


@dataclass(frozen=True, slots=True)
class SmithSchedule(ScheduleToBatch):
    """For SGD: where the schedule divides the learning rate by k, the batch grows by k and the rate stays.

    lr / b is always that of the schedule with the first batch, so at the cap the rest of the decay goes into the
    learning rate. That is the linear coupling, which it brings with it.

    >>> seen = Measurement(epoch=1, batch_size=128, first_batch_size=128, dataset_size=50_000, lr_schedule_ratio=0.2)
    >>> SmithSchedule(4096).next(seen).batch_size
    640

    Args:
        max_batch_size: The largest batch, in samples.
    """

    lr_coupling = "linear"


@dataclass(frozen=True, slots=True)
class Seesaw(ScheduleToBatch):
    """For Adam-like optimizers: where the rate would fall by k, it falls by sqrt(k) and the batch grows by k.

    That is the square-root coupling, which it brings with it.

    Args:
        max_batch_size: The largest batch, in samples.
    """

    lr_coupling = "sqrt"
