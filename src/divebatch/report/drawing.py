"""Draw figures with matplotlib in a common palette and style: panels of lines, and bars. Needs the extra `report`."""

import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from io import BytesIO
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from divebatch.errors import MissingExtraError
from divebatch.report.analysis import Arrival, Curve, Floats, MethodResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours and dashes

Dashes = tuple[float, tuple[float, ...]] | Literal["solid"]
"""Dashes in matplotlib's form: (offset, lengths in points)."""
DASHED: Dashes = (0, (3.0, 1.5))
DOTTED: Dashes = (0, (1.0, 1.3))
PATTERNS: tuple[Dashes, ...] = ("solid", DASHED, DOTTED, (0, (5.0, 1.6, 1.2, 1.6)))
# Colours differ in lightness as well as hue, so that they remain distinct in grey and for colour-blind readers.
PALETTE = {
    "#0072B2": "#4DA8E0",
    "#882255": "#D96BA0",
    "#009E73": "#2CC79A",
    "#D55E00": "#FF8A3D",
    "#E69F00": "#E69F00",
    "#56B4E9": "#56B4E9",
    "#CC79A7": "#E3A5C7",
    "#7F5F2A": "#C8A25C",
    "#222222": "#EDEDED",
    "#999999": "#999999",
}
"""Each colour with its lighter form for a dark page."""
NUM_HUES = 8
"""Number of colours that names choose from; the rest, black and grey, are used if these are taken."""
SALT = 16846
"""A number that gives methods which are often compared different colours by name alone."""
MAIN, SECOND, THIRD, LIMIT = "#0072B2", "#009E73", "#882255", "#D55E00"
"""Colours of figures without methods: three for measurements, one for limits."""


@dataclass(frozen=True, slots=True)
class Look:
    """The colour and dashes of a line."""

    color: str
    """The colour on white."""
    dashes: Dashes

    @property
    def dark_color(self) -> str:
        return PALETTE[self.color]


def looks_for(*experiments: Sequence[str]) -> dict[str, Look]:
    """Return a look for each method, the same in all experiments and different from all others within each.

    A colour follows from the method's name, so reports agree unless two methods of an experiment share a colour. A name
    that extends another name gets the other's colour with different dashes.

    >>> looks = looks_for(["sgd", "adabatch", "adabatch-rescaled"])
    >>> looks["adabatch"].color == looks["adabatch-rescaled"].color != looks["sgd"].color
    True
    """
    looks: dict[str, Look] = {}
    for method in dict.fromkeys(name for methods in experiments for name in methods):
        beside = {name for methods in experiments if method in methods for name in methods if name in looks}
        looks[method] = _free_look(method, {name: looks[name] for name in beside}, looks)
    return looks


def _free_look(method: str, beside: Mapping[str, Look], looks: Mapping[str, Look]) -> Look:
    start = blake2b(f"{method} {SALT}".encode(), digest_size=4).digest()[0] % NUM_HUES
    hues = [*PALETTE][:NUM_HUES]
    colors = [*hues[start:], *hues[:start], *[*PALETTE][NUM_HUES:]]
    bases = [looks[name].color for name in sorted(looks, key=len) if method.startswith(f"{name}-")]
    all_looks = [Look(color, dashes) for dashes, color in product(PATTERNS, colors)]
    free = [look for look in all_looks if look not in beside.values()]
    related = [look for look in free if look.color in bases[-1:]]
    fresh = [look for look in free if look.color not in {used.color for used in beside.values()}]
    return next(iter(related or fresh or free), Look(colors[0], "solid"))


def other_looks(taken: str) -> list[Look]:
    """Return looks for lines beside a solid line of the colour `taken`."""
    return [Look(color, dashes) for dashes in (DASHED, DOTTED) for color in PALETTE if color != taken]


# The contents of figures, for the page and for matplotlib

AXES = {"epochs": "Epoch", "steps": "Optimizer steps", "samples": "Samples", "seconds": "Training time (s)"}
"""Labels of the horizontal axes by name."""
EARLY = 0.2
"""Fraction of epochs at the start that a linear axis need not show."""


