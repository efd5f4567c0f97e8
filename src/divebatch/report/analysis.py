"""Compute every number of a report: averages over trials, final values, targets and the ways to them.

All numbers of a method are based on the trials that count: the finished trials, or all trials while none has finished.
Only a finished trial has a final value. A target lies one point below a final accuracy, or 1 % above a final loss. A
method reaches the target at the first epoch at which its metric, averaged over the trials that count, is as good.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from divebatch.records import Metric
from divebatch.report.load import RecordedExperiment, RecordedRun

Floats = NDArray[np.float64]
STRETCHES = 400
"""Number of parts of a long curve's outline."""
MOST_POINTS = 6 * STRETCHES
"""Number of points above which only a curve's outline is drawn."""
MARGIN = 0.01
"""Margin between a final value and its target: 0.01 of accuracy, from 0 to 1, or 1 % of a loss."""
TOLERANCE = 1e-12
"""Rounding error with which an accuracy of 0.94 still reaches a target of 0.95 - 0.01."""
LOSS = Metric("val_loss", "lower")
UNITS = {"seconds": "train_seconds", "epochs": "epoch", "steps": "steps", "samples": "samples"}
"""Units of the way to a target, each with its field of a record."""


# Averages over trials


@dataclass(frozen=True, slots=True)
class Average:
    """A mean over trials, in the field's own unit."""

    mean: float
    std: float
    """Sample standard deviation (divisor n - 1); NaN for a single trial."""
    num_trials: int

    @property
    def standard_error(self) -> float:
        return self.std / math.sqrt(self.num_trials)


@dataclass(frozen=True, slots=True)
class Curve:
    """A field's mean over trials at each epoch that any trial reached.

    `num_trials` counts the trials with a finite value at each epoch. The mean is NaN if there is none, and the
    spread if there are fewer than two.
    """

    epochs: NDArray[np.int64]
    mean: Floats
    std: Floats
    num_trials: NDArray[np.int64]

    @property
    def standard_error(self) -> Floats:
        return self.std / np.sqrt(np.maximum(self.num_trials, 1))

    def final(self) -> Average | None:
        """Return the average at the last epoch that any trial reached; None: no finite value."""
        return self.at(int(self.epochs[-1])) if len(self.epochs) else None

    def at(self, epoch: int) -> Average | None:
        """Return the average at an epoch; None: no finite value."""
        index = int(np.searchsorted(self.epochs, epoch))
        if index == len(self.epochs) or self.epochs[index] != epoch or self.num_trials[index] == 0:
            return None
        return Average(float(self.mean[index]), float(self.std[index]), int(self.num_trials[index]))

    def measured(self) -> "Curve":
        """Return the curve at epochs with a finite value, because some fields are not measured every epoch."""
        return self.only(np.isfinite(self.mean))

    def since(self, epoch: int) -> "Curve":
        return self.only(self.epochs >= epoch)

    def only(self, kept: NDArray[np.bool_] | NDArray[np.intp]) -> "Curve":
        return Curve(self.epochs[kept], self.mean[kept], self.std[kept], self.num_trials[kept])

    def scaled(self, factor: float) -> "Curve":
        """Return the curve in another unit: mean and spread times `factor`."""
        return Curve(self.epochs, self.mean * factor, self.std * factor, self.num_trials)

    def outline(self) -> "Curve":
        """Return the points to draw: all, or the ends and extremes of each stretch of a long curve.

        Extremes of the mean and its band are kept, so that no peak disappears.
        """
        if len(self.epochs) <= MOST_POINTS:
            return self
        width = np.where(np.isfinite(self.std), self.std, 0.0)
        lows = [np.where(np.isnan(each), np.inf, each) for each in (self.mean, self.mean - width)]
        highs = [np.where(np.isnan(each), -np.inf, each) for each in (self.mean, self.mean + width)]
        kept: set[int] = set()
        for first, end in pairwise(np.linspace(0, len(self.epochs), STRETCHES + 1).astype(int).tolist()):
            extremes = [*(each[first:end].argmin() for each in lows), *(each[first:end].argmax() for each in highs)]
            kept |= {first, end - 1, *(first + int(index) for index in extremes)}
        return self.only(np.array(sorted(kept)))


def average_curve(runs: Sequence[RecordedRun], field: str) -> Curve:
    """Average a field of `EpochRecord` over trials at each epoch."""
    epochs = _epochs_of(runs)
    values = _by_trial(runs, field, epochs)
    counts, mean = np.isfinite(values).sum(axis=0), _mean(values)
    with np.errstate(over="ignore"):  # a spread beyond the range of floats becomes infinite
        variance = _ratio(np.nansum((values - mean) ** 2, axis=0), counts - 1)
    return Curve(np.array(epochs, dtype=np.int64), mean, np.sqrt(variance), counts)


