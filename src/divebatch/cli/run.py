"""The command `divebatch run EXPERIMENT`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from divebatch.checks import require_choice
from divebatch.cli import common
from divebatch.cli.progress import make_display
from divebatch.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from divebatch.lab import Experiment, Failure, Run
    from divebatch.ranks import Ranks

CANNOT_BEGIN = (ArgumentError, DataError)
"""Errors of settings and data that stop a run before it begins, so that there is nothing to resume."""


def run(
    experiment: common.ExperimentName,
    methods: Annotated[str | None, typer.Option(help="Methods to run, comma-separated; all by default.")] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Number of seeds; the paper's number by default.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Number of epochs; schedules are scaled to it.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    settings: common.Settings = None,
    data_dir: common.DataDir = Path("data"),
    model: Annotated[str | None, typer.Option(help="Train another network, such as resnet20 or gpt-tiny.")] = None,
    device: common.Device = "cpu",
    sharding: Annotated[
        str, typer.Option(help="Under torchrun: ddp (a copy of the model on each rank) or fsdp (a part on each).")
    ] = "ddp",
    log_exact: Annotated[bool, typer.Option("--log-exact", help="Log the exact diversity of every epoch.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs in parallel; one for each core by default.")] = None,
    checkpoint_steps: Annotated[
        int | None, typer.Option(min=1, help="Also write a checkpoint every N steps within an epoch.")
    ] = None,
    keep_checkpoints: Annotated[
        str | None, typer.Option(help="Epochs whose checkpoints stay: 4,20,36; `divebatch probe` starts from them.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the records.")] = Path("runs"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue runs that were begun; start the others.")] = False,
    logger: Annotated[
        list[str] | None, typer.Option(help="Also log epochs to tensorboard or wandb; may be repeated.")
    ] = None,
    quiet: common.Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each epoch, one per line.")] = False,
) -> None:
    """Train all or some methods of an experiment over several seeds.

    Under torchrun, all processes train each run together.
    """
    # Imported here: torch takes seconds, and help must not.
    from divebatch.lab import Run, check_parts, default_jobs, lengthened
    from divebatch.lab.loggers import make_logger
    from divebatch.lab.ranks import is_restarted, process_group
    from divebatch.ranks import Ranks

    with common.errors_exit_with(common.WRONG_USE), process_group(common.chosen_device(device)) as own_device:
        ranks = Ranks.here()
        if quiet and json:
            raise ArgumentError("--quiet and --json exclude each other: leave one of them out")
        mode = "quiet" if quiet else "json" if json else "show"
        plan = partial(_planned, experiment, [*(settings or []), *([f"model.kind={model}"] if model else [])])
        planned = plan(epochs)
        check_parts(planned)
        for kind in logger or ():
            make_logger(kind)  # raises if the logger is unknown or not installed
        first = Run(
            planned,
            "",
            seed,
            out,
            device=own_device,
            log_exact=log_exact,
            data_dir=data_dir,
            checkpoint_steps=checkpoint_steps,
            keep_epochs=common.whole_numbers("--keep-checkpoints", keep_checkpoints),
            sharding=sharding,
            loggers=tuple(dict.fromkeys(logger or ())),
        )
        names = common.comma_separated(methods) or list(planned.methods)
        for name in names:
            planned.method(name)  # raises if the name is unknown
        seeds = range(seed, seed + (trials or planned.trials))
        runs = [replace(first, method_name=name, seed=each) for name in names for each in seeds]
        if resume and epochs is not None:
            runs = [lengthened(each, plan) for each in runs]
        if ranks.is_alone:
            count = jobs or default_jobs(own_device, len(runs))
        elif jobs not in (None, 1):
            raise ArgumentError(f"--jobs {jobs}: the {ranks.size} ranks train each run together; leave it out")
        else:
            count = 1
        # A launcher restarts a failed job with the same command.
        _train(runs, count, ranks, resume=resume or is_restarted(), mode=mode if ranks.is_first else "quiet")
        if mode == "show" and ranks.is_first:
            typer.echo(f"{len(runs)} run{'s' * (len(runs) > 1)} in {out / planned.name}; next: divebatch report {out}")


def _planned(name: str, settings: Sequence[str], epochs: int | None) -> "Experiment":
    from divebatch.lab import get_experiment
    from divebatch.report.figures import FIGURES

    experiment = get_experiment(name, settings)
    for figure in experiment.report.figures:
        require_choice(f"{name}: [report] figure", figure, tuple(FIGURES))
    return experiment.scaled(epochs) if epochs is not None else experiment


def _train(runs: "list[Run]", jobs: int, ranks: "Ranks", *, resume: bool, mode: str) -> None:
    """Execute all runs; report failures and how to continue."""
    from divebatch.lab import check_can_write, execute_all
    from divebatch.lab.ranks import first_does

    def check() -> None:
        for each in runs:
            check_can_write(each, resume=resume)

    out = runs[0].folder
    with common.errors_exit_with(common.FAILED):
        common.make_folder(out)
    first_does(ranks, check)
    again = f"  {common.command_again('--resume')}"
    way_on = f"the same command with --resume continues the runs in '{out}':\n{again}"
    with common.errors_exit_with(common.FAILED):
        with common.interrupts_say(way_on), make_display(runs, mode) as display:
            on_resume = partial(display.on_epoch, was_done=True)
            failures = execute_all(runs, jobs=jobs, resume=resume, on_epoch=display.on_epoch, on_resume=on_resume)
        if not failures:
            return
        lines = _lines(failures)
        if len(failures) == len(runs) and all(isinstance(each.error, CANNOT_BEGIN) for each in failures):
            raise common.leave("\n".join(lines), common.WRONG_USE)
        done = f"{len(runs) - len(failures)} of {len(runs)} runs are complete"
        raise common.leave(
            "\n".join([*lines, f"{done}; once the cause is fixed, continue the rest with:\n{again}"]), common.FAILED
        )


def _lines(failures: "Sequence[Failure]") -> list[str]:
    """Return a line for each cause, which several runs may share."""
    by_cause: dict[str, list[Failure]] = {}
    for failure in failures:
        by_cause.setdefault(str(failure.error), []).append(failure)
    return [
        str(first) + (f" (the same for {len(others)} more of the runs)" if others else "")
        for first, *others in by_cause.values()
    ]
