"""A program whose processes end right after a collective over gloo; prints how many of them aborted.

A thread of gloo drops the tensor it reduced a moment after it has said that it is done, and needs the interpreter's
lock for that; if the interpreter is leaving by then, the process aborts. A switch interval of many seconds keeps the
lock from the thread for as long as the program does not give it away, which makes a rare event a frequent one.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from divebatch.ranks import Ranks

LONG_SWITCH_INTERVAL = 1000.0
"""In seconds."""


def through_library() -> None:
    ranks = Ranks.here()
    ranks.gather({"some": "thing"})
    ranks.sum_([torch.ones(1000)])


def called_directly() -> None:
    dist.all_gather_object([None, None], {"some": "thing"})
    dist.all_reduce(torch.ones(1000))


def child(talk: Callable[[], None], rank: int, meeting_point: Path) -> None:
    """Talks and leaves as any program does, through the interpreter's own end."""
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    sys.setswitchinterval(LONG_SWITCH_INTERVAL)
    talk()
    sys.exit()


def start(talk: Callable[[], None], rank: int, meeting_point: Path) -> int:
    pid = os.fork()  # with torch imported already: a start takes no time
    if pid == 0:
        child(talk, rank, meeting_point)
    return pid


def count_aborted(talk: Callable[[], None], pairs: int) -> int:
    scratch = Path(tempfile.mkdtemp())  # no context manager: children that leave would clean up after us
    codes = []
    for pair in range(pairs):
        started = [start(talk, rank, scratch / str(pair)) for rank in range(2)]
        codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    shutil.rmtree(scratch)
    return codes.count(-signal.SIGABRT)


if __name__ == "__main__":
    torch.set_num_threads(1)
    counts = [count_aborted(talk, int(sys.argv[1])) for talk in (through_library, called_directly)]
    print("aborted:", *counts)
