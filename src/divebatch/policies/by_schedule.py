"""Policies that grow the batch as the learning rate schedule falls (Smith et al. 2018; Seesaw 2025)."""

import math
from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count
from divebatch.errors import UsageError
from divebatch.measurement import Decision, Measurement
from divebatch.policies.auto import POWERS
from divebatch.policies.policy import Capped, decided


@dataclass(frozen=True)
class ScheduleToBatch(Capped):
    """The first batch size over the schedule's own rate, relative to its highest; works with every torch scheduler.

    During a warm-up the rate is the highest so far, so growth begins when the rate begins to fall.
    """

    decides_within_epochs = True
    has_many_sizes = True

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
        return decided(seen, wanted, self.max_batch_size, at_least=seen.first_batch_size, reason=reason)


@dataclass(frozen=True)
class SmithSchedule(ScheduleToBatch):
    """A schedule of the batch for SGD: b grows by k and the rate stays, if the schedule divides the rate by k.

    lr / b is always that of the schedule with the first batch, so at the cap the rest of the decay goes into the
    learning rate. That is the linear coupling, which it brings with it.

    >>> seen = Measurement(epoch=1, batch_size=128, first_batch_size=128, dataset_size=50_000, lr_schedule_ratio=0.2)
    >>> SmithSchedule(4096).next(seen).batch_size
    640

    Args:
        max_batch_size: The largest batch, in samples.
    """

    lr_coupling = "linear"


@dataclass(frozen=True)
class Seesaw(ScheduleToBatch):
    """A schedule of the batch for Adam-like optimizers: b grows by k and the rate falls by sqrt(k) instead of k.

    That is the square-root coupling, which it brings with it.

    Args:
        max_batch_size: The largest batch, in samples.
    """

    lr_coupling = "sqrt"


POWER, START, LEAD = 1.5, 2**0.25, 4.0
"""The growth runs ahead of the decay, START * (highest / rate)^POWER, up to LEAD first batches."""
STEPS_LEFT = 40
"""The fewest steps that a size must have before it."""
STEPS_SEEN = 150
"""Steps of a size that fit into the samples seen, at least, if nobody says how many are still to come."""
TINY = 1e-9
"""A rate of zero counts as this part of its highest."""


def growth(fallen_to: float) -> float:
    """Return how many first batches a batch should have when the schedule's rate has fallen to a part of its highest.

    >>> [round(growth(part), 1) for part in (1.0, 0.8, 0.5, 0.25, 0.1)]
    [1.2, 1.7, 3.4, 4.0, 10.0]
    """
    ahead = START / math.pow(fallen_to, POWER)
    return max(1 / fallen_to, min(ahead, LEAD))


def step_size(first: int, wanted: float, most: float) -> int:
    """Return the largest of 1, 1.5, 2, 3, 4, 6, 8, ... first batches within `wanted` first batches and `most` samples.

    Two sizes an octave: a compiler sees few shapes.

    >>> step_size(64, 3.4, 4096), step_size(64, 100, 1000), step_size(7, 1.9, 4096)
    (192, 768, 7)
    """
    size, most = first, min(wanted * first * (1 + 1e-9), most)
    while 2 * size <= most:
        size *= 2
    return size * 3 // 2 if size % 2 == 0 and size * 3 // 2 <= most else size


