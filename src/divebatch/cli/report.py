"""`divebatch report DIR...`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table as RichTable

from divebatch.cli.console import make_console
from divebatch.cli.exits import FAILED, WRONG_USE, errors_exit_with, leave
from divebatch.report import Report, Table, write_report


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders that `divebatch run --out` wrote.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the report; the first folder if not given.")] = None,
) -> None:
    """Print the tables and write report.html, report.md and every figure and table as files."""
    for folder in folders:
        if not folder.is_dir():
            raise leave(f"'{folder}' is not a folder", WRONG_USE)
    with errors_exit_with(FAILED):
        written = write_report(*folders, out=out)
    _print_results(written)
    for problem in written.problems:
        typer.echo(f"skipped: {problem}", err=True)
    pages = [path for path in written.paths if path.parent == written.html.parent]
    for path in pages:
        typer.echo(str(path))
    typer.echo(f"{len(written.paths) - len(pages)} files of figures and tables beside it, in figures and tables")


def _print_results(written: Report) -> None:
    console = make_console()
    for answer in (*written.answers, *written.gains):
        console.print(escape(answer), style="bold", highlight=False)
    for details in written.details:
        console.print(escape(details), highlight=False)
    for table in written.tables:
        console.print(_rich(table, console.width))
        for note in table.notes:
            console.print(escape(note), style="dim", highlight=False)


def _rich(table: Table, terminal_width: int) -> RichTable:
    shown = RichTable(title=escape(table.title), title_justify="left", box=None, padding=(0, 1, 0, 0))
    rows = [[cell.replace("± ", "±") for cell in row] for row in table.rows]  # wraps before the error, not within
    columns = list(zip(table.columns, *rows, strict=True))
    for number, width in enumerate(_widths(columns, terminal_width)):
        shown.add_column(table.columns[number], justify="left" if number == 0 else "right", width=width)
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown


def _widths(columns: list[tuple[str, ...]], terminal_width: int) -> list[int]:
    """As wide as the longest word, for lines break between words only; from the left as wide as all, where it fits."""
    widths = [max(len(word) for cell in cells for word in cell.split()) for cells in columns]
    for number, cells in enumerate(columns):
        room = terminal_width - sum(widths) - len(columns)
        wanted = max(map(len, cells)) - widths[number]
        widths[number] += wanted if wanted <= room else 0
    return widths
