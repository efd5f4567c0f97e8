"""What the page's figures show: each quantity's mean over trials, over epochs, steps, samples or training time."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from typing import Literal

import numpy as np

from divebatch.report.analysis import UNITS, Analysis, Arrival, MethodResult
from divebatch.report.curves import Curve, Floats, average_curve
from divebatch.report.runs import RecordedRun
from divebatch.report.style import DOTTED, Look, looks_for, other_looks
from divebatch.report.tables import MEBIBYTE, batch_size_range, seconds

AXES = {"epochs": "Epoch", "steps": "Optimizer steps", "samples": "Samples", "seconds": "Training time (s)"}
"""Horizontal axes, each with its label."""
WIDEST, THINNEST = 5.0, 1.5
"""In points: where many methods share a course, each line is thinner than the one before, so that all are seen."""
TRIAL_NOTE = "Lines are means over the trials that count in the tables, bands ± the standard error of the mean."
SHADOW_NOTE = (
    "Solid: the batch size in force. The others: what each shadow would have put in force there, decided after the "
    "epoch before, from the size and the weights that training then had."
)
BARS_NOTE = (
    "Bars: until the metric averaged over trials reaches the target, as in the table. Whiskers: the middle 95 % of the "
    "same number when the trials are drawn again with replacement (bootstrap), dotted where they run on to never. With "
    "few trials they are too short rather than too long."
)


# Lines and panels, which the page and the files draw


@dataclass(frozen=True, slots=True)
class Line:
    """A curve and how it is drawn."""

    label: str
    look: Look
    curve: Curve
    seconds: Floats | None = None
    """Training time at each epoch of the curve, where that and not the epoch is the horizontal axis."""
    width: float | None = None
    """In points; the figures' usual width where None."""

    @property
    def x(self) -> Floats:
        """Where each point lies on the horizontal axis."""
        return self.curve.epochs.astype(np.float64) if self.seconds is None else self.seconds

    def outline(self) -> "Line":
        """The line with the points that a drawing needs."""
        kept = self.curve.outline()
        return replace(self, curve=self.curve.only(kept), seconds=None if self.seconds is None else self.seconds[kept])


@dataclass(frozen=True, slots=True)
class Panel:
    """What one set of axes shows."""

    title: str
    """The quantity with its unit."""
    lines: Sequence[Line]
    bounds: tuple[float, float] = (-np.inf, np.inf)
    """Values that the quantity cannot leave; bands are cut there."""
    may_be_log: bool = True
    log_base: int = 10
    spread: Literal["std", "standard_error"] = "standard_error"
    """What the bands show."""
    first_epoch: int = 1
    """Where the axis of epochs begins."""

    def outline(self) -> "Panel":
        """The panel with the points that a drawing needs."""
        return replace(self, lines=[line.outline() for line in self.lines])

    @property
    def is_over_seconds(self) -> bool:
        """Whether the horizontal axis is training time."""
        return any(line.seconds is not None for line in self.lines)

    @property
    def is_log(self) -> bool:
        """Whether the means are positive and span more than a factor of ten."""
        means = np.concatenate([line.curve.mean for line in self.lines])
        means = means[np.isfinite(means)]
        return self.may_be_log and bool(means.min() > 0 and means.max() > 10 * means.min())


# Quantities: a figure of a record's field is one row here


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something that records hold for each epoch."""

    title: str
    fields: tuple[tuple[str, str], ...]
    """Fields of a record that are drawn together, each with what its lines' names end in."""
    factor: float = 1.0
    bounds: tuple[float, float] | None = None
    """None: from 0 on where no mean is negative."""
    may_be_log: bool = True
    log_base: int = 10
    is_course: bool = False
    """Whether methods often share it exactly."""
    only_on_gpu: bool = False
    note: str = ""


QUANTITIES = {
    "accuracy": Quantity(
        "Validation accuracy (%)", (("val_accuracy", ""),), factor=100.0, bounds=(0.0, 100.0), may_be_log=False
    ),
    "loss": Quantity("Validation loss", (("val_loss", ""),)),
    "bits": Quantity("Validation bits per byte", (("bits_per_byte", ""),)),
    "trainloss": Quantity("Training loss", (("train_loss", ""),)),
    "batchsize": Quantity(
        "Batch size (samples)",
        (("batch_size", ""),),
        bounds=(1, np.inf),
        log_base=2,
        is_course=True,
        note="Where it changed within an epoch: the size that the epoch ended with.",
    ),
    "lr": Quantity("Learning rate", (("lr", ""),), may_be_log=False, is_course=True),
    "diversity": Quantity(
        "Gradient diversity",
        (("diversity", ""), ("exact_diversity", ", exact")),
        note="Dotted: the exact value, where runs recorded it. Epochs in which nothing was measured are left out.",
    ),
    "memory": Quantity(
        "Peak GPU memory (MiB)",
        (("peak_memory_bytes", ""),),
        factor=1 / MEBIBYTE,
        may_be_log=False,
        only_on_gpu=True,
    ),
}
"""By name, which is part of file names: without a dash, so that no two experiments' files can meet."""


