"""How long training takes as a function of the batch size. No torch in here.

With noise scale B a batch of b samples needs 1 + B/b times the fewest possible steps (McCandlish et al. 2018), each at
the learning rate that suits it. A step takes t(b) seconds, so the same progress takes (1 + B/b) * t(b). With
t(b) = fixed + b * per_sample that is least at b = sqrt(B * fixed / per_sample).
"""

import math
from dataclasses import dataclass

from divebatch.checks import require_count, require_positive
from divebatch.errors import ArgumentError
from divebatch.measurement import gain
from divebatch.step_line import line_misfit, step_line

SLACK = 0.05
"""A batch that takes at most this part longer than the best is as good; of several the smallest is taken."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a whole training step at each batch size that was timed, smallest first."""

    measured: tuple[tuple[int, float], ...]
    stopped: str = ""
    """Why no larger size was timed."""

    def __post_init__(self) -> None:
        for size, seconds in self.measured:
            require_count("batch_sizes", size)
            require_positive(f"the seconds of a step of {size} samples", seconds)
        if not self.measured or list(self.sizes) != sorted(set(self.sizes)):
            raise ArgumentError(f"step times need different batch sizes in rising order, got {self.measured}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that were timed."""
        return tuple(size for size, _ in self.measured)

    def line(self) -> tuple[float, float]:
        """(fixed, per_sample) of t(b) = fixed + b * per_sample, neither below zero, with the least relative errors.

        >>> StepTimes(((10, 3.0), (20, 5.0), (40, 9.0))).line()
        (1.0, 0.2)
        """
        return step_line(self.measured)

    @property
    def misfit(self) -> float:
        """The largest part by which a time is off the line."""
        return line_misfit(self.measured)

    @property
    def balance(self) -> float:
        """Samples whose own time equals a step's fixed cost: below it a batch leaves the device idle."""
        fixed, per_sample = self.line()
        return fixed / per_sample if per_sample else math.inf

    def seconds(self, batch_size: int) -> float:
        """The seconds of a step at a size that was timed."""
        return dict(self.measured)[batch_size]


def time_to_progress(times: StepTimes, noise_scale: float) -> list[tuple[int, float]]:
    """(batch size, time to the same progress), in units of the best; an infinite noise scale leaves throughput alone.

    >>> time_to_progress(StepTimes(((1, 1.0), (10, 1.0))), 10.0)
    [(1, 5.5), (10, 1.0)]
    """
    if math.isnan(noise_scale) or noise_scale < 0:
        raise ArgumentError(f"noise_scale must not be negative, got noise_scale={noise_scale}")
    infinite = math.isinf(noise_scale)
    raw = [(size, s * (1 / size if infinite else 1 + noise_scale / size)) for size, s in times.measured]
    best = min(time for _, time in raw)
    return [(size, time / best) for size, time in raw]


def good_size(times: StepTimes, noise_scale: float, *, slack: float = SLACK) -> int:
    """The smallest batch size that takes at most `slack` longer to the same progress than the best one."""
    return next(size for size, time in time_to_progress(times, noise_scale) if time <= 1 + slack)


def lr_factor(batch_size: int, reference: int, noise_scale: float, *, adaptive: bool = False) -> float:
    """The factor of the learning rate from the `reference` batch: almost linear below the noise scale, flat above.

    (1 + B/b_ref) / (1 + B/b); for Adam-like optimizers its square root.

    >>> lr_factor(64, 32, float("inf")), lr_factor(64, 32, 0.0), lr_factor(64, 32, 64.0)
    (2.0, 1.0, 1.5)
    """
    factor = gain(batch_size / reference, noise_scale / reference)
    return math.sqrt(factor) if adaptive else factor
