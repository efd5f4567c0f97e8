"""Several runs, one after the other or in parallel processes."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from divebatch.errors import DivergedError, RankError, StoppedError
from divebatch.lab.experiments.run import Run
from divebatch.lab.experiments.run_workers import in_processes
from divebatch.lab.experiments.runner import execute, make_stop
from divebatch.lab.training import StopRequest
from divebatch.lab.training.launch import why
from divebatch.ranks import Ranks
from divebatch.records import EpochRecord

OnEpoch = Callable[[int, EpochRecord], None]
"""Called in the parent with the run's index and each finished epoch."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that did not reach its end."""

    run: Run
    error: BaseException

    def __str__(self) -> str:
        return f"{self.run.experiment.name} {self.run.method_name} seed {self.run.seed}: {self.error}"


def default_jobs(device: str, num_runs: int) -> int:
    """One process a core on a CPU, one run at a time on a GPU."""
    return max(1, min(num_runs, os.cpu_count() or 1)) if device == "cpu" else 1


def _say_nothing(_: int, __: EpochRecord) -> None:
    """Nobody listens."""


def execute_all(
    runs: Sequence[Run], *, jobs: int, resume: bool, on_epoch: OnEpoch, on_resume: OnEpoch = _say_nothing
) -> list[Failure]:
    """Execute every run; one that fails does not stop the others. Asked to stop, all save and `StoppedError` rises.

    `on_resume` gets the last epoch that a run had before, and `on_epoch` those that follow. Several
    ranks train each run together, one after the other. An error that not all of them have ends all of them.
    """
    ranks = Ranks.here()
    with make_stop(ranks) as stop:
        if jobs == 1 or not ranks.is_alone:
            _require_same(runs, ranks)
            return _in_turn(runs, resume, on_epoch, on_resume, stop, ranks)
        errors = in_processes(runs, jobs, resume, on_epoch, on_resume, stop)
        if errors and stop.is_set:
            raise StoppedError(f"stopped; {len(runs) - len(errors)} of {len(runs)} runs are complete")
        return [Failure(runs[index], error) for index, error in sorted(errors.items())]


def _in_turn(
    runs: Sequence[Run], resume: bool, on_epoch: OnEpoch, on_resume: OnEpoch, stop: StopRequest, ranks: Ranks
) -> list[Failure]:
    failures = []
    for index, run in enumerate(runs):
        listeners = {"on_epoch": partial(on_epoch, index), "on_resume": partial(on_resume, index)}
        try:
            execute(run, resume=resume, stop=stop, **listeners)
        except StoppedError:
            raise
        except Exception as error:
            if not ranks.is_alone and not isinstance(error, DivergedError):  # a loss diverges on all ranks alike
                name = f"{run.experiment.name} {run.method_name} seed {run.seed}"
                raise RankError(f"rank {ranks.rank} of {ranks.size}, {name}: {why(error)}") from error
            failures.append(Failure(run, error))
    return failures


def _require_same(runs: Sequence[Run], ranks: Ranks) -> None:
    """Commands may differ between machines, and ranks that save or end at different steps wait for each other."""
    ranks.require_same({"the runs": [f"{run.method_name} seed {run.seed}" for run in runs]})
    for run in runs:
        ranks.require_same(run.settings_of_all_ranks)
