"""What the page's figures show: each quantity's mean over trials, over epochs, steps, samples or training time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from divebatch.report.cost import MEBIBYTE
from divebatch.report.curves import Curve, Floats, average_curve
from divebatch.report.plot import Line, Panel
from divebatch.report.runs import Experiment, Run
from divebatch.report.style import DOTTED, Look, looks_for
from divebatch.report.targets import counted

AXES = {
    "epochs": ("epoch", "Epoch"),
    "steps": ("steps", "Optimizer steps"),
    "samples": ("samples", "Samples"),
    "seconds": ("train_seconds", "Training time (s)"),
}
"""Horizontal axes: name -> field of a record, and label."""
WIDEST, THINNEST = 5.0, 1.5
"""In points: where many methods share a course, each line is thinner than the one before, so that all are seen."""
TRIAL_NOTE = "Lines are means over the trials that count in the tables, bands ± the standard error of the mean."


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something that records hold for each epoch."""

    name: str
    """In file names; without a dash, so that no two experiments' files can meet."""
    title: str
    fields: tuple[tuple[str, str], ...]
    """Fields of a record that are drawn together, each with what its lines' names end in."""
    factor: float = 1.0
    bounds: tuple[float, float] = (-np.inf, np.inf)
    may_be_log: bool = True
    log_base: int = 10
    is_course: bool = False
    """Whether methods often share it exactly."""
    only_on_gpu: bool = False
    note: str = ""


QUANTITIES = (
    Quantity("accuracy", "Validation accuracy (%)", (("val_accuracy", ""),), 100.0, (0.0, 100.0), may_be_log=False),
    Quantity("loss", "Validation loss", (("val_loss", ""),)),
    Quantity("trainloss", "Training loss", (("train_loss", ""),)),
    Quantity(
        "batchsize",
        "Batch size (samples)",
        (("batch_size", ""),),
        bounds=(1, np.inf),
        log_base=2,
        is_course=True,
        note="Where it changed within an epoch: the size that the epoch ended with.",
    ),
    Quantity("lr", "Learning rate", (("lr", ""),), bounds=(0.0, np.inf), may_be_log=False, is_course=True),
    Quantity(
        "diversity",
        "Gradient diversity, estimated and exact",
        (("diversity", ""), ("exact_diversity", ", exact")),
        bounds=(0.0, np.inf),
        note="Dotted: the exact value, where runs recorded it. Epochs in which nothing was measured are left out.",
    ),
    Quantity(
        "memory",
        "Peak GPU memory (MiB)",
        (("peak_memory_bytes", ""),),
        1 / MEBIBYTE,
        (0.0, np.inf),
        may_be_log=False,
        only_on_gpu=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Track:
    """A method with its look, the trials that are drawn, and where each epoch lies on every axis."""

    method: str
    look: Look
    runs: tuple[Run, ...]
    epochs: Floats
    axes: Mapping[str, Floats]
    """Means over trials; only the axes that the runs recorded."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure: a panel, and for each of its lines the track it belongs to."""

    name: str
    panel: Panel
    tracks: Sequence[Track]
    caption: str

    def positions(self, number: int, axis: str) -> Floats | None:
        """Where the points of a line lie on an axis; None where its runs did not record that."""
        track, curve = self.tracks[number], self.panel.lines[number].curve
        values = track.axes.get(axis)
        return None if values is None else values[np.searchsorted(track.epochs, curve.epochs)]


def make_charts(experiment: Experiment) -> list[Chart]:
    """Those that the records can fill."""
    tracks = make_tracks(experiment)
    charts = [_chart(quantity, tracks) for quantity in QUANTITIES]
    return [chart for chart in charts if chart.panel.lines]


def make_tracks(experiment: Experiment) -> list[Track]:
    """One for each method that has begun."""
    looks = looks_for(experiment.methods, real_data=experiment.is_on_real_data)
    methods = counted(experiment).methods.items()
    return [_track(method, looks[method], runs) for method, runs in methods if any(run.epochs for run in runs)]


def _track(method: str, look: Look, runs: tuple[Run, ...]) -> Track:
    curves = {name: average_curve(runs, field) for name, (field, _) in AXES.items()}
    # Where fewer trials are left a mean can fall; a line must not run backwards.
    axes = {n: np.maximum.accumulate(c.mean) for n, c in curves.items() if np.isfinite(c.mean).all()}
    return Track(method, look, runs, axes["epochs"], axes)


def _chart(quantity: Quantity, tracks: Sequence[Track]) -> Chart:
    pairs = [(track, line) for track in tracks for line in _lines(quantity, track)]
    if quantity.is_course:
        widths = np.linspace(WIDEST, THINNEST, len(pairs)).tolist()
        pairs = [(track, replace(line, width=width)) for (track, line), width in zip(pairs, widths, strict=True)]
    lines = [line for _, line in pairs]
    panel = Panel(
        quantity.title,
        lines,
        bounds=quantity.bounds,
        may_be_log=quantity.may_be_log,
        log_base=quantity.log_base,
        spread="standard_error",
    )
    caption = [TRIAL_NOTE, quantity.note, *_ratio_notes(quantity, tracks)]
    return Chart(quantity.name, panel, [track for track, _ in pairs], " ".join(filter(None, caption)))


def _lines(quantity: Quantity, track: Track) -> Iterator[Line]:
    runs = [run for run in track.runs if run.is_on_gpu or not quantity.only_on_gpu]
    before: Curve | None = None
    for field, ending in quantity.fields:
        curve = average_curve(runs, field).measured().scaled(quantity.factor)
        # Oracle acts on the exact value: there the second line would hide the first.
        if len(curve.epochs) and not (before and _are_one(before, curve)):
            look = replace(track.look, dashes=DOTTED) if ending else track.look
            yield Line(track.method + ending, look, curve)
        before = curve


def _are_one(one: Curve, other: Curve) -> bool:
    return np.array_equal(one.epochs, other.epochs) and np.allclose(one.mean, other.mean, rtol=1e-3)


def _ratio_notes(quantity: Quantity, tracks: Sequence[Track]) -> Iterator[str]:
    """How far the estimate of the diversity is from the exact value."""
    for track in tracks if quantity.name == "diversity" else ():
        records = [record for run in track.runs for record in run.epochs]
        ratios = [r.diversity / r.exact_diversity for r in records if r.diversity and r.exact_diversity]
        if ratios and not np.allclose(ratios, 1.0, rtol=1e-2):
            low, middle, high = np.percentile(ratios, (10, 50, 90))
            yield (
                f"{track.method}: the estimate is {middle:.2f} times the exact value in the median epoch "
                f"({low:.2f} to {high:.2f} from the 10th to the 90th percentile)."
            )