# Tracks and charts


@dataclass(frozen=True, slots=True)
class Track:
    """A method with its look, and where each of its epochs lies on every axis."""

    result: MethodResult
    look: Look
    epochs: Floats
    axes: Mapping[str, Floats]
    """Means over trials; only the axes that the runs recorded."""

    @property
    def method(self) -> str:
        return self.result.method

    @property
    def legend(self) -> str:
        """The method's label with its first batch size and, where it differs, the mean of the final ones."""
        sizes = batch_size_range(self.result.first_batch_size, self.result.final_mean("batch_size"), " - ")
        return f"{self.result.label} ({sizes})"

    def positions(self, curve: Curve, axis: str) -> Floats | None:
        """Where the points of a curve lie on an axis; None where the runs did not record that."""
        values = self.axes.get(axis)
        return None if values is None else values[np.searchsorted(self.epochs, curve.epochs)]


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure: a panel, and for each of its lines the track it belongs to."""

    name: str
    panel: Panel
    tracks: Sequence[Track]
    caption: str

    def positions(self, number: int, axis: str) -> Floats | None:
        """Where the points of a line lie on an axis; None where its runs did not record that."""
        return self.tracks[number].positions(self.panel.lines[number].curve, axis)


def make_tracks(analysis: Analysis) -> list[Track]:
    """One for each method that has begun."""
    looks = looks_for(analysis.experiment.methods)
    begun = [result for result in analysis.methods if any(run.epochs for run in result.runs)]
    return [_track(result, looks[result.method]) for result in begun]


def _track(result: MethodResult, look: Look) -> Track:
    means = {axis: result.curve(UNITS[axis]).mean for axis in AXES}
    # Where fewer trials are left a mean can fall; a line must not run backwards.
    axes = {axis: np.maximum.accumulate(mean) for axis, mean in means.items() if np.isfinite(mean).all()}
    return Track(result, look, axes["epochs"], axes)


def make_charts(tracks: Sequence[Track]) -> list[Chart]:
    """Those that the records can fill: each quantity, then what shadows wanted."""
    charts = [_chart(name, tracks) for name in QUANTITIES]
    return [chart for chart in charts if chart.panel.lines] + make_shadow_charts(tracks)


def _chart(name: str, tracks: Sequence[Track]) -> Chart:
    quantity = QUANTITIES[name]
    pairs = [(track, line) for track in tracks for line in lines_of(quantity, track, track.method)]
    caption = [TRIAL_NOTE, quantity.note, *_ratio_notes(name, tracks)]
    panel = panel_of(quantity, [line for _, line in pairs])
    return Chart(name, panel, [track for track, _ in pairs], " ".join(filter(None, caption)))


def panel_of(quantity: Quantity, lines: Sequence[Line]) -> Panel:
    """Lines of one quantity, with the axis that it needs."""
    bounds = quantity.bounds
    if bounds is None:  # most losses cannot be negative, but some can
        lowest = min((float(np.nanmin(line.curve.mean)) for line in lines), default=0.0)
        bounds = (0.0 if lowest >= 0 else -np.inf, np.inf)
    if quantity.is_course:
        lines = nested(lines, WIDEST, THINNEST)
    return Panel(quantity.title, lines, bounds=bounds, may_be_log=quantity.may_be_log, log_base=quantity.log_base)


def nested(lines: Sequence[Line], widest: float, thinnest: float) -> list[Line]:
    """Each thinner than the one before, so that lines in one place are all seen; few lines need no wide ones."""
    widest = min(widest, thinnest + 0.9 * (len(lines) - 1))
    widths = np.linspace(widest, thinnest, len(lines)).tolist()
    return [replace(line, width=width) for line, width in zip(lines, widths, strict=True)]


def lines_of(quantity: Quantity, track: Track, label: str) -> Iterator[Line]:
    """One line for each field of the quantity that the track's runs have a finite value of."""
    runs = track.result.runs
    on_gpu = [run for run in runs if run.is_on_gpu]
    before: Curve | None = None
    for field, ending in quantity.fields:
        is_whole = not quantity.only_on_gpu or len(on_gpu) == len(runs)
        curve = track.result.curve(field) if is_whole else average_curve(on_gpu, field)
        curve = curve.measured().scaled(quantity.factor)
        # A policy may act on the exact value: there the second line would hide the first.
        if len(curve.epochs) and not (before and _are_one(before, curve)):
            look = replace(track.look, dashes=DOTTED) if ending else track.look
            yield Line(label + ending, look, curve)
        before = curve


