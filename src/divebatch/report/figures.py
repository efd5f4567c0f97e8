"""The paper's Figures 1 and 2, drawn from records. Needs the extra `report`."""

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from divebatch.errors import MissingExtraError
from divebatch.report.curves import average_curve
from divebatch.report.plot import Line, Panel, draw
from divebatch.report.runs import Experiment
from divebatch.report.style import EXACT, LOOKS, SETTINGS, legend_label
from divebatch.report.summary import MethodSummary, summarise
from divebatch.report.table import diverged_note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_1_METHODS = ("sgd-small", "sgd-large", "adabatch", "divebatch")
FIGURE_2_METHODS = ("divebatch", "oracle")
DIVERSITY = "Gradient diversity"
DIVERSITY_NOTES = {
    "divebatch": "DiveBatch's diversity is its estimate along the epoch.",
    "oracle": "Oracle's diversity is exact, at the weights each epoch ended with.",
}
PANEL_WIDTH, HEIGHT = 3.9, 3.3
"""Inches."""
PNG_DPI = 150


@dataclass(frozen=True, slots=True)
class Drawing:
    """A finished figure: file name without folder and suffix, what it shows in words, and its bytes."""

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes


def require_matplotlib() -> None:
    """Raise an error that names the extra to install, before any work."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report") from error


def draw_figures(experiment: Experiment) -> list[Drawing]:
    """Both figures, or those for which the experiment has the methods."""
    require_matplotlib()
    return [drawing for drawing in (figure_1(experiment), figure_2(experiment)) if drawing is not None]


def figure_1(experiment: Experiment) -> Drawing | None:
    """Validation loss and accuracy against epochs: small batch, large batch, and the batch that grows."""
    shown = _summaries(experiment, FIGURE_1_METHODS)
    panels = [
        _loss_panel(experiment, shown),
        _accuracy_panel(experiment, shown),
    ]
    return _drawing("figure1", "Figure 1: validation loss and accuracy", experiment, shown, panels)


def figure_2(experiment: Experiment) -> Drawing | None:
    """DiveBatch against Oracle: validation loss, batch size, and the diversity each of them acts upon."""
    shown = _summaries(experiment, FIGURE_2_METHODS)
    panels = [
        _loss_panel(experiment, shown),
        Panel("Batch size (samples)", _lines(experiment, shown, "batch_size"), bounds=(1.0, np.inf), log_base=2),
        Panel(DIVERSITY, _diversity_lines(experiment, shown)),
    ]
    names = " and ".join(LOOKS[summary.method].label for summary in shown)
    return _drawing("figure2", f"Figure 2: {names}", experiment, shown, panels)


def _summaries(experiment: Experiment, methods: Sequence[str]) -> list[MethodSummary]:
    return [summary for summary in summarise(experiment) if summary.method in methods and summary.last_epoch]


def _loss_panel(experiment: Experiment, shown: list[MethodSummary]) -> Panel:
    lines = _lines(experiment, shown, "val_loss")
    lowest = min((float(np.nanmin(line.curve.mean)) for line in lines), default=0.0)
    # Most losses cannot be negative, but some can.
    return Panel("Validation loss", lines, bounds=(0.0 if lowest >= 0 else -np.inf, np.inf))


def _accuracy_panel(experiment: Experiment, shown: list[MethodSummary]) -> Panel:
    lines = [
        Line(line.label, line.look, line.curve.scaled(100.0)) for line in _lines(experiment, shown, "val_accuracy")
    ]
    return Panel("Validation accuracy (%)", lines, bounds=(0.0, 100.0), may_be_log=False)


def _lines(experiment: Experiment, shown: list[MethodSummary], field: str) -> list[Line]:
    """One line a method that has a finite value of the field."""
    curves = [(summary, average_curve(experiment.methods[summary.method], field)) for summary in shown]
    return [Line(legend_label(s), LOOKS[s.method], curve) for s, curve in curves if not curve.is_empty]


def _diversity_lines(experiment: Experiment, shown: list[MethodSummary]) -> list[Line]:
    lines = _lines(experiment, shown, "diversity")
    exact = average_curve(experiment.methods.get("divebatch", ()), "exact_diversity")
    if not exact.is_empty:
        lines.append(Line(EXACT.label, EXACT, exact))
    # Some epochs are not measured: join those that are.
    return [Line(line.label, line.look, line.curve.measured()) for line in lines]


def _drawing(
    name: str, title: str, experiment: Experiment, shown: list[MethodSummary], panels: list[Panel]
) -> Drawing | None:
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        return None
    caption = " ".join(_caption(shown, panels))
    with _settings():
        figure = _compose(experiment.name, panels)
        return Drawing(name, title, caption, _bytes(figure, "svg"), _bytes(figure, "png"))


def _caption(shown: list[MethodSummary], panels: list[Panel]) -> Iterator[str]:
    """What the lines and bands are, how many trials, and what is missing from them."""
    unfinished = [summary for summary in shown if summary.num_finished < summary.num_trials]
    yield f"Lines are means over {_trials(shown)}" + (
        ", at each epoch over those that reached it." if unfinished else "."
    )
    if any(summary.num_trials > 1 for summary in shown):
        yield "Bands are ± one standard deviation over trials, cut off at the axis and at impossible values."
    yield "In parentheses: the batch size, or the first one and the mean of the final ones."
    if any(panel.title == DIVERSITY for panel in panels):
        yield from (DIVERSITY_NOTES[summary.method] for summary in shown)
    yield from (f"{s.method}: {s.num_finished} of {s.num_trials} trials finished." for s in unfinished)
    yield from (diverged_note(summary) for summary in shown if summary.num_diverged)


def _trials(shown: list[MethodSummary]) -> str:
    counts = [summary.num_trials for summary in shown]
    if len(set(counts)) > 1:
        return "trials (" + ", ".join(f"{summary.method}: {summary.num_trials}" for summary in shown) + ")"
    return "1 trial" if counts[0] == 1 else f"{counts[0]} trials"


@contextmanager
def _settings() -> Iterator[None]:
    """Ours over matplotlib's defaults, whatever the user's own are; put back afterwards."""
    import matplotlib
    from matplotlib import style

    with style.context("default"), matplotlib.rc_context(SETTINGS):
        yield


def _compose(title: str, panels: list[Panel]) -> "Figure":
    from matplotlib.figure import Figure

    last_epoch = max(int(line.curve.epochs[-1]) for panel in panels for line in panel.lines)
    figure = Figure(figsize=(PANEL_WIDTH * len(panels), HEIGHT), layout="constrained")
    for index, panel in enumerate(panels):
        draw(figure.add_subplot(1, len(panels), index + 1), panel, last_epoch)
    # Only what every font can draw, and only as much as there is room for.
    drawable = re.sub(r"[^ -~]", "?", title)[:60]
    figure.suptitle(drawable, x=0.01, ha="left", fontsize=11, fontweight="bold")
    _add_legend(figure, panels)
    return figure


def _add_legend(figure: "Figure", panels: list[Panel]) -> None:
    """One for all panels, below them, where it covers no data."""
    from matplotlib.lines import Line2D

    entries = dict.fromkeys((line.label, line.look) for panel in panels for line in panel.lines)
    handles = [Line2D([], [], color=look.color, linestyle=look.dashes, label=label) for label, look in entries]
    num_columns = 2 if len(handles) == 4 else 3
    figure.legend(handles=handles, loc="outside lower left", ncols=num_columns, handlelength=3.2)


def _bytes(figure: "Figure", kind: str) -> bytes:
    buffer = BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=metadata)
    return buffer.getvalue()
