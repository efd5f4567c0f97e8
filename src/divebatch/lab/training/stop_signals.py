"""SIGTERM and Ctrl-C as a request to stop after the step under way."""

import os
import signal
import sys
import threading
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from divebatch.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _StartedQuietly(ForkProcess):
    """Begins with all signals held back, so that its own threads leave them to `leave_to_parent`, too."""

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _QuietStart(ForkContext):
    Process = _StartedQuietly


def worker_context() -> BaseContext | None:
    """How processes that load data are to be started; None for the usual way, on other systems than Linux."""
    return _QuietStart() if sys.platform == "linux" else None


def leave_to_parent(_: int = 0) -> None:
    """In a process that loads data: take no signal but the parent's own SIGTERM, which comes when it has saved.

    A job manager sends SIGTERM, and a terminal Ctrl-C, to every process of a job.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        # Blocked and waited for: a handler would not be told who has sent it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


class StopRequest:
    """Inside, a signal sets `is_set`; a second Ctrl-C interrupts at once, as if nobody listened."""

    def __init__(self) -> None:
        self.is_set, self._was_interrupted = False, False
        self._before: dict[signal.Signals, Any] = {}

    def after_step(self) -> bool:
        """Whether to stop before the next step."""
        return self.is_set

    def now(self) -> bool:
        """Whether to stop here."""
        return self.is_set

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python takes handlers from no other
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside Python

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self._was_interrupted:
            raise KeyboardInterrupt
        self._was_interrupted = self._was_interrupted or number == signal.SIGINT
        self.is_set = True


class AgreedStop(StopRequest):
    """A request to any rank stops all of them after the same step: one that stopped alone would leave the others stuck.

    Every `every` steps the requests are added up in the background and read as many steps later, so no step waits.
    """

    def __init__(self, ranks: Ranks, *, every: int = 4) -> None:
        super().__init__()
        self._ranks, self._every, self._steps = ranks, every, 0
        self._requests = torch.zeros(1)
        self._poll: dist.Work | None = None

    def after_step(self) -> bool:
        """The same answer on all ranks."""
        self._steps += 1
        if self._steps % self._every:
            return False
        is_agreed = self._polled()
        self._requests = torch.tensor([float(self.is_set)])
        # In the background, read some steps later: no step waits, and all ranks stop after the same one.
        self._poll = dist.all_reduce(self._requests, async_op=True)
        return is_agreed

    def now(self) -> bool:
        """The same answer on all ranks, after waiting for them."""
        return self._polled() or self._ranks.sum_numbers([float(self.is_set)])[0] > 0

    def _polled(self) -> bool:
        if self._poll is None:
            return False
        self._poll.wait()
        self._poll = None
        return bool(self._requests.item() > 0)
