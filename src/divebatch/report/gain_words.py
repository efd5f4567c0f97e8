"""Does it pay? The gains of adaptive methods as a table, and those of the first one as a sentence."""

from collections.abc import Iterator, Sequence

from divebatch.records import Metric
from divebatch.report.analysis import Analysis, MethodResult
from divebatch.report.gains import (
    BEST,
    CUSTOMARY,
    HERE,
    RATIOS,
    Baseline,
    Change,
    Gain,
    best_fixed,
    is_fixed,
)
from divebatch.report.tables import MISSING, Table

NONE_SHOWN = "none shown"
"""No difference, that is; the table is wide enough as it is."""
SHORT_ROLES = {BEST: "best fixed", CUSTOMARY: "customary"}


def with_size(result: MethodResult) -> str:
    """A method with the batch size it begins with, for instance `sgd-tuned (512)`."""
    return f"{result.method} ({result.first_batch_size or 0:.0f})"


# As a table


def gains_table(analysis: Analysis, gains: Sequence[Gain]) -> Table | None:
    """One row for each adaptive method and baseline; None without gains.

    Args:
        analysis: The experiment's, from `analyse`.
        gains: Those of its methods.
    """
    if not gains:
        return None
    unit = " (points)" if analysis.metric.is_accuracy else ""
    columns = ["method", "against", "seeds", f"{analysis.metric.word}{unit}", *RATIOS]
    rows = [
        [
            gain.method,
            _against(gain.baseline),
            f"{gain.num_seeds}",
            _difference(gain.metric, analysis.metric),
            *(_ratio(gain.ratios.get(name), alone=name != HERE) for name in RATIOS),
        ]
        for gain in gains
    ]
    return Table(f"{analysis.experiment.name}: does it pay?", columns, rows, list(_notes(analysis)))


def _against(baseline: Baseline) -> str:
    """For instance `sgd-tuned (512), best fixed`."""
    roles = " and ".join(SHORT_ROLES[role] for role in baseline.roles)
    return f"{with_size(baseline.result)}, {roles}"


def _difference(change: Change | None, metric: Metric) -> str:
    """For instance `0.39 worse (0.11 to 0.67)`, or `none shown: -0.03 (-0.16 to +0.11)` with a plus for a gain."""
    if change is None:
        return MISSING
    if change.is_shown is False:
        return f"{NONE_SHOWN}: {_signed(change.value, metric)} ({_span(change, metric)})"
    text = f"{_size(change, metric)} {_direction(change)}"
    return f"{text} ({_span(change, metric)})" if change.is_shown else text


def _span(change: Change, metric: Metric) -> str:
    """The interval; of a difference that is shown without signs: how much better, or how much worse."""
    if not change.is_shown:
        return f"{_signed(change.low, metric)} to {_signed(change.high, metric)}"
    low, high = sorted((change.low, change.high), key=abs)
    return f"{_signed(low, metric)[1:]} to {_signed(high, metric)[1:]}"


def _signed(value: float, metric: Metric) -> str:
    return f"{value:+.2f}" if metric.is_accuracy else f"{value:+.4f}"


def _size(change: Change, metric: Metric) -> str:
    return _signed(change.value, metric)[1:]


def _direction(change: Change) -> str:
    return "better" if change.value >= 0 else "worse"


def _ratio(change: Change | None, *, alone: bool = False) -> str:
    """For instance `0.71 (0.70 to 0.72)`; the value `alone`, and with a single seed or where all seeds agree."""
    if change is None:
        return MISSING
    value, (low, high) = f"{change.value:.2f}", _ends(change).split(" to ")
    if alone or change.is_shown is None or (change.is_shown and low == high):
        return value
    return f"{value} ({low} to {high})" if change.is_shown else f"{NONE_SHOWN}: {value} ({low} to {high})"


def _ends(change: Change) -> str:
    return f"{change.low:.2f} to {change.high:.2f}"


def _notes(analysis: Analysis) -> Iterator[str]:
    yield (
        f"Final {analysis.metric.word}: how much better or worse than the fixed batch. All others: ratios to the fixed "
        "batch, below 1 where less was needed. Means over the seeds that both have finished, in parentheses with "
        f"Student's 95 % interval. '{NONE_SHOWN}': no difference is shown, since the interval holds a gain (plus sign) "
        "and a loss."
    )
    yield (
        "Seconds are those of training, without evaluation and compilation. What it takes to find the best fixed batch "
        "is not counted."
    )
    yield from _baseline_notes(analysis)
    yield "On many devices the ratio of steps bounds what the ratio of seconds can come down to."
    if any(run.header.config.get("seconds") is not None for run in analysis.experiment.runs):
        yield ("Runs end after some seconds of training, so that methods see different numbers of samples.")
    if len(analysis.experiment.machines) > 1:
        yield "Seconds here are left out where two methods ran on different hardware."


def _baseline_notes(analysis: Analysis) -> Iterator[str]:
    best, name = best_fixed(analysis), analysis.experiment.settings.customary
    if best is not None:
        fixed = [with_size(each) for each in analysis.methods if is_fixed(each)]
        yield (
            f"{BEST.capitalize()}: {best.method}, the best in final {analysis.metric.word} or, of those within one "
            f"standard error of the best, the quickest. Fixed batches here: {', '.join(fixed)}."
        )
    if name is not None and not any(each.method == name and each.num_finished for each in analysis.methods):
        yield f"The customary batch, {name}, has no finished run."


# In words


def gains_in_words(analysis: Analysis, gains: Sequence[Gain]) -> str:
    """What the first adaptive method gained over each baseline; empty without gains."""
    if not gains:
        return ""
    first = [gain for gain in gains if gain.method == gains[0].method]
    sentences = [_sentence(gain, analysis.metric) for gain in first]
    others = len({gain.method for gain in gains}) - 1
    what = "method that changes its batch size" if others == 1 else "methods that change their batch size"
    more = f"The table has {others} more {what}." if others else ""
    return " ".join(filter(None, ["Does it pay?", *sentences, more]))


def _sentence(gain: Gain, metric: Metric) -> str:
    seeds = f"{gain.num_seeds} seeds" if gain.num_seeds > 1 else "a single seed, so it may be chance"
    told = [_ratio_in_words(name, gain.ratios[name]) for name in RATIOS if name in gain.ratios]
    parts = [_metric_in_words(gain.metric, metric), *told] if gain.metric is not None else told
    roles = " and ".join(gain.baseline.roles)
    return f"{gain.method} against {with_size(gain.baseline.result)}, {roles}, over {seeds}: {', '.join(parts)}."


def _metric_in_words(change: Change, metric: Metric) -> str:
    unit = " points" if metric.is_accuracy else ""
    if change.is_shown is False:
        value, span = _signed(change.value, metric), _span(change, metric)
        return f"no difference in {metric.word} shown ({value}{unit}, {span})"
    span = f" ({_span(change, metric)})" if change.is_shown else ""
    return f"{_size(change, metric)}{unit} {_direction(change)} in {metric.word}{span}"


def _ratio_in_words(name: str, change: Change) -> str:
    if change.is_shown is False:
        return f"no difference in {name} shown ({change.value:.2f} times, {_ends(change)})"
    value, _, ends = _ratio(change).partition(" ")
    return f"{value} times the {name} {ends}".strip()
