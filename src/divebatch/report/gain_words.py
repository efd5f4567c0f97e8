"""Does it pay? The gains of adaptive methods as a table, and those of the first one as a sentence."""

from collections.abc import Iterator, Sequence

from divebatch.records import Metric
from divebatch.report.analysis import Analysis
from divebatch.report.devices import DeviceModel, Untold
from divebatch.report.gains import BEST, HERE, RATIOS, STEPS, Change, Gain, best_fixed, is_fixed, on_devices
from divebatch.report.tables import MISSING, Table

NO_DIFFERENCE = "no difference shown"
TOLD = (STEPS, HERE, on_devices(64))
"""The ratios that the sentence has; the table has all."""


# As a table


def gains_table(analysis: Analysis, gains: Sequence[Gain], devices: DeviceModel | Untold) -> Table | None:
    """One row for each adaptive method and baseline; None without gains.

    Args:
        analysis: The experiment's, from `analyse`.
        gains: Those of its methods.
        devices: What they were found with.
    """
    if not gains:
        return None
    unit = " (points)" if analysis.metric.is_accuracy else ""
    columns = ["method", "against", "seeds", f"{analysis.metric.word}{unit}", *RATIOS]
    rows = [
        [
            gain.method,
            f"{gain.baseline.name}, {' and '.join(gain.baseline.roles)}",
            f"{gain.num_seeds}",
            _difference(gain.metric, analysis.metric),
            *(_ratio(gain.ratios.get(name)) for name in RATIOS),
        ]
        for gain in gains
    ]
    return Table(f"{analysis.experiment.name}: does it pay?", columns, rows, list(_notes(analysis, devices)))


def _difference(change: Change | None, metric: Metric) -> str:
    """For instance `0.39 worse (0.11 to 0.67)`, or `no difference shown: -0.03 (-0.16 to +0.11)` with plus for gain."""
    if change is None:
        return MISSING
    if change.is_shown is False:
        return f"{NO_DIFFERENCE}: {_signed(change.value, metric)} ({_span(change, metric)})"
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


def _ratio(change: Change | None) -> str:
    """For instance `0.71 (0.70 to 0.72)`; the value alone with a single seed, and where all seeds agree."""
    if change is None:
        return MISSING
    if change.is_shown is False:
        return f"{NO_DIFFERENCE}: {change.value:.2f} ({_ends(change)})"
    low, high = _ends(change).split(" to ")
    return f"{change.value:.2f}" if change.is_shown is None or low == high else f"{change.value:.2f} ({_ends(change)})"


def _ends(change: Change) -> str:
    return f"{change.low:.2f} to {change.high:.2f}"


def _notes(analysis: Analysis, devices: DeviceModel | Untold) -> Iterator[str]:
    yield (
        f"Final {analysis.metric.word}: how much better or worse than the fixed batch. All others: ratios to the fixed "
        "batch, below 1 where less was needed. Means over the seeds that both have finished, with Student's 95 % "
        f"interval. '{NO_DIFFERENCE.capitalize()}': the interval holds a gain and a loss; a plus sign is a gain."
    )
    yield (
        "Seconds are those of training, without evaluation and compilation. What it takes to find the best fixed batch "
        "is not counted."
    )
    yield from _baseline_notes(analysis)
    if isinstance(devices, Untold):
        yield devices.note
    else:
        yield "Seconds on N devices are a model, not a measurement; its assumptions are below the table of devices."
    if len(analysis.experiment.machines) > 1:
        yield "Seconds here are left out where two methods ran on different hardware."


def _baseline_notes(analysis: Analysis) -> Iterator[str]:
    best, name = best_fixed(analysis), analysis.experiment.settings.customary
    if best is not None:
        fixed = [f"{each.method} ({each.first_batch_size or 0:.0f})" for each in analysis.methods if is_fixed(each)]
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
    return "Does it pay? " + " ".join(_sentence(gain, analysis.metric) for gain in first)


def _sentence(gain: Gain, metric: Metric) -> str:
    seeds = f"{gain.num_seeds} seeds" if gain.num_seeds > 1 else "a single seed, so it may be chance"
    told = [_ratio_in_words(name, gain.ratios[name]) for name in TOLD if name in gain.ratios]
    parts = [_metric_in_words(gain.metric, metric), *told] if gain.metric is not None else told
    roles = " and ".join(gain.baseline.roles)
    return f"{gain.method} against {gain.baseline.name}, {roles}, over {seeds}: {', '.join(parts)}."


def _metric_in_words(change: Change, metric: Metric) -> str:
    unit = " points" if metric.is_accuracy else ""
    if change.is_shown is False:
        value, span = _signed(change.value, metric), _span(change, metric)
        return f"no difference in {metric.word} shown ({value}{unit}, {span})"
    span = f" ({_span(change, metric)})" if change.is_shown else ""
    return f"{_size(change, metric)}{unit} {_direction(change)} in {metric.word}{span}"


def _ratio_in_words(name: str, change: Change) -> str:
    what = name if name in (STEPS, HERE) else f"{name} by a model"
    if change.is_shown is False:
        return f"no difference in {what} shown ({change.value:.2f} times, {_ends(change)})"
    value, _, ends = _ratio(change).partition(" ")
    return f"{value} times the {what} {ends}".strip()
