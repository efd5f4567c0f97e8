"""The gradient noise scale over a short run."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from divebatch.errors import DivergedError
from divebatch.estimators import Estimator
from divebatch.measurement import Diversity, Spread


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """The noise scale, in samples, over the steps `first` to `last`, with its 95 % interval, which may be infinite."""

    first: int
    last: int
    value: float | None
    """None where the mean gradient cannot be told from zero."""
    low: float
    high: float

    @classmethod
    def of(cls, diversity: Diversity, first: int, last: int) -> "NoiseEstimate":
        """The noise scale of a diversity measured from step `first` to `last`, at least zero."""
        low, high = diversity.noise_scale_interval()
        value = max(0.0, diversity.noise_scale) if diversity.is_defined else None
        return cls(first, last, value, low, high)


@dataclass(frozen=True, slots=True)
class NoiseCourse:
    """How the noise scale went over the run, stretch by stretch, and where it stands."""

    stretches: tuple[NoiseEstimate, ...]
    now: NoiseEstimate
    """Over the second half of the run."""


def measure_noise(
    step: Callable[[Any], Tensor], batches: Iterator[Any], estimator: Estimator, *, steps: int, stretches: int = 6
) -> NoiseCourse:
    """Train for `steps` steps; `step` gives each one's loss and must let the estimator, which is bound, see it."""
    found, points, done = [], [], 0
    for index in range(stretches):
        count = steps * (index + 1) // stretches - done
        found.append(_stretch(step, batches, estimator, count, done))
        points.append(NoiseEstimate.of(found[-1], done + 1, done + count))
        done += count
    half = stretches // 2
    return NoiseCourse(tuple(points), NoiseEstimate.of(pooled(found[half:]), points[half].first, steps))


def _stretch(
    step: Callable[[Any], Tensor], batches: Iterator[Any], estimator: Estimator, count: int, done: int
) -> Diversity:
    estimator.start()
    try:
        for index in range(count):
            loss = step(next(batches))
            # Only at the ends of a stretch: reading a loss waits for the device.
            if index in (0, count - 1) and not math.isfinite(float(loss)):
                raise DivergedError(
                    f"the loss is {float(loss)} after {done + index} steps: this learning rate is too large for this "
                    f"batch size, so there is nothing to start from. Pass a smaller one"
                )
        return estimator.finish()
    finally:
        estimator.close()


def pooled(diversities: Sequence[Diversity]) -> Diversity:
    """The mean of independent estimates, weighed by samples; numerator and denominator apart, so without bias."""
    total = sum(each.num_samples for each in diversities)
    parts = [each.num_samples / total for each in diversities]
    trace = sum(part * each.trace for part, each in zip(parts, diversities, strict=True))
    sq_norm = sum(part * each.sq_norm for part, each in zip(parts, diversities, strict=True))
    spreads = [each.spread for each in diversities]
    if any(spread is None for spread in spreads):
        return Diversity.from_noise(trace, sq_norm, total)
    known = [(part**2, spread) for part, spread in zip(parts, spreads, strict=True) if spread is not None]
    spread = Spread(
        trace_variance=sum(weight * each.trace_variance for weight, each in known),
        sq_norm_variance=sum(weight * each.sq_norm_variance for weight, each in known),
        covariance=sum(weight * each.covariance for weight, each in known),
        degrees=sum(each.degrees for _, each in known),
    )
    return Diversity.from_noise(trace, sq_norm, total, spread=spread)
