"""From folders of runs to a report: Markdown, one HTML page, and every figure and table as files beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from divebatch.errors import RecordError
from divebatch.report.drawing import require_matplotlib
from divebatch.report.exports import bars_to_csv, chart_to_csv, table_to_csv, table_to_latex
from divebatch.report.markdown import render_markdown, table_to_markdown
from divebatch.report.runs import load_runs
from divebatch.report.sections import Section, make_sections
from divebatch.report.table import Table
from divebatch.report.web import render_html

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
    verdicts: tuple[str, ...]
    """What the tables of an experiment come to, of those that have something to compare."""
    problems: tuple[str, ...]
    """Record files that were left out, and why."""


def write_report(*folders: Path, out: Path | None = None) -> Report:
    """Write report.html, report.md, figures/ and tables/ from the runs in `folders` into `out`, else into the first.

    Equal records give equal files. Raises `RecordError` where there is no run to report or nothing can be written,
    and `MissingExtraError` without matplotlib.
    """
    require_matplotlib()
    if not folders:
        raise RecordError("no folder to report on: name at least one that `divebatch run --out` wrote")
    runs = load_runs(*folders)
    sections = make_sections(runs.experiments)
    folder = out or folders[0]
    files = {
        "report.html": _encoded(render_html(sections, runs.problems)),
        "report.md": _encoded(render_markdown(sections, runs.problems)),
    }
    for section in sections:
        files |= {**_figure_files(section), **_table_files(section)}
    _write(folder, files)
    tables = tuple(table for section in sections for table in section.tables)
    return Report(
        html=folder / "report.html",
        paths=tuple(folder / name for name in files),
        tables=tables,
        answers=tuple(section.answer for section in sections),
        verdicts=tuple(section.verdict for section in sections if section.verdict),
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
    for name, content in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise RecordError(f"cannot write '{path}': {error.strerror}. Is the folder writable?") from error
