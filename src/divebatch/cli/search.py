"""`divebatch search EXPERIMENT`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from divebatch.cli import common

if TYPE_CHECKING:
    from divebatch.lab.search import Search, Tried

ROWS = 10
"""Rows of the table that is printed."""


def search(
    experiment: common.ExperimentName,
    method: Annotated[
        str | None, typer.Option(help="Method whose settings are searched; the first baseline by default.")
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE,VALUE,... or NAME=LOW..HIGH; once for each setting. Default: the paper's grid."),
    ] = None,
    sampler: Annotated[str, typer.Option(help="How points are chosen: grid, random, tpe.")] = "grid",
    trials: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Points to try; a grid tries all of its own.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs; schedules are scaled to it.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, max=100_000, help="Number of seeds at each point; their mean counts.")
    ] = 1,
    held_out: Annotated[float, typer.Option(help="Part of the training data that points are judged by.")] = 0.2,
    apply_to: Annotated[str | None, typer.Option(help="Other methods that get the best settings too: a,b.")] = None,
    study: Annotated[str | None, typer.Option(help="Name of the study; EXPERIMENT-METHOD by default.")] = None,
    settings: common.Settings = None,
    data_dir: common.DataDir = Path("data"),
    device: common.Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for records and results.")] = Path("runs/search"),
    results: Annotated[bool, typer.Option("--results", help="Run nothing; show what is there.")] = False,
    quiet: common.Quiet = False,
) -> None:
    """Search for a method's best settings on held-out training data.

    Start the same command several times, and all processes share the work. Started again after any interruption, it
    continues.
    """
    # Here and not above: torch takes seconds, and help must not.
    from divebatch.lab import get_experiment
    from divebatch.lab.search import Search, default_space, parse_space, work, write_results

    def say(text: str) -> None:
        if not quiet:
            typer.echo(text)

    with common.errors_exit_with(common.WRONG_USE):
        tuned = get_experiment(experiment, settings or ())
        name = method or tuned.baseline
        space = parse_space(over) if over else default_space(tuned, tuned.method(name))
        plan = Search(
            experiment=tuned,
            method_name=name,
            folder=out,
            space=space,
            epochs=epochs,
            sampler=sampler,
            num_trials=trials,
            seed=seed,
            num_seeds=seeds,
            held_out=held_out,
            study_name=study or "",
            run_settings={"device": common.chosen_device(device), "data_dir": data_dir},
        )
        others = common.comma_separated(apply_to)
        for other in others:
            tuned.method(other)  # raises for an unknown one
        common.make_folder(out)
        plan.begin()
    if not results:
        waited: list[int] = []

        def on_wait(running: int) -> None:
            if not waited:
                say(f"waiting for {running} points of other processes")
            waited.append(running)

        way_on = f"the same command continues the search:\n  {common.command_again()}"
        with common.errors_exit_with(common.FAILED), common.interrupts_say(way_on):
            work(plan, on_result=lambda tried: say(_line(plan, tried)), on_wait=on_wait)
    paths = list(write_results(plan, plan.results(), apply_to=others))
    if not quiet:
        _show(plan, paths)


def _line(plan: "Search", tried: "Tried") -> str:
    metric = plan.experiment.metric
    settings = ", ".join(f"{name} {value:g}" for name, value in tried.point.items())
    value = "failed" if tried.value is None else f"{metric.word} {metric.text(tried.value)}"
    note = f" ({tried.note})" if tried.note else ""
    return f"[{len(plan.results().tried)}/{plan.total}] {settings}: {value}{note}"


def _show(plan: "Search", paths: list[Path]) -> None:
    found, metric, names = plan.results(), plan.experiment.metric, tuple(plan.space)
    typer.echo(f"{plan.name}: {len(found.tried)} of {found.total} trials, the best {ROWS}")
    rows = []
    for each in found.tried[:ROWS]:
        value = "failed" if each.value is None else metric.text(each.value)
        rows.append((*(f"{each.point[name]:g}" for name in names), value, each.note[:60]))
    common.print_table((*names, metric.word, ""), rows, left=("",))
    for path in paths:
        typer.echo(str(path))
    if found.best is not None:
        typer.echo(f"next: divebatch run {paths[0]} --methods {plan.method_name}")
