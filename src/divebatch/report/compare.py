"""Compare methods seed by seed: two methods by name, and each adaptive method with fixed batches.

Final values are compared as differences, steps and seconds as ratios. Intervals are Student's at 95 %; there are none
below three seeds or if all seeds agree. The best fixed batch has the best final value, or is the quickest of those
within one standard error of the best, seed by seed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from divebatch.measurement import t_quantile
from divebatch.records import Metric
from divebatch.report.analysis import LOSS, Analysis, MethodResult, trained_alike
from divebatch.report.load import RecordedRun

LEVEL = 0.95
FEWEST_SEEDS = 3
"""Fewest seeds for an interval."""
FEW_SEEDS = 5
"""Number of seeds below which `compare` warns."""
EFFECTS = ((0.2, "negligible"), (0.5, "small"), (0.8, "medium"), (math.inf, "large"))
"""Cohen's words for effects below each bound."""
BEST, CUSTOMARY = "best fixed batch", "customary batch"
SECONDS = "seconds"

Pairs = Sequence[tuple[RecordedRun, RecordedRun]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two methods in one measure.

    Args:
        values: The difference, or the logarithm of the ratio, for each common seed; at least one.
        is_ratio: Whether the values are logarithms of ratios.
    """

    values: tuple[float, ...]
    is_ratio: bool = False

    @property
    def value(self) -> float:
        """Return the mean difference, or the geometric mean of ratios."""
        return self._unit(fmean(self.values))

    @property
    def std(self) -> float:
        """Return the sample standard deviation of the values, or 0 if it is below rounding."""
        if len(self.values) < 2:
            return math.nan
        spread = stdev(self.values)
        return 0.0 if spread <= 1e-12 * max(map(abs, self.values)) else spread

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return Student's interval; None: fewer than three seeds, or all agree."""
        if len(self.values) < FEWEST_SEEDS or self.std == 0:
            return None
        low, high = self._ends
        return self._unit(low), self._unit(high)

    @property
    def is_shown(self) -> bool | None:
        """Return whether the interval of the mean excludes zero; None: a single seed."""
        if len(self.values) < 2:
            return None
        low, high = self._ends
        return low > 0 or high < 0

    @property
    def effect(self) -> float | None:
        """Return mean over standard deviation with Hedges' correction; None: fewer than three seeds, or all agree."""
        if len(self.values) < 3 or self.std == 0:
            return None
        return fmean(self.values) / self.std * (1 - 3 / (4 * (len(self.values) - 1) - 1))

    @property
    def _ends(self) -> tuple[float, float]:
        mean, count = fmean(self.values), len(self.values)
        half = t_quantile(0.5 + LEVEL / 2, count - 1) * self.std / math.sqrt(count)
        return mean - half, mean + half

    def _unit(self, value: float) -> float:
        if not self.is_ratio:
            return value
        return math.exp(value) if value < 700 else math.inf


# Two methods over the seeds of both


def seed_pairs(one: MethodResult, other: MethodResult, metric: Metric) -> Pairs:
    """Return a pair of finished runs with values of the metric for each common seed."""
    first, second = (
        {run.header.seed: run for run in result.runs if result.num_finished and _values_of(run, metric)}
        for result in (one, other)
    )
    return [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]


def _values_of(run: RecordedRun, metric: Metric) -> list[float]:
    return [value for record in run.epochs if (value := metric.of(record)) is not None]


def _final_value(run: RecordedRun, metric: Metric) -> float:
    """Return the metric at a run's end, or the worst value if the run diverged."""
    value = metric.of(run.epochs[-1])
    return metric.worst if value is None else value


def _best_value(run: RecordedRun, metric: Metric) -> float:
    value = metric.best(_values_of(run, metric))
    return metric.worst if value is None else value


def _metric_difference(
    pairs: Pairs, metric: Metric, of: Callable[[RecordedRun, Metric], float] = _final_value
) -> Difference | None:
    """Return a difference that is positive if the first method is better; None: a value is not finite."""
    scale = (1 if metric.higher_is_better else -1) * (100.0 if metric.is_accuracy else 1.0)
    values = tuple(scale * (of(one, metric) - of(other, metric)) for one, other in pairs)
    return Difference(values) if values and all(map(math.isfinite, values)) else None


def _ratio(values: Sequence[tuple[float | None, float | None]]) -> Difference | None:
    """Return the ratios of pairs; None: a value is missing, infinite or not positive."""
    known = [(one, other) for one, other in values if one and other and min(one, other) > 0 and max(one, other) < 1e300]
    if not known or len(known) < len(values):
        return None
    return Difference(tuple(math.log(one / other) for one, other in known), is_ratio=True)


def _same_machine(pairs: Pairs) -> bool:
    return len({(run.machine, run.is_on_gpu) for each in pairs for run in each}) == 1


# Adaptive methods against fixed batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The gain of an adaptive method over a fixed batch."""

    result: MethodResult
    baseline: MethodResult
    roles: tuple[str, ...]
    """The roles of the fixed batch: `BEST`, `CUSTOMARY` or both."""
    num_seeds: int
    metric: Difference | None
    """Difference in points or the metric's unit, positive if the adaptive method is better. None: a run diverged."""
    steps: Difference | None
    seconds: Difference | None
    """The ratio of training times. None: times are missing, or the machines differ."""

    @property
    def word(self) -> str:
        """Return the gain in one or two words: accuracy if it differs, then seconds, then steps."""
        if self.metric is None or self.num_seeds < 2:
            return ""
        if self.metric.is_shown:
            return "better" if self.metric.value > 0 else "worse"
        if self.seconds is not None and self.seconds.is_shown and self.num_seeds >= FEWEST_SEEDS:
            return "faster" if self.seconds.value < 1 else "slower"
        return "fewer steps" if self.steps is not None and self.steps.value < 0.95 else "no gain"


def find_gains(analysis: Analysis) -> list[Gain]:
    """Compare each adaptive method with the best fixed batch and the customary batch, if the experiment names one.

    Methods of the policy `auto`, which need no settings, come first.
    """
    best, name = best_fixed(analysis), analysis.experiment.settings.customary
    roles: dict[str, list[str]] = {} if best is None else {best.method: [BEST]}
    if any(result.method == name and result.num_finished for result in analysis.methods):
        roles.setdefault(str(name), []).append(CUSTOMARY)
    adaptive = [result for result in analysis.methods if not result.is_fixed]
    adaptive.sort(key=lambda result: result.trials[0].kind_of("method", "policy") != "auto")
    gains = []
    for result in adaptive:
        for baseline in map(analysis.method, roles):
            pairs = seed_pairs(result, baseline, analysis.metric)
            if not pairs:
                continue
            ends = [(one.epochs[-1], other.epochs[-1]) for one, other in pairs]
            timed = [(one.train_seconds, other.train_seconds) for one, other in ends] if _same_machine(pairs) else []
            gain = Gain(
                result=result,
                baseline=baseline,
                roles=tuple(roles[baseline.method]),
                num_seeds=len(pairs),
                metric=_metric_difference(pairs, analysis.metric),
                steps=_ratio([(one.steps, other.steps) for one, other in ends]),
                seconds=_ratio(timed),
            )
            gains.append(gain)
    return gains


def best_fixed(analysis: Analysis) -> MethodResult | None:
    """Return the best fixed batch; None: none has finished."""
    metric = analysis.metric
    fixed = [result for result in analysis.methods if result.is_fixed and result.num_finished]
    finals = [fmean(_final_value(run, metric) for run in result.runs) for result in fixed]
    value = metric.best(finals)
    if value is None:
        return None
    best = fixed[finals.index(value)]
    tied = [result for result in fixed if result is best or _is_within_noise(result, best, metric)]
    seconds = {result.method: result.final_mean("train_seconds") for result in analysis.methods}
    is_timed = analysis.is_timed and None not in seconds.values()
    return min(tied, key=lambda result: (seconds[result.method] if is_timed else result.final_mean("steps")) or 0.0)


def _is_within_noise(result: MethodResult, best: MethodResult, metric: Metric) -> bool:
    """Return whether the mean difference by seed is at most its standard error and no run diverged."""
    pairs = seed_pairs(result, best, metric)
    if len(pairs) < 2 or any(metric.of(run.epochs[-1]) is None for each in pairs for run in each):
        return False
    found = _metric_difference(pairs, metric)
    return found is not None and abs(found.value) <= found.std / math.sqrt(len(pairs))


# In words


def _number(value: float, metric: Metric | None, sign: str = "") -> str:
    """Format a number; points of accuracy and ratios have two decimals."""
    return f"{value:{sign}{'.4g' if metric is not None and not metric.is_accuracy else '.2f'}}"


def _span(change: Difference, metric: Metric | None, sign: str = "") -> str:
    """Return text like ` (0.11 to 0.67)`, or none if there is no interval or its shown ends are equal."""
    ends = [_number(end, metric, sign) for end in change.interval or ()]
    return f" ({' to '.join(ends)})" if len(set(ends)) == 2 else ""


def metric_in_words(change: Difference, metric: Metric) -> str:
    """Return text like `0.39 points better (0.11 to 0.67)`, or that no difference is shown."""
    unit = " points" if metric.is_accuracy else ""
    if change.is_shown is False:
        return f"no difference shown: {_number(change.value, metric, '+')}{unit}{_span(change, metric, '+')}"
    size = change if change.value >= 0 else Difference(tuple(-value for value in change.values))
    return f"{_number(size.value, metric)}{unit} {'better' if size is change else 'worse'}{_span(size, metric)}"


def ratio_in_words(change: Difference) -> str:
    """Return text like `0.71 times (0.70 to 0.72)`, or that no difference is shown."""
    unsure = "no difference shown: " if change.is_shown is False else ""
    return f"{unsure}{_number(change.value, None)} times{_span(change, None)}"


def verdict(analysis: Analysis, gains: Sequence[Gain]) -> str:
    """Return the result in a sentence: how the first adaptive method compares with the best fixed batch."""
    so_far = "" if analysis.is_finished else "So far: "
    gain = next((gain for gain in gains if BEST in gain.roles), None)
    if gain is None:
        return so_far + _best_in_words(analysis)
    names = f"{gain.result.method} against {gain.baseline.method}"
    if trained_alike(gain.result, gain.baseline):
        return f"{so_far}{names}: both trained exactly the same."
    chance = " (one seed, so it may be chance)" if gain.num_seeds == 1 else ""
    return f"{so_far}{names}: {', '.join(_parts(gain, analysis.metric))}{chance}."


def _parts(gain: Gain, metric: Metric) -> Iterator[str]:
    """Yield the parts of a verdict, accuracy before speed; measures without a shown difference share a part."""
    differences = {metric.word: gain.metric, SECONDS: gain.seconds}
    alike = {name: change for name, change in differences.items() if change is not None and change.is_shown is False}
    if gain.metric is None:
        yield f"no comparison of {metric.word}, because a run diverged"
    elif metric.word not in alike:
        yield f"{metric.word} {metric_in_words(gain.metric, metric)}"
    if alike:
        unit = " points)" if metric.is_accuracy else ")"
        spans = [
            name + (_span(change, None) if change.is_ratio else _span(change, metric, "+").replace(")", unit))
            for name, change in alike.items()
        ]
        yield f"no difference shown in {' or '.join(spans)}"
    if gain.steps is not None:
        yield f"{_number(gain.steps.value, None)} times the steps"
    if gain.seconds is not None and SECONDS not in alike:
        yield f"{_number(gain.seconds.value, None)} times the seconds{_span(gain.seconds, None)}"


def _best_in_words(analysis: Analysis) -> str:
    """Name the method with the best final value, for experiments without a fixed and an adaptive method."""
    for metric in (analysis.metric, LOSS):
        finals = {result.method: result.final_mean(metric.name) for result in analysis.methods}
        best = metric.best(value for value in finals.values() if value is not None)
        if best is None:
            continue
        names = [method for method, value in finals.items() if value == best]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        verb = "ends" if len(names) == 1 else "end"
        alone = "; there is nothing to compare with" if len(analysis.methods) == 1 else ""
        return f"{' and '.join(names[:3])}{more} {verb} best, with {metric.word} {metric.text(best)}{alone}."
    return "no run has a validation loss."


def note_on(result: MethodResult, gains: Sequence[Gain], best: MethodResult | None) -> str:
    """Return a note of a few words to a method's numbers."""
    count, notes = len(result.trials), []
    if best is not None and result.method == best.method:
        notes.append(BEST)
    gain = next((gain for gain in gains if gain.result is result and BEST in gain.roles), None)
    if result.is_at_chance:
        notes.append("learned nothing")
    elif result.num_at_chance:
        notes.append(f"learned nothing in {result.num_at_chance} of {result.num_finished} seeds")
    elif gain is not None and gain.word:
        notes.append(gain.word)
    if result.num_diverged:
        notes.append(f"{result.num_diverged} of {count} seeds diverged")
    if result.num_finished < count:
        notes.append(f"{result.num_finished} of {count} seeds finished")
    return ", ".join(notes)


# Two methods by name


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of two methods of an experiment over their common finished seeds."""

    seeds: tuple[int, ...]
    answers: dict[str, str]
    """The difference between the methods in words, by measure."""
    cautions: tuple[str, ...]


def compare_methods(
    analysis: Analysis,
    first: str,
    second: str,
    *,
    against: Analysis | None = None,
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Compare two methods by their final value, their best value and their time to the target of `analysis`.

    If `against` is given, the same experiment from another folder, the second method comes from it. Cautions call the
    methods by `names`.
    """
    results = (analysis.method(first), (against or analysis).method(second))
    pairs = seed_pairs(*results, analysis.metric)
    answers = dict(_answers(results, pairs, analysis)) if len(pairs) > 1 else {}
    cautions = _cautions(results, pairs, names or (first, second))
    return Comparison(tuple(run.header.seed for run, _ in pairs), answers, tuple(cautions))


def _answers(results: tuple[MethodResult, MethodResult], pairs: Pairs, analysis: Analysis) -> Iterator[tuple[str, str]]:
    """Yield each measure and its difference in words."""
    metric, target = analysis.metric, analysis.target
    for kind, value in (("final", _final_value), ("best", _best_value)):
        change = _metric_difference(pairs, metric, value)
        values = [(value(one, metric), value(other, metric)) for one, other in pairs]
        fair = change and metric_in_words(change, metric) + _effect_in_words(change)
        yield f"{kind} {metric.word}", fair or _unfair(values, "have one")
    if target is not None:
        first, second = (_seconds_by_seed(result, metric, target.value) for result in results)
        times = [(first[one.header.seed], second[other.header.seed]) for one, other in pairs]
        change = _ratio(times)
        fair = change and ratio_in_words(change) + _effect_in_words(change)
        yield f"seconds to {metric.text(target.value)}", fair or _unfair(times, "reached it, with a time")


def _effect_in_words(change: Difference) -> str:
    if change.effect is None:
        return ""
    word = next(word for bound, word in EFFECTS if abs(change.effect) < bound)
    return f"; effect size {abs(change.effect):.2f}, {word}"


def _unfair(values: Sequence[tuple[float, float]], what: str) -> str:
    first, second = (sum(map(math.isfinite, each)) for each in zip(*values, strict=True))
    return f"no fair average: {first} and {second} of {len(values)} seeds {what}"


def _seconds_by_seed(result: MethodResult, metric: Metric, target: float) -> dict[int, float]:
    trials = result.arrivals(metric, target)["seconds"].trials
    return {run.header.seed: seconds for run, seconds in zip(result.runs, trials, strict=True)}


def _cautions(results: tuple[MethodResult, MethodResult], pairs: Pairs, names: tuple[str, str]) -> Iterator[str]:
    if not pairs:
        yield f"{names[0]} and {names[1]} have no finished run of the same seed: nothing can be said."
    elif len(pairs) == 1:
        yield "With a single seed nothing can be said: run five or so."
    elif len(pairs) < FEW_SEEDS:
        yield f"{len(pairs)} seeds show little: run five or so."
    if pairs and trained_alike(*results):
        yield f"{names[0]} and {names[1]} trained exactly the same: they can only differ in time."
    left_out = sum(len(result.trials) for result in results) - 2 * len(pairs)
    if left_out:
        yield f"{left_out} runs are left out: unfinished, or without a partner of the same seed."
    if pairs and not _same_machine(pairs):
        yield "The runs come from different hardware: the times do not compare."
