"""Policies that grow the batch as the learning rate schedule falls (Smith et al. 2018; Seesaw 2025)."""

import math
from dataclasses import dataclass

from divebatch.errors import UsageError
from divebatch.measurement import Decision, Measurement
from divebatch.policies.policy import Capped, decided


@dataclass(frozen=True)
class ScheduleToBatch(Capped):
    """A batch size inversely proportional to the schedule's rate, with any torch scheduler.

    The rate is relative to its highest so far. So growth begins when the rate begins to fall, after any warm-up.
    """

    decides_within_epochs = True
    has_many_sizes = True

    def next(self, seen: Measurement) -> Decision:
        """Return b0 / (schedule's rate / its highest), never below b0."""
        fallen_to = seen.lr_schedule_ratio
        if fallen_to is None:
            raise UsageError(f"{type(self).__name__} needs the schedule's own rate, and the measurement has none")
        wanted = math.nan if math.isnan(fallen_to) else math.inf
        if fallen_to > 0:
            wanted = seen.first_batch_size / fallen_to
        # 0.1 -> 0.02 must give 5 times the batch, not one sample less because of rounding.
        wanted = round(wanted, 6) if math.isfinite(wanted) else wanted
        reason = f"the schedule stands at {fallen_to:g} of its highest rate"
        return decided(seen, wanted, self.max_batch_size, at_least=seen.first_batch_size, reason=reason)


@dataclass(frozen=True)
class SmithSchedule(ScheduleToBatch):
    """A batch schedule for SGD: if the schedule divides the rate by k, b grows by k and the rate stays.

    lr / b is always that of the schedule with the first batch, so at the cap the rest of the decay goes into the
    learning rate. This is the linear coupling, which the policy requests.

    >>> seen = Measurement(epoch=1, batch_size=128, first_batch_size=128, dataset_size=50_000, lr_schedule_ratio=0.2)
    >>> SmithSchedule(4096).next(seen).batch_size
    640

    Args:
        max_batch_size: The largest batch, in samples.
    """

    lr_coupling = "linear"


@dataclass(frozen=True)
class Seesaw(ScheduleToBatch):
    """A batch schedule for Adam-like optimizers: if the schedule divides the rate by k, b grows by k.

    The rate then falls by sqrt(k). This is the square-root coupling, which the policy requests.

    Args:
        max_batch_size: The largest batch, in samples.
    """

    lr_coupling = "sqrt"
