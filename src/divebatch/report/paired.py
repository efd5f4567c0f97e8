"""Paired differences: mean, Student's interval, effect size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from divebatch.student import t_quantile

LEVEL = 0.95
SIZES = ((0.2, "negligible"), (0.5, "small"), (0.8, "medium"), (math.inf, "large"))
"""Cohen's words for an effect below each bound."""


@dataclass(frozen=True, slots=True)
class Paired:
    """Differences of pairs, in the unit they were given in."""

    mean: float
    std: float
    """Sample standard deviation (divisor n - 1)."""
    num_pairs: int

    @property
    def interval(self) -> tuple[float, float]:
        """Student's, for the mean, at `LEVEL`."""
        half = t_quantile(0.5 + LEVEL / 2, self.num_pairs - 1) * self.std / math.sqrt(self.num_pairs)
        return self.mean - half, self.mean + half

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        low, high = self.interval
        return low > 0 or high < 0

    @property
    def effect(self) -> float:
        """Mean over standard deviation of the differences, with Hedges' correction for few pairs; may be infinite.

        NaN for two pairs that differ: the correction would make it zero, whatever the differences.
        """
        if self.std == 0:
            return 0.0 if self.mean == 0 else math.copysign(math.inf, self.mean)
        if self.num_pairs == 2:
            return math.nan
        return self.mean / self.std * (1 - 3 / (4 * (self.num_pairs - 1) - 1))

    @property
    def effect_in_words(self) -> str:
        """For instance `effect size 1.32, large; 5 seeds`."""
        return f"{self._size_in_words}; {self.num_pairs} seeds"

    @property
    def _size_in_words(self) -> str:
        if self.std == 0:
            return "the same in every seed"
        if math.isnan(self.effect):
            return "too few for an effect size"
        word = next(word for bound, word in SIZES if abs(self.effect) < bound or bound == math.inf)
        return f"effect size {self.effect:.2f}, {word}"


def pair(differences: Sequence[float]) -> Paired:
    """Of at least two pairs. A spread below rounding counts as none."""
    mean, std = fmean(differences), stdev(differences)
    largest = max(map(abs, differences))
    return Paired(mean, 0.0 if std <= 1e-12 * largest else std, len(differences))
