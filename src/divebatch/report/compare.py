"""Are two methods different? Seed by seed, with Student's interval and an effect size, in words."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from divebatch.records import Metric
from divebatch.report.analysis import Analysis, MethodResult, trained_alike
from divebatch.report.runs import RecordedRun
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


# Two methods

FEW_SEEDS = 5
Pairs = Sequence[tuple[RecordedRun, RecordedRun]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one measure says."""

    measure: str
    paired: Paired | None
    """None where there is no fair average."""
    text: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two methods of one experiment over the seeds that both have finished."""

    experiment: str
    first: str
    second: str
    seeds: tuple[int, ...]
    answers: tuple[Answer, ...]
    cautions: tuple[str, ...]


def compare_methods(
    analysis: Analysis,
    first: str,
    second: str,
    *,
    against: Analysis | None = None,
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Compare two methods by their final value, their best value and their time to the common target.

    Args:
        analysis: The experiment's, which also gives the target.
        first: A method of it.
        second: Another one, of `against` where that is given.
        against: The same experiment from another folder.
        names: What the two are called in the answers; their method names where not given.
    """
    results = (analysis.method(first), (against or analysis).method(second))
    metric, called = analysis.metric, names or (first, second)
    pairs = seed_pairs(*results, metric)
    answers: list[Answer] = []
    if len(pairs) > 1:
        for which, value in (("final", final_value), ("best", _best)):
            values = [(value(one, metric), value(other, metric)) for one, other in pairs]
            answers.append(_values(which, values, metric, called))
        answers += _times(pairs, results, analysis, called)
    seeds = tuple(run.header.seed for run, _ in pairs)
    cautions = tuple(_cautions(results, pairs, called))
    return Comparison(analysis.experiment.name, *called, seeds, tuple(answers), cautions)


def seed_pairs(one: MethodResult, other: MethodResult, metric: Metric) -> Pairs:
    """Finished runs that have a value of the metric, two of each seed."""
    first, second = (
        {run.header.seed: run for run in result.runs if result.num_finished and _values_of(run, metric)}
        for result in (one, other)
    )
    return [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]


def _values_of(run: RecordedRun, metric: Metric) -> list[float]:
    values = [metric.of(record) for record in run.epochs]
    return [value for value in values if value is not None]


def final_value(run: RecordedRun, metric: Metric) -> float:
    """The metric at a run's end. A run that ended without a value, because it diverged, has the worst one."""
    value = metric.of(run.epochs[-1])
    return metric.worst if value is None else value


def _best(run: RecordedRun, metric: Metric) -> float:
    value = metric.best(_values_of(run, metric))
    return metric.worst if value is None else value


def _values(which: str, values: Sequence[tuple[float, float]], metric: Metric, names: tuple[str, str]) -> Answer:
    measure = f"{which} {metric.word}"
    counts = [sum(math.isfinite(each[place]) for each in values) for place in (0, 1)]
    if min(counts) < len(values):
        return Answer(measure, None, _no_average("has one", names, counts, len(values)))
    scale, unit, form = (100.0, " points", ".2f") if metric.is_accuracy else (1.0, "", ".4g")
    found = pair([scale * (one - other) for one, other in values])
    low, high = found.interval
    span = f"{LEVEL:.0%} interval {low:+{form}} to {high:+{form}}{unit}"
    if found.excludes_zero:
        better, worse = names if (found.mean > 0) == metric.higher_is_better else names[::-1]
        text = f"{better} is better than {worse} by {abs(found.mean):{form}}{unit}"
    else:
        text = f"no difference shown between {names[0]} and {names[1]}: {found.mean:+{form}}{unit} on average"
    return Answer(measure, found, f"{text} ({names[0]} less {names[1]}: {span}; {found.effect_in_words}).")


def _times(
    pairs: Pairs, results: tuple[MethodResult, MethodResult], analysis: Analysis, names: tuple[str, str]
) -> Iterator[Answer]:
    """Training time to the common target."""
    target = analysis.target
    if target is None:
        return
    measure = f"time to {analysis.metric.text(target.value)}"
    by_seed = [_seconds_by_seed(result, analysis.metric, target.value) for result in results]
    times = [(by_seed[0][one.header.seed], by_seed[1][other.header.seed]) for one, other in pairs]
    counts = [sum(0 < each[place] < math.inf for each in times) for place in (0, 1)]
    if min(counts) < len(pairs):
        yield Answer(measure, None, _no_average("reached it, with a time,", names, counts, len(pairs)))
        return
    found = pair_ratios(times)
    yield _ratio(measure, found, names, found.effect_in_words)


def pair_ratios(values: Sequence[tuple[float, float]]) -> Paired:
    """Of the logarithms of ratios, for what differs by a factor; both of a pair must be positive."""
    return pair([math.log(one / other) for one, other in values])


def factors(found: Paired) -> tuple[float, float, float]:
    """The mean ratio and the ends of its interval, of what `pair_ratios` found; infinite where no float holds it."""
    mean, low, high = (math.exp(value) if value < 700 else math.inf for value in (found.mean, *found.interval))
    return mean, low, high


def _ratio(measure: str, found: Paired, names: tuple[str, str], certainty: str) -> Answer:
    factor, low, high = factors(found)
    if found.excludes_zero:
        faster, slower, by = (*names, 1 / factor) if factor < 1 else (*names[::-1], factor)
        text = f"{faster} is {by:.2f} times as fast as {slower}"
    else:
        text = f"no difference shown between {names[0]} and {names[1]}"
    ratio = f"time of {names[0]} over that of {names[1]}: {factor:.2f}, {LEVEL:.0%} interval {low:.2f} to {high:.2f}"
    return Answer(measure, found, f"{text} ({ratio}; {certainty}).")


def _seconds_by_seed(result: MethodResult, metric: Metric, target: float) -> dict[int, float]:
    trials = result.arrivals(metric, target)["seconds"].trials
    return {run.header.seed: seconds for run, seconds in zip(result.runs, trials, strict=True)}


def _no_average(what: str, names: tuple[str, str], counts: Sequence[int], num_pairs: int) -> str:
    first, second = (f"in {count} of {num_pairs}" for count in counts)
    return f"{names[0]} {what} {first} seeds and {names[1]} {second}: no fair average."


def _cautions(results: tuple[MethodResult, MethodResult], pairs: Pairs, names: tuple[str, str]) -> Iterator[str]:
    if not pairs:
        yield f"{names[0]} and {names[1]} have no finished run of the same seed: nothing can be said."
    elif len(pairs) == 1:
        yield "With a single seed nothing can be said: run five or so."
    elif len(pairs) < FEW_SEEDS:
        yield (
            f"{len(pairs)} seeds are few: the intervals hold if the differences are normally distributed, "
            f"which so few cannot show."
        )
    if pairs and trained_alike(*results):
        yield f"{names[0]} and {names[1]} trained exactly the same: they can only differ in time."
    left_out = sum(len(result.trials) for result in results) - 2 * len(pairs)
    if left_out:
        yield f"{left_out} runs are left out: unfinished, or without a partner of the same seed."
    if len({(run.machine, run.is_on_gpu) for each in pairs for run in each}) > 1:
        yield "The runs come from different hardware: the times do not compare."
