"""Panels to a finished figure, as SVG and PNG, with a caption. Needs the extra `report`."""

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from divebatch.errors import MissingExtraError
from divebatch.report.plot import Panel, draw
from divebatch.report.style import SETTINGS
from divebatch.report.summary import MethodSummary
from divebatch.report.table import diverged_note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_SIZE = (3.9, 3.3)
"""Width and height in inches."""
PNG_DPI = 150
SPREADS = {"std": "one standard deviation over trials", "standard_error": "the standard error of the mean over trials"}


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


def make_drawing(
    name: str,
    title: str,
    heading: str,
    panels: Sequence[Panel],
    caption: Sequence[str],
    *,
    panel_size: tuple[float, float] = PANEL_SIZE,
) -> Drawing:
    """`title` and `caption` go beside the figure, `heading` into it. Every panel needs a line."""
    with settings():
        return finish(name, title, _compose(heading, panels, panel_size), caption)


def finish(name: str, title: str, figure: "Figure", caption: Sequence[str]) -> Drawing:
    """The figure in both formats; call it within `settings`."""
    svg = _bytes(figure, "svg")
    figure.set_layout_engine("none")  # all has its place now; the second search for it would find the same
    return Drawing(name, title, " ".join(caption), svg, _bytes(figure, "png"))


def trial_notes(shown: Sequence[MethodSummary], panels: Sequence[Panel]) -> Iterator[str]:
    """What the lines and bands are, and how many trials."""
    unfinished = any(summary.num_finished < summary.num_trials for summary in shown)
    yield f"Lines are means over {_trials(shown)}" + (
        ", at each epoch over those that reached it." if unfinished else "."
    )
    if any(summary.num_trials > 1 for summary in shown):
        yield f"Bands are ± {SPREADS[panels[0].spread]}, cut off at the axis and at impossible values."
    yield "In parentheses: the batch size, or the first one and the mean of the final ones."


def missing_notes(shown: Sequence[MethodSummary]) -> Iterator[str]:
    """What is not in the lines: trials that have not finished or that diverged."""
    unfinished = [summary for summary in shown if summary.num_finished < summary.num_trials]
    yield from (f"{s.method}: {s.num_finished} of {s.num_trials} trials finished." for s in unfinished)
    yield from (diverged_note(summary) for summary in shown if summary.num_diverged)


def _trials(shown: Sequence[MethodSummary]) -> str:
    counts = [summary.num_trials for summary in shown]
    if len(set(counts)) > 1:
        return "trials (" + ", ".join(f"{summary.method}: {summary.num_trials}" for summary in shown) + ")"
    return "1 trial" if counts[0] == 1 else f"{counts[0]} trials"


@contextmanager
def settings() -> Iterator[None]:
    """Ours over matplotlib's defaults, whatever the user's own are; put back afterwards."""
    import matplotlib
    from matplotlib import style

    with style.context("default"), matplotlib.rc_context(SETTINGS):
        yield


def _compose(heading: str, panels: Sequence[Panel], panel_size: tuple[float, float]) -> "Figure":
    from matplotlib.figure import Figure

    last_epoch = max(int(line.curve.epochs[-1]) for panel in panels for line in panel.lines)
    figure = Figure(figsize=(panel_size[0] * len(panels), panel_size[1]), layout="constrained")
    for index, panel in enumerate(panels):
        draw(figure.add_subplot(1, len(panels), index + 1), panel, last_epoch)
    add_heading(figure, heading)
    _add_legend(figure, panels)
    return figure


def add_heading(figure: "Figure", heading: str) -> None:
    """At the top left."""
    figure.suptitle(drawable(heading, 60), x=0.01, ha="left", fontsize=11, fontweight="bold")


def drawable(text: str, length: int) -> str:
    """Only what every font can draw, and only as much as there is room for.

    >>> drawable("naïve", 4)
    'na?v'
    """
    return re.sub(r"[^ -~]", "?", text)[:length]


def _add_legend(figure: "Figure", panels: Sequence[Panel]) -> None:
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