@dataclass(frozen=True, slots=True)
class Track:
    """A method with its look and the positions of its epochs on every axis."""

    result: MethodResult
    look: Look
    axes: Mapping[str, Floats]
    """Positions by axis, averaged over trials: epochs, and the other axes that the runs recorded."""

    @property
    def method(self) -> str:
        return self.result.method


@dataclass(frozen=True, slots=True)
class Line:
    """A curve with its label, look and width, and the track of its method."""

    label: str
    look: Look
    curve: Curve
    track: Track
    width: float | None = None
    """Width in points. None: the usual width."""

    def positions(self, axis: str) -> Floats | None:
        """Return the points' positions on an axis; None: the runs did not record this axis."""
        values = self.track.axes.get(axis)
        return None if values is None else values[np.searchsorted(self.track.axes["epochs"], self.curve.epochs)]

    def outline(self) -> "Line":
        """Return the line with only the points to draw."""
        return replace(self, curve=self.curve.outline())


@dataclass(frozen=True, slots=True)
class Panel:
    """The contents of one set of axes."""

    title: str
    """The shown quantity and its unit."""
    lines: Sequence[Line]
    bounds: tuple[float, float] = (-np.inf, np.inf)
    """The possible range of the quantity, at which bands are cut."""
    may_be_log: bool = True
    log_base: int = 10
    is_steps: bool = False
    """Whether a value holds for the whole epoch before its point."""
    axis: str = "epochs"
    first_epoch: int = 1
    """The epoch at which the axis of epochs begins."""
    name: str = ""
    """The name of the panel's own file, without folder and suffix."""
    caption: str = ""

    @property
    def is_log(self) -> bool:
        """Return whether the means are positive and span more than a factor of ten."""
        means = np.concatenate([line.curve.mean for line in self.lines])
        means = means[np.isfinite(means)]
        return self.may_be_log and bool(means.min() > 0 and means.max() > 10 * means.min())

    @property
    def focus(self) -> tuple[float, float] | None:
        """Return the ends of a linear axis that early epochs would more than double; None: no such axis."""
        ends = [band(line.curve, self.bounds) for line in self.lines]
        whole = np.concatenate([*(np.concatenate(each) for each in ends), *(line.curve.mean for line in self.lines)])
        last = max(int(line.curve.epochs[-1]) for line in self.lines)
        late = np.concatenate([line.curve.mean[line.curve.epochs > EARLY * last] for line in self.lines])
        late, whole = late[np.isfinite(late)], whole[np.isfinite(whole)]
        if self.is_log or self.is_steps or last < 10 or not len(late) or late.max() == late.min():
            return None
        margin = 0.05 * float(late.max() - late.min())
        low, high = max(self.bounds[0], late.min() - margin), min(self.bounds[1], late.max() + margin)
        return (float(low), float(high)) if whole.max() - whole.min() > 2 * (high - low) else None


@dataclass(frozen=True, slots=True)
class TargetBars:
    """Bars of each method's way to the common target, in one unit."""

    unit: str
    goal: str
    """The target as text like `92.83 %`."""
    arrivals: Mapping[str, Arrival]
    looks: Mapping[str, Look]

    @property
    def title(self) -> str:
        return f"{AXES[self.unit]} to the common target of {self.goal}"

    @property
    def end(self) -> float:
        """Return the largest finite value of all bars and dots."""
        numbers = [n for each in self.arrivals.values() for n in (each.value or 0.0, *each.trials)]
        return max(filter(math.isfinite, numbers), default=0.0)

    def text(self, method: str) -> str:
        """Return a method's value as text like `21.5 s` or `not reached`."""
        value = self.arrivals[method].value
        if value is None:
            return "not reached"
        return f"{seconds(value)} s" if self.unit == "seconds" else f"{value:,.0f}"


def seconds(value: float) -> str:
    """Format seconds with three significant digits, or all digits before the point.

    >>> seconds(1.234), seconds(56.78), seconds(1234.5)
    ('1.23', '56.8', '1234')
    """
    return f"{value:.{2 if value < 10 else 1 if value < 1000 else 0}f}"


