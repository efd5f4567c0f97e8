"""The page's figures as files for papers: the curves over epochs, and the bars. Needs the extra `report`."""

import math
from typing import TYPE_CHECKING

from divebatch.report.bars import BARS_NOTE, Bar, Bars, shown
from divebatch.report.charts import AXES, Chart
from divebatch.report.drawing import Drawing, add_heading, drawable, finish, make_drawing, settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_SIZE = (6.4, 4.2)
"""Width and height in inches."""
BAR_HEIGHT = 0.34
"""Inches for each method."""


def draw_chart(chart: Chart, heading: str) -> Drawing:
    """The chart as it is first shown: over epochs."""
    return make_drawing(chart.name, chart.panel.title, heading, [chart.panel], [chart.caption], panel_size=PANEL_SIZE)


def draw_bars(bars: Bars, heading: str) -> Drawing:
    """One bar a method, the first on top."""
    from matplotlib.figure import Figure

    with settings():
        figure = Figure(figsize=(PANEL_SIZE[0], 1.2 + BAR_HEIGHT * len(bars.bars)), layout="constrained")
        _draw(figure.add_subplot(), bars)
        add_heading(figure, heading)
        return finish("target", bars.title, figure, [BARS_NOTE])


def _draw(axes: "Axes", bars: Bars) -> None:
    for place, bar in enumerate(bars.bars):
        _draw_bar(axes, place, bar, bars)
    axes.set_yticks(range(len(bars.bars)), [drawable(bar.method, 30) for bar in bars.bars])
    axes.set_ylim(len(bars.bars) - 0.5, -0.5)
    axes.set_xlim(0, 1.25 * bars.end)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(AXES[bars.axis][1])
    axes.set_title(bars.title, loc="left")


def _draw_bar(axes: "Axes", place: int, bar: Bar, bars: Bars) -> None:
    if bar.value is None:
        axes.text(0, place, " not reached", va="center", fontsize=9)
        return
    axes.barh(place, bar.value, height=0.6, color=bar.look.color, alpha=0.75)
    ends = [bar.low, min(bar.high, bars.end)] if bar.has_interval else []
    if ends:
        style = "-" if math.isfinite(bar.high) else ":"
        axes.plot(ends, [place, place], color="black", linewidth=1.2, linestyle=style, marker="|")
    text_from = max([bar.value, *ends])
    axes.text(text_from, place, f"  {shown(bar.value, bars.axis)}", va="center", fontsize=9)
