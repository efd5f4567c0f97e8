"""The report as one self-contained HTML page: nothing is fetched, and text from records only ever appears as text."""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from divebatch.report.analysis import Arrival
from divebatch.report.charts import AXES, BARS_NOTE, Chart, Line, TargetBars, Track, bar_text
from divebatch.report.runs import RecordedExperiment, RecordedRun
from divebatch.report.sections import Section
from divebatch.report.style import Dashes, Look
from divebatch.report.tables import Table

STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = ("uPlot.iife.min.js", "page.js")
HINT = "Arrow keys move along the curve, Escape goes back to the end."
NO_SCRIPT = "This figure needs JavaScript. The links below lead to the same figure as a file."
NAMES = {"experiment", "method", "seed", "report"}
DIGITS = 5
"""Significant ones of the numbers that the script draws: more than a screen shows."""


def render_html(sections: Sequence[Section], problems: Sequence[str]) -> str:
    """The whole page."""
    body = [*_opening(sections, problems), *(_section(section, n) for n, section in enumerate(sections))]
    licence = f"<!-- This page contains uPlot.\n{asset('uPlot.LICENSE')}-->"
    scripts = "\n".join(f"<script>{asset(name)}</script>" for name in SCRIPTS)
    data = f'<script type="application/json" id="data">{payload(sections)}</script>'
    return "\n".join([_head(), *body, "</main>", data, licence, scripts, "</body>", "</html>", ""])


@cache
def asset(name: str) -> str:
    """The text of a file that belongs to the page."""
    return files("divebatch.report").joinpath("assets", name).read_text(encoding="utf-8")


def _head() -> str:
    """Only the page's own scripts may run, and nothing may be fetched."""
    hashes = " ".join(f"'sha256-{_sha256(asset(name))}'" for name in SCRIPTS)
    policy = f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}"
    styles = "\n".join(asset(name) for name in STYLES)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>divebatch report</title>
<style>{styles}</style>
</head>
<body>"""


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _opening(sections: Sequence[Section], problems: Sequence[str]) -> Iterator[str]:
    options = "".join(f'<option value="{name.lower()}">{name}</option>' for name in ("System", "Light", "Dark"))
    yield (
        '<a class="skip" href="#main">Skip to the answer</a>\n<header><h1>divebatch report</h1>'
        f'<label class="script-only">Colours <select id="theme">{options}</select></label></header>\n<main id="main">'
    )
    if len(sections) > 1:
        links = (f'<li><a href="#{escape(section.stem)}">{escape(section.name)}</a></li>' for section in sections)
        yield f'<nav aria-label="Experiments"><ul>{"".join(links)}</ul></nav>'
    if problems:
        yield f'<section class="problems"><h2>Files left out</h2>{render_list(problems)}</section>'


def _section(section: Section, number: int) -> str:
    tables = [_table(section, table, place) for place, table in enumerate(section.tables, 1)]
    parts = [
        f'<section class="experiment" id="{escape(section.stem)}" data-section="{number}">',
        f"<h2>{escape(section.name)}</h2>",
        f"<p>{escape(section.summary)}</p>" if section.summary else "",
        f'<p class="answer">{escape(section.answer)}</p>',
        f'<p class="answer">{escape(section.gains)}</p>' if section.gains else "",
        *tables[: section.num_first],
        *render_figures(section, number),
        *tables[section.num_first :],
        *_settings(section),
        *render_runs(section.experiment),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _table(section: Section, table: Table, place: int) -> str:
    is_first = place == 1
    words = f'<p class="verdict">{escape(section.details)}</p>\n' if is_first and section.details else ""
    notes = f'<div class="notes">{render_list(table.notes)}</div>' if table.notes else ""
    return f"<h3>{escape(table.title)}</h3>\n{render_table(table, section.table_links(place))}\n{words}{notes}"


def _settings(section: Section) -> Iterator[str]:
    if section.settings:
        yield '<details class="settings"><summary>Settings, versions, hardware in short</summary>'
        for place, table in enumerate(section.settings, len(section.tables) + 1):
            yield f"<h3>{escape(table.title)}</h3>\n{render_table(table, section.table_links(place))}"
        yield "</details>"


# Tables and lists


def render_table(table: Table, links: Mapping[str, str]) -> str:
    """The table and links to it as files; the first column heads its row."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "\n".join(f"<tr>{_cells(row)}</tr>" for row in table.rows)
    label = escape(table.title)
    return (
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>\n"
        f"{render_links(table.title, links)}"
    )


def render_links(what: str, links: Mapping[str, str]) -> str:
    """One link for each format to a file beside the page; `what` tells a screen reader whose file it is."""
    if not links:
        return ""
    anchors = (
        f'<a href="{escape(path)}" download target="_blank" rel="noopener" '
        f'aria-label="{escape(what)} as {kind}">{kind}</a>'
        for kind, path in links.items()
    )
    return f'<span class="files">{" ".join(anchors)}</span>'