@dataclass(frozen=True)
class AnnealToBatch(Capped):
    """Growth of the batch in the place of the learning rate's decay; nothing is measured.

    A lower rate makes the steps' noise smaller, and so does a larger batch, in fewer steps. If the schedule's rate has
    fallen to a part x of its highest, the batch grows to 1.2 / x^1.5 first batches, up to 4, and to 1 / x from there,
    in steps of 1, 1.5, 2, 3, 4, 6, ... first batches. The rate follows as suits the optimizer (linear for SGD, the root
    for Adam-like optimizers), but never above the schedule's highest.

    With a constant rate there is no decay to trade, and nothing grows: see `HorizonRamp`. If parameter groups have
    schedules of their own, the first group's counts.

    >>> seen = Measurement(epoch=1, batch_size=64, dataset_size=50_000, samples=50_000, lr_schedule_ratio=0.5)
    >>> AnnealToBatch(4096).next(seen).batch_size
    192

    Args:
        max_batch_size: The largest batch, in samples.
        total_samples: The samples of the whole training, so that every size has at least 40 steps before it. None: no
            batch is larger than a 150th of the samples seen.
    """

    needs_lr_coupling = True
    moves_lr = True
    decides_within_epochs = True
    run_settings = frozenset({"total_samples"})

    _: KW_ONLY
    total_samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_samples is not None:
            require_count("total_samples", self.total_samples)

    def next(self, seen: Measurement) -> Decision:
        """Return the size for the schedule's present rate, and a rate that is never above its highest."""
        fallen_to = seen.lr_schedule_ratio
        if fallen_to is None:
            raise UsageError("AnnealToBatch needs the schedule's own rate, and the measurement has none")
        if math.isnan(fallen_to):
            return Decision(batch_size=seen.batch_size, reason="the learning rate is zero: no change")
        fallen_to = min(1.0, max(fallen_to, TINY))
        wanted, reason = growth(fallen_to), f"the rate has fallen to {fallen_to:.3g} of its highest"
        if fallen_to >= 1:
            wanted = 1.0
            reason = "the rate is at its highest: nothing to trade (if it never falls, take HorizonRamp)"
        most = min(self.max_batch_size, seen.largest_batch_size, self._room(seen.samples))
        size = max(seen.batch_size, step_size(seen.first_batch_size, wanted, most))
        power = POWERS.get(seen.lr_coupling, 0.0) if isinstance(seen.lr_coupling, str) else seen.lr_coupling
        raised = min((size / seen.first_batch_size) ** power, 1 / fallen_to)
        by_coupling = (size / seen.batch_size) ** power
        return Decision(
            batch_size=size,
            lr_factor=raised / seen.lr_growth / by_coupling,
            reason=reason,
            unclamped=wanted * seen.first_batch_size,
        )

    def _room(self, samples: int) -> float:
        """Return the largest size that leaves enough steps; without a horizon the samples seen are the measure."""
        if self.total_samples is None:
            return samples / STEPS_SEEN
        return (self.total_samples - samples) / STEPS_LEFT


@dataclass(frozen=True)
class HorizonRamp(Capped):
    """For a constant learning rate: 1 / (1 - x) first batches after the part x of all samples; the rate stays.

    The noise of the steps then falls as under a linear decay of the rate to zero. Sizes are 1, 1.5, 2, 3, 4, 6, ...
    first batches, and every size has at least 40 steps before it.

    >>> seen = Measurement(epoch=1, batch_size=64, first_batch_size=64, dataset_size=50_000, samples=300_000)
    >>> HorizonRamp(4096, total_samples=500_000).next(seen).batch_size
    128

    Args:
        max_batch_size: The largest batch, in samples.
        total_samples: Samples of the whole training.
    """

    lr_coupling = "none"
    decides_within_epochs = True
    run_settings = frozenset({"total_samples"})

    _: KW_ONLY
    total_samples: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("total_samples", self.total_samples)

    def next(self, seen: Measurement) -> Decision:
        left = self.total_samples - seen.samples
        reason = f"{max(0, left)} of {self.total_samples} samples are left"
        if left <= 0:
            return Decision(batch_size=seen.batch_size, reason=f"{reason}: no change")
        wanted = self.total_samples / left
        most = min(self.max_batch_size, seen.largest_batch_size, left / STEPS_LEFT)
        size = max(seen.batch_size, step_size(seen.first_batch_size, wanted, most))
        return Decision(batch_size=size, reason=reason, unclamped=wanted * seen.first_batch_size)
