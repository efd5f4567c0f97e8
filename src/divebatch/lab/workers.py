"""Several runs, in turn or in parallel processes; if a process dies, only its current run fails."""

import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from divebatch.errors import DivebatchError, DivergedError, RankError, StoppedError, WorkerError
from divebatch.lab.ranks import SIGNALS, StopRequest
from divebatch.lab.runs import Run, execute, num_cores
from divebatch.ranks import Ranks
from divebatch.records import EpochRecord

LOOK = 0.1
"""Seconds between two checks for a request to stop."""
OnEpoch = Callable[[int, EpochRecord], None]
"""A callback in the parent process with the run's index and each finished epoch."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that did not reach its end."""

    run: Run
    error: BaseException

    def __str__(self) -> str:
        return f"{self.run.name}: {self.error}"


def default_jobs(device: str, num_runs: int) -> int:
    """Return the number of parallel runs: one per core on a CPU, one in all on a GPU."""
    return max(1, min(num_runs, num_cores())) if device == "cpu" else 1


def execute_all(
    runs: Sequence[Run], *, jobs: int, resume: bool, on_epoch: OnEpoch, on_resume: OnEpoch = lambda *_: None
) -> list[Failure]:
    """Execute every run and return the failures; if asked to stop, save all runs and raise `StoppedError`.

    `on_resume` gets the last epoch of a run before a resume, and `on_epoch` all later epochs. Several ranks train each
    run together, one run after the other; an error that not all ranks share ends all of them.
    """
    ranks = Ranks.here()
    with StopRequest(ranks) as stop:
        if jobs == 1 or not ranks.is_alone:
            return _in_turn(runs, resume, on_epoch, on_resume, stop, ranks)
        errors = _in_processes(runs, jobs, resume, {"epoch": on_epoch, "resume": on_resume}, stop)
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
            if not ranks.is_alone and not isinstance(error, DivergedError):  # divergence occurs on all ranks alike
                if isinstance(error, DivebatchError):
                    raise RankError(f"rank {ranks.rank} of {ranks.size}, {run.name}: {error}") from error
                raise
            failures.append(Failure(run, error))
    return failures


def _in_processes(
    runs: Sequence[Run], jobs: int, resume: bool, listeners: dict[str, OnEpoch], stop: StopRequest
) -> dict[int, BaseException]:
    """Execute all runs, `jobs` at a time; return the errors of failed runs by index."""
    waiting = deque(enumerate(runs))
    messages: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
    # All workers together must not use more threads than there are cores.
    threads = max(1, num_cores() // jobs)
    workers = [_Worker(waiting, messages, resume, threads) for _ in range(min(jobs, len(runs)))]
    errors: dict[int, BaseException] = {}
    ended = 0
    try:
        while ended < len(runs):
            if stop.is_set:
                while waiting:
                    index, run = waiting.popleft()
                    messages.put((index, "end", StoppedError(f"stopped before {run.records_path} was begun")))
                for worker in workers:
                    worker.ask_to_stop()
            with suppress(queue.Empty):
                index, kind, content = messages.get(timeout=LOOK)
                if kind in listeners:
                    listeners[kind](index, content)
                    continue
                ended += 1
                if content is not None:
                    errors[index] = content
    except BaseException:
        for worker in workers:
            worker.ask_to_stop()
        raise
    return errors


class _Worker(threading.Thread):
    """A thread that executes waiting runs in its own process, which is replaced if it dies."""

    def __init__(
        self, waiting: deque[tuple[int, Run]], messages: queue.SimpleQueue[Any], resume: bool, threads: int
    ) -> None:
        super().__init__(daemon=True)
        self._waiting, self._messages, self._resume, self._threads = waiting, messages, resume, threads
        self._process: Any = None
        self._is_asked = False
        self.start()

    def ask_to_stop(self) -> None:
        """Send SIGTERM once, after which the process finishes its step and saves."""
        if self._process is not None and not self._is_asked:
            self._is_asked = True
            self._process.terminate()

    def run(self) -> None:
        line: Connection | None = None
        with suppress(IndexError):
            while True:
                index, run = self._waiting.popleft()
                try:
                    line = line or self._start_process()
                    line.send((run, self._resume))
                    kind = ""
                    while kind != "end":
                        kind, content = line.recv()
                        self._messages.put((index, kind, content))
                except Exception as error:
                    cause, line = error, None
                    if isinstance(error, EOFError | OSError) and self._process is not None:  # the process died
                        self._process.join()
                        cause = WorkerError(_cause_of_death(self._process.exitcode))
                    self._messages.put((index, "end", cause))
        if line is not None:
            with suppress(OSError):
                line.send(None)

    def _start_process(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        # Signals are blocked until the new process can handle them, which takes seconds.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process = context.Process(target=_work, args=(theirs, self._threads))
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._process = process
        return ours


def _cause_of_death(code: int) -> str:
    how = f"exited with {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    memory = ", which a system also does where memory runs out" if code == -signal.SIGKILL else ""
    return f"its process {how}{memory}; --resume continues the run from its last checkpoint"


# In the process


def _work(line: Connection, threads: int) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with StopRequest() as stop:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        while (task := line.recv()) is not None:
            run, resume = task
            line.send(("end", _outcome(line, run, resume, stop)))


def _outcome(line: Connection, run: Run, resume: bool, stop: StopRequest) -> BaseException | None:
    """Execute a run and return its error in a form that can be sent; None: the run succeeded."""
    try:
        execute(
            run,
            resume=resume,
            on_epoch=lambda record: line.send(("epoch", record)),
            on_resume=lambda record: line.send(("resume", record)),
            stop=stop,
        )
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # a class that cannot be unpickled
            return RuntimeError(f"{type(error).__name__}: {error}")
        return error
    return None


def _die_with_parent() -> None:
    """Exit when the parent dies, instead of continuing runs that nobody watches."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