def _epochs_of(runs: Sequence[RecordedRun]) -> list[int]:
    return sorted({record.epoch for run in runs for record in run.epochs})


def _by_trial(runs: Sequence[RecordedRun], field: str, epochs: list[int]) -> Floats:
    """Return a row per trial and a column per epoch, with NaN for missing or infinite values."""
    column = {epoch: index for index, epoch in enumerate(epochs)}
    values = np.full((len(runs), len(epochs)), np.nan)
    for row, run in enumerate(runs):
        for record in run.epochs:
            value = getattr(record, field)
            if value is not None and math.isfinite(value):
                values[row, column[record.epoch]] = value
    return values


def _mean(values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return _ratio(np.nansum(values, axis=0), np.isfinite(values).sum(axis=0))


def _ratio(sums: Floats, counts: NDArray[np.int64]) -> Floats:
    """Divide, with NaN for counts of 0 and without the warnings of nanmean and nanstd."""
    ratio = np.full(len(sums), np.nan)
    np.divide(sums, counts, out=ratio, where=counts > 0)
    return ratio


# Targets


def target_below(metric: Metric, value: float) -> float:
    """Return the target of a final value: one point less accuracy, or a loss that is 1 % higher."""
    margin = MARGIN if metric.is_accuracy else MARGIN * abs(value)
    return value - margin if metric.higher_is_better else value + margin


def reaches(metric: Metric, values: Floats, target: float) -> NDArray[np.bool_]:
    """Return a mask of the values that are at least as good as a target, which NaN never is."""
    if metric.higher_is_better:
        return values >= target - TOLERANCE
    return values <= target + TOLERANCE


@dataclass(frozen=True, slots=True)
class Arrival:
    """The way of a method to a target, in one unit.

    Args:
        value: The way of the mean over the trials that count. None: the mean never reached the target.
        trials: The way of each trial alone, in the order of seeds; infinite if the trial never reached the target.
    """

    value: float | None
    trials: tuple[float, ...]


def _arrivals(runs: Sequence[RecordedRun], metric: Metric, target: float) -> dict[str, Arrival]:
    epochs = _epochs_of(runs)
    if not epochs:
        return dict.fromkeys(UNITS, Arrival(None, (math.inf,) * len(runs)))
    values = _by_trial(runs, metric.name, epochs)
    reached = reaches(metric, np.vstack([_mean(values), values]), target)
    firsts = [int(each.argmax()) if each.any() else None for each in reached]
    found: dict[str, Arrival] = {}
    for unit, name in UNITS.items():
        places = _by_trial(runs, name, epochs)
        groups = (places, *places[:, None])  # all trials, then each alone
        value, *alone = (_mean_place(group, first) for group, first in zip(groups, firsts, strict=True))
        found[unit] = Arrival(value if math.isfinite(value) else None, tuple(alone))
    return found


def _mean_place(places: Floats, epoch: int | None) -> float:
    """Return the mean place of some trials at the epoch with this index, or infinity if there is none."""
    there = places[:, epoch] if epoch is not None else np.array([])
    there = there[np.isfinite(there)]
    return float(there.mean()) if len(there) else math.inf


# Methods and experiments


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodResult:
    """The results of a method over its trials."""

    method: str
    label: str
    """The method in words, for legends."""
    trials: tuple[RecordedRun, ...]
    """All trials, finished or not."""
    runs: tuple[RecordedRun, ...]
    """The trials that count."""
    num_finished: int
    num_diverged: int
    """Number of trials whose last epoch has no finite validation loss."""
    num_at_chance: int
    """Number of finished trials that a model without any training would match."""
    is_at_chance: bool
    """Whether a model without any training would match the final value."""
    final: Average | None
    """The metric at the last planned epoch. None: no trial has finished."""
    _curves: dict[str, Curve] = field(default_factory=dict, compare=False, repr=False)

    def curve(self, name: str) -> Curve:
        """Return the average of a record's field over the trials that count."""
        if name not in self._curves:
            self._curves[name] = average_curve(self.runs, name)
        return self._curves[name]

    def final_mean(self, name: str) -> float | None:
        """Return a field's mean at the last epoch that any counting trial has reached."""
        final = self.curve(name).final()
        return final.mean if final else None

    @property
    def is_fixed(self) -> bool:
        """Return whether the policy keeps the batch size, or if no policy is known, whether the size stayed."""
        kinds = {run.kind_of("method", "policy") for run in self.trials}
        return kinds == {"fixed"} or (kinds == {None} and all(len(set(run.batch_sizes)) < 2 for run in self.trials))

    @property
    def first_batch_size(self) -> float | None:
        """Return the first batch size, averaged over trials."""
        sizes = [run.batch_sizes[0] for run in self.runs if run.epochs]
        return fmean(sizes) if sizes else None

    @property
    def largest_batch_size(self) -> float | None:
        """Return the largest batch size of each trial, averaged over trials."""
        sizes = [max(run.batch_sizes) for run in self.runs if run.epochs]
        return fmean(sizes) if sizes else None

    def arrivals(self, metric: Metric, target: float | None) -> dict[str, Arrival]:
        """Return the arrival at the target by unit; empty if there is no target."""
        return {} if target is None else _arrivals(self.runs, metric, target)


@dataclass(frozen=True, slots=True)
class Target:
    """A common target for all methods, slightly below the final value of `method`."""

    method: str
    value: float
    is_baseline: bool
    """Whether `method` is one of the experiment's baselines. False: it is the method with the best final value."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """The numbers of an experiment and its methods."""

    experiment: RecordedExperiment
    methods: Sequence[MethodResult]
    target: Target | None
    common: Mapping[str, Mapping[str, Arrival]]
    """Arrivals at the common target, by method and unit; empty if there is no target."""
    own: Mapping[str, Mapping[str, Arrival]]
    """Arrivals at each method's own target, by method and unit; empty if there is no target."""

    @property
    def metric(self) -> Metric:
        return self.experiment.metric

    def method(self, name: str) -> MethodResult:
        return next(result for result in self.methods if result.method == name)

    @property
    def is_timed(self) -> bool:
        """Return whether one machine ran all trials, so that seconds are comparable."""
        return len(self.experiment.machines) == 1

    @property
    def is_finished(self) -> bool:
        """Return whether all trials of all methods have finished."""
        return all(result.num_finished == len(result.trials) for result in self.methods)


def analyse(experiment: RecordedExperiment) -> Analysis:
    """Compute all numbers of tables, figures and verdicts."""
    metric, methods = experiment.metric, [_result(experiment, method) for method in experiment.methods]
    # None without a final value, and for methods that a model without any training would match.
    own = {
        result.method: None if result.final is None or result.is_at_chance else target_below(metric, result.final.mean)
        for result in methods
    }
    target = _common_target(experiment, own)
    value = target.value if target else None
    return Analysis(
        experiment,
        methods,
        target,
        common={result.method: result.arrivals(metric, value) for result in methods},
        own={result.method: result.arrivals(metric, own[result.method]) for result in methods},
    )


def _result(experiment: RecordedExperiment, method: str) -> MethodResult:
    trials, metric = experiment.methods[method], experiment.metric
    finished = tuple(run for run in trials if run.is_finished(length=experiment.longest))
    runs = finished or trials
    curve = average_curve(runs, metric.name)
    final = curve.at(experiment.length) if finished else None
    finals = [metric.of(run.epochs[-1]) for run in finished]
    diverged = [run for run in trials if run.last is not None and LOSS.of(run.last) is None]
    return MethodResult(
        method=method,
        label=trials[0].header.label or method,
        trials=trials,
        runs=runs,
        num_finished=len(finished),
        num_diverged=len(diverged) if has_validation(experiment) else 0,
        num_at_chance=sum(_is_at_chance(experiment, value) for value in finals if value is not None),
        is_at_chance=final is not None and _is_at_chance(experiment, final.mean),
        final=final,
        _curves={metric.name: curve},
    )


def has_validation(experiment: RecordedExperiment) -> bool:
    """Return whether any epoch of any run has a validation loss or accuracy."""
    records = (record for run in experiment.runs for record in run.epochs)
    return any(record.val_loss is not None or record.val_accuracy is not None for record in records)


def _is_at_chance(experiment: RecordedExperiment, value: float) -> bool:
    metric, chance = experiment.metric, experiment.settings.chance
    return chance is not None and bool(reaches(metric, np.array(chance), target_below(metric, value)))


def _common_target(experiment: RecordedExperiment, own: Mapping[str, float | None]) -> Target | None:
    """Return the own target of the first baseline that has one, else of the best method; None: there is none."""
    targets = {method: target for method, target in own.items() if target is not None}
    baseline = next((name for name in experiment.settings.baselines if name in targets), None)
    if baseline is not None:
        return Target(baseline, targets[baseline], is_baseline=True)
    best = experiment.metric.best(targets.values())
    return next((Target(name, best, is_baseline=False) for name in targets if targets[name] == best), None)


def trained_alike(one: MethodResult, other: MethodResult) -> bool:
    """Return whether two methods have equal sizes, rates and losses in every epoch of every seed."""
    return [*map(_course, one.trials)] == [*map(_course, other.trials)]


def _course(run: RecordedRun) -> tuple[int, list[tuple[object, ...]]]:
    fields = ("epoch", "batch_size", "lr", "steps", "train_loss", "val_loss", "val_accuracy")
    return run.header.seed, [tuple(getattr(record, name) for name in fields) for record in run.epochs]
