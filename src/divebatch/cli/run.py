"""`divebatch run EXPERIMENT`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from divebatch.cli.exits import WRONG_USE, errors_exit_with
from divebatch.cli.options import (
    Compile,
    DataDir,
    Device,
    ExperimentName,
    MicroBatch,
    Quiet,
    chosen_device,
    comma_separated,
    whole_numbers,
)
from divebatch.cli.progress import mode_of


def run(
    experiment: ExperimentName,
    methods: Annotated[str | None, typer.Option(help="Methods to run, comma-separated; all by default.")] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Number of seeds; the paper's by default.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs; schedules are scaled to it.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="End a run of one pass after so many samples; its schedule is fitted.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="End it after so many seconds of training; its schedule is fitted.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    data_dir: DataDir = Path("data"),
    model: Annotated[str | None, typer.Option(help="Train another network, such as resnet20 or gpt-tiny.")] = None,
    device: Device = "cpu",
    precision: Annotated[str | None, typer.Option(help="Number format: fp32, tf32 or bf16.")] = None,
    compile: Compile = None,
    micro_batch: MicroBatch = None,
    sharding: Annotated[
        str, typer.Option(help="Under torchrun: ddp (a copy of the model on each rank) or fsdp (a part on each).")
    ] = "ddp",
    log_exact: Annotated[bool, typer.Option("--log-exact", help="Log the exact diversity of every epoch.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs in parallel; one for each core by default.")] = None,
    checkpoint_steps: Annotated[
        int | None, typer.Option(min=1, help="Also write one every so many steps within an epoch.")
    ] = None,
    keep_checkpoints: Annotated[
        str | None, typer.Option(help="Epochs whose checkpoints stay: 4,20,36; `divebatch probe` starts from them.")
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
    # Here and not above: torch takes seconds, and help must not.
    from divebatch.cli.work import run as work

    with (
        errors_exit_with(WRONG_USE),
        work.process_group(chosen_device(device)) as own_device,
    ):
        ranks = work.Ranks.here()
        mode = mode_of(quiet=quiet, json=json)
        training: dict[str, Any] = {"precision": precision, "compile": compile, "micro_batch_size": micro_batch}
        planned = work.prepared(experiment, epochs, model=model, training=training)
        planned = planned.ending(samples=samples, seconds=seconds)
        work.check_parts(planned)
        first = work.Run(
            planned,
            "",
            seed,
            out,
            device=own_device,
            log_exact=log_exact,
            data_dir=data_dir,
            checkpoint_steps=checkpoint_steps,
            keep_epochs=whole_numbers("--keep-checkpoints", keep_checkpoints),
            sharding=sharding,
            loggers=work.known_loggers(logger),
        )
        runs = work.all_runs(first, comma_separated(methods), trials or planned.trials)
        if resume and epochs is not None:
            plan = partial(work.prepared, experiment, model=model, training=training)
            runs = [work.lengthened(each, plan) for each in runs]
        count = work.num_jobs(jobs, runs, num_ranks=ranks.size)
        work.train(runs, count, ranks, resume=resume, mode=mode if ranks.is_first else "quiet")
        if mode == "show" and ranks.is_first:
            typer.echo(f"{len(runs)} run{'s' * (len(runs) > 1)} in {out / planned.name}; next: divebatch report {out}")
