"""One paragraph above the tables: who reached the common target first, by how much, and whether that may be chance."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from divebatch.report.runs import Experiment
from divebatch.report.stages import machines_of
from divebatch.report.table import seconds
from divebatch.report.targets import Arrival, Progress, common_target, progress_of

BASELINES = ("sgd-small", "sgd-tuned")
"""What the first is compared with: the paper's baseline, and the best fixed batch size of a sweep."""


@dataclass(frozen=True, slots=True)
class Racer:
    """A method that reached the target."""

    progress: Progress
    seconds: float
    """Training time to the target, on the accuracy averaged over trials."""
    epoch: int
    seconds_with_compilation: float
    seconds_of_trials: tuple[float, ...]
    """Of each trial alone; infinite where it never reached the target."""

    @property
    def name(self) -> str:
        """The method's."""
        return self.progress.method

    @property
    def time(self) -> str:
        """For instance `48.2 s of training (epoch 33)`."""
        return f"{seconds(self.seconds)} s of training (epoch {self.epoch})"

    @property
    def span(self) -> str:
        """From the fastest to the slowest trial, for instance `47.0 s to 49.5 s (3 seeds)`."""
        ends = (min(self.seconds_of_trials), max(self.seconds_of_trials))
        low, high = (f"{seconds(end)} s" if math.isfinite(end) else "never" for end in ends)
        return f"{low} to {high} ({len(self.seconds_of_trials)} seeds)"


def verdict(experiment: Experiment) -> str:
    """Empty where there is nothing to compare: no common target, no times, or a single method."""
    methods = progress_of(experiment)
    target = common_target(methods)
    if target is None or len(methods) < 2:
        return ""
    racers = sorted(_racers(methods, target.accuracy), key=lambda racer: racer.seconds)
    return " ".join(_sentences(experiment, methods, racers, target.accuracy)) if racers else ""


def _racers(methods: Sequence[Progress], target: float) -> Iterator[Racer]:
    for progress in methods:
        arrival = progress.arrival(target)
        if arrival and arrival.seconds:
            total = arrival.seconds + arrival.compile_seconds
            of_trials = tuple(map(_seconds, progress.arrivals(target)))
            yield Racer(progress, arrival.seconds, arrival.epoch, total, of_trials)


def _seconds(arrival: Arrival | None) -> float:
    return math.inf if arrival is None or arrival.seconds is None else arrival.seconds


def _sentences(
    experiment: Experiment, methods: Sequence[Progress], racers: Sequence[Racer], target: float
) -> Iterator[str]:
    first = racers[0]
    tied = [racer for racer in racers if racer.seconds == first.seconds]
    others = racers[len(tied) :]
    names = [racer.name for racer in tied]
    place = "first" if len(tied) == 1 else "at the same time"
    yield f"{' and '.join(names)} reached the common target of {100 * target:.2f} % {place}, after {first.time}."
    yield from (_against(first, name, methods, others) for name in BASELINES if name not in names)
    if not any(racer.progress.changes_batch_size for racer in tied):
        yield from _fastest_adaptive(first, methods, others)
    yield from _cautions(experiment, racers)


def _against(first: Racer, baseline: str, methods: Sequence[Progress], others: Sequence[Racer]) -> str:
    for racer in others:
        if racer.name == baseline:
            ratio = racer.seconds / first.seconds
            return f"{baseline} took {ratio:.2f} times as long, {racer.time}: {_certainty(first, racer)}."
    was_run = baseline in {progress.method for progress in methods}
    return f"{baseline} has not reached it." if was_run else f"{baseline} was not run."


def _fastest_adaptive(first: Racer, methods: Sequence[Progress], others: Sequence[Racer]) -> Iterator[str]:
    """How the best of the methods that this library is about did, where a fixed batch size came first."""
    adaptive = [racer for racer in others if racer.progress.changes_batch_size]
    if adaptive:
        best = adaptive[0]
        ratio = best.seconds / first.seconds
        yield (
            f"The fastest method that changes its batch size, {best.name}, took {ratio:.2f} times as long, "
            f"{best.time}: {_certainty(first, best)}."
        )
    elif any(progress.changes_batch_size for progress in methods):
        yield "No method that changes its batch size has reached it."


def _certainty(first: Racer, other: Racer) -> str:
    """Whether every trial of the one was faster than every trial of the other."""
    if min(len(first.seconds_of_trials), len(other.seconds_of_trials)) < 2:
        return "with a single seed this may be chance"
    spans = f"{first.span} and {other.span}"
    if max(first.seconds_of_trials) < min(other.seconds_of_trials):
        return f"the times of single seeds, {spans}, do not overlap"
    return f"the times of single seeds, {spans}, overlap, so the order may be chance"


def _cautions(experiment: Experiment, racers: Sequence[Racer]) -> Iterator[str]:
    quickest = min(racers, key=lambda racer: racer.seconds_with_compilation)
    if quickest.seconds_with_compilation < racers[0].seconds_with_compilation:
        yield f"With compilation counted, {quickest.name} was first: {seconds(quickest.seconds_with_compilation)} s."
    if len(machines_of(experiment.runs)) > 1:
        yield "The times come from different hardware and do not compare."
    if not all(experiment.is_finished(run) for run in experiment.runs):
        yield "Not all runs have finished, so this may change."
