"""The default policy: a batch that grows instead of the learning rate's decay, and towards the end of training."""

import math
from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count, warn_user
from divebatch.errors import UsageError
from divebatch.measurement import Decision, Measurement
from divebatch.policies.policy import Capped

POWERS = {"linear": 1.0, "sqrt": 0.5, "adam": 0.5, "adam-beta1": 0.5}
"""The power of the batch size that the learning rate follows, for each coupling by name."""
NEAREST = 2**0.25
"""The factor within which a size is the nearest: a quarter of an octave, as sizes are half an octave apart."""
LEAD = 4.0
"""The most first batches reached by time alone, so that a wrong length of the training costs little."""
STEPS_LEFT, STEPS_SEEN = 40, 75
"""The fewest steps of a size that must remain, and that must fit into the samples seen."""
STEPS_SEEN_ALONE = 250
"""The number of steps that must fit into the samples seen if the length of the training is unknown."""
TINY = 1e-9
"""The fraction of its highest rate that replaces a rate of zero."""


def power_of(coupling: str | float) -> float:
    """Return the power of the batch size that the learning rate follows; 0 if the coupling is no power."""
    return POWERS.get(coupling, 0.0) if isinstance(coupling, str) else coupling


def growth(fallen_to: float, part: float = 0.0) -> float:
    """Return the wanted batch size as a multiple of the first batch.

    A lower learning rate reduces the noise of the steps, and so does a larger batch, in fewer steps. At a constant rate
    the noise must still fall towards the end, as under a linear decay: up to LEAD first batches.

    >>> [round(growth(rate), 1) for rate in (1.0, 0.8, 0.5, 0.25, 0.1)]
    [1.0, 1.5, 2.4, 4.8, 11.9]
    >>> [growth(1.0, part) for part in (0.0, 0.5, 0.75, 0.9)]
    [1.0, 2.0, 4.0, 4.0]

    Args:
        fallen_to: The schedule's rate over its highest so far.
        part: The completed fraction of the training; 0 if the length is unknown.
    """
    by_rate = NEAREST / max(fallen_to, TINY) if fallen_to < 1 else 1.0
    return max(by_rate, min(1 / max(1 - part, TINY), LEAD))


def step_size(first: int, wanted: float, most: float) -> int:
    """Return the largest of 1, 1.5, 2, 3, 4, 6, 8, ... first batches, at most `wanted` of them and `most` samples.

    Two sizes an octave keep the number of shapes small for a compiler.

    >>> step_size(64, 3.4, 4096), step_size(64, 100, 1000), step_size(7, 1.9, 4096)
    (192, 768, 7)
    """
    size, most = first, min(wanted * first * (1 + 1e-9), most)
    while 2 * size <= most:
        size *= 2
    return size * 3 // 2 if size % 2 == 0 and size * 3 // 2 <= most else size


def room(samples: int, total_samples: int | None) -> float:
    """Return the largest size that has enough steps, both in the samples seen and in those left."""
    if total_samples is None:
        return samples / STEPS_SEEN_ALONE
    return min(samples / STEPS_SEEN, (total_samples - samples) / STEPS_LEFT)


@dataclass(frozen=True)
class Auto(Capped):
    """A batch that grows instead of the learning rate's decay. Nothing is measured.

    A lower learning rate reduces the noise of the steps, and so does a larger batch, in fewer steps. If the schedule's
    rate has fallen to a fraction x of its highest, the batch grows to 1 / x first batches. The learning rate follows as
    suits the optimizer (linear for SGD, the root for Adam-like optimizers), but never above the schedule's highest.
    Adam's beta1 follows as well, so that its mean spans the same number of samples.

    With `total_samples` the batch also grows while the rate is constant: to 1 / (1 - p) first batches after a fraction
    p of the training, up to 4. Without `total_samples`, a rate that never falls means that the batch never grows, and
    the record says so.

    Sizes are 1, 1.5, 2, 3, 4, 6, ... first batches, the nearest one, and never fall. A size is used if 75 of its steps
    fit into the samples seen and 40 into those to come; without `total_samples`, if 250 fit into those seen. If
    parameter groups have their own schedules, the rate that has fallen least counts. For a training of few epochs, also
    decide within epochs: `Controller(..., every_steps=50)`.

    >>> seen = Measurement(epoch=1, batch_size=64, dataset_size=50_000, samples=50_000, lr_schedule_ratio=0.5)
    >>> Auto(4096).next(seen).batch_size
    128

    Args:
        max_batch_size: The largest batch, in samples.
        total_samples: The samples of the whole training: epochs times the size of the dataset. None: not known, so only
            the schedule counts.
    """

    needs_lr_coupling = True
    adam_coupling = "adam-beta1"
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
        """Return the size for the schedule's current rate, and a rate that never exceeds its highest."""
        fallen_to = seen.lr_schedule_ratio
        if fallen_to is None:
            raise UsageError("Auto needs the schedule's own rate, and the measurement has none")
        if math.isnan(fallen_to):
            return Decision(batch_size=seen.batch_size, reason="the learning rate is zero: no change")
        fallen_to = min(1.0, max(fallen_to, TINY))
        wanted = growth(fallen_to, self._part_over(seen.samples))
        most = min(self.max_batch_size, seen.largest_batch_size, room(seen.samples, self.total_samples))
        size = max(seen.batch_size, step_size(seen.first_batch_size, wanted, most))
        power = power_of(seen.lr_coupling)
        raised = min((size / seen.first_batch_size) ** power, 1 / fallen_to)
        by_coupling = (size / seen.batch_size) ** power
        return Decision(
            batch_size=size,
            lr_factor=raised / seen.lr_growth / by_coupling,
            reason=self._reason(seen, fallen_to),
            unclamped=wanted * seen.first_batch_size,
        )

    def _part_over(self, samples: int) -> float:
        if self.total_samples is None:
            return 0.0
        if samples > self.total_samples:
            warn_user(
                f"training goes beyond total_samples={self.total_samples}, so its batches grew too early: pass "
                f"Auto(..., total_samples=EPOCHS * len(dataset))"
            )
            return 0.0
        return samples / self.total_samples

    def _reason(self, seen: Measurement, fallen_to: float) -> str:
        rate = "rate at its peak" if fallen_to >= 1 else f"rate at {round(fallen_to, 6):.3g} of its peak"
        if self.total_samples is not None:
            return f"{rate}, {seen.samples / self.total_samples:.0%} of the samples seen"
        never = ": nothing to trade; if it never falls, pass total_samples=EPOCHS * len(dataset)"
        return rate + never if fallen_to >= 1 else rate
