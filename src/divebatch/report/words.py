"""What the numbers come to, in words: the report's first sentence, and a paragraph with the details."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from divebatch.report.analysis import WITH_COMPILATION, Analysis, Arrival
from divebatch.report.charts import shown
from divebatch.report.tables import metric_name, seconds

MAX_NAMES = 3
"""So many that came first at the same time are named; the rest is counted."""
SHORT_CERTAINTY = {
    None: "a single seed, so it may be chance",
    True: "seeds overlap, so it may be chance",
    False: "no seeds overlap",
}
"""What the headline says of seeds that overlap, by `Race.seeds_overlap`."""


@dataclass(frozen=True, slots=True)
class Race:
    """Who reached the common target in what order."""

    analysis: Analysis
    unit: str
    """What they are compared in, "seconds" or "epochs"."""
    goal: str
    order: Sequence[str]
    """The methods that reached it, the fastest first."""
    leaders: Sequence[str]
    """Those that came first at the same time, and those that trained exactly as the first did."""

    @property
    def others(self) -> list[str]:
        """The methods that came later."""
        return [method for method in self.order if method not in self.leaders]

    @property
    def are_the_same(self) -> bool:
        """Whether several leaders are one way of training under several names."""
        first, *rest = self.leaders
        return bool(rest) and all(_alike_so_far(self.analysis, first, method) for method in rest)

    @property
    def has_no_winner(self) -> bool:
        """Whether all that got there are one way of training, so that only chance tells their times apart."""
        return self.are_the_same and not self.others

    @property
    def baselines(self) -> list[str]:
        """The experiment's baselines that are not among the leaders."""
        return [method for method in self.analysis.experiment.settings.baselines if method not in self.leaders]

    def arrival(self, method: str) -> Arrival:
        """When a method reached the target, in the race's unit."""
        return self.analysis.common[method][self.unit]

    def ratio(self, method: str) -> str:
        """How much longer a method took than the first, for instance `1.52 times as long`."""
        ratio = (self.arrival(method).value or 0.0) / (self.arrival(self.leaders[0]).value or 1.0)
        return f"{ratio:.2f} times as {'long' if self.unit == 'seconds' else 'many'}"

    def seeds_overlap(self, method: str) -> bool | None:
        """Whether a trial of `method` was as fast as a trial of the first; None with a single seed."""
        first, other = self.arrival(self.leaders[0]), self.arrival(method)
        if min(len(first.trials), len(other.trials)) < 2:
            return None
        return first.slowest >= other.fastest

    def amount(self, method: str) -> str:
        """For instance `21.5 s of training` or `3 epochs`."""
        value = self.arrival(method).value or 0.0
        if self.unit == "seconds":
            return f"{shown(value, self.unit)} of training"
        return f"{shown(value, self.unit)} epoch{'' if value == 1 else 's'}"


def find_race(analysis: Analysis) -> Race | None:
    """None without a common target, without a method that reached it, or with a single method."""
    unit, target = analysis.race_unit, analysis.target
    if unit is None or target is None or len(analysis.methods) < 2:
        return None
    values = {method: arrival.value for method, arrival in analysis.arrivals(unit).items()}
    reached = {method: value for method, value in values.items() if value is not None}
    order = sorted(reached, key=lambda method: reached[method])
    first = order[0]
    leaders = [m for m in order if reached[m] == reached[first] or _alike_so_far(analysis, first, m)]
    return Race(analysis, unit, analysis.metric.text(target.value), order, leaders)


def _alike_so_far(analysis: Analysis, first: str, other: str) -> bool:
    """Whether two methods trained the same until they reached the target: then no difference of times means a thing."""
    epochs = analysis.common[first]["epochs"].value
    return analysis.trained_alike(first, other, until=None if epochs is None else round(epochs))


# One sentence


def headline(analysis: Analysis) -> str:
    """The report's first sentence, whatever the records hold: who was fastest, by how much, and is it chance."""
    race = find_race(analysis)
    if race is None:
        return _without_race(analysis)
    so_far = "" if analysis.is_finished else "So far, "
    what = metric_name(analysis.metric)
    goal = f"{race.goal} {what}" if analysis.metric.is_accuracy else f"a {what} of {race.goal}"
    if race.has_no_winner:
        alike = " and ".join(race.leaders)
        return f"{so_far}No method was faster: {alike} trained the same until they got to {goal}."
    comparisons = "; ".join(_comparisons(race))
    return f"{so_far}{_names(race)} got to {goal} first, in {race.amount(race.leaders[0])}: {comparisons}."


def _names(race: Race) -> str:
    names = list(race.leaders)
    if len(names) > MAX_NAMES:
        names = [*names[:MAX_NAMES], f"{len(names) - MAX_NAMES} more"]
    return " and ".join(names) + (", which trained the same," if race.are_the_same else "")


