"""Processes of `divebatch`: real ones, forked from one that has imported torch already, which saves seconds each."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from divebatch.__main__ import main
from faults.outcome import Outcome

LIMIT = 240.0
"""Seconds after which a process that ought to end hangs; generous, since others may use the machine."""
LOOK = 0.001
"""Seconds from one look at a process or a file to the next."""
PRELOADED = [
    "divebatch.cli",
    "divebatch.lab",
    "divebatch.lab.search",
    "torch.distributed.fsdp",
    "torch._dynamo",
]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)


@dataclass
class Command:
    """A process in a session of its own, its output in a file."""

    process: Any
    log: Path
    began: float = field(default_factory=time.monotonic)

    @property
    def is_running(self) -> bool:
        return self.process.exitcode is None

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output

    @property
    def last_words(self) -> str:
        """The first line it said as `divebatch`, or the last that there is."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return next((line for line in lines if line.startswith("divebatch: ")), lines[-1] if lines else "nothing said")

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def wait_for(self, event: Callable[[], Any], *, limit: float = LIMIT) -> bool:
        """Whether it came to the event before its own end and within the limit."""
        deadline = time.monotonic() + limit
        while self.is_running and time.monotonic() < deadline:
            if event():
                return True
            time.sleep(LOOK)
        return False

    def end(self, *, limit: float = LIMIT) -> int | None:
        """Its exit code; None where it does not end by itself. What it has started ends with it."""
        self.process.join(limit)
        code: int | None = self.process.exitcode
        self.kill()
        return code

    def kill(self) -> None:
        """With all that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()


def start(log: Path, function: Callable[..., Any], *arguments: Any, **environment: str) -> Command:
    """A process that calls `function`; it may be pickled by its name."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    process = CONTEXT.Process(target=_be, args=(log, environment, function, arguments))
    process.start()
    return Command(process, log)


def divebatch(log: Path, *words: str, **environment: str) -> Command:
    """The command line."""
    return start(log, _command, list(words), **environment)


def in_child(log: Path, tries: Callable[..., Iterator[Outcome]], *arguments: Any) -> Iterator[Outcome]:
    """What `tries` yields in a process of its own; one that is silent for long hangs, and the rest is left out."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    child = start(log, _tell, theirs, tries, arguments)
    theirs.close()
    fault = tries.__module__.rpartition(".")[2]
    try:
        while ours.poll(LIMIT):
            outcome = ours.recv()
            if outcome is None:
                return
            yield outcome
        yield Outcome(fault, "hung", f"after {LIMIT:.0f} s without a word")
    except EOFError:
        yield Outcome(fault, "traceback", child.last_words)
    finally:
        child.kill()


# In the process


def _be(log: Path, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*arguments)


def _command(words: list[str]) -> None:
    sys.argv = ["divebatch", *words]
    main()


def _tell(line: Connection, tries: Callable[..., Iterator[Outcome]], arguments: tuple[Any, ...]) -> None:
    for outcome in tries(*arguments):
        line.send(outcome)
    line.send(None)
