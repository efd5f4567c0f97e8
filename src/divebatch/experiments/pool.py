"""Several runs, one after the other or in parallel processes."""

import multiprocessing
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from divebatch.experiments.runner import Run, execute
from divebatch.records import EpochRecord

OnEpoch = Callable[[int, EpochRecord], None]
"""Called in the parent with the run's index and each finished epoch."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that did not reach its end."""

    run: Run
    error: BaseException


def default_jobs(device: str, num_runs: int) -> int:
    """One process a core on a CPU, one run at a time on a GPU."""
    return max(1, min(num_runs, os.cpu_count() or 1)) if device == "cpu" else 1


def execute_all(runs: Sequence[Run], *, jobs: int, resume: bool, on_epoch: OnEpoch) -> list[Failure]:
    """Execute every run; one that fails does not stop the others."""
    if jobs == 1:
        return _one_by_one(runs, resume, on_epoch)
    context = multiprocessing.get_context("spawn")
    events: Any = context.Queue()
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ProcessPoolExecutor(jobs, context, _start_worker, (events, threads)) as pool:
        futures = [pool.submit(_execute_in_worker, index, run, resume) for index, run in enumerate(runs)]
        try:
            _relay(futures, events, on_epoch)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    errors = [future.exception() for future in futures]
    return [Failure(run, error) for run, error in zip(runs, errors, strict=True) if error is not None]


def _one_by_one(runs: Sequence[Run], resume: bool, on_epoch: OnEpoch) -> list[Failure]:
    failures = []
    for index, run in enumerate(runs):
        try:
            execute(run, resume=resume, on_epoch=lambda record, index=index: on_epoch(index, record))  # type: ignore[misc]
        except Exception as error:  # as in a process of its own
            failures.append(Failure(run, error))
    return failures


_events: Any = None


def _start_worker(events: Any, threads: int) -> None:
    global _events
    _events = events
    torch.set_num_threads(threads)


def _execute_in_worker(index: int, run: Run, resume: bool) -> None:
    execute(run, resume=resume, on_epoch=lambda record: _events.put((index, record)))


def _relay(futures: Sequence[Future[None]], events: Any, on_epoch: OnEpoch) -> None:
    """Hand on what the workers say until all are done and nothing is left to say."""
    while True:
        finished = all(future.done() for future in futures)
        try:
            while True:
                on_epoch(*events.get(timeout=0.1))
        except queue.Empty:
            if finished:
                return
