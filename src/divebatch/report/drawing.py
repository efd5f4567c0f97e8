"""Panels and bars to finished figures, as SVG and PNG, with a caption. Needs the extra `report`."""

import importlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from divebatch.errors import MissingExtraError
from divebatch.report.analysis import Arrival
from divebatch.report.charts import AXES, BARS_NOTE, Chart, Line, Panel, TargetBars, shown
from divebatch.report.curves import Curve, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_SIZE = (3.9, 3.3)
"""Width and height of a panel beside others, in inches."""
CHART_SIZE = (6.4, 4.2)
"""Of a figure with a single panel."""
BAR_HEIGHT = 0.34
"""Inches for each method."""
PNG_DPI = 150
FEW_POINTS = 12
"""Curves with at most so many epochs show each as a dot."""
MOST_DECADES = 1e30
"""A log axis spans at most this ratio, from the top: a run that diverges can span more than a float holds."""
SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica", "sans-serif"],
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "divebatch",
}
"""Over matplotlib's defaults. Text in SVG stays text; ids follow from the content, so equal figures are equal bytes."""


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
        return finish(name, title, _compose(heading, [panel.outline() for panel in panels], panel_size), caption)


def finish(name: str, title: str, figure: "Figure", caption: Sequence[str]) -> Drawing:
    """The figure in both formats; call it within `settings`."""
    svg = _bytes(figure, "svg")
    figure.set_layout_engine("none")  # all has its place now; the second search for it would find the same
    return Drawing(name, title, " ".join(caption), svg, _bytes(figure, "png"))


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
        _draw_panel(figure.add_subplot(1, len(panels), index + 1), panel, last_epoch)
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
    handles = [
        Line2D([], [], color=look.color, linestyle=look.dashes, label=drawable(label, 60)) for label, look in entries
    ]
    num_columns = 2 if len(handles) == 4 else 3
    figure.legend(handles=handles, loc="outside lower left", ncols=num_columns, handlelength=3.2)


def _bytes(figure: "Figure", kind: str) -> bytes:
    buffer = BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=metadata)
    return buffer.getvalue()


# One panel: mean lines with a band of their spread, on axes that fit the numbers


def _draw_panel(axes: "Axes", panel: Panel, last_epoch: int) -> None:
    """Draw every line of the panel up to `last_epoch`; each must have a finite value."""
    for line in panel.lines:
        _draw_line(axes, line, panel)
    _set_x_axis(axes, panel, last_epoch)
    _set_y_axis(axes, panel)
    axes.set_title(f"{panel.title}, log scale" if panel.is_log else panel.title, loc="left")


def _draw_line(axes: "Axes", line: Line, panel: Panel) -> None:
    x, color = line.x, line.look.color
    marker = "o" if len(x) <= FEW_POINTS else None
    style: dict[str, Any] = {"color": color, "linestyle": line.look.dashes, "linewidth": line.width, "marker": marker}
    axes.plot(x, line.curve.mean, label=line.label, **style)
    bounds = (log_limits(panel)[0], panel.bounds[1]) if panel.is_log else panel.bounds
    low, high = band(line.curve, bounds, panel.spread)
    if len(x) == 1:
        axes.vlines(x, low, high, color=color, linewidth=1)
    else:
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def band(curve: Curve, bounds: tuple[float, float], spread: str) -> tuple[Floats, Floats]:
    """Mean ± the spread, cut at the bounds; NaN, that is no band, where there is no finite spread."""
    width: Floats = getattr(curve, spread)
    width = np.where(np.isfinite(width), width, np.nan)
    return np.clip(curve.mean - width, *bounds), np.clip(curve.mean + width, *bounds)


def log_limits(panel: Panel) -> tuple[float, float]:
    """Ends of a log axis: room for every mean and upper band, but a lower band that nears zero runs off."""
    bands = [band(line.curve, panel.bounds, panel.spread) for line in panel.lines]
    means = np.concatenate([line.curve.mean for line in panel.lines])
    lowest = np.nanmin(means)
    low = max(lowest / 1.5, np.nanmin(np.concatenate([low for low, _ in bands] + [[lowest]])))
    high = np.nanmax(np.concatenate([high for _, high in bands] + [means]))
    low = max(low, high / MOST_DECADES)
    margin = (high / low) ** 0.05
    return float(low / margin), float(high * margin)


def _set_x_axis(axes: "Axes", panel: Panel, last_epoch: int) -> None:
    from matplotlib.ticker import MaxNLocator

    if panel.is_over_seconds:
        axes.set_xlim(left=0)
        axes.set_xlabel("Training time (s)")
    else:
        margin = max(0.5, 0.02 * (last_epoch - panel.first_epoch + 1))
        axes.set_xlim(panel.first_epoch - margin, last_epoch + margin)
        axes.set_xlabel("Epoch")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=not panel.is_over_seconds))


def _set_y_axis(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if panel.is_log:
        axes.set_ylim(*log_limits(panel))  # first, or the log scale looks for limits of its own
        axes.set_yscale("log", base=panel.log_base)
        axes.yaxis.set_major_locator(LogLocator(base=panel.log_base, subs=_log_ticks(panel), numticks=9))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _log_ticks(panel: Panel) -> tuple[float, ...]:
    """Multiples of the base's powers that get a label: also 2 and 5 where there are few powers of ten."""
    low, high = log_limits(panel)
    return (1.0, 2.0, 5.0) if panel.log_base == 10 and high < 300 * low else (1.0,)


def _tick(value: float) -> str:
    """Plain digits where they are short."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


# Charts and bars as files


def draw_chart(chart: Chart, heading: str) -> Drawing:
    """The chart as it is first shown: over epochs."""
    return make_drawing(chart.name, chart.panel.title, heading, [chart.panel], [chart.caption], panel_size=CHART_SIZE)


def draw_bars(bars: TargetBars, heading: str) -> Drawing:
    """One bar a method, the first on top."""
    from matplotlib.figure import Figure

    with settings():
        figure = Figure(figsize=(CHART_SIZE[0], 1.2 + BAR_HEIGHT * len(bars.arrivals)), layout="constrained")
        _draw_bars(figure.add_subplot(), bars)
        add_heading(figure, heading)
        return finish("target", bars.title, figure, [BARS_NOTE])


def _draw_bars(axes: "Axes", bars: TargetBars) -> None:
    for place, (method, arrival) in enumerate(bars.arrivals.items()):
        _draw_bar(axes, place, arrival, bars.looks[method].color, bars)
    axes.set_yticks(range(len(bars.arrivals)), [drawable(method, 30) for method in bars.arrivals])
    axes.set_ylim(len(bars.arrivals) - 0.5, -0.5)
    axes.set_xlim(0, 1.25 * bars.end)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(AXES[bars.unit])
    axes.set_title(bars.title, loc="left")


def _draw_bar(axes: "Axes", place: int, arrival: Arrival, color: str, bars: TargetBars) -> None:
    if arrival.value is None:
        axes.text(0, place, " not reached", va="center", fontsize=9)
        return
    axes.barh(place, arrival.value, height=0.6, color=color, alpha=0.75)
    ends = [arrival.low, min(arrival.high, bars.end)] if arrival.has_interval else []
    if ends:
        style = "-" if math.isfinite(arrival.high) else ":"
        axes.plot(ends, [place, place], color="black", linewidth=1.2, linestyle=style, marker="|")
    text_from = max([arrival.value, *ends])
    axes.text(text_from, place, f"  {shown(arrival.value, bars.unit)}", va="center", fontsize=9)
