"""Define the figures: charts of single quantities, time to target, and the paper's figures.

A figure of a record's field is a row of `QUANTITIES`; a figure of panels side by side is a row of `FIGURES`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise

import numpy as np

from divebatch.report.analysis import UNITS, Analysis, Curve, MethodResult, average_curve
from divebatch.report.drawing import (
    AXES,
    DOTTED,
    PANEL_SIZE,
    Drawing,
    Line,
    Look,
    Panel,
    TargetBars,
    Track,
    draw_panels,
    other_looks,
)
from divebatch.report.load import RecordedRun
from divebatch.report.tables import MEBIBYTE, diverged_note, size_range, stage_epochs

WIDEST, THINNEST = 5.0, 1.5
"""Widths in points between which lines get thinner, so that all methods on the same course remain visible."""
WIDE_PANEL = (4.6, 4.2)
"""Width and height of a panel with room for ten lines and their names, in inches."""
BANDS_NOTE = "Lines are means over the trials that count, bands ± the standard error of the mean."
SHADOW_NOTE = (
    "Solid: the batch size in force. The others: what each shadow would have put in force there, decided after the "
    "epoch before, from the size and the weights that training then had."
)
BARS_NOTE = (
    "Bars: until the metric averaged over trials reaches the target. Dots: each trial alone, which may get there "
    "earlier, being rougher than the average."
)


# Quantities


@dataclass(frozen=True, slots=True)
class Quantity:
    """A field of epoch records, or two fields that belong together."""

    title: str
    fields: tuple[tuple[str, str], ...]
    """Fields of a record to draw together, each with the suffix of its lines' names."""
    factor: float = 1.0
    bounds: tuple[float, float] | None = None
    """The possible range of the quantity. None: at least 0, unless a mean is negative."""
    may_be_log: bool = True
    log_base: int = 10
    is_steps: bool = False
    """Whether a value holds for a whole epoch, so that methods often share values exactly."""
    only_on_gpu: bool = False
    note: str = ""


QUANTITIES = {
    "accuracy": Quantity(
        "Validation accuracy (%)", (("val_accuracy", ""),), factor=100.0, bounds=(0.0, 100.0), may_be_log=False
    ),
    "bits": Quantity("Validation bits per byte", (("bits_per_byte", ""),)),
    "loss": Quantity("Validation loss", (("val_loss", ""),)),
    "batchsize": Quantity(
        "Batch size (samples)",
        (("batch_size", ""),),
        bounds=(1, np.inf),
        log_base=2,
        is_steps=True,
        note="Where it changed within an epoch: the size that the epoch ended with.",
    ),
    "noise": Quantity(
        "Gradient noise scale (samples)",
        (("noise_scale", ""),),
        note="Of estimates at fixed weights; epochs in which nothing was measured are left out.",
    ),
    "diversity": Quantity(
        "Gradient diversity",
        (("diversity", ""), ("exact_diversity", ", exact")),
        note="Dotted: the exact value, where runs recorded it. Epochs in which nothing was measured are left out.",
    ),
    "trainloss": Quantity("Training loss", (("train_loss", ""),)),
    "lr": Quantity("Learning rate", (("lr", ""),), is_steps=True),
    "memory": Quantity(
        "Peak GPU memory (MiB)",
        (("peak_memory_bytes", ""),),
        factor=1 / MEBIBYTE,
        may_be_log=False,
        only_on_gpu=True,
    ),
}
"""The quantities by name. File names contain this name, so it has no dash and two experiments' files differ."""
METRICS = {"val_accuracy": "accuracy", "val_loss": "loss", "bits_per_byte": "bits"}
"""The quantity of each metric."""


def make_tracks(analysis: Analysis, looks: Mapping[str, Look]) -> list[Track]:
    """Return a track for each method that has begun."""
    tracks = []
    for result in analysis.methods:
        if any(run.epochs for run in result.runs):
            means = {axis: result.curve(UNITS[axis]).mean for axis in AXES}
            # A mean over fewer trials can fall, but a line must not run backwards.
            axes = {axis: np.maximum.accumulate(mean) for axis, mean in means.items() if np.isfinite(mean).all()}
            tracks.append(Track(result, looks[result.method], axes))
    return tracks


def _lines(quantity: Quantity, track: Track, label: str) -> Iterator[Line]:
    """Yield a line for each field of the quantity for which the track's runs have finite values."""
    runs = track.result.runs
    on_gpu = [run for run in runs if run.is_on_gpu]
    before: Curve | None = None
    for field, ending in quantity.fields:
        is_whole = not quantity.only_on_gpu or len(on_gpu) == len(runs)
        curve = track.result.curve(field) if is_whole else average_curve(on_gpu, field)
        curve = curve.measured().scaled(quantity.factor)
        # A policy may act on the exact value, so that the second line would hide the first.
        is_new = before is None or not (
            np.array_equal(before.epochs, curve.epochs) and np.allclose(before.mean, curve.mean, rtol=1e-3)
        )
        if len(curve.epochs) and is_new:
            look = replace(track.look, dashes=DOTTED) if ending else track.look
            yield Line(label + ending, look, curve, track)
        before = curve


