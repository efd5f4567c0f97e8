"""`divebatch run EXPERIMENT`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from divebatch.cli.exits import FAILED, WRONG_USE, command_again, errors_exit_with, leave
from divebatch.cli.options import (
    Compile,
    DataDir,
    Device,
    ExperimentName,
    MicroBatch,
    Quiet,
    comma_separated,
    require_device,
)
from divebatch.cli.progress import make_display, mode_of
from divebatch.cli.results_files import make_folder
from divebatch.errors import ArgumentError, StoppedError
from divebatch.lab.experiments import (
    Experiment,
    Run,
    check_can_write,
    check_parts,
    default_jobs,
    execute_all,
    get_experiment,
    locked_runs,
    marked_as_begun,
    was_begun_by_this_launch,
)
from divebatch.lab.loggers import make_logger
from divebatch.lab.training.launch import first_does, process_group
from divebatch.ranks import Ranks


def run(
    experiment: ExperimentName,
    methods: Annotated[str | None, typer.Option(help="Methods to run, comma-separated; all by default.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Number of seeds; the paper's by default.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs; schedules are scaled to it.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    data_dir: DataDir = Path("data"),
    model: Annotated[str | None, typer.Option(help="Train another network, such as resnet20.")] = None,
    device: Device = "cpu",
    precision: Annotated[str | None, typer.Option(help="Number format: fp32, tf32 or bf16.")] = None,
    compile: Compile = None,
    cuda_graphs: Annotated[
        bool | None, typer.Option("--cuda-graphs/--no-cuda-graphs", help="Replay compiled passes on a GPU.")
    ] = None,
    micro_batch: MicroBatch = None,
    norm_mode: Annotated[str | None, typer.Option(help="How per-sample norms are measured: exact or sketch.")] = None,
    data_on_host: Annotated[
        bool, typer.Option("--data-on-host", help="Keep images in host memory or on disk, not on the device.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes that load images; needs --data-on-host.")] = 0,
    sharding: Annotated[
        str, typer.Option(help="Under torchrun: ddp (a copy of the model on each rank) or fsdp (a part on each).")
    ] = "ddp",
    log_exact: Annotated[bool, typer.Option("--log-exact", help="Log the exact diversity of every epoch.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs in parallel; one for each core by default.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Write a checkpoint every so many epochs.")] = 1,
    checkpoint_steps: Annotated[
        int | None, typer.Option(min=1, help="Also write one every so many steps within an epoch.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the records.")] = Path("runs"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue runs that were begun, start the others.")] = False,
    logger: Annotated[
        list[str] | None, typer.Option(help="Also log epochs to tensorboard or wandb; may be repeated.")
    ] = None,
    quiet: Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for every epoch.")] = False,
) -> None:
    """Run an experiment: all its methods, or some, over several seeds.

    Under torchrun all its processes train each run together.
    """
    with errors_exit_with(WRONG_USE), process_group(device) as (own_device, ranks):
        require_device(device)
        mode = mode_of(quiet=quiet, json=json)
        planned = _prepared(experiment, epochs, model).with_training(
            precision=precision,
            compile=compile,
            cuda_graphs=cuda_graphs,
            micro_batch_size=micro_batch,
            norms=norm_mode,
        )
        check_parts(planned)
        first = Run(
            planned,
            "",
            seed,
            out,
            device=own_device,
            log_exact=log_exact,
            data_dir=data_dir,
            on_device=not data_on_host,
            num_workers=workers,
            checkpoint_every=checkpoint_every,
            checkpoint_steps=checkpoint_steps,
            sharding=sharding,
            loggers=_loggers(logger),
        )
        runs = _all_runs(first, comma_separated(methods), trials or planned.trials)
        count = _num_jobs(jobs, default_jobs(device, len(runs)), num_ranks=ranks.size)
        _train(runs, count, ranks, resume=resume, mode=mode if ranks.is_first else "quiet")
        if mode == "show" and ranks.is_first:
            typer.echo(f"{len(runs)} run{'s' * (len(runs) > 1)} in {out / planned.name}; next: divebatch report {out}")


def _train(runs: list[Run], jobs: int, ranks: Ranks, *, resume: bool, mode: str) -> None:
    """Execute all runs, which no other command gets meanwhile."""
    out = runs[0].folder
    with errors_exit_with(FAILED):
        make_folder(out)
    with locked_runs(runs, ranks):
        resume = resume or was_begun_by_this_launch(out, ranks)
        first_does(ranks, lambda: _check_can_write(runs, resume=resume))
        with errors_exit_with(FAILED), marked_as_begun(out, ranks):
            with _saying_how_to_continue(out), make_display(runs, mode) as display:
                failures = execute_all(runs, jobs=jobs, resume=resume, on_epoch=display.on_epoch)
            if failures:  # within: what failed is begun, and a launcher that starts it anew continues it
                raise leave("\n".join(map(str, failures)), FAILED)


@contextmanager
def _saying_how_to_continue(out: Path) -> Iterator[None]:
    try:
        yield
    except (StoppedError, KeyboardInterrupt) as error:
        what = str(error) or "interrupted"
        way_on = f"the same command with --resume continues the runs in '{out}':\n  {command_again('--resume')}"
        raise leave(f"{what}; {way_on}", FAILED) from None


def _loggers(kinds: list[str] | None) -> tuple[str, ...]:
    for kind in kinds or ():
        make_logger(kind)  # raises for one that is unknown or not installed
    return tuple(dict.fromkeys(kinds or ()))


def _num_jobs(asked: int | None, default: int, *, num_ranks: int) -> int:
    if num_ranks == 1:
        return asked or default
    if (asked or 1) > 1:
        raise ArgumentError(f"--jobs {asked}: the {num_ranks} ranks train each run together; leave it out")
    return 1


def _check_can_write(runs: list[Run], *, resume: bool) -> None:
    for each in runs:
        check_can_write(each, resume=resume)


def _prepared(name: str, epochs: int | None, model: str | None) -> Experiment:
    experiment = get_experiment(name)
    experiment = experiment.scaled(epochs) if epochs is not None else experiment
    return experiment.with_model(model) if model is not None else experiment


def _all_runs(first: Run, methods: list[str], trials: int) -> list[Run]:
    for name in methods:
        first.experiment.method(name)  # raises for one that is unknown
    seeds = range(first.seed, first.seed + trials)
    names = methods or list(first.experiment.methods)
    return [replace(first, method_name=name, seed=seed) for name in names for seed in seeds]
