"""What `divebatch search` does."""

from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from divebatch.cli.console import make_console
from divebatch.cli.exits import FAILED, command_again, leave
from divebatch.errors import ArgumentError, StoppedError
from divebatch.lab.experiments import get_experiment
from divebatch.lab.search import (
    Plan,
    Result,
    Results,
    Space,
    Study,
    collect,
    make_plan,
    open_study,
    parse_space,
    work,
    write_results,
)

__all__ = [
    "collect",
    "get_experiment",
    "make_plan",
    "open_study",
    "show_results",
    "space_of",
    "work_on",
    "write_results",
]

ROWS = 10
"""Of the table that is printed."""


def space_of(over: list[str] | None) -> Space | None:
    """The space that `--over` names; None for the paper's grid."""
    try:
        return parse_space(over) if over else None
    except ArgumentError as error:
        raise ArgumentError(f"--over: {error}") from error


def work_on(plan: Plan, study: Study, quiet: bool) -> None:
    """Try points until none is left, a line for each."""
    waited: list[int] = []

    def say(text: str) -> None:
        if not quiet:
            typer.echo(text)

    def on_wait(running: int) -> None:
        if not waited:
            say(f"waiting for {running} trials of other processes")
        waited.append(running)

    try:
        work(plan, study, on_result=lambda result: say(_line(result, study)), on_wait=on_wait)
    except (StoppedError, KeyboardInterrupt) as error:
        what = str(error) or "interrupted"
        raise leave(f"{what}; the same command goes on with the search:\n  {command_again()}", FAILED) from None


def _line(result: Result, study: Study) -> str:
    done = len(study.completed()) + len(study.failed())
    name = "accuracy" if study.metric.is_accuracy else study.metric.name
    value = "failed" if result.value is None else f"{name} {study.metric.text(result.value)}"
    return f"[{done}/{study.total}] {_settings(result)}: {value}" + (f" ({result.note})" if result.note else "")


def _settings(result: Result) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in result.point.items())


def show_results(plan: Plan, found: Results, paths: list[Path]) -> None:
    """Print the best points, the files, and what to do next."""
    console = make_console()
    typer.echo(f"{plan.name}: {len(found.tried)} of {found.total} trials, the best {ROWS}")
    table = Table(box=None)
    for name in (*plan.space.names, "accuracy" if found.metric.is_accuracy else found.metric.name):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in found.tried[:ROWS]:
        value = "failed" if each.value is None else found.metric.text(each.value)
        table.add_row(*(f"{each.point[name]:g}" for name in plan.space.names), value, Text(each.note[:60]))
    console.print(table)
    for path in paths:
        typer.echo(str(path))
    if found.best is not None:
        typer.echo(f"next: divebatch run {paths[0]} --methods {plan.method_name}")