def _panel(quantity: Quantity, lines: Sequence[Line]) -> Panel:
    """Return a panel with the lines of a quantity."""
    bounds = quantity.bounds
    if bounds is None:  # some losses can be negative
        lowest = min((float(np.nanmin(line.curve.mean)) for line in lines), default=0.0)
        bounds = (0.0 if lowest >= 0 else -np.inf, np.inf)
    if quantity.is_steps:
        lines = _nested(lines, WIDEST, THINNEST)
    return Panel(quantity.title, lines, bounds, quantity.may_be_log, quantity.log_base, quantity.is_steps)


def _nested(lines: Sequence[Line], widest: float, thinnest: float) -> list[Line]:
    """Make each line thinner than its predecessor, so that lines in one place remain visible."""
    widest = min(widest, thinnest + 0.9 * (len(lines) - 1))
    widths = np.linspace(widest, thinnest, len(lines)).tolist()
    return [replace(line, width=width) for line, width in zip(lines, widths, strict=True)]


# Charts


def make_charts(analysis: Analysis, tracks: Sequence[Track]) -> list[Panel]:
    """Return a chart of each recorded quantity: metric, batch size and noise scale first, shadows last."""
    names = dict.fromkeys([METRICS[analysis.metric.name], "batchsize", "noise", "diversity", *QUANTITIES])
    charts = []
    for name in names:
        quantity = QUANTITIES[name]
        lines = [line for track in tracks for line in _lines(quantity, track, track.method)]
        if lines:
            notes = [BANDS_NOTE, quantity.note, *(_ratio_notes(tracks) if name == "diversity" else ())]
            charts.append(replace(_panel(quantity, lines), name=name, caption=" ".join(filter(None, notes))))
    return charts + _shadow_charts(tracks)


def _ratio_notes(tracks: Sequence[Track]) -> Iterator[str]:
    """Yield a note on each method whose estimate of the diversity can be compared with the exact value."""
    for track in tracks:
        records = [record for run in track.result.runs for record in run.epochs]
        ratios = [r.diversity / r.exact_diversity for r in records if r.diversity and r.exact_diversity]
        if ratios and not np.allclose(ratios, 1.0, rtol=1e-2):
            low, middle, high = np.percentile(ratios, (10, 50, 90))
            yield (
                f"{track.method}: the estimate is {middle:.2f} times the exact value in the median epoch "
                f"({low:.2f} to {high:.2f} from the 10th to the 90th percentile)."
            )


def _shadow_charts(tracks: Sequence[Track]) -> list[Panel]:
    """Return a chart for each method with shadows, policies that only watch, and more than one epoch."""
    charts: list[Panel] = []
    for track in tracks:
        wishes = list(_wishes(track))
        if wishes:
            actual = track.result.curve("batch_size").measured()
            driver = Line(f"{track.method}, in force", replace(track.look, dashes="solid"), actual, track, width=3.5)
            chart = replace(
                _panel(QUANTITIES["batchsize"], []),
                name=f"shadows{len(charts) + 1}",
                title=f"Batch size wanted (samples), {track.method} driving",
                lines=[driver, *_nested(wishes, 2.0, 1.0)],
                caption=f"{SHADOW_NOTE} {BANDS_NOTE}",
            )
            charts.append(chart)
    return charts


def _wishes(track: Track) -> Iterator[Line]:
    """Yield a line of wanted sizes for each shadow, in the order of the records."""
    runs = track.result.runs
    names = dict.fromkeys(name for run in runs for record in run.epochs for name in record.shadows or {})
    for name, look in zip(names, cycle(other_looks(track.look.color)), strict=False):
        curve = average_curve([_as_if_driven(run, name) for run in runs], "batch_size")
        if len(curve.epochs):
            yield Line(name, look, curve, track)


def _as_if_driven(run: RecordedRun, name: str) -> RecordedRun:
    """Return the epochs for which the shadow wanted a batch size, with this size as theirs."""
    wished = [
        replace(record, batch_size=before.shadows[name])
        for before, record in pairwise(run.epochs)
        if before.shadows and name in before.shadows and record.epoch == before.epoch + 1
    ]
    return replace(run, epochs=tuple(wished))


