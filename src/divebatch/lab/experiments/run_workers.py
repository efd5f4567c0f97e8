"""Runs in parallel processes, each with its own line to the parent: one that dies takes its own run with it alone."""

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from divebatch.errors import StoppedError, WorkerError
from divebatch.lab.experiments.run import Run
from divebatch.lab.experiments.runner import execute
from divebatch.lab.training.stop_signals import SIGNALS, StopRequest
from divebatch.records import EpochRecord

LOOK = 0.1
"""Seconds from one look at the workers' health to the next."""
Listener = Callable[[int, EpochRecord], None]
Errors = dict[int, BaseException]


def in_processes(
    runs: Sequence[Run], jobs: int, resume: bool, on_epoch: Listener, on_resume: Listener, stop: StopRequest
) -> Errors:
    """Execute all runs, `jobs` at a time. Returns, by the run's index, why one did not reach its end."""
    crew = _Crew(runs, jobs, resume, {"epoch": on_epoch, "resume": on_resume})
    try:
        while crew.is_at_work:
            if stop.is_set:
                crew.stop()
            crew.hand_out()
            crew.listen()
    finally:
        crew.dismiss()
    return crew.errors


@dataclass(slots=True)
class _Worker:
    """A process, the line to it, and the run that it works on; None while it waits for one."""

    process: Any
    line: Connection
    run: int | None = None


@dataclass(slots=True)
class _Crew:
    """The workers and what is left to do."""

    runs: Sequence[Run]
    jobs: int
    resume: bool
    listeners: dict[str, Listener]
    errors: Errors = field(default_factory=dict)
    _workers: list[_Worker] = field(default_factory=list)
    _waiting: deque[int] = field(default_factory=deque)
    _is_stopping: bool = False

    def __post_init__(self) -> None:
        self._waiting.extend(range(len(self.runs)))

    @property
    def is_at_work(self) -> bool:
        """Whether a run waits or is under way."""
        return bool(self._waiting) or any(worker.run is not None for worker in self._workers)

    def stop(self) -> None:
        """Ask those under way to save, once, and begin no other."""
        if self._is_stopping:
            return
        self._is_stopping = True
        while self._waiting:
            index = self._waiting.popleft()
            self.errors[index] = StoppedError(f"stopped before {self.runs[index].records_path} was begun")
        for worker in self._workers:
            worker.process.terminate()  # SIGTERM: they finish their step and save

    def hand_out(self) -> None:
        """Give a run to each worker that waits for one, and to new ones while there may be more."""
        while self._waiting:
            worker = self._free_worker()
            if worker is None:
                return
            index = self._waiting.popleft()
            try:
                worker.line.send((self.runs[index], self.resume))
                worker.run = index
            except OSError:  # killed while it waited: the run is not begun, another takes it
                self._waiting.appendleft(index)
                self._workers.remove(worker)

    def listen(self) -> None:
        """One message of each worker that has something to say: none may drown out a request to stop."""
        ready = wait([worker.line for worker in self._workers], timeout=LOOK)
        for worker in list(self._workers):
            if worker.line in ready:
                self._hear(worker)
            elif not worker.process.is_alive() and not worker.line.poll():
                self._bury(worker)

    def dismiss(self) -> None:
        """Send home those that are left; after an error those under way are ended."""
        for worker in self._workers:
            if worker.run is not None:
                worker.process.terminate()
            with suppress(OSError):  # it is gone already
                worker.line.send(None)
            worker.line.close()

    def _free_worker(self) -> _Worker | None:
        waiting = next((worker for worker in self._workers if worker.run is None), None)
        if waiting is not None or len(self._workers) == self.jobs:
            return waiting
        self._workers.append(_hired(self.jobs))
        return self._workers[-1]

    def _hear(self, worker: _Worker) -> None:
        try:
            kind, content = worker.line.recv()
        except (EOFError, OSError):
            self._bury(worker)
            return
        if kind in self.listeners:
            assert worker.run is not None
            self.listeners[kind](worker.run, content)
            return
        if content is not None and worker.run is not None:
            self.errors[worker.run] = content
        worker.run = None

    def _bury(self, worker: _Worker) -> None:
        """Its own run has failed; the others go on."""
        self._workers.remove(worker)
        worker.process.join()
        worker.line.close()
        if worker.run is not None:
            self.errors[worker.run] = WorkerError(_cause_of_death(worker.process.exitcode))


def _cause_of_death(code: int) -> str:
    how = f"exited with {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    memory = ", which a system also does where memory runs out" if code == -signal.SIGKILL else ""
    return f"its process {how}{memory}; resume=True continues the run from its last checkpoint"


def _hired(jobs: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # Together the workers must not ask for more threads than there are cores.
    threads = max(1, (os.cpu_count() or 1) // jobs)
    process = context.Process(target=_work, args=(theirs, threads))
    with _signals_held():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _signals_held() -> Iterator[None]:
    """A process that is started inside gets signals only when it is ready for them: importing takes it seconds."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the worker


def _work(line: Connection, threads: int) -> None:
    """Execute one run after the other, as the parent sends them, until it sends none."""
    _start(threads)
    with StopRequest() as stop:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        while True:
            task = line.recv()
            if task is None:
                return
            run, resume = task
            line.send(("end", _outcome(line, run, resume, stop)))


def _outcome(line: Connection, run: Run, resume: bool, stop: StopRequest) -> BaseException | None:
    """The error that a run ended with, in a form that can be sent; None for a good end."""
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
        except Exception:  # a class that cannot be built again from what it says
            return RuntimeError(f"{type(error).__name__}: {error}")
        return error
    return None


def _start(threads: int) -> None:
    """What a worker does first."""
    torch.set_num_threads(threads)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A worker that outlived a killed parent would write into the files of the run that resumes its own."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
