"""Goodput (Pollux, Qiao et al. 2021), throughput times the worth of a sample, and the line of step times."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from operator import mul

from divebatch.checks import require_count, require_positive
from divebatch.measurement import Decision, Measurement, gain
from divebatch.policies.policy import Capped, clamp, require_diversity

Line = tuple[float, float]
"""(fixed seconds of a step, seconds for each of its samples)."""


@dataclass(frozen=True)
class Goodput(Capped):
    """The size with the best product of throughput and AdaScale's gain per sample.

    Throughput is measured in samples a second. Candidates go from the first batch to the cap by factors of 2^(1/2). The
    time of a step is a straight line through the sizes used so far. With only one size, half of its time counts as
    fixed cost, so that a second size is tried. Changes that would lose at either end of the noise scale's interval are
    not made. The first epoch at a size decides nothing, since compilers and GPU libraries do one-time work in it.
    Measured times vary, so two runs may decide differently.

    Args:
        max_batch_size: The largest batch, in samples.
        min_improvement: The least improvement that a change must promise: 0.05 for 5 % more goodput.
        every_epochs: Epochs between two decisions.
    """

    needs = frozenset({"diversity", "throughputs"})
    estimator = "moments"
    epoch_settings = frozenset({"every_epochs"})
    has_many_sizes = True

    _: KW_ONLY
    min_improvement: float = 0.05
    every_epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("min_improvement", self.min_improvement)
        require_count("every_epochs", self.every_epochs)

    def measures(self, epoch: int, batch_size: int) -> bool:
        return epoch % self.every_epochs == 0

    def next(self, seen: Measurement) -> Decision:
        times = [(size, size / speed) for size, speed in seen.history.throughputs if speed > 0]
        if not self.measures(seen.epoch, seen.batch_size) or not times:
            return Decision(batch_size=seen.batch_size)
        # The first epoch's time includes one-time work of compilers and GPU libraries.
        if seen.history.decisions_at_size < 2:
            return Decision(batch_size=seen.batch_size, reason="the first epoch at a size does not tell its speed")
        diversity = require_diversity(self, seen)
        if not diversity.is_defined:
            return Decision(batch_size=seen.batch_size, reason=f"no noise scale: {diversity.undefined_reason}")
        first, line = seen.first_batch_size, _line_through(times)

        def improvement(size: int, noise: float) -> float:
            return goodput(size, first, noise, line) / goodput(seen.batch_size, first, noise, line) - 1

        best = max(self._candidates(first), key=lambda size: goodput(size, first, diversity.noise_scale, line))
        promised = improvement(best, diversity.noise_scale)
        if promised <= self.min_improvement:
            return Decision(batch_size=seen.batch_size, reason=f"{best} promises only {promised:.1%} more")
        # A change must not lose at either end of the interval.
        worst = min(improvement(best, noise) for noise in diversity.noise_scale_interval())
        if worst <= 0:
            reason = f"{best} promises {promised:.1%} more, but with 95 % confidence only {worst:.1%}"
            return Decision(batch_size=seen.batch_size, reason=reason)
        return Decision(batch_size=best, reason=f"{promised:.0%} more goodput", unclamped=best)

    def _candidates(self, first: int) -> Sequence[int]:
        powers = range(math.ceil(2 * math.log2(max(1.0, self.max_batch_size / first))) + 1)
        return sorted({clamp(first * 2 ** (power / 2), self.max_batch_size, at_least=first) for power in powers})


def goodput(batch_size: int, first_batch_size: int, noise_scale: float, line: Line) -> float:
    """Return the throughput in samples a second times the worth of a sample, relative to the first batch."""
    ratio = batch_size / first_batch_size
    worth = gain(ratio, max(0.0, noise_scale) / first_batch_size) / ratio
    return batch_size / (line[0] + line[1] * batch_size) * worth


def step_line(times: Sequence[tuple[float, float]]) -> Line:
    """Fit seconds = fixed + batch_size * per_sample, neither below zero, with the smallest relative errors.

    >>> step_line([(10, 3.0), (20, 5.0), (40, 9.0)])
    (1.0, 0.2)

    Args:
        times: (batch size, seconds of a step) at one size or more; a single size is fitted without fixed cost.
    """
    # Rows of fixed / seconds + per_sample * size / seconds = 1, by their normal equations.
    x, y = [1 / seconds for _, seconds in times], [size / seconds for size, seconds in times]
    xx, yy, xy = (sum(map(mul, a, b)) for a, b in ((x, x), (y, y), (x, y)))
    determinant = xx * yy - xy**2
    if determinant <= 1e-12 * xx * yy:  # a single size cannot separate the two
        return (0.0, sum(y) / yy)
    fixed, per_sample = (yy * sum(x) - xy * sum(y)) / determinant, (xx * sum(y) - xy * sum(x)) / determinant
    if fixed < 0:
        return (0.0, sum(y) / yy)
    return (sum(x) / xx, 0.0) if per_sample < 0 else (round(fixed, 12), round(per_sample, 15))


def _line_through(times: Sequence[tuple[int, float]]) -> Line:
    if len(times) > 1:
        return step_line(times)
    size, seconds = times[0]
    # Half as fixed cost is a guess that makes a second size worth trying; after that the line is measured.
    return (seconds / 2, seconds / 2 / size)
