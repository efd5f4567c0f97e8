"""`divebatch run EXPERIMENT`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from divebatch.cli.command_line import command_again
from divebatch.cli.device import require_device
from divebatch.cli.exits import FAILED, WRONG_USE, errors_exit_with, leave
from divebatch.cli.options import Compile, DataDir, Device, ExperimentName, MicroBatch, Quiet
from divebatch.cli.progress import make_display, mode_of
from divebatch.cli.results_files import make_folder
from divebatch.errors import ArgumentError, StoppedError
from divebatch.lab.experiments import (
    Experiment,
    Failure,
    Run,
    begun_here,
    check_can_write,
    check_parts,
    default_jobs,
    execute_all,
    first_does,
    get_experiment,
    in_hand,
    process_group,
    was_begun_here,
)
from divebatch.lab.loggers import make_logger
from divebatch.ranks import Ranks


def run(
    experiment: ExperimentName,
    methods: Annotated[str | None, typer.Option(help="Comma-separated; all by default.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Seeds to run; the paper's number by default.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Shorten or lengthen, schedules scaled.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    data_dir: DataDir = Path("data"),
    model: Annotated[str | None, typer.Option(help="Another network, such as resnet20.")] = None,
    device: Device = "cpu",
    precision: Annotated[str | None, typer.Option(help="fp32, tf32 or bf16.")] = None,
    compile: Compile = None,
    cuda_graphs: Annotated[
        bool | None, typer.Option("--cuda-graphs/--no-cuda-graphs", help="Replay compiled passes on a GPU.")
    ] = None,
    micro_batch: MicroBatch = None,
    norms: Annotated[str | None, typer.Option(help="Per-sample norms where measured: exact or sketch.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Keep images off the device; load them with so many processes.")
    ] = None,
    sharding: Annotated[
        str, typer.Option(help="Under torchrun: ddp (a copy of the model on each rank) or fsdp (a part on each).")
    ] = "ddp",
    log_exact: Annotated[bool, typer.Option("--log-exact", help="Log the exact diversity of every epoch.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Parallel processes; one a core by default.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Epochs from checkpoint to checkpoint.")] = 1,
    checkpoint_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps from checkpoint to checkpoint within an epoch.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the records.")] = Path("runs"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue what is there, start what is not.")] = False,
    log: Annotated[
        list[str] | None, typer.Option(help="Show epochs there too: tensorboard or wandb; may be repeated.")
    ] = None,
    quiet: Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line for every epoch.")] = False,
) -> None:
    """Run an experiment: all its methods, or some, over several seeds.

    Under torchrun all its processes train each run together.
    """
    with errors_exit_with(WRONG_USE), process_group(device) as (own_device, ranks):
        require_device(device)
        mode = mode_of(quiet=quiet, json=json)
        for kind in log or ():
            make_logger(kind)
        planned = _prepared(experiment, epochs, model).with_training(
            precision=precision, compile=compile, cuda_graphs=cuda_graphs, micro_batch_size=micro_batch, norms=norms
        )
        check_parts(planned)
        first = Run(
            planned, "", seed, out, device=own_device, log_exact=log_exact, sharding=sharding,
            data_dir=data_dir, on_device=workers is None, num_workers=workers or 0,
            checkpoint_every=checkpoint_every, checkpoint_steps=checkpoint_steps,
            loggers=tuple(dict.fromkeys(log or ())),
        )  # fmt: skip
        runs = _all_runs(first, _method_names(planned, methods), trials or planned.trials)
        count = _num_jobs(jobs, default_jobs(device, len(runs)), num_ranks=ranks.size)
        _train(runs, count, ranks, resume=resume, out=out, mode=mode if ranks.is_first else "quiet")
        if mode == "show" and ranks.is_first:
            typer.echo(f"{len(runs)} run{'s' * (len(runs) > 1)} in {out / planned.name}; next: divebatch report {out}")


def _train(runs: list[Run], jobs: int, ranks: Ranks, *, resume: bool, out: Path, mode: str) -> None:
    """All of them, held against other commands."""
    with errors_exit_with(FAILED):
        make_folder(out)
    with in_hand(runs, ranks):
        resume = resume or was_begun_here(out, ranks)
        first_does(ranks, lambda: _check_can_write(runs, resume=resume))
        with errors_exit_with(FAILED), begun_here(out, ranks):
            failures = _execute(runs, jobs, resume, out, mode)
            if failures:  # within: what failed is begun, and a launcher that starts it anew continues it
                raise leave("\n".join(_say(failure) for failure in failures), FAILED)


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
    seeds = range(first.seed, first.seed + trials)
    return [replace(first, method_name=name, seed=seed) for name in methods for seed in seeds]


def _method_names(experiment: Experiment, methods: str | None) -> list[str]:
    names = [name.strip() for name in methods.split(",")] if methods is not None else list(experiment.methods)
    for name in names:
        experiment.method(name)
    return list(dict.fromkeys(names))


def _execute(runs: list[Run], jobs: int, resume: bool, out: Path, mode: str) -> list[Failure]:
    try:
        with make_display(runs, mode) as display:
            return execute_all(runs, jobs=jobs, resume=resume, on_epoch=display.on_epoch)
    except (StoppedError, KeyboardInterrupt) as error:
        what = str(error) or "interrupted"
        way_on = f"the same command with --resume continues the runs in '{out}':\n  {command_again('--resume')}"
        raise leave(f"{what}; {way_on}", FAILED) from None


def _say(failure: Failure) -> str:
    run = failure.run
    return f"{run.experiment.name} {run.method_name} seed {run.seed}: {failure.error}"
