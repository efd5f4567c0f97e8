"""The report as one self-contained HTML page: nothing is fetched, and text from records only ever appears as text."""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from divebatch.report.figure_web import render_figures
from divebatch.report.payload import payload
from divebatch.report.run_web import render_runs
from divebatch.report.sections import Section
from divebatch.report.table import Table
from divebatch.report.table_web import render_list, render_table

STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = ("uPlot.iife.min.js", "page.js")


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
    first, *others = section.tables
    parts = [
        f'<section class="experiment" id="{escape(section.stem)}" data-section="{number}">',
        f"<h2>{escape(section.name)}</h2>",
        f"<p>{escape(section.summary)}</p>" if section.summary else "",
        f'<p class="answer">{escape(section.answer)}</p>',
        _table(section, first, 1, section.verdict),
        *render_figures(section, number),
        *(_table(section, table, place) for place, table in enumerate(others, 2)),
        *_settings(section),
        *render_runs(section.experiment),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _table(section: Section, table: Table, place: int, verdict: str = "") -> str:
    words = f'<p class="verdict">{escape(verdict)}</p>\n' if verdict else ""
    notes = f'<div class="notes">{render_list(table.notes)}</div>' if table.notes else ""
    return f"<h3>{escape(table.title)}</h3>\n{render_table(table, section.table_links(place))}\n{words}{notes}"


def _settings(section: Section) -> Iterator[str]:
    if section.settings:
        yield '<details class="settings"><summary>Settings, versions, hardware in short</summary>'
        for place, table in enumerate(section.settings, len(section.tables) + 1):
            yield f"<h3>{escape(table.title)}</h3>\n{render_table(table, section.table_links(place))}"
        yield "</details>"