def make_bars(analysis: Analysis, looks: Mapping[str, Look]) -> dict[str, TargetBars]:
    """Return bars by unit, seconds first if one machine ran all trials; empty if nobody reached a target."""
    if analysis.target is None:
        return {}
    goal = analysis.metric.text(analysis.target.value)
    bars = {}
    for unit in sorted(UNITS, key=lambda unit: unit == "seconds" and not analysis.is_timed):
        arrivals = {method: ways[unit] for method, ways in analysis.common.items()}
        if any(arrival.value is not None for arrival in arrivals.values()):
            bars[unit] = TargetBars(unit, goal, arrivals, looks)
    return bars


# The paper's figures


@dataclass(frozen=True, slots=True)
class PanelFigure:
    """A figure of panels side by side.

    Args:
        title: The figure's subject.
        quantities: One quantity for each panel. A single quantity gets three panels: over epochs as in the paper, over
            training time, and the last quarter enlarged.
        panel_size: Width and height of each panel, in inches.
    """

    title: str
    quantities: tuple[str, ...]
    panel_size: tuple[float, float]

    def draw(self, name: str, analysis: Analysis, tracks: Sequence[Track]) -> Drawing | None:
        """Draw the figure from some tracks; None: the records cannot fill any panel."""
        panels = []
        for quantity in map(QUANTITIES.__getitem__, self.quantities):
            labelled = ((track, f"{track.result.label} ({_sizes(track.result)})") for track in tracks)
            panels.append(_panel(quantity, [line for each in labelled for line in _lines(quantity, *each)]))
        if len(panels) == 1:
            panels = _three_ways(panels[0], stage_epochs(analysis.experiment.length)[2])
        panels = [panel for panel in panels if panel.lines]
        if not panels:
            return None
        caption = " ".join(_caption(analysis, [track.result for track in tracks]))
        return draw_panels(name, self.title, analysis.experiment.name, panels, caption, self.panel_size)


def _sizes(result: MethodResult) -> str:
    """Return the first batch size and, if it differs, the mean final batch size."""
    return size_range(result.first_batch_size, result.final_mean("batch_size"))


def _three_ways(whole: Panel, late: int) -> list[Panel]:
    end = [replace(line, curve=line.curve.since(late)) for line in whole.lines]
    return [
        whole,
        replace(whole, axis="seconds", lines=[line for line in whole.lines if line.positions("seconds") is not None]),
        replace(
            whole,
            lines=[line for line in end if len(line.curve.epochs)],
            title=f"{whole.title}, last quarter",
            first_epoch=late,
            may_be_log=False,
        ),
    ]


FIGURES = {
    "figure1": PanelFigure("Figure 1: validation loss and accuracy", ("loss", "accuracy"), PANEL_SIZE),
    "figure2": PanelFigure(
        "Figure 2: validation loss, batch size and diversity", ("loss", "batchsize", "diversity"), PANEL_SIZE
    ),
    "figure3": PanelFigure("Figure 3: validation accuracy", ("accuracy",), WIDE_PANEL),
    "figure4": PanelFigure("Figure 4: validation loss", ("loss",), WIDE_PANEL),
    "course": PanelFigure("Batch size and learning rate", ("batchsize", "lr"), WIDE_PANEL),
}
"""The paper's figures by the name that experiment files and file names use."""


def draw_paper_figures(analysis: Analysis, tracks: Sequence[Track]) -> list[Drawing]:
    """Draw the paper's figures that the experiment names and the records can fill."""
    wanted = analysis.experiment.settings.figures
    drawings = []
    for name in (name for name in FIGURES if name in wanted):
        shown = [track for track in tracks if not wanted[name] or track.method in wanted[name]]
        drawings.append(FIGURES[name].draw(name, analysis, shown))
    return [drawing for drawing in drawings if drawing is not None]


def _caption(analysis: Analysis, shown: Sequence[MethodResult]) -> Iterator[str]:
    counts = [len(result.runs) for result in shown]
    if len(set(counts)) > 1:
        trials = "trials (" + ", ".join(f"{result.method}: {len(result.runs)}" for result in shown) + ")"
    else:
        trials = "1 trial" if counts[0] == 1 else f"{counts[0]} trials"
    is_open = any(not result.num_finished for result in shown)
    yield f"Lines are means over {trials}" + (", at each epoch over those that reached it." if is_open else ".")
    if max(counts) > 1:
        yield "Bands are ± the standard error of the mean, cut off at the axis and at impossible values."
    yield "In parentheses: the batch size, or the first one and the mean of the final ones."
    unfinished = [result for result in shown if result.num_finished < len(result.trials)]
    yield from (f"{r.method}: {r.num_finished} of {len(r.trials)} trials finished." for r in unfinished)
    yield from (diverged_note(result, analysis) for result in shown if result.num_diverged)