def render_list(lines: Sequence[str]) -> str:
    """Bullet points."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _cells(row: Sequence[str]) -> str:
    first, *rest = map(escape, row)
    return f'<th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest)


# Figures


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


def _bar_table(section: Section, bars: TargetBars, *, hidden: bool) -> str:
    places = {track.method: place for place, track in enumerate(section.tracks)}
    rows = "".join(
        f'<tr data-method="{places.get(method, "")}"><th scope="row">{escape(method)}</th>'
        f'<td class="bar" aria-hidden="true">{_bar(arrival, bars.looks[method], bars.end)}</td>'
        f"<td>{escape(bar_text(arrival, bars.unit))}</td></tr>"
        for method, arrival in bars.arrivals.items()
    )
    return (
        f'<table data-axis="{bars.unit}"{" hidden" if hidden else ""}><caption>{escape(bars.title)}</caption>'
        f"<tbody>{rows}</tbody></table>"
    )


def _bar(arrival: Arrival, look: Look, end: float) -> str:
    if arrival.value is None or end <= 0:
        return ""
    fill = f'<span class="fill" style="{_colors(look)};width:{_percent(arrival.value, end)}"></span>'
    if not arrival.has_interval:
        return fill
    kind = "whisker" if math.isfinite(arrival.high) else "whisker open"
    place = f"left:{_percent(arrival.low, end)};width:{_percent(min(arrival.high, end) - arrival.low, end)}"
    return f'{fill}<span class="{kind}" style="{place}"></span>'


def _swatch(look: Look) -> str:
    kind = "swatch" if look.dashes == "solid" else "swatch dashed"
    return f'<span class="{kind}" style="{_colors(look)}"></span>'


def _colors(look: Look) -> str:
    return f"--light:{look.color};--dark:{look.dark_color}"


def _percent(value: float, whole: float) -> str:
    return f"{100 * value / whole:.2f}%"


# The numbers that the page's script draws


def payload(sections: Sequence[Section]) -> str:
    """One JSON object, without any character that could end the element that holds it."""
    data = {"axes": AXES, "sections": [_section_data(section) for section in sections]}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section_data(section: Section) -> dict[str, Any]:
    charts = [replace(chart, panel=chart.panel.outline()) for chart in section.charts]
    tracks = {track.method: _outline(track, charts) for track in section.tracks}
    drawn = [replace(chart, tracks=[tracks[track.method] for track in chart.tracks]) for chart in charts]
    place = {method: number for number, method in enumerate(tracks)}
    return {
        "methods": [_method_data(track) for track in tracks.values()],
        "charts": [_chart_data(chart, place) for chart in drawn],
    }


def _outline(track: Track, charts: Sequence[Chart]) -> Track:
    """The track with the epochs at which one of its lines has a point."""
    pairs = (pair for chart in charts for pair in zip(chart.tracks, chart.panel.lines, strict=True))
    used = {epoch for owner, line in pairs if owner is track for epoch in line.curve.epochs.tolist()}
    kept = np.isin(track.epochs, list(used))
    axes = {axis: values[kept] for axis, values in track.axes.items()}
    return replace(track, epochs=track.epochs[kept], axes=axes)


def _method_data(track: Track) -> dict[str, Any]:
    return {
        "name": track.method,
        "color": track.look.color,
        "dark": track.look.dark_color,
        "x": {axis: _rounded(values) for axis, values in track.axes.items()},
    }


def _chart_data(chart: Chart, place: dict[str, int]) -> dict[str, Any]:
    low, high = chart.panel.bounds
    return {
        "title": chart.panel.title,
        "log": chart.panel.is_log,
        "base": chart.panel.log_base,
        "bounds": _rounded((low, high)),
        "lines": [
            {"method": place[track.method], **_line_data(track, line)}
            for track, line in zip(chart.tracks, chart.panel.lines, strict=True)
        ],
    }


def _line_data(track: Track, line: Line) -> dict[str, Any]:
    own = {"color": line.look.color, "dark": line.look.dark_color} if line.look.color != track.look.color else {}
    return {
        **own,
        "label": line.label,
        "dash": _dash(line.look.dashes),
        "width": line.width,
        "at": np.searchsorted(track.epochs, line.curve.epochs).tolist(),
        "mean": _rounded(line.curve.mean),
        "error": _rounded(line.curve.standard_error),
    }


def _dash(dashes: Dashes) -> list[float]:
    """In pixels, dash and gap in turn; empty for a solid line."""
    return [] if dashes == "solid" else [2 * length for length in dashes[1]]


def _rounded(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values]


# Every run with all that its header says


def render_runs(experiment: RecordedExperiment) -> Iterator[str]:
    """One closed box for all, with one for each run in it."""
    runs = experiment.runs
    yield f'<details class="runs"><summary>All {len(runs)} runs: configuration, versions, hardware</summary>'
    for run in runs:
        title, text = _run_title(experiment, run), json.dumps(_header_data(run), indent=2, ensure_ascii=False)
        yield f'<details><summary>{escape(title)}</summary><pre tabindex="0">{escape(text)}</pre></details>'
    yield "</details>"


def _run_title(experiment: RecordedExperiment, run: RecordedRun) -> str:
    reached = run.last.epoch if run.last else 0
    planned = run.planned_epochs or experiment.longest
    state = "finished" if run.is_finished(length=experiment.longest) else "not finished"
    return f"{run.header.method}, seed {run.header.seed}: epoch {reached} of {planned}, {state}"


def _header_data(run: RecordedRun) -> dict[str, Any]:
    """What the header says beyond the run's names, which stand in its title."""
    return {key: value for key, value in asdict(run.header).items() if key not in NAMES}
