"""What `divebatch run` does."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from divebatch.checks import require_choice
from divebatch.cli.exits import FAILED, WRONG_USE, command_again, errors_exit_with, leave
from divebatch.cli.progress import make_display
from divebatch.cli.results_files import make_folder
from divebatch.errors import ArgumentError, DataError, StoppedError
from divebatch.lab import (
    Experiment,
    Failure,
    Run,
    check_can_write,
    check_parts,
    default_jobs,
    execute_all,
    get_experiment,
    lengthened,
)
from divebatch.lab.loggers import make_logger
from divebatch.lab.ranks import first_does, is_restarted, process_group
from divebatch.ranks import Ranks
from divebatch.report.figures import FIGURES

__all__ = [
    "Ranks",
    "Run",
    "all_runs",
    "check_parts",
    "known_loggers",
    "lengthened",
    "num_jobs",
    "prepared",
    "process_group",
    "train",
]

CANNOT_BEGIN = (ArgumentError, DataError)
"""Errors of settings and data that no run can begin with: the command is wrong, and there is nothing to resume."""


def train(runs: list[Run], jobs: int, ranks: Ranks, *, resume: bool, mode: str) -> None:
    """Execute all runs, which no other command gets meanwhile."""
    out = runs[0].folder
    with errors_exit_with(FAILED):
        make_folder(out)
    resume = resume or is_restarted()  # by a launcher, which gives the same command again
    first_does(ranks, lambda: _check_can_write(runs, resume=resume))
    with errors_exit_with(FAILED):
        with _saying_how_to_continue(out), make_display(runs, mode) as display:
            listeners = {"on_epoch": display.on_epoch, "on_resume": display.on_resume}
            failures = execute_all(runs, jobs=jobs, resume=resume, **listeners)
        if len(failures) == len(runs) and all(isinstance(each.error, CANNOT_BEGIN) for each in failures):
            raise leave("\n".join(_lines(failures)), WRONG_USE)
        if failures:
            raise leave(_in_words(failures, len(runs)), FAILED)


def _in_words(failures: Sequence[Failure], num_runs: int) -> str:
    """What failed, then how many are complete and how the rest is tried again."""
    done = f"{num_runs - len(failures)} of {num_runs} runs are complete"
    way_on = f"{done}; once the cause is mended, this continues the rest:"
    return "\n".join([*_lines(failures), way_on, f"  {command_again('--resume')}"])


def _lines(failures: Sequence[Failure]) -> list[str]:
    """One for each cause: it may be that of many runs."""
    by_cause: dict[str, list[Failure]] = {}
    for failure in failures:
        by_cause.setdefault(str(failure.error), []).append(failure)
    return [
        str(first) + (f" (the same for {len(others)} more of the runs)" if others else "")
        for first, *others in by_cause.values()
    ]


@contextmanager
def _saying_how_to_continue(out: Path) -> Iterator[None]:
    try:
        yield
    except (StoppedError, KeyboardInterrupt) as error:
        what = str(error) or "interrupted"
        way_on = f"the same command with --resume continues the runs in '{out}':\n  {command_again('--resume')}"
        raise leave(f"{what}; {way_on}", FAILED) from None


def known_loggers(kinds: list[str] | None) -> tuple[str, ...]:
    """Each kind once; raises for one that is unknown or not installed."""
    for kind in kinds or ():
        make_logger(kind)
    return tuple(dict.fromkeys(kinds or ()))


def num_jobs(asked: int | None, runs: Sequence[Run], *, num_ranks: int) -> int:
    """How many runs go on at the same time."""
    if num_ranks == 1:
        return asked or default_jobs(runs[0].device, len(runs))
    if (asked or 1) > 1:
        raise ArgumentError(f"--jobs {asked}: the {num_ranks} ranks train each run together; leave it out")
    return 1


def _check_can_write(runs: list[Run], *, resume: bool) -> None:
    for each in runs:
        check_can_write(each, resume=resume)


def prepared(name: str, epochs: int | None, *, model: str | None, training: Mapping[str, Any]) -> Experiment:
    """The experiment over so many epochs, with that network and use of the device."""
    experiment = get_experiment(name)
    for figure in experiment.report.figures:
        require_choice(f"{name}: [report] figure", figure, tuple(FIGURES))
    experiment = experiment.scaled(epochs) if epochs is not None else experiment
    experiment = experiment.with_model(model) if model is not None else experiment
    return experiment.with_training(**training)


def all_runs(first: Run, methods: list[str], trials: int) -> list[Run]:
    """Each method, or all where none is named, with as many seeds from the first run's on."""
    for name in methods:
        first.experiment.method(name)  # raises for one that is unknown
    seeds = range(first.seed, first.seed + trials)
    names = methods or list(first.experiment.methods)
    return [replace(first, method_name=name, seed=seed) for name in names for seed in seeds]
