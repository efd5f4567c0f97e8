"""`divebatch report DIR`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from divebatch.cli.exits import FAILED, WRONG_USE, errors_exit_with, leave
from divebatch.report import Table, write_report


def report(
    folder: Annotated[Path, typer.Argument(help="Folder that `divebatch run --out` wrote.")],
) -> None:
    """Print the tables and write figures, report.md and report.html into the folder."""
    if not folder.is_dir():
        raise leave(f"'{folder}' is not a folder", WRONG_USE)
    with errors_exit_with(FAILED):
        written = write_report(folder)
    console = Console()
    for table in written.tables:
        console.print(_rich(table))
        for note in table.notes:
            console.print(escape(note), style="dim", highlight=False)
    for problem in written.problems:
        typer.echo(f"skipped: {problem}", err=True)
    for path in written.paths:
        typer.echo(str(path))


def _rich(table: Table) -> RichTable:
    shown = RichTable(title=escape(table.title), title_justify="left", box=None, padding=(0, 1, 0, 0))
    rows = [[cell.replace("± ", "±") for cell in row] for row in table.rows]  # wraps before the error, not within
    for number, column in enumerate(table.columns):
        words = [word for cell in (column, *(row[number] for row in rows)) for word in cell.split()]
        width = max(map(len, words))  # a narrow terminal breaks lines between words only
        shown.add_column(column, justify="left" if number == 0 else "right", min_width=width)
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown
