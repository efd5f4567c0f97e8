"""What each method that changes its batch size gained over the best fixed batch, and over the customary one.

Seed by seed, as `compare` does: the final value as a difference, steps and seconds as ratios. The best fixed batch is
the one with the best final value; of those within one standard error of it, seed by seed, the quickest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from divebatch.records import Metric
from divebatch.report.analysis import Analysis, MethodResult
from divebatch.report.compare import Pairs, factors, final_value, pair, pair_ratios, seed_pairs
from divebatch.report.runs import RecordedRun

BEST, CUSTOMARY = "the best fixed batch", "the customary batch"
STEPS, HERE = "steps", "seconds here"

RATIOS = (STEPS, HERE)


@dataclass(frozen=True, slots=True)
class Change:
    """How two methods differ in one measure, over the seeds that both have.

    Args:
        value: The mean difference, or the geometric mean of ratios.
        low: Lower end of Student's 95 % interval; NaN with a single seed.
        high: Upper end.
        is_shown: Whether the interval leaves out that there is no difference; None with a single seed.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    is_shown: bool | None = None


@dataclass(frozen=True, slots=True)
class Baseline:
    """A fixed batch that others are held against."""

    result: MethodResult
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """One adaptive method against one fixed batch."""

    method: str
    baseline: Baseline
    num_seeds: int
    metric: Change | None
    """Positive where the adaptive method is better, in points of accuracy or in the metric's own unit; None where a
    run diverged."""
    ratios: Mapping[str, Change]
    """Those of `RATIOS` that are known: the adaptive method's over the fixed batch's."""


def is_fixed(result: MethodResult) -> bool:
    """Whether its policy keeps the batch size; where no policy is named, whether the size was kept."""
    kinds = {run.kind_of("method", "policy") for run in result.trials}
    return kinds == {"fixed"} or (kinds == {None} and all(len(set(run.batch_sizes)) < 2 for run in result.trials))


def adaptive_methods(analysis: Analysis) -> list[MethodResult]:
    """The methods that change their batch size, those that have nothing to choose first."""
    found = [result for result in analysis.methods if not is_fixed(result)]
    return sorted(found, key=lambda result: result.trials[0].kind_of("method", "policy") != "auto")


def find_gains(analysis: Analysis) -> list[Gain]:
    """Of each adaptive method over each baseline that it has a seed in common with.

    Args:
        analysis: The experiment's, from `analyse`.
    """
    gains, baselines = [], baselines_of(analysis)
    for result in adaptive_methods(analysis):
        for baseline in baselines:
            pairs = seed_pairs(result, baseline.result, analysis.metric)
            if pairs:
                ratios = _ratios(pairs)
                metric = _metric_change(pairs, analysis.metric)
                gains.append(Gain(result.method, baseline, len(pairs), metric, ratios))
    return gains


# What they are held against


def baselines_of(analysis: Analysis) -> list[Baseline]:
    """The best fixed batch, and the customary one where the experiment names it and it was run; they may be one."""
    best, name = best_fixed(analysis), analysis.experiment.settings.customary
    customary = next((result for result in analysis.methods if result.method == name and result.num_finished), None)
    if best is not None and best is customary:
        return [Baseline(best, (BEST, CUSTOMARY))]
    found = [(best, BEST), (customary, CUSTOMARY)]
    return [Baseline(result, (role,)) for result, role in found if result is not None]


def best_fixed(analysis: Analysis) -> MethodResult | None:
    """None while no fixed batch has finished."""
    metric = analysis.metric
    finals = {
        result.method: fmean(final_value(run, metric) for run in result.runs)
        for result in analysis.methods
        if is_fixed(result) and result.num_finished
    }
    value = metric.best(finals.values())
    if value is None:
        return None
    best = next(analysis.method(name) for name in finals if finals[name] == value)
    tied = [analysis.method(name) for name in finals if _is_within_noise(analysis.method(name), best, metric)]
    return min(tied, key=_cost_of(analysis), default=best)


def _is_within_noise(result: MethodResult, best: MethodResult, metric: Metric) -> bool:
    """Whether the mean difference, seed by seed, is at most its standard error; no run may have diverged."""
    if result is best:
        return True
    pairs = seed_pairs(result, best, metric)
    if len(pairs) < 2 or any(metric.of(run.epochs[-1]) is None for each in pairs for run in each):
        return False
    found = pair([final_value(one, metric) - final_value(other, metric) for one, other in pairs])
    return abs(found.mean) <= found.std / math.sqrt(found.num_pairs)


def _cost_of(analysis: Analysis) -> Callable[[MethodResult], float]:
    """Seconds of training where one machine ran all, else steps."""
    seconds = {result.method: result.final_mean("train_seconds") for result in analysis.methods}
    if len(analysis.experiment.machines) == 1 and None not in seconds.values():
        return lambda result: seconds[result.method] or 0.0
    return lambda result: result.final_mean("steps") or 0.0


# How they differ


def _metric_change(pairs: Pairs, metric: Metric) -> Change | None:
    sign = 1 if metric.higher_is_better else -1
    scale = 100.0 if metric.is_accuracy else 1.0
    differences = [sign * scale * (final_value(one, metric) - final_value(other, metric)) for one, other in pairs]
    if not all(map(math.isfinite, differences)):
        return None
    if len(pairs) == 1:
        return Change(differences[0])
    found = pair(differences)
    return Change(found.mean, *found.interval, found.excludes_zero)


def _ratios(pairs: Pairs) -> dict[str, Change]:
    measures: dict[str, Callable[[RecordedRun], float | None]] = {STEPS: lambda run: run.epochs[-1].steps}
    if len({(run.machine, run.is_on_gpu) for each in pairs for run in each}) == 1:
        measures[HERE] = lambda run: run.epochs[-1].train_seconds
    found = {name: _ratio([(of(one), of(other)) for one, other in pairs]) for name, of in measures.items()}
    return {name: change for name, change in found.items() if change is not None}


def _ratio(values: Sequence[tuple[float | None, float | None]]) -> Change | None:
    """None where a value is missing or not positive."""
    known = [(one, other) for one, other in values if one and other and min(one, other) > 0]
    if len(known) < len(values):
        return None
    if len(known) == 1:
        return Change(known[0][0] / known[0][1])
    found = pair_ratios(known)
    return Change(*factors(found), found.excludes_zero)
