"""From a folder of runs to a report beside them: Markdown, one HTML page, figures as files."""

from dataclasses import dataclass
from pathlib import Path

from divebatch.errors import RecordError
from divebatch.report.drawing import require_matplotlib
from divebatch.report.markdown import render_markdown
from divebatch.report.runs import load_runs
from divebatch.report.sections import Section, make_sections
from divebatch.report.table import Table
from divebatch.report.web import render_html


@dataclass(frozen=True, slots=True)
class Report:
    """What `write_report` did."""

    html: Path
    """The page to open."""
    paths: tuple[Path, ...]
    """All files written, the page first."""
    tables: tuple[Table, ...]
    """Of all experiments, in order."""
    verdicts: tuple[str, ...]
    """What the tables of an experiment come to, of those that have something to compare."""
    problems: tuple[str, ...]
    """Record files that were left out, and why."""


def write_report(folder: Path) -> Report:
    """Write `folder`/report.html, report.md and figures/*.svg, *.png from the runs in it.

    Equal records give equal files. Raises `RecordError` where there is no run to report or nothing can be written,
    and `MissingExtraError` without matplotlib.
    """
    require_matplotlib()
    runs = load_runs(folder)
    sections = make_sections(runs.experiments)
    files = {
        folder / "report.html": _encoded(render_html(sections, runs.problems)),
        folder / "report.md": _encoded(render_markdown(sections, runs.problems)),
        **_figure_files(folder / "figures", sections),
    }
    _write(files)
    tables = tuple(table for section in sections for table in section.tables)
    verdicts = tuple(section.verdict for section in sections if section.verdict)
    return Report(folder / "report.html", tuple(files), tables, verdicts, runs.problems)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # JSON can hold halves of characters that UTF-8 cannot


def _figure_files(folder: Path, sections: list[Section]) -> dict[Path, bytes]:
    files: dict[Path, bytes] = {}
    for section in sections:
        for drawing in section.drawings:
            files[folder / section.figure_name(drawing, "svg")] = drawing.svg
            files[folder / section.figure_name(drawing, "png")] = drawing.png
    return files


def _write(files: dict[Path, bytes]) -> None:
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise RecordError(f"cannot write '{path}': {error.strerror}. Is the folder writable?") from error
