"""An experiment's interactive figures as HTML: the controls, an empty place for each chart, and the bars."""

import math
from collections.abc import Iterator
from html import escape

from divebatch.report.bars import BARS_NOTE, Bar, Bars, shown
from divebatch.report.charts import AXES, Chart
from divebatch.report.sections import Section
from divebatch.report.style import Look
from divebatch.report.table_web import render_links

HINT = "Arrow keys move along the curve, Escape goes back to the end."
NO_SCRIPT = "This figure needs JavaScript. The links below lead to the same figure as a file."


def render_figures(section: Section, number: int) -> Iterator[str]:
    """Everything from the controls to the links to the paper's figures."""
    if section.charts:
        yield "<h3>Figures</h3>"
        yield _controls(section, number)
        yield '<div class="charts">'
        yield from (_chart(section, chart, place) for place, chart in enumerate(section.charts))
        yield from _bars(section)
        yield "</div>"
    if section.drawings:
        yield '<p class="notes">The same runs in the form of the paper\'s figures, as files:</p><ul class="notes">'
        for drawing in section.drawings:
            links = render_links(drawing.title, section.figure_links(drawing.name))
            yield f"<li>{escape(drawing.title)} {links}</li>"
        yield "</ul>"


def _controls(section: Section, number: int) -> str:
    axes = [axis for axis in AXES if any(axis in track.axes for track in section.tracks)]
    radios = "".join(
        f'<label><input type="radio" name="axis-{number}" value="{axis}"{" checked" if axis == "epochs" else ""}> '
        f"{axis}</label>"
        for axis in axes
    )
    boxes = "".join(
        f'<label><input type="checkbox" checked data-method="{place}"> {_swatch(track.look)}{escape(track.method)}'
        "</label>"
        for place, track in enumerate(section.tracks)
    )
    return (
        '<div class="controls script-only">'
        f'<fieldset class="axis"><legend>Over</legend>{radios}</fieldset>'
        f'<fieldset class="methods"><legend>Methods</legend>{boxes}'
        '<button type="button" data-all="1">All</button><button type="button" data-all="">None</button></fieldset>'
        '<button type="button" data-reset>Reset zoom</button></div>'
    )


def _chart(section: Section, chart: Chart, place: int) -> str:
    title = escape(chart.panel.title)
    checked = " checked" if chart.panel.is_log else ""
    return (
        f'<figure class="chart" data-chart="{place}"><div class="title"><h4>{title}</h4>'
        f'<label class="script-only"><input type="checkbox" data-log{checked}> log scale</label></div>'
        f'<div class="plot" tabindex="0" role="group" aria-roledescription="chart" aria-label="{title}. {HINT}">'
        f"<noscript>{NO_SCRIPT}</noscript></div>"
        '<div class="readout"></div><div class="spoken" role="status"></div>'
        f"<figcaption>{escape(chart.caption)}</figcaption>"
        f"{render_links(chart.panel.title, section.figure_links(chart.name, csv=True))}</figure>"
    )


def _bars(section: Section) -> Iterator[str]:
    """One table for each axis, of which the script shows the chosen one; the first is there without a script."""
    if not section.bars:
        return
    options = "".join(f'<option value="{axis}">{axis}</option>' for axis in section.bars)
    tables = "".join(_bar_table(section, bars, hidden=place > 0) for place, bars in enumerate(section.bars.values()))
    links = render_links("Time to target", section.figure_links("target", csv=True))
    yield (
        '<figure class="bars"><div class="title"><h4>Time to target</h4>'
        f'<label class="script-only">in <select data-unit>{options}</select></label></div>'
        f"{tables}<figcaption>{escape(BARS_NOTE)}</figcaption>{links}</figure>"
    )


def _bar_table(section: Section, bars: Bars, *, hidden: bool) -> str:
    places = {track.method: place for place, track in enumerate(section.tracks)}
    rows = "".join(
        f'<tr data-method="{places.get(bar.method, "")}"><th scope="row">{escape(bar.method)}</th>'
        f'<td class="bar" aria-hidden="true">{_bar(bar, bars.end)}</td><td>{escape(bar_text(bar, bars.axis))}</td></tr>'
        for bar in bars.bars
    )
    return (
        f'<table data-axis="{bars.axis}"{" hidden" if hidden else ""}><caption>{escape(bars.title)}</caption>'
        f"<tbody>{rows}</tbody></table>"
    )


def _bar(bar: Bar, end: float) -> str:
    if bar.value is None or end <= 0:
        return ""
    fill = f'<span class="fill" style="{_colors(bar.look)};width:{_percent(bar.value, end)}"></span>'
    if not bar.has_interval:
        return fill
    kind = "whisker" if math.isfinite(bar.high) else "whisker open"
    place = f"left:{_percent(bar.low, end)};width:{_percent(min(bar.high, end) - bar.low, end)}"
    return f'{fill}<span class="{kind}" style="{place}"></span>'


def bar_text(bar: Bar, axis: str) -> str:
    """The number and its interval, for instance `21.5 s (21.2 s to 22.4 s)`."""
    if bar.value is None:
        return "not reached"
    number = shown(bar.value, axis)
    return f"{number} ({shown(bar.low, axis)} to {shown(bar.high, axis)})" if bar.has_interval else number


def _swatch(look: Look) -> str:
    kind = "swatch" if look.dashes == "solid" else "swatch dashed"
    return f'<span class="{kind}" style="{_colors(look)}"></span>'


def _colors(look: Look) -> str:
    return f"--light:{look.color};--dark:{look.dark_color}"


def _percent(value: float, whole: float) -> str:
    return f"{100 * value / whole:.2f}%"
