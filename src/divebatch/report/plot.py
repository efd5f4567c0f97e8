"""One panel: mean lines with a band of their spread, on axes that fit the numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from divebatch.report.curves import Curve, Floats
from divebatch.report.style import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW_POINTS = 12
"""Curves with at most so many epochs show each as a dot."""

MOST_DECADES = 1e30
"""A log axis spans at most this ratio, from the top: a run that diverges can span more than a float holds."""


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
    spread: Literal["std", "standard_error"] = "std"
    """What the bands show."""
    first_epoch: int = 1
    """Where the axis of epochs begins."""

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


def draw(axes: "Axes", panel: Panel, last_epoch: int) -> None:
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


def band(curve: Curve, bounds: tuple[float, float], spread: str = "std") -> tuple[Floats, Floats]:
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
