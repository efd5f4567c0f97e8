"""The report as Markdown, in which text from records stays text."""

import html
import re
from collections.abc import Sequence

from divebatch.report.sections import Section
from divebatch.report.table import Table


def escape(text: str) -> str:
    """On one line, with neither tags nor markup in force.

    >>> print(escape("<b> a|b"))
    &lt;b&gt; a\\|b
    """
    one_line = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", html.escape(one_line, quote=False))


def table_to_markdown(table: Table) -> str:
    """The table and its notes, without the title."""
    lines = [_row(table.columns), "|" + " --- |" * len(table.columns), *map(_row, table.rows)]
    notes = [f"- {escape(note)}" for note in table.notes]
    return "\n".join([*lines, "", *notes]).strip()


def render_markdown(sections: Sequence[Section], problems: Sequence[str]) -> str:
    """The whole report; figures are linked relative to the report's folder."""
    blocks = ["# Report", *_problem_blocks(problems)]
    for section in sections:
        blocks += _section_blocks(section)
    return "\n\n".join(blocks) + "\n"


def _section_blocks(section: Section) -> list[str]:
    blocks = [f"## {escape(section.name)}", escape(section.summary), _answer(section), escape(section.verdict)]
    for table in section.tables:
        heading = f"### {escape(table.title)}" if len(section.tables) > 1 else ""
        blocks += [heading, table_to_markdown(table)]
    for drawing in (*section.drawings, *section.chart_drawings):
        link = f"figures/{section.file_name(drawing.name, 'svg')}"
        blocks += [f"![{escape(drawing.title)}]({link})", f"**{escape(drawing.title)}.** {escape(drawing.caption)}"]
    for table in section.settings:
        blocks += [f"### {escape(table.title)}", table_to_markdown(table)]
    return [block for block in blocks if block]


def _answer(section: Section) -> str:
    return f"**{escape(section.answer)}**"


def _problem_blocks(problems: Sequence[str]) -> list[str]:
    if not problems:
        return []
    return ["## Files left out", "\n".join(f"- {escape(problem)}" for problem in problems)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escape, cells)) + " |"
