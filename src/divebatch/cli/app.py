"""The application with its commands; exit codes are 0 (done), 1 (failed) and 2 (wrong use)."""

from typing import Annotated

import typer

from divebatch import __version__
from divebatch.cli.advise import advise
from divebatch.cli.compare import compare
from divebatch.cli.doctor import doctor
from divebatch.cli.frontier import frontier
from divebatch.cli.list import list_experiments
from divebatch.cli.probe import probe
from divebatch.cli.ramp import ramp
from divebatch.cli.report import report
from divebatch.cli.run import run
from divebatch.cli.search import search
from divebatch.cli.watch import watch

app = typer.Typer(
    name="divebatch",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables cut option names at 80 columns
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"divebatch {__version__}")
        raise typer.Exit


@app.callback()
def divebatch(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models with the batch size their gradients ask for."""


app.command("list")(list_experiments)
app.command("run")(run)
app.command("report")(report)
app.command("compare")(compare)
app.command("frontier")(frontier)
app.command("watch")(watch)
app.command("search")(search)
app.command("probe")(probe)
app.command("advise")(advise)
app.command("ramp")(ramp)
app.command("doctor")(doctor)
