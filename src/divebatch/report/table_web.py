"""Tables, lists and links to files, as HTML."""

from collections.abc import Mapping, Sequence
from html import escape

from divebatch.report.table import Table


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