def band(curve: Curve, bounds: tuple[float, float]) -> tuple[Floats, Floats]:
    """Return mean ± standard error, cut at the bounds; NaN if the spread is not finite."""
    width = np.where(np.isfinite(curve.standard_error), curve.standard_error, np.nan)
    return np.clip(curve.mean - width, *bounds), np.clip(curve.mean + width, *bounds)


# The style of every figure

PANEL_SIZE = (3.9, 3.3)
"""Width and height of a panel beside others, in inches."""
CHART_SIZE = (6.4, 4.2)
"""Width and height of a figure with a single panel, in inches."""
BAR_HEIGHT = 0.34
"""Height of a method's bar, in inches."""
PNG_DPI = 150
FEW_POINTS = 12
"""Most epochs of a curve that shows each epoch as a dot."""
MOST_DECADES = 1e30
"""Largest ratio that a log axis spans, from the top; a diverging run can exceed the range of floats."""
MOST_TICKS = 7
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
"""Changes to matplotlib's defaults. SVG keeps text as text, and ids follow from the content, so that equal figures have
equal bytes."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A finished figure: file name without folder and suffix, title, caption and bytes."""

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes


def require_matplotlib() -> None:
    """Raise if matplotlib is missing, before any work; the error names the extra to install."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report") from error


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the report's style over matplotlib's defaults; restore the user's settings afterwards."""
    import matplotlib
    from matplotlib import style

    with style.context("default"), matplotlib.rc_context(SETTINGS):
        yield


def finish(name: str, title: str, figure: "Figure", caption: str) -> Drawing:
    """Return the figure as a drawing in both formats; requires `styled`."""
    svg = _bytes(figure, "svg")
    figure.set_layout_engine("none")  # the layout is done; a second search would find the same
    return Drawing(name, title, caption, svg, _bytes(figure, "png"))


def _bytes(figure: "Figure", kind: str) -> bytes:
    buffer = BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=metadata)
    return buffer.getvalue()


def add_heading(figure: "Figure", heading: str) -> None:
    """Write a heading at the top left."""
    figure.suptitle(drawable(heading, 60), x=0.01, ha="left", fontsize=11, fontweight="bold")


def drawable(text: str, length: int) -> str:
    """Return text with only characters that every font can draw, cut to `length`.

    >>> drawable("naïve", 4)
    'na?v'
    """
    return re.sub(r"[^ -~]", "?", text)[:length]


