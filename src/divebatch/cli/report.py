"""The command `divebatch report DIR...`."""

from pathlib import Path
from typing import Annotated

import typer

from divebatch.cli.common import FAILED, WRONG_USE, errors_exit_with, leave
from divebatch.report import write_report


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders that `divebatch run --out` wrote.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the report; the first DIR by default.")] = None,
) -> None:
    """Print each experiment's result and write a report.

    The report consists of report.html, report.md, figures and tables.
    """
    for folder in folders:
        if not folder.is_dir():
            raise leave(f"'{folder}' is not a folder", WRONG_USE)
    with errors_exit_with(FAILED):
        written = write_report(*folders, out=out)
    typer.echo(written.text)
    for problem in written.problems:
        typer.echo(f"skipped: {problem}", err=True)
    typer.echo(f"Open {written.html}")
