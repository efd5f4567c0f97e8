"""From folders of runs to a report: Markdown, one HTML page, and every figure and table as files beside it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from divebatch.errors import RecordError
from divebatch.report.drawing import require_matplotlib
from divebatch.report.export import (
    bars_to_csv,
    chart_to_csv,
    escape_markdown,
    table_to_csv,
    table_to_latex,
    table_to_markdown,
)
from divebatch.report.html import render_html
from divebatch.report.runs import load_runs
from divebatch.report.sections import Section, make_sections
from divebatch.report.tables import Table

TABLE_FORMATS: dict[str, Callable[[Table], str]] = {
    "CSV": table_to_csv,
    "LaTeX": table_to_latex,
    "Markdown": table_to_markdown,
}


@dataclass(frozen=True, slots=True)
class Report:
    """What `write_report` did."""

    html: Path
    """The page to open."""
    paths: tuple[Path, ...]
    """All files written, the page first."""
    tables: tuple[Table, ...]
    """Of all experiments, in order."""
    answers: tuple[str, ...]
    """One sentence for each experiment."""
    gains: tuple[str, ...]
    """What changing the batch size gained over fixed batches, of the experiments that have both."""
    details: tuple[str, ...]
    """What stands behind the answers, of the experiments that have something to compare."""
    problems: tuple[str, ...]
    """Record files that were left out, and why."""


def write_report(folder: Path, *more: Path, out: Path | None = None) -> Report:
    """Write report.html, report.md, figures/ and tables/.

    Args:
        folder: Where the runs are, as `load_runs` takes it.
        more: Further folders of the same kind.
        out: Where to write; the first folder if not given.

    Equal records give equal files. Raises `RecordError` where there is no run to report or nothing can be written,
    and `MissingExtraError` without matplotlib.
    """
    require_matplotlib()
    runs = load_runs(folder, *more)
    sections = make_sections(runs.experiments)
    target = out or folder
    files = {
        "report.html": _encoded(render_html(sections, runs.problems)),
        "report.md": _encoded(render_markdown(sections, runs.problems)),
    }
    for section in sections:
        files |= {**_figure_files(section), **_table_files(section)}
    _write(target, files)
    tables = tuple(table for section in sections for table in section.tables)
    return Report(
        html=target / "report.html",
        paths=tuple(target / name for name in files),
        tables=tables,
        answers=tuple(section.answer for section in sections),
        gains=tuple(section.gains for section in sections if section.gains),
        details=tuple(section.details for section in sections if section.details),
        problems=runs.problems,
    )


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # JSON can hold halves of characters that UTF-8 cannot


def _figure_files(section: Section) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for drawing in (*section.drawings, *section.chart_drawings):
        links = section.figure_links(drawing.name)
        files |= {links["SVG"]: drawing.svg, links["PNG"]: drawing.png}
    numbers = {chart.name: chart_to_csv(chart) for chart in section.charts}
    numbers |= {"target": bars_to_csv(section.bars)} if section.bars else {}
    return files | {section.figure_links(name, csv=True)["CSV"]: _encoded(text) for name, text in numbers.items()}


def _table_files(section: Section) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for place, table in enumerate((*section.tables, *section.settings), 1):
        for kind, path in section.table_links(place).items():
            files[path] = _encoded(TABLE_FORMATS[kind](table))
    return files


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """All of them or none: what is there stays until every new file lies beside its place."""
    scratch, name = {name: folder / f"{name}.tmp" for name in files}, ""
    try:
        for name, content in files.items():
            scratch[name].parent.mkdir(parents=True, exist_ok=True)
            scratch[name].write_bytes(content)
        for name, path in scratch.items():
            path.replace(folder / name)
    except OSError as error:
        for path in scratch.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise RecordError(f"cannot write '{folder / name}': {error.strerror}. Choose another folder.") from error


# Markdown


def render_markdown(sections: Sequence[Section], problems: Sequence[str]) -> str:
    """The whole report; figures are linked relative to the report's folder."""
    blocks = ["# Report", *_problem_blocks(problems)]
    for section in sections:
        blocks += _section_blocks(section)
    return "\n\n".join(blocks) + "\n"


def _section_blocks(section: Section) -> list[str]:
    blocks = [
        f"## {escape_markdown(section.name)}",
        escape_markdown(section.summary),
        _answer(section),
        f"**{escape_markdown(section.gains)}**" if section.gains else "",
        escape_markdown(section.details),
    ]
    for table in section.tables:
        heading = f"### {escape_markdown(table.title)}" if len(section.tables) > 1 else ""
        blocks += [heading, table_to_markdown(table)]
    for drawing in (*section.drawings, *section.chart_drawings):
        link = f"figures/{section.file_name(drawing.name, 'svg')}"
        blocks += [
            f"![{escape_markdown(drawing.title)}]({link})",
            f"**{escape_markdown(drawing.title)}.** {escape_markdown(drawing.caption)}",
        ]
    for table in section.settings:
        blocks += [f"### {escape_markdown(table.title)}", table_to_markdown(table)]
    return [block for block in blocks if block]


def _answer(section: Section) -> str:
    return f"**{escape_markdown(section.answer)}**"


def _problem_blocks(problems: Sequence[str]) -> list[str]:
    if not problems:
        return []
    return ["## Files left out", "\n".join(f"- {escape_markdown(problem)}" for problem in problems)]
