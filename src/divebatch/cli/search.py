"""`divebatch search EXPERIMENT`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from divebatch.cli.exits import FAILED, WRONG_USE, command_again, errors_exit_with, leave
from divebatch.cli.options import DataDir, Device, ExperimentName, Quiet, comma_separated, require_device
from divebatch.cli.results_files import make_folder
from divebatch.errors import ArgumentError, StoppedError
from divebatch.lab.experiments import get_experiment
from divebatch.lab.search import (
    SAMPLERS,
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

ROWS = 10
"""Of the table that is printed."""


def search(
    experiment: ExperimentName,
    method: Annotated[str, typer.Option(help="Method whose settings are searched.")] = "sgd-small",
    over: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE,VALUE,... or NAME=LOW..HIGH; once for each setting. Default: the paper's grid."),
    ] = None,
    sampler: Annotated[str, typer.Option(help=f"How points are chosen: {', '.join(SAMPLERS)}.")] = "grid",
    trials: Annotated[int | None, typer.Option(min=1, help="Points to try; a grid tries all of its own.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs; schedules are scaled to it.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds at each point; their mean counts.")] = 1,
    held_out: Annotated[float, typer.Option(help="Part of the training data that points are judged by.")] = 0.2,
    apply_to: Annotated[str | None, typer.Option(help="Other methods that get the best settings too: a,b.")] = None,
    study: Annotated[str | None, typer.Option(help="Name of the study; EXPERIMENT-METHOD by default.")] = None,
    storage: Annotated[str | None, typer.Option(help="Database URL; OUT/STUDY.db by default.")] = None,
    heartbeat_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which a silent process is dead; the same for all.")
    ] = 60.0,
    data_dir: DataDir = Path("data"),
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for records and results.")] = Path("runs/search"),
    results: Annotated[bool, typer.Option("--results", help="Run nothing; show what is there.")] = False,
    quiet: Quiet = False,
) -> None:
    """Search for a method's best settings on held-out training data.

    Start the same command several times, on one machine or many with one --storage, and all work on one study.
    Started again after any interruption it goes on.
    """
    with errors_exit_with(WRONG_USE):
        require_device(device)
        plan = make_plan(
            get_experiment(experiment),
            method,
            out,
            space=_space(over),
            epochs=epochs,
            sampler=sampler,
            num_trials=trials,
            seed=seed,
            num_seeds=seeds,
            held_out=held_out,
            study_name=study or "",
            storage=storage or "",
            run_settings={"device": device, "data_dir": data_dir},
        )
        plan.check()
        others = comma_separated(apply_to)
        for name in others:
            plan.experiment.method(name)  # raises for one that is unknown
        make_folder(out)
        opened = open_study(plan, heartbeat_timeout=heartbeat_timeout)
    if not results:
        with errors_exit_with(FAILED):
            _work(plan, opened, quiet)
    found = collect(opened)
    paths = list(write_results(plan, found, apply_to=others))
    if not quiet:
        _show(plan, found, paths)


def _space(over: list[str] | None) -> Space | None:
    try:
        return parse_space(over) if over else None
    except ArgumentError as error:
        raise ArgumentError(f"--over: {error}") from error


def _work(plan: Plan, study: Study, quiet: bool) -> None:
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


def _show(plan: Plan, found: Results, paths: list[Path]) -> None:
    console = Console()
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
