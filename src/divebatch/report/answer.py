"""The report's first sentence: who was fastest, by how much, and whether that may be chance."""

from collections.abc import Iterator, Mapping, Sequence

from divebatch.report.bars import Bar, Bars, shown
from divebatch.report.runs import Experiment
from divebatch.report.stages import machines_of
from divebatch.report.summary import MethodSummary, summarise
from divebatch.report.verdict import BASELINES

MAX_NAMES = 3
"""So many that came first at the same time are named; the rest is counted."""


def answer(experiment: Experiment, charts: Mapping[str, Bars]) -> str:
    """One sentence, whatever the records hold; `charts` are the experiment's `make_bars`."""
    bars = _race(experiment, charts)
    if bars is None or len(experiment.methods) < 2:
        return _without_race(summarise(experiment))
    order = sorted((bar for bar in bars.bars if bar.value), key=lambda bar: bar.value or 0.0)
    leaders = [bar for bar in order if bar.value == order[0].value]
    so_far = "" if all(map(experiment.is_finished, experiment.runs)) else "So far, "
    comparisons = "; ".join(_comparisons(bars, leaders, order[len(leaders) :]))
    goal = f"{100 * bars.target:.2f} % validation accuracy"
    return f"{so_far}{_names(leaders)} got to {goal} first, in {_amount(leaders[0], bars)}: {comparisons}."


def _race(experiment: Experiment, charts: Mapping[str, Bars]) -> Bars | None:
    """In seconds on real data from one machine; else in epochs, which do not depend on the machine."""
    is_timed = experiment.is_on_real_data and len(machines_of(experiment.runs)) == 1
    return (charts.get("seconds") if is_timed else None) or charts.get("epochs")


def _names(leaders: Sequence[Bar]) -> str:
    names = [bar.method for bar in leaders]
    if len(names) > MAX_NAMES:
        names = [*names[:MAX_NAMES], f"{len(names) - MAX_NAMES} more"]
    return " and ".join(names)


def _amount(bar: Bar, bars: Bars) -> str:
    number = shown(bar.value or 0.0, bars.axis)
    if bars.axis == "seconds":
        return f"{number} of training"
    return f"{number} epoch{'' if bar.value == 1 else 's'}"


def _comparisons(bars: Bars, leaders: Sequence[Bar], others: Sequence[Bar]) -> Iterator[str]:
    """With the baselines that were run, or with the next one where none is left to compare with."""
    leading = {bar.method for bar in leaders}
    rivals = [bar for bar in bars.bars if bar.method in BASELINES and bar.method not in leading]
    if not rivals and not others:
        yield "no other method has reached it"
    for rival in rivals or others[:1]:
        if rival.value is None:
            yield f"{rival.method} has not reached it"
        else:
            ratio = rival.value / (leaders[0].value or 1.0)
            how_long = f"{ratio:.2f} times as {'long' if bars.axis == 'seconds' else 'many'}"
            yield f"{rival.method} took {how_long} ({_certainty(leaders[0], rival)})"


def _certainty(first: Bar, other: Bar) -> str:
    if min(len(first.trials), len(other.trials)) < 2:
        return "a single seed, so it may be chance"
    return "no seeds overlap" if first.slowest < other.fastest else "seeds overlap, so it may be chance"


def _without_race(summaries: Sequence[MethodSummary]) -> str:
    """Without a target to race to: the lowest loss, or that there is no answer yet."""
    losses = {s.method: s.final_loss.mean for s in summaries if s.final_loss}
    if len(losses) > 1:
        best, second = sorted(losses, key=lambda method: losses[method])[:2]
        return (
            f"{best} has the lowest last validation loss, {losses[best]:.4g}; "
            f"{second} comes next with {losses[second]:.4g}."
        )
    if len(summaries) == 1 and losses:
        return f"Only {summaries[0].method} was run, so there is nothing to compare."
    return "No answer yet: fewer than two methods have a validation loss."
