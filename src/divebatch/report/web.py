"""The report as one self-contained HTML page: no script, nothing fetched, text from records only ever as text."""

import base64
from collections.abc import Iterator, Sequence
from html import escape

from divebatch.report.drawing import Drawing
from divebatch.report.sections import Section
from divebatch.report.table import Table

STYLE = """
:root { color-scheme: light dark;
  --text: #1c1e21; --quiet: #59616b; --page: #fafafa; --card: #ffffff; --line: #d9dde2; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --quiet: #a3abb5; --page: #15171a; --card: #1e2125; --line: #383d44; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 75rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.3rem; margin-top: 3rem; } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
a { color: inherit; } nav ul { padding-left: 1.2rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .8rem; text-align: right; vertical-align: top; overflow-wrap: normal; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
.settings th, .settings td { text-align: left; overflow-wrap: anywhere; }
thead th { color: var(--quiet); font-weight: 600; vertical-align: bottom; }
tbody tr { border-top: 1px solid var(--line); }
tbody th { font-weight: 600; white-space: nowrap; } .settings tbody th { white-space: normal; font-weight: 400; }
td { white-space: nowrap; } .settings td { white-space: normal; }
.notes, figcaption { color: var(--quiet); font-size: .9rem; }
.verdict { border-left: 4px solid #0072b2; padding: .4rem 1rem; background: var(--card); max-width: 60rem; }
.problems { border-left: 4px solid #c2571a; padding: .2rem 1rem; background: var(--card); }
figure { margin: 1.5rem 0; }
figure .scroll { background: #ffffff; padding: .6rem; }
figure img { display: block; margin: 0 auto; max-width: 100%; min-width: 40rem; height: auto; }
figcaption { margin-top: .5rem; max-width: 60rem; }
summary { cursor: pointer; font-weight: 600; margin-top: 1rem; }
"""

HEAD = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>divebatch report</title>
<style>{STYLE}</style>
</head>
<body>
"""


def render_html(sections: Sequence[Section], problems: Sequence[str]) -> str:
    """The whole page."""
    body = [*_opening(sections, problems), *(line for section in sections for line in _section(section))]
    return HEAD + "\n".join(body) + "\n</body>\n</html>\n"


def _opening(sections: Sequence[Section], problems: Sequence[str]) -> Iterator[str]:
    yield "<h1>divebatch report</h1>"
    if len(sections) > 1:
        links = (f'<li><a href="#{escape(section.stem)}">{escape(section.name)}</a></li>' for section in sections)
        yield f"<nav><ul>{''.join(links)}</ul></nav>"
    if problems:
        yield f'<section class="problems"><h3>Files left out</h3>{_list(problems)}</section>'


def _section(section: Section) -> Iterator[str]:
    yield f'<section id="{escape(section.stem)}">\n<h2>{escape(section.name)}</h2>'
    if section.summary:
        yield f"<p>{escape(section.summary)}</p>"
    if section.verdict:
        yield f'<p class="verdict">{escape(section.verdict)}</p>'
    for table in section.tables:
        if len(section.tables) > 1:
            yield f"<h3>{escape(table.title)}</h3>"
        yield _table(table)
        yield f'<div class="notes">{_list(table.notes)}</div>'
    for drawing in section.drawings:
        yield _figure(drawing)
    if section.settings:
        yield '<details class="settings"><summary>Settings, versions, hardware</summary>'
        for table in section.settings:
            yield f"<h3>{escape(table.title)}</h3>\n{_table(table)}"
        yield "</details>"
    yield "</section>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "\n".join(f"<tr>{_cells(row)}</tr>" for row in table.rows)
    label = escape(table.title)
    return (
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _cells(row: Sequence[str]) -> str:
    first, *rest = map(escape, row)
    return f'<th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest)


def _figure(drawing: Drawing) -> str:
    """As an image, not inline: ids and styles of one figure stay out of the page and out of the others."""
    data = base64.b64encode(drawing.svg).decode("ascii")
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(drawing.title)}">'
    caption = f"<strong>{escape(drawing.title)}.</strong> {escape(drawing.caption)}"
    return f'<figure><div class="scroll">{image}</div><figcaption>{caption}</figcaption></figure>'


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
