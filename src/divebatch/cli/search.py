"""`divebatch search EXPERIMENT`."""

from pathlib import Path
from typing import Annotated

import typer

from divebatch.cli.exits import FAILED, WRONG_USE, errors_exit_with
from divebatch.cli.options import DataDir, Device, ExperimentName, Quiet, chosen_device, comma_separated
from divebatch.cli.results_files import make_folder


def search(
    experiment: ExperimentName,
    method: Annotated[str, typer.Option(help="Method whose settings are searched.")] = "sgd-small",
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
    # Here and not above: torch takes seconds, and help must not.
    from divebatch.cli.work.search import (
        collect,
        get_experiment,
        make_plan,
        open_study,
        show_results,
        space_of,
        work_on,
        write_results,
    )

    with errors_exit_with(WRONG_USE):
        plan = make_plan(
            get_experiment(experiment),
            method,
            out,
            space=space_of(over),
            epochs=epochs,
            sampler=sampler,
            num_trials=trials,
            seed=seed,
            num_seeds=seeds,
            held_out=held_out,
            study_name=study or "",
            storage=storage or "",
            run_settings={"device": chosen_device(device), "data_dir": data_dir},
        )
        plan.check()
        others = comma_separated(apply_to)
        for name in others:
            plan.experiment.method(name)  # raises for one that is unknown
        make_folder(out)
        opened = open_study(plan, heartbeat_timeout=heartbeat_timeout)
    if not results:
        with errors_exit_with(FAILED):
            work_on(plan, opened, quiet)
    found = collect(opened)
    paths = list(write_results(plan, found, apply_to=others))
    if not quiet:
        show_results(plan, found, paths)