def _are_one(one: Curve, other: Curve) -> bool:
    return np.array_equal(one.epochs, other.epochs) and np.allclose(one.mean, other.mean, rtol=1e-3)


def _ratio_notes(name: str, tracks: Sequence[Track]) -> Iterator[str]:
    """How far the estimate of the diversity is from the exact value."""
    for track in tracks if name == "diversity" else ():
        records = [record for run in track.result.runs for record in run.epochs]
        ratios = [r.diversity / r.exact_diversity for r in records if r.diversity and r.exact_diversity]
        if ratios and not np.allclose(ratios, 1.0, rtol=1e-2):
            low, middle, high = np.percentile(ratios, (10, 50, 90))
            yield (
                f"{track.method}: the estimate is {middle:.2f} times the exact value in the median epoch "
                f"({low:.2f} to {high:.2f} from the 10th to the 90th percentile)."
            )


# Policies that only watched


def make_shadow_charts(tracks: Sequence[Track]) -> list[Chart]:
    """One for each method whose runs have shadows and an epoch after the first."""
    wishes = [(track, list(_wishes(track))) for track in tracks]
    shown = [(track, lines) for track, lines in wishes if lines]
    return [_shadow_chart(f"shadows{number}", track, lines) for number, (track, lines) in enumerate(shown, 1)]


def _shadow_chart(name: str, track: Track, wishes: Sequence[Line]) -> Chart:
    in_force = track.result.curve("batch_size").measured()
    driver = Line(f"{track.method}, in force", replace(track.look, dashes="solid"), in_force, width=3.5)
    panel = replace(
        panel_of(QUANTITIES["batchsize"], []),
        title=f"Batch size wanted (samples), {track.method} driving",
        lines=[driver, *nested(wishes, 2.0, 1.0)],
    )
    return Chart(name, panel, [track] * len(panel.lines), f"{SHADOW_NOTE} {TRIAL_NOTE}")


def _wishes(track: Track) -> Iterator[Line]:
    """One line a shadow, in the order of the records."""
    runs = track.result.runs
    names = dict.fromkeys(name for run in runs for record in run.epochs for name in record.shadows or {})
    for name, look in zip(names, cycle(other_looks(track.look.color)), strict=False):
        curve = average_curve([_as_if_driven(run, name) for run in runs], "batch_size")
        if not curve.is_empty:
            yield Line(name, look, curve)


def _as_if_driven(run: RecordedRun, name: str) -> RecordedRun:
    """The epochs for which the shadow had a wish, with that as their batch size."""
    wished = [
        replace(record, batch_size=before.shadows[name])
        for before, record in pairwise(run.epochs)
        if before.shadows and name in before.shadows and record.epoch == before.epoch + 1
    ]
    return replace(run, epochs=tuple(wished))


# Bars


@dataclass(frozen=True, slots=True)
class TargetBars:
    """When each method reached the common target, in one unit."""

    unit: str
    goal: str
    """The target, for instance `92.83 %`."""
    arrivals: Mapping[str, Arrival]
    looks: Mapping[str, Look]

    @property
    def title(self) -> str:
        """The axis with its unit, and the target."""
        return f"{AXES[self.unit]} to the common target of {self.goal}"

    @property
    def end(self) -> float:
        """The largest finite number of all, where the axis may end."""
        numbers = [n for each in self.arrivals.values() for n in (each.value or 0.0, each.low, each.high)]
        return max(filter(math.isfinite, numbers), default=0.0)


def make_bars(analysis: Analysis) -> dict[str, TargetBars]:
    """Unit -> bars, first the unit of the headline; empty while there is no target or no one reached it."""
    if analysis.target is None:
        return {}
    looks, goal = looks_for(analysis.experiment.methods), analysis.metric.text(analysis.target.value)
    units = sorted(UNITS, key=lambda unit: unit != analysis.race_unit)
    bars = {unit: TargetBars(unit, goal, analysis.arrivals(unit), looks) for unit in units}
    return {unit: each for unit, each in bars.items() if each.arrivals}


def shown(value: float, unit: str) -> str:
    """An arrival with its unit, where that has a sign.

    >>> shown(21.52, "seconds"), shown(35.0, "epochs"), shown(1750000.0, "samples"), shown(math.inf, "steps")
    ('21.5 s', '35', '1,750,000', 'never')
    """
    if not math.isfinite(value):
        return "never"
    return f"{seconds(value)} s" if unit == "seconds" else f"{value:,.0f}"


def bar_text(arrival: Arrival, unit: str) -> str:
    """The number and its interval, for instance `21.5 s (21.2 s to 22.4 s)`."""
    if arrival.value is None:
        return "not reached"
    number = shown(arrival.value, unit)
    return f"{number} ({shown(arrival.low, unit)} to {shown(arrival.high, unit)})" if arrival.has_interval else number
