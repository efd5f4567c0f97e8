"""Time to the common target, as one bar a method with an interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from divebatch.report.charts import AXES
from divebatch.report.curves import TOLERANCE, Floats, by_trial
from divebatch.report.runs import Experiment
from divebatch.report.style import Look, looks_for
from divebatch.report.table import seconds
from divebatch.report.targets import Progress, common_target, progress_of

ORDER = ("seconds", "epochs", "steps", "samples")
"""Of the axes: what costs comes first."""
RESAMPLES = 1000
LEVEL = 0.95
BARS_NOTE = (
    "Bars: until the accuracy averaged over trials is at least the target, as in the table. Whiskers: the middle 95 % "
    "of the same number when the trials are drawn again with replacement (bootstrap), dotted where they run on to "
    "never. With few trials they are too short rather than too long."
)


@dataclass(frozen=True, slots=True)
class Bar:
    """One method's way to the target, in the unit of the axis."""

    method: str
    look: Look
    value: float | None
    """On the accuracy averaged over trials; None where that never reached the target."""
    low: float
    high: float
    """Ends of the interval, infinite for never; NaN for a single trial."""
    trials: tuple[float, ...]
    """Of each trial alone; infinite where it never reached the target."""

    @property
    def num_reached(self) -> int:
        """Trials that reached the target."""
        return sum(map(math.isfinite, self.trials))

    @property
    def fastest(self) -> float:
        """Infinite where no trial reached the target."""
        return min(self.trials, default=math.inf)

    @property
    def slowest(self) -> float:
        """Infinite where a trial never reached the target."""
        return max(self.trials, default=math.inf)

    @property
    def has_interval(self) -> bool:
        """Whether there is something to draw."""
        return self.value is not None and math.isfinite(self.low)


@dataclass(frozen=True, slots=True)
class Bars:
    """All methods on one axis."""

    axis: str
    """A key of `AXES`."""
    target: float
    """Accuracy, 0..1."""
    bars: Sequence[Bar]

    @property
    def title(self) -> str:
        """With unit and target."""
        return f"{AXES[self.axis][1]} to the common target of {100 * self.target:.2f} %"

    @property
    def end(self) -> float:
        """The largest finite number of all, where the axis may end."""
        numbers = [n for bar in self.bars for n in (bar.value or 0.0, bar.low, bar.high) if math.isfinite(n)]
        return max(numbers, default=0.0)


def make_bars(experiment: Experiment) -> dict[str, Bars]:
    """Axis -> bars, the time first where the runs were timed; empty while there is no target or no one reached it."""
    methods = progress_of(experiment)
    target = common_target(methods)
    if target is None:
        return {}
    looks = looks_for(experiment.methods, real_data=experiment.is_on_real_data)
    bars = [_bars_of(progress, looks[progress.method], target.accuracy) for progress in methods]
    charts = [Bars(axis, target.accuracy, [of_method[axis] for of_method in bars]) for axis in ORDER]
    return {chart.axis: chart for chart in charts if any(bar.value for bar in chart.bars)}


def shown(value: float, axis: str) -> str:
    """With its unit where the axis has one.

    >>> shown(21.52, "seconds"), shown(35.0, "epochs"), shown(1750000.0, "samples"), shown(math.inf, "steps")
    ('21.5 s', '35', '1,750,000', 'never')
    """
    if not math.isfinite(value):
        return "never"
    return f"{seconds(value)} s" if axis == "seconds" else f"{value:,.0f}"


def _bars_of(progress: Progress, look: Look, target: float) -> dict[str, Bar]:
    """Axis -> the method's bar."""
    runs = progress.runs
    epochs = sorted({record.epoch for run in runs for record in run.epochs})
    if not epochs:
        never = (math.inf,) * len(runs)
        return {axis: Bar(progress.method, look, None, math.nan, math.nan, never) for axis in ORDER}
    # All trials once, each trial alone, and then trials drawn at random: the same arithmetic for all.
    drawn = np.random.default_rng(0).multinomial(len(runs), [1 / len(runs)] * len(runs), RESAMPLES)
    draws = np.vstack([np.ones(len(runs)), np.eye(len(runs)), drawn])
    reached = _drawn_means(draws, by_trial(runs, "val_accuracy", epochs)) >= target - TOLERANCE
    places = {axis: by_trial(runs, AXES[axis][0], epochs) for axis in ORDER}
    return {axis: _bar(progress.method, look, _arrivals(draws, reached, places[axis])) for axis in ORDER}


def _bar(method: str, look: Look, arrivals: Floats) -> Bar:
    """From the arrivals of all trials together, of each alone, and of the draws."""
    num_trials = len(arrivals) - 1 - RESAMPLES
    value, trials, drawn = arrivals[0], arrivals[1 : 1 + num_trials], arrivals[1 + num_trials :]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    ends = (float(low), float(high)) if num_trials > 1 else (math.nan, math.nan)
    return Bar(method, look, float(value) if math.isfinite(value) else None, *ends, tuple(trials.tolist()))


def _arrivals(draws: Floats, reached: NDArray[np.bool_], places: Floats) -> Floats:
    """For each draw the mean place of its trials at the first epoch in `reached`; infinite where there is none.

    `draws` says how often each draw has each trial, `reached` has one row a draw, `places` one row a trial.
    """
    there = places[:, reached.argmax(axis=1)].T
    counts = draws * np.isfinite(there)
    sums, totals = (counts * np.nan_to_num(there)).sum(axis=1), counts.sum(axis=1)
    arrivals = np.full(len(draws), np.inf)
    np.divide(sums, totals, out=arrivals, where=reached.any(axis=1) & (totals > 0))
    return arrivals


def _drawn_means(draws: Floats, values: Floats) -> Floats:
    """One row a draw, one column an epoch; NaN where no drawn trial has a value."""
    known = np.isfinite(values)
    counts = draws @ known.astype(float)
    sums = draws @ np.where(known, values, 0.0)
    means = np.full(sums.shape, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means
