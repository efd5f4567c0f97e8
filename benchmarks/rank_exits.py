"""How often a program aborts that ends right after a collective over gloo: this library's, and torch's called directly.

A thread of gloo drops the tensor it reduced a moment after it has said that it is done, and needs the interpreter's
lock for that; if the interpreter is leaving by then, the process aborts. A switch interval of many seconds keeps the
lock from the thread for as long as the program does not give it away, which makes a rare event a frequent one.

    python benchmarks/rank_exits.py [--pairs 100] [--check]
"""

import argparse
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


def direct() -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--check", action="store_true", help="exit with 1 if one aborted that used the library alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {talk.__name__: count_aborted(talk, options.pairs) for talk in (direct, through_library)}
    for name, aborted in found.items():
        print(f"{name:>16}: {aborted} of {2 * options.pairs} processes aborted")
    if options.check and found[through_library.__name__]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