def size_axis(axes: "Axes", sizes: Sequence[int]) -> None:
    """Make the horizontal axis a log axis of batch sizes, with a tick at each size or, if there are many, at some."""
    from matplotlib.ticker import NullLocator

    powers = [size for size in sizes if size & (size - 1) == 0] or list(sizes)
    shown = powers[:: math.ceil(len(powers) / MOST_TICKS)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [str(size) for size in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("Batch size (samples)")


# Panels side by side: lines of means with bands of their spread, on axes that fit the numbers


def draw_panels(
    name: str,
    title: str,
    heading: str,
    panels: Sequence[Panel],
    caption: str,
    panel_size: tuple[float, float],
) -> Drawing:
    """Draw panels in a row with one legend; `heading` goes into the figure, `title` and `caption` beside it."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(panel_size[0] * len(panels), panel_size[1]), layout="constrained")
        for place, panel in enumerate(panels, 1):
            _draw_panel(figure.add_subplot(1, len(panels), place), panel)
        add_heading(figure, heading)
        _add_legend(figure, panels)
        return finish(name, title, figure, caption)


def _add_legend(figure: "Figure", panels: Sequence[Panel]) -> None:
    """Add a legend for all panels below them, where it covers no data."""
    from matplotlib.lines import Line2D

    entries = dict.fromkeys((line.label, line.look) for panel in panels for line in panel.lines)
    handles = [
        Line2D([], [], color=look.color, linestyle=look.dashes, label=drawable(label, 60)) for label, look in entries
    ]
    num_columns = 2 if len(handles) == 4 else 3
    figure.legend(handles=handles, loc="outside lower left", ncols=num_columns, handlelength=3.2)


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    for line in panel.lines:
        _draw_line(axes, line.outline(), panel)
    _set_x_axis(axes, panel)
    _set_y_axis(axes, panel)
    axes.set_title(f"{panel.title}, log scale" if panel.is_log else panel.title, loc="left")


def _draw_line(axes: "Axes", line: Line, panel: Panel) -> None:
    x, mean = line.positions(panel.axis), line.curve.mean
    assert x is not None
    low, high = band(line.curve, (log_limits(panel)[0], panel.bounds[1]) if panel.is_log else panel.bounds)
    if panel.is_steps:  # from the start of the first epoch
        x = np.concatenate([[x[0] - 1 if panel.axis == "epochs" else 0.0], x])
        mean, low, high = (np.concatenate([each[:1], each]) for each in (mean, low, high))
    marker = "o" if len(x) <= FEW_POINTS else None
    style: dict[str, Any] = {"color": line.look.color, "linestyle": line.look.dashes, "linewidth": line.width}
    style |= {"drawstyle": "steps-pre"} if panel.is_steps else {"marker": marker}
    axes.plot(x, mean, label=line.label, **style)
    if len(x) == 1:
        axes.vlines(x, low, high, color=line.look.color, linewidth=1)
    else:
        step: Any = "pre" if panel.is_steps else None
        axes.fill_between(x, low, high, color=line.look.color, alpha=0.15, linewidth=0, step=step)


def log_limits(panel: Panel) -> tuple[float, float]:
    """Return the ends of a log axis, with room for means and upper bands but not for lower bands near zero."""
    bands = [band(line.curve, panel.bounds) for line in panel.lines]
    means = np.concatenate([line.curve.mean for line in panel.lines])
    lowest = np.nanmin(means)
    low = max(lowest / 1.5, np.nanmin(np.concatenate([low for low, _ in bands] + [[lowest]])))
    high = np.nanmax(np.concatenate([high for _, high in bands] + [means]))
    low = max(low, high / MOST_DECADES)
    margin = (high / low) ** 0.05
    return float(low / margin), float(high * margin)


def _set_x_axis(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    is_epochs = panel.axis == "epochs"
    if is_epochs:
        last = max(int(line.curve.epochs[-1]) for line in panel.lines)
        margin = max(0.5, 0.02 * (last - panel.first_epoch + 1))
        axes.set_xlim(panel.first_epoch - panel.is_steps - margin, last + margin)
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(AXES[panel.axis])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=is_epochs))


def _set_y_axis(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if panel.is_log:
        low, high = log_limits(panel)
        axes.set_ylim(low, high)  # first, or the log scale chooses its own limits
        axes.set_yscale("log", base=panel.log_base)
        # Also 2 and 5 if there are few powers of ten.
        subs = (1.0, 2.0, 5.0) if panel.log_base == 10 and high < 300 * low else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(base=panel.log_base, subs=subs, numticks=9))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        if panel.focus is not None:
            axes.set_ylim(*panel.focus)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
    plain = FuncFormatter(lambda value, _: f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}")
    axes.yaxis.set_major_formatter(plain)


def draw_bars(bars: TargetBars, heading: str, caption: str) -> Drawing:
    """Draw a bar for each method, the first on top, with a dot for each trial."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(CHART_SIZE[0], 1.2 + BAR_HEIGHT * len(bars.arrivals)), layout="constrained")
        axes = figure.add_subplot()
        for place, (method, arrival) in enumerate(bars.arrivals.items()):
            color = bars.looks[method].color
            dots = [each for each in arrival.trials if math.isfinite(each)] if len(arrival.trials) > 1 else []
            axes.barh(place, arrival.value or 0.0, height=0.6, color=color, alpha=0.5)
            axes.plot(dots, [place] * len(dots), color=color, marker="o", markersize=3, linestyle="none")
            text_from = max([arrival.value or 0.0, *dots])
            axes.text(text_from, place, f"  {bars.text(method)}", va="center", fontsize=9)
        axes.set_yticks(range(len(bars.arrivals)), [drawable(method, 30) for method in bars.arrivals])
        axes.set_ylim(len(bars.arrivals) - 0.5, -0.5)
        axes.set_xlim(0, 1.25 * bars.end or 1.0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(AXES[bars.unit])
        axes.set_title(bars.title, loc="left")
        add_heading(figure, heading)
        return finish("target", bars.title, figure, caption)
