"""Which branches keep up with the smallest batch, how surely, and what the critical batch is. No torch in here."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import takewhile
from statistics import fmean, stdev
from typing import Any

from divebatch.student import t_quantile

LEVEL = 0.95
"""The confidence level of all intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One branch to train: `steps` batches of `batch_size` samples at `lr_factor` times the learning rate.

    With the coupling "adam" `divebatch.lr.scale_settings(optimizer, branch.factor)` moves the rest.
    """

    factor: int
    batch_size: int
    lr_factor: float
    steps: int
    repeat: int
    """From 0. All branches of a repeat should see the same data in the same order, another repeat another order."""
    coupling: str | float = "sqrt"
    """How the optimizer follows the batch size: a name, or a power of it."""

    @property
    def samples(self) -> int:
        """The samples that the whole branch sees."""
        return self.steps * self.batch_size


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one branch ended. `course` is the smoothed training loss after each step."""

    branch: Branch
    loss: float
    course: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far a factor's loss lies above that of factor 1 on the same data, as a part of it, with its 95 % interval."""

    factor: int
    batch_size: int
    steps: int
    loss: float
    """Mean over repeats."""
    mean: float
    low: float
    high: float
    tolerance: float

    @property
    def keeps_up(self) -> bool:
        """Whether the mean is within the tolerance."""
        return self.mean <= self.tolerance

    @property
    def verdict(self) -> str:
        """`keeps up`, `falls behind`, or the same with `perhaps` where the interval reaches over the tolerance."""
        word = "keeps up" if self.keeps_up else "falls behind"
        return word if self.high <= self.tolerance or self.low > self.tolerance else f"perhaps {word}"


@dataclass(frozen=True, slots=True)
class Critical:
    """The critical batch size in samples, and between which tried sizes it lies with confidence."""

    size: int
    low: int
    high: int | None
    """None: no size that was tried surely falls behind."""
    is_open: bool
    """Whether even the largest size that was tried keeps up."""

    def __str__(self) -> str:
        """For instance `512 (surely 256, perhaps up to 1024)`."""
        least = "at least " if self.is_open else ""
        most = "surely no more" if self.high == self.size else f"perhaps up to {self.high}"
        most = "no upper end found" if self.high is None else most
        return f"{least}{self.size} (surely {self.low}, {most})"


@dataclass(frozen=True, slots=True)
class Probe:
    """The branches' outcomes. `window` is the samples of each, `problem` why the largest factors are missing."""

    batch_size: int
    window: int
    coupling: str | float
    tolerance: float
    outcomes: tuple[Outcome, ...]
    problem: str = ""

    @property
    def gaps(self) -> list[Gap]:
        """One for each factor, smallest first."""
        return [self._gap(factor) for factor in sorted({outcome.branch.factor for outcome in self.outcomes})]

    @property
    def critical(self) -> Critical:
        """The largest size that keeps up with all smaller ones keeping up too."""
        gaps = self.gaps
        size = _last_while(gaps, lambda gap: gap.keeps_up)
        sure = _last_while(gaps, lambda gap: gap.high <= self.tolerance)
        possible = _last_while(gaps, lambda gap: gap.low <= self.tolerance)
        largest = gaps[-1].batch_size
        return Critical(size, sure, None if possible == largest else possible, is_open=size == largest)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: settings, gaps, the critical batch and every branch."""
        return {
            "batch_size": self.batch_size,
            "window_samples": self.window,
            "coupling": self.coupling,
            "tolerance": self.tolerance,
            "critical": asdict(self.critical),
            "gaps": [{**asdict(gap), "verdict": gap.verdict} for gap in self.gaps],
            "branches": [
                {**asdict(outcome.branch), "loss": outcome.loss, "course": outcome.course} for outcome in self.outcomes
            ],
            "problem": self.problem,
        }

    def _gap(self, factor: int) -> Gap:
        first = {each.branch.repeat: each.loss for each in self.outcomes if each.branch.factor == 1}
        mine = [each for each in self.outcomes if each.branch.factor == factor]
        # In pairs: branches of a repeat saw the same data, whose luck then cancels.
        parts = [_part_above(each.loss, first[each.branch.repeat]) for each in mine]
        mean, low, high = interval(parts) if factor > 1 else (0.0, 0.0, 0.0)
        return Gap(
            factor=factor,
            batch_size=mine[0].branch.batch_size,
            steps=mine[0].branch.steps,
            loss=fmean(each.loss for each in mine),
            mean=mean,
            low=low,
            high=high,
            tolerance=self.tolerance,
        )


def interval(values: list[float]) -> tuple[float, float, float]:
    """(mean, low, high): Student's 95 % interval of the mean; without end for a single value.

    >>> interval([0.1])
    (0.1, -inf, inf)
    """
    mean = fmean(values)
    if not math.isfinite(mean):
        return (math.inf, math.inf, math.inf)  # a branch diverged: no tolerance forgives that
    if len(values) < 2:
        return (mean, -math.inf, math.inf)
    reach = t_quantile((1 + LEVEL) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return (mean, mean - reach, mean + reach)


def _part_above(loss: float, reference: float) -> float:
    if not math.isfinite(loss) or reference == 0:
        return 0.0 if loss == reference else math.inf
    return (loss - reference) / abs(reference)


def _last_while(gaps: list[Gap], holds: Callable[[Gap], bool]) -> int:
    """The largest size up to which it holds throughout; factor 1 is its own measure."""
    return [gaps[0], *takewhile(holds, gaps[1:])][-1].batch_size
