"""Goodput (Pollux, Qiao et al. 2021): throughput times the worth of a sample."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count, require_positive
from divebatch.errors import ArgumentError
from divebatch.measurement import Decision, Measurement, gain
from divebatch.policies.bounds import Bounds, require_start_under_cap
from divebatch.policies.confidence import require_diversity
from divebatch.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Goodput(Policy):
    """The size with the best product of samples a second, measured on the fly, and the worth of a sample, gain / S.

    Candidates go from the first batch to the cap by factors of 2^(1/2). How the time of a step grows with the batch is
    a straight line through the sizes that have been run; while only one has been, half of its step's time is taken to
    be fixed cost, so that a second size gets tried. Changes that promise less than `least_improvement` are not made:
    they cost recompiling and prove little. Nor are those that would lose at either end of the noise scale's interval.
    The first epoch at a size decides nothing: what compilers and GPU libraries do once is in its time.
    Time is measured, so two runs need not decide alike.
    """

    needs = frozenset({"diversity", "throughputs"})
    epoch_settings = frozenset({"every"})
    has_many_sizes = True

    max_batch_size: int
    _: KW_ONLY
    least_improvement: float = 0.05
    every: int = 1
    multiple_of: int = 1

    def __post_init__(self) -> None:
        require_positive("least_improvement", self.least_improvement)
        require_count("every", self.every)
        Bounds(1, self.max_batch_size, self.multiple_of)

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Every `every`-th epoch."""
        return epoch % self.every == 0

    def next(self, seen: Measurement) -> Decision:
        """The best candidate, if it is better enough."""
        speeds = [(size, speed) for size, speed in seen.history.throughputs if speed > 0]
        if not self.measures(seen.epoch, seen.batch_size) or not speeds:
            return Decision(batch_size=seen.batch_size)
        if seen.history.epochs_at_size < 2:
            return Decision(batch_size=seen.batch_size, reason="the first epoch at a size does not tell its speed")
        diversity = require_diversity(self, seen)
        if not diversity.is_defined:
            return Decision(batch_size=seen.batch_size, reason=f"no noise scale: {diversity.problem}")
        start, line = seen.start, step_time(speeds)

        def improvement(size: int, noise: float) -> float:
            return goodput(size, start, noise, line) / goodput(seen.batch_size, start, noise, line) - 1

        best = max(self._candidates(start), key=lambda size: goodput(size, start, diversity.noise_scale, line))
        promised = improvement(best, diversity.noise_scale)
        if promised <= self.least_improvement:
            return Decision(batch_size=seen.batch_size, reason=f"{best} promises only {promised:.1%} more")
        worst = min(improvement(best, noise) for noise in diversity.noise_scale_interval())
        if worst <= 0:
            reason = f"{best} promises {promised:.1%} more, but with 95 % confidence only {worst:.1%}"
            return Decision(batch_size=seen.batch_size, reason=reason)
        return Decision(batch_size=best, reason=f"{promised:.0%} more goodput", wanted=best)

    def check_start(self, batch_size: int) -> None:
        """Raise if the first batch is above the cap."""
        require_start_under_cap(batch_size, self.max_batch_size)

    def _candidates(self, start: int) -> Sequence[int]:
        bounds = Bounds(1, self.max_batch_size, self.multiple_of)
        powers = range(math.ceil(2 * math.log2(max(1.0, self.max_batch_size / start))) + 1)
        return sorted({max(start, bounds.clamp(start * 2 ** (power / 2))) for power in powers})


def goodput(batch_size: int, first_batch_size: int, noise_scale: float, line: tuple[float, float]) -> float:
    """Samples a second times the worth of one, relative to one in the first batch."""
    ratio = batch_size / first_batch_size
    worth = gain(ratio, max(0.0, noise_scale) / first_batch_size) / ratio
    return batch_size / (line[0] + line[1] * batch_size) * worth


def step_time(speeds: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(seconds of a step whatever its size, seconds for each sample), neither below zero, by least squares.

    >>> step_time([(100, 100 / 3), (200, 200 / 5)])  # steps of 3 and 5 seconds
    (1.0, 0.02)
    """
    if not speeds:
        raise ArgumentError("step_time needs the speed of at least one batch size")
    sizes, seconds = [size for size, _ in speeds], [size / speed for size, speed in speeds]
    if len(speeds) == 1:
        return (seconds[0] / 2, seconds[0] / 2 / sizes[0])
    size, second = sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    slope = sum((x - size) * (y - second) for x, y in zip(sizes, seconds, strict=True))
    slope /= sum((x - size) ** 2 for x in sizes)
    slope = min(max(slope, 0.0), second / size)
    return (second - slope * size, slope)
