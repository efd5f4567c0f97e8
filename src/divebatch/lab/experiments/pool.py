"""Several runs, one after the other or in parallel processes."""

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from divebatch.errors import DivergedError, RankError, StoppedError
from divebatch.lab.experiments.run import Run
from divebatch.lab.experiments.runner import execute, make_stop
from divebatch.lab.training import StopRequest
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


def execute_all(runs: Sequence[Run], *, jobs: int, resume: bool, on_epoch: OnEpoch) -> list[Failure]:
    """Execute every run; one that fails does not stop the others. Asked to stop, all save and `StoppedError` rises.

    Several ranks train each run together, one after the other. An error that not all of them have ends all of them.
    """
    ranks = Ranks.here()
    with make_stop(ranks) as stop:
        if jobs == 1 or not ranks.is_alone:
            _require_same(runs, ranks)
            return _in_turn(runs, resume, on_epoch, stop, ranks)
        failures = _in_processes(runs, jobs, resume, on_epoch, stop)
        if failures and stop.is_set:
            raise StoppedError(f"stopped; {len(runs) - len(failures)} of {len(runs)} runs are complete")
        return failures


def _in_turn(runs: Sequence[Run], resume: bool, on_epoch: OnEpoch, stop: StopRequest, ranks: Ranks) -> list[Failure]:
    failures = []
    for index, run in enumerate(runs):
        try:
            execute(run, resume=resume, on_epoch=partial(on_epoch, index), stop=stop)
        except StoppedError:
            raise
        except Exception as error:
            if not ranks.is_alone and not isinstance(error, DivergedError):  # a loss diverges on all ranks alike
                name = f"{run.experiment.name} {run.method_name} seed {run.seed}"
                raise RankError(f"rank {ranks.rank} of {ranks.size}, {name}: {_in_short(error)}") from error
            failures.append(Failure(run, error))
    return failures


def _require_same(runs: Sequence[Run], ranks: Ranks) -> None:
    """Commands may differ between machines, and ranks that save or end at different steps wait for each other."""
    ranks.require_same({"the runs": [f"{run.method_name} seed {run.seed}" for run in runs]})
    for run in runs:
        ranks.require_same(run.settings_of_all_ranks)


def _in_short(error: Exception) -> str:
    """The first line, and what it means where another rank is gone: gloo and NCCL tell long stories."""
    what = (str(error) or type(error).__name__).partition("\n")[0]
    is_lost = isinstance(error, RuntimeError) and any(word in what for word in ("gloo", "NCCL", "ProcessGroup"))
    return f"lost contact with another rank ({what[:200]})" if is_lost else what


def _in_processes(runs: Sequence[Run], jobs: int, resume: bool, on_epoch: OnEpoch, stop: StopRequest) -> list[Failure]:
    context = multiprocessing.get_context("spawn")
    events: Any = context.Queue()
    # Together the workers must not ask for more threads than there are cores.
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ProcessPoolExecutor(jobs, context, _start_worker, (events, threads)) as pool:
        futures = [pool.submit(_execute_in_worker, index, run, resume) for index, run in enumerate(runs)]
        try:
            _relay(futures, events, on_epoch, stop)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    errors = [future.exception() for future in futures]
    return [Failure(run, error) for run, error in zip(runs, errors, strict=True) if error is not None]


_events: Any = None
_stop = StopRequest()


def _start_worker(events: Any, threads: int) -> None:
    global _events
    _events = events
    torch.set_num_threads(threads)
    _stop.__enter__()  # for as long as the process lives
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A worker that outlived a killed parent would write into the files of the run that resumes its own."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _execute_in_worker(index: int, run: Run, resume: bool) -> None:
    execute(run, resume=resume, on_epoch=lambda record: _events.put((index, record)), stop=_stop)


def _relay(futures: Sequence[Future[None]], events: Any, on_epoch: OnEpoch, stop: StopRequest) -> None:
    """Report the workers' epochs until all are done and reported; pass a request to stop on to them."""
    told = False
    while True:
        if stop.is_set and not told:
            told = True
            for worker in multiprocessing.active_children():
                worker.terminate()  # SIGTERM: they finish their step and save
        finished = all(future.done() for future in futures)
        try:
            on_epoch(*events.get(timeout=0.1))  # one at a time: quick epochs must not drown out a request to stop
        except queue.Empty:
            if finished:
                return
