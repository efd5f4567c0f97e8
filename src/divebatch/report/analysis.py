"""What the runs of an experiment come to: the one definition of finished, final, target, arrival and same course.

All numbers of a method are over the same trials, those that count: the finished ones, or all of them while none has
finished. Only a finished trial has a final value. A target lies one point below a final accuracy, or 1 % above a final
loss, and is reached at the first epoch at which the metric, averaged over the trials that count, is at least as good.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from divebatch.records import Metric
from divebatch.report.curves import Average, Curve, Floats, average_curve, by_trial
from divebatch.report.runs import RecordedExperiment, RecordedRun

ONE_POINT = 0.01
"""Of accuracy, which runs from 0 to 1."""
ONE_PERCENT = 0.01
"""Of a loss."""
TOLERANCE = 1e-12
"""So that an accuracy of 0.94 reaches a target of 0.95 - 0.01."""
UNITS = {"seconds": "train_seconds", "epochs": "epoch", "steps": "steps", "samples": "samples"}
"""What a way to a target is counted in, the costly first, and the field of a record that holds it."""
WITH_COMPILATION = "seconds with compilation"
RESAMPLES = 1000
LEVEL = 0.95
MOST_MEANS = 2_000_000
"""Numbers that the bootstrap has in memory at a time: draws times epochs."""


def target_below(metric: Metric, value: float) -> float:
    """What counts as almost as good as `value`: one point less accuracy, or a loss that is 1 % higher."""
    if metric.is_accuracy:
        return value - ONE_POINT if metric.higher_is_better else value + ONE_POINT
    return value - ONE_PERCENT * abs(value) if metric.higher_is_better else value + ONE_PERCENT * abs(value)


def reaches(metric: Metric, values: Floats, target: float) -> NDArray[np.bool_]:
    """Which of some values are at least as good as a target; NaN is not."""
    if metric.higher_is_better:
        return values >= target - TOLERANCE
    return values <= target + TOLERANCE


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a method reached a target, in one unit.

    Args:
        value: By the metric averaged over the trials that count; None where that never reached the target.
        low: Lower end of the bootstrap interval of `value`; NaN for a single trial.
        high: Upper end; infinite for never.
        trials: The same of each trial alone, in the order of the seeds; infinite where it never got there.
    """

    value: float | None
    low: float
    high: float
    trials: tuple[float, ...]

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
        """Whether there is an interval to draw."""
        return self.value is not None and math.isfinite(self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodResult:
    """One method over its trials."""

    method: str
    label: str
    """The method in words, for legends."""
    trials: tuple[RecordedRun, ...]
    """All of them, also those that have not finished."""
    runs: tuple[RecordedRun, ...]
    """Those that count."""
    num_finished: int
    num_diverged: int
    """Of `trials`: whose last epoch has no finite validation loss."""
    final: Average | None
    """The metric at the last epoch that was asked for; None while no trial has finished."""
    _curves: dict[str, Curve] = field(default_factory=dict, compare=False, repr=False)

    def curve(self, name: str) -> Curve:
        """A record's field, averaged over the trials that count."""
        if name not in self._curves:
            self._curves[name] = average_curve(self.runs, name)
        return self._curves[name]

    def final_mean(self, name: str) -> float | None:
        """A field at the last epoch that a trial that counts has reached."""
        final = self.curve(name).final()
        return final.mean if final else None

    @property
    def last_epoch(self) -> int | None:
        """The highest epoch number that any trial reached."""
        return max((run.last.epoch for run in self.trials if run.last), default=None)

    @property
    def first_batch_size(self) -> float | None:
        """Mean over trials, in samples."""
        begun = [run for run in self.runs if run.epochs]
        return fmean(run.batch_sizes[0] for run in begun) if begun else None

    @property
    def largest_batch_size(self) -> float | None:
        """Mean over trials of each trial's largest, in samples."""
        begun = [run for run in self.runs if run.epochs]
        return fmean(max(run.batch_sizes) for run in begun) if begun else None

    @property
    def changes_batch_size(self) -> bool:
        """Whether its policy is another than to keep the batch size."""
        return any(run.kind_of("method", "policy") != "fixed" for run in self.runs)

    def arrivals(self, metric: Metric, target: float | None, *, resamples: int = 0) -> dict[str, Arrival]:
        """Unit -> when the target was reached; empty without a target."""
        return {} if target is None else _arrivals(self.runs, metric, target, resamples)


@dataclass(frozen=True, slots=True)
class Target:
    """One value for all methods: a little below the final one of `method`."""

    method: str
    value: float
    is_baseline: bool
    """Whether `method` is one of the experiment's baselines; else it is the one that ended best."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """An experiment's methods in numbers; everything that a report says comes from here."""

    experiment: RecordedExperiment
    methods: Sequence[MethodResult]
    target: Target | None
    common: Mapping[str, Mapping[str, Arrival]]
    """Method -> unit -> when it reached the common target; empty without one."""
    own: Mapping[str, Mapping[str, Arrival]]
    """The same for each method's own target; empty for a method that has none."""

    @property
    def metric(self) -> Metric:
        return self.experiment.metric

    def method(self, name: str) -> MethodResult:
        return next(result for result in self.methods if result.method == name)

    def arrivals(self, unit: str) -> dict[str, Arrival]:
        """Method -> when it reached the common target, in one unit; empty where no method did."""
        found = {method: units[unit] for method, units in self.common.items() if unit in units}
        return found if any(arrival.value is not None for arrival in found.values()) else {}

    @property
    def race_unit(self) -> str | None:
        """What the words compare: seconds where the experiment wants it and one machine ran all, else epochs."""
        # Seconds of different machines cannot be compared.
        is_timed = self.experiment.settings.race_in == "seconds" and len(self.experiment.machines) == 1
        wanted = ["seconds", "epochs"] if is_timed else ["epochs"]
        return next((unit for unit in wanted if self.arrivals(unit)), None)

    def trained_alike(self, one: str, other: str, *, until: int | None = None) -> bool:
        """Whether two methods trained exactly the same, in all epochs or until one."""
        return trained_alike(self.method(one), self.method(other), until=until)

    @property
    def is_finished(self) -> bool:
        """Whether all trials of all methods have finished."""
        return all(result.num_finished == len(result.trials) for result in self.methods)


def analyse(experiment: RecordedExperiment) -> Analysis:
    """Every number that tables, figures and words show.

    Args:
        experiment: One of `load_runs`.
    """
    methods = [_result(experiment, method) for method in experiment.methods]
    target, metric = _common_target(experiment, methods), experiment.metric
    value = target.value if target else None
    common = {result.method: result.arrivals(metric, value, resamples=RESAMPLES) for result in methods}
    own = {result.method: result.arrivals(metric, _own_target(experiment, result)) for result in methods}
    return Analysis(experiment, methods, target, common, own)


def _result(experiment: RecordedExperiment, method: str) -> MethodResult:
    trials = experiment.methods[method]
    finished = tuple(run for run in trials if run.is_finished(length=experiment.longest))
    # One rule for all tables and figures: an unfinished trial counts everywhere or nowhere.
    runs = finished or trials
    curve = average_curve(runs, experiment.metric.name)
    return MethodResult(
        method=method,
        label=trials[0].header.label or method,
        trials=trials,
        runs=runs,
        num_finished=len(finished),
        num_diverged=sum(map(_diverged, trials)) if has_validation(experiment) else 0,
        final=curve.at(experiment.length) if finished else None,
        _curves={experiment.metric.name: curve},
    )


def has_validation(experiment: RecordedExperiment) -> bool:
    """Whether any epoch of any run has a validation loss or accuracy."""
    records = (record for run in experiment.runs for record in run.epochs)
    return any(record.val_loss is not None or record.val_accuracy is not None for record in records)


def _diverged(run: RecordedRun) -> bool:
    return run.last is not None and (run.last.val_loss is None or not math.isfinite(run.last.val_loss))


def _own_target(experiment: RecordedExperiment, result: MethodResult) -> float | None:
    """None without a final value, and for a method that a model which has learned nothing would match."""
    if result.final is None:
        return None
    metric, chance = experiment.metric, experiment.settings.chance
    target = target_below(metric, result.final.mean)
    is_at_chance = chance is not None and bool(reaches(metric, np.array(chance), target))
    return None if is_at_chance else target


def _common_target(experiment: RecordedExperiment, methods: Sequence[MethodResult]) -> Target | None:
    """Of the first baseline that has one, else of the method that ended best; None while none has one."""
    own = {result.method: _own_target(experiment, result) for result in methods}
    targets = {method: target for method, target in own.items() if target is not None}
    baseline = next((name for name in experiment.settings.baselines if name in targets), None)
    if baseline is not None:
        return Target(baseline, targets[baseline], is_baseline=True)
    best = experiment.metric.best(targets.values())
    return next((Target(name, best, is_baseline=False) for name in targets if targets[name] == best), None)


def trained_alike(one: MethodResult, other: MethodResult, *, until: int | None = None) -> bool:
    """Whether two methods trained exactly the same: equal sizes, rates and losses in every epoch of every seed.

    Args:
        one: A method.
        other: Another.
        until: The last epoch that counts; None for all.
    """
    runs = [(_first(a, until), _first(b, until)) for a, b in zip(one.trials, other.trials, strict=False)]
    return len(one.trials) == len(other.trials) and all(_is_same_course(first, second) for first, second in runs)


def _first(run: RecordedRun, until: int | None) -> RecordedRun:
    return run if until is None else replace(run, epochs=tuple(each for each in run.epochs if each.epoch <= until))


def _is_same_course(one: RecordedRun, other: RecordedRun) -> bool:
    fields = ("epoch", "batch_size", "lr", "steps", "train_loss", "val_loss", "val_accuracy")
    if (one.header.seed, len(one.epochs)) != (other.header.seed, len(other.epochs)):
        return False
    epochs = zip(one.epochs, other.epochs, strict=True)
    return all(getattr(first, name) == getattr(second, name) for first, second in epochs for name in fields)


def _arrivals(runs: Sequence[RecordedRun], metric: Metric, target: float, resamples: int) -> dict[str, Arrival]:
    epochs = sorted({record.epoch for run in runs for record in run.epochs})
    if not epochs:
        never = Arrival(None, math.nan, math.nan, (math.inf,) * len(runs))
        return dict.fromkeys((*UNITS, WITH_COMPILATION), never)
    # All trials once, each trial alone, and then trials drawn at random: the same arithmetic for all.
    resamples = resamples if len(runs) > 1 else 0
    drawn = np.random.default_rng(0).multinomial(len(runs), [1 / len(runs)] * len(runs), resamples)
    draws = np.vstack([np.ones(len(runs)), np.eye(len(runs)), drawn])
    first = _first_reached(draws, metric, by_trial(runs, metric.name, epochs), target)
    places = {unit: by_trial(runs, name, epochs) for unit, name in UNITS.items()}
    places[WITH_COMPILATION] = places["seconds"] + np.nan_to_num(by_trial(runs, "compile_seconds", epochs))
    return {unit: _arrival(_first_places(draws, first, there), len(runs)) for unit, there in places.items()}


def _arrival(places: Floats, num_trials: int) -> Arrival:
    """From the places of all trials together, of each alone, and of the draws."""
    value, alone, drawn = places[0], places[1 : 1 + num_trials], places[1 + num_trials :]
    low = high = math.nan
    if num_trials > 1 and len(drawn):
        low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf").tolist()
    return Arrival(float(value) if math.isfinite(value) else None, low, high, tuple(alone.tolist()))


def _first_reached(draws: Floats, metric: Metric, values: Floats, target: float) -> NDArray[np.int64]:
    """For each draw the index of the first epoch at which its mean is as good as the target; -1 where there is none."""
    rows = max(1, MOST_MEANS // values.shape[1])
    parts = (draws[start : start + rows] for start in range(0, len(draws), rows))
    reached = (reaches(metric, _drawn_means(part, values), target) for part in parts)
    return np.concatenate([np.where(each.any(axis=1), each.argmax(axis=1), -1) for each in reached])


def _first_places(draws: Floats, first: NDArray[np.int64], places: Floats) -> Floats:
    """For each draw the mean place of its trials at the epoch with index `first`; infinite where there is none.

    `draws` says how often each draw has each trial, `places` has one row a trial.
    """
    there = places[:, first].T
    counts = draws * np.isfinite(there)
    sums, totals = (counts * np.nan_to_num(there)).sum(axis=1), counts.sum(axis=1)
    means = np.full(len(draws), np.inf)
    np.divide(sums, totals, out=means, where=(first >= 0) & (totals > 0))
    return means


def _drawn_means(draws: Floats, values: Floats) -> Floats:
    """One row a draw, one column an epoch; NaN where no drawn trial has a value."""
    known = np.isfinite(values)
    counts = draws @ known.astype(float)
    with np.errstate(over="ignore"):  # a mean beyond what a float holds reaches nothing
        sums = draws @ np.where(known, values, 0.0)
    means = np.full(sums.shape, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means