def _comparisons(race: Race) -> Iterator[str]:
    """With the baselines that were run, or with the next one where none is left to compare with."""
    rivals = [method for method in race.baselines if method in race.analysis.experiment.methods]
    if not rivals and not race.others:
        yield "no other method has reached it"
    for rival in rivals or race.others[:1]:
        if rival in race.order:
            yield f"{rival} took {race.ratio(rival)} ({SHORT_CERTAINTY[race.seeds_overlap(rival)]})"
        else:
            yield f"{rival} has not reached it"


def _without_race(analysis: Analysis) -> str:
    """Without a target to race to: the lowest loss, or that there is no answer yet."""
    finals = {result.method: result.final_mean("val_loss") for result in analysis.methods}
    losses = {method: loss for method, loss in finals.items() if loss is not None}
    if len(losses) > 1:
        best, second = sorted(losses, key=lambda method: losses[method])[:2]
        if losses[best] == losses[second]:
            return f"{best} and {second} have the same last validation loss, {losses[best]:.4g}, and none has a lower."
        return (
            f"{best} has the lowest last validation loss, {losses[best]:.4g}; "
            f"{second} comes next with {losses[second]:.4g}."
        )
    if len(analysis.methods) == 1 and losses:
        return f"Only {analysis.methods[0].method} was run, so there is nothing to compare."
    return "No answer yet: fewer than two methods have a validation loss."


# A paragraph


def details(analysis: Analysis) -> str:
    """What stands behind the headline: times, the spread over seeds, and cautions. Empty where nothing was compared."""
    race = find_race(analysis)
    return " ".join(_sentences(race)) if race else ""


def _sentences(race: Race) -> Iterator[str]:
    place = "at the same time" if len(race.leaders) > 1 and not race.are_the_same else "first"
    names = " and ".join(race.leaders) + (", which trained the same," if race.are_the_same else "")
    yield f"{names} reached the common target of {race.goal} {place}, after {_time(race, race.leaders[0])}."
    yield from (_against(race, name) for name in race.baselines)
    if not any(_is_adaptive(race, method) for method in race.leaders):
        yield from _fastest_adaptive(race)
    yield from _cautions(race)


def _time(race: Race, method: str) -> str:
    epoch = race.analysis.common[method]["epochs"].value or 0.0
    return race.amount(method) + (f" (epoch {epoch:.0f})" if race.unit == "seconds" else "")


def _is_adaptive(race: Race, method: str) -> bool:
    return race.analysis.method(method).changes_batch_size


def _against(race: Race, baseline: str) -> str:
    if baseline not in race.analysis.experiment.methods:
        return f"{baseline} was not run."
    if baseline not in race.order:
        return f"{baseline} has not reached it."
    return f"{baseline} took {race.ratio(baseline)}, {_time(race, baseline)}: {_certainty(race, baseline)}."


def _fastest_adaptive(race: Race) -> Iterator[str]:
    """How the best of the methods that this library is about did, where a fixed batch size came first."""
    best = next((method for method in race.others if _is_adaptive(race, method)), None)
    if best is not None:
        yield (
            f"The fastest method that changes its batch size, {best}, took {race.ratio(best)}, "
            f"{_time(race, best)}: {_certainty(race, best)}."
        )
    elif any(result.changes_batch_size for result in race.analysis.methods):
        yield "No method that changes its batch size has reached it."


def _certainty(race: Race, other: str) -> str:
    """Whether every trial of the first was faster than every trial of the other."""
    overlap = race.seeds_overlap(other)
    if overlap is None:
        return "with a single seed this may be chance"
    spans = " and ".join(_span(race.arrival(method), race.unit) for method in (race.leaders[0], other))
    what = "times" if race.unit == "seconds" else "epochs"
    outcome = "overlap, so the order may be chance" if overlap else "do not overlap"
    return f"the {what} of single seeds, {spans}, {outcome}"


def _span(arrival: Arrival, unit: str) -> str:
    """From the fastest to the slowest trial, for instance `47.0 s to 49.5 s (3 seeds)`."""
    return f"{shown(arrival.fastest, unit)} to {shown(arrival.slowest, unit)} ({len(arrival.trials)} seeds)"


def _cautions(race: Race) -> Iterator[str]:
    analysis = race.analysis
    totals = {method: analysis.common[method][WITH_COMPILATION].value or math.inf for method in race.order}
    quickest = min(race.order, key=lambda method: totals[method])
    is_other = quickest not in race.leaders and totals[quickest] < totals[race.leaders[0]]
    if race.unit == "seconds" and is_other:
        yield f"With compilation counted, {quickest} was first: {seconds(totals[quickest])} s."
    if len(analysis.experiment.machines) > 1:
        yield "The times come from different hardware and do not compare."
    if not analysis.is_finished:
        yield "Not all runs have finished, so this may change."
