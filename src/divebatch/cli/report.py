"""`divebatch report DIR`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
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
    shown = RichTable(title=escape(table.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0, overflow="fold")
    for row in table.rows:
        shown.add_row(*(escape(cell) for cell in row))
    return shown
