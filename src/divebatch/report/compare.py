"""Are two methods different? Seed by seed, with an interval and an effect size, in words."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from divebatch.report.paired import LEVEL, Paired, pair
from divebatch.report.runs import Run

ONE_POINT = 0.01
"""Of accuracy, which runs from 0 to 1."""
FEW_SEEDS = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """What one measure says."""

    measure: str
    paired: Paired | None
    """None where fewer than two seeds can be paired."""
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


def compare_methods(experiment: str, first: Sequence[Run], second: Sequence[Run], names: tuple[str, str]) -> Comparison:
    """First against second: final accuracy, best accuracy, training time to an accuracy that both can reach."""
    pairs = _pairs(first, second)
    answers: tuple[Answer, ...] = ()
    if len(pairs) > 1:
        target = _common_target(pairs)
        answers = (
            _accuracies("final accuracy", pairs, names, _final),
            _accuracies("best accuracy", pairs, names, _best),
            _times(pairs, names, target),
        )
    seeds = tuple(one.header.seed for one, _ in pairs)
    return Comparison(experiment, *names, seeds, answers, tuple(_cautions(first, second, pairs, names)))


def _pairs(first: Sequence[Run], second: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Finished runs with an accuracy, two of each seed."""
    ones, others = ({run.header.seed: run for run in runs if _is_finished(run)} for runs in (first, second))
    return [(ones[seed], others[seed]) for seed in sorted(ones.keys() & others.keys())]


def _is_finished(run: Run) -> bool:
    last = run.last
    return last is not None and last.epoch >= (run.planned_epochs or 0) and _best(run) is not None


def _final(run: Run) -> float | None:
    """A run that ended without one, because it diverged, is worth nothing."""
    last = run.last
    return (last.val_accuracy or 0.0) if last else None


def _best(run: Run) -> float | None:
    return max((record.val_accuracy for record in run.epochs if record.val_accuracy is not None), default=None)


def _common_target(pairs: Sequence[tuple[Run, Run]]) -> float:
    """One point below the lower of the two mean final accuracies."""
    means = (fmean(_final(pair[which]) or 0.0 for pair in pairs) for which in (0, 1))
    return min(means) - ONE_POINT


def _seconds_to(run: Run, target: float) -> float | None:
    for record in run.epochs:
        if record.val_accuracy is not None and record.val_accuracy >= target - 1e-12:
            return record.train_seconds
    return None


# In words


def _accuracies(
    measure: str, pairs: Sequence[tuple[Run, Run]], names: tuple[str, str], value: Callable[[Run], float | None]
) -> Answer:
    differences = [100 * ((value(one) or 0.0) - (value(other) or 0.0)) for one, other in pairs]
    found = pair(differences)
    low, high = found.interval
    span = f"{LEVEL:.0%} interval {low:+.2f} to {high:+.2f} points"
    if found.excludes_zero:
        better, worse = names if found.mean > 0 else names[::-1]
        text = f"{better} is better than {worse} by {abs(found.mean):.2f} points"
    else:
        text = f"no difference shown between {names[0]} and {names[1]}: {found.mean:+.2f} points on average"
    return Answer(measure, found, f"{text} ({names[0]} less {names[1]}: {span}; {found.effect_in_words}).")


def _times(pairs: Sequence[tuple[Run, Run]], names: tuple[str, str], target: float) -> Answer:
    """Times differ by a factor, so their logarithms are compared."""
    measure = f"time to {100 * target:.2f} %"
    times = [(_seconds_to(one, target), _seconds_to(other, target)) for one, other in pairs]
    reached = [(one, other) for one, other in times if one and other]
    if len(reached) < len(pairs):
        counts = [sum(bool(each[which]) for each in times) for which in (0, 1)]
        text = " and ".join(f"{name} by {count}" for name, count in zip(names, counts, strict=True))
        return Answer(measure, None, f"of {len(pairs)} seeds it was reached, with a time, in {text}: no fair average.")
    found = pair([math.log(one / other) for one, other in reached])
    low, high = map(math.exp, found.interval)
    span = f"{LEVEL:.0%} interval {low:.2f} to {high:.2f}"
    factor = math.exp(found.mean)
    if found.excludes_zero:
        faster, slower, by = (*names, 1 / factor) if factor < 1 else (*names[::-1], factor)
        text = f"{faster} is {by:.2f} times as fast as {slower}"
    else:
        text = f"no difference shown between {names[0]} and {names[1]}"
    ratio = f"time of {names[0]} over that of {names[1]}: {factor:.2f}, {span}"
    return Answer(measure, found, f"{text} ({ratio}; {found.effect_in_words}).")


def _cautions(
    first: Sequence[Run], second: Sequence[Run], pairs: Sequence[tuple[Run, Run]], names: tuple[str, str]
) -> Iterator[str]:
    if not pairs:
        yield f"{names[0]} and {names[1]} have no finished run of the same seed: nothing can be said."
    elif len(pairs) == 1:
        yield "With a single seed nothing can be said: run more, --trials 5 or so."
    elif len(pairs) < FEW_SEEDS:
        yield (
            f"{len(pairs)} seeds are few: the intervals hold if the differences are normally distributed, "
            f"which so few cannot show."
        )
    left_out = len(first) + len(second) - 2 * len(pairs)
    if left_out:
        yield f"{left_out} runs are left out: unfinished, or without a partner of the same seed."
    machines = {(str(run.header.hardware.get("name")), run.is_on_gpu) for each in pairs for run in each}
    if len(machines) > 1:
        yield "The runs come from different hardware: the times do not compare."
