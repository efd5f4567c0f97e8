"""The processes of `run --jobs 2`: one that works and the one that started them get SIGKILL."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from faults.courses import num_records, same_bits
from faults.outcome import Outcome, Verdict
from faults.processes import LIMIT, LOOK, Command, divebatch
from faults.shop import Shop

SEEDS = 3
WORDS = ("run", "synthetic-nonconvex", "--methods", "sgd-small", "--epochs", "200", "--trials", str(SEEDS))


def tries(shop: Shop) -> Iterator[Outcome]:
    whole = shop.fresh("whole")
    if start(shop, whole, jobs=1).end() != 0:
        yield Outcome("pool: undisturbed", "lost")
        return
    for _ in range(shop.tries(quick=1, full=3)):
        yield one_try(shop, whole, "a worker at work", kill_busy, code=1)
        yield one_try(shop, whole, "the parent", kill_parent, code=-signal.SIGKILL)


def one_try(shop: Shop, whole: Path, whom: str, kill: Callable[[Command, Path], bool], *, code: int) -> Outcome:
    out, fault = shop.fresh("pool"), f"pool: SIGKILL to {whom}"
    command = start(shop, out, jobs=2)
    if not kill(command, out):
        command.kill()
        return Outcome(fault, "lost", "the moment to strike never came")
    verdict, detail = judged(command, command.end(), code)
    if verdict != "whole":
        return Outcome(fault, verdict, detail)
    again = start(shop, out, "--resume", jobs=1)
    if again.end() != 0:
        return Outcome(fault, "traceback" if again.has_traceback else "lost", again.last_words)
    is_same = all(same_bits(records(out, seed), records(whole, seed)) for seed in range(SEEDS))
    return Outcome(fault, "whole" if is_same else "mixed up", detail)


def judged(command: Command, ended: int | None, expected: int) -> tuple[Verdict, str]:
    if ended is None:
        return "hung", ""
    if command.has_traceback or (ended == 1 and "was killed by SIGKILL" not in command.output):
        return "traceback", command.last_words
    if ended != expected:
        return "lost", f"ended with {ended}: {command.last_words}"
    return "whole", command.last_words if ended == 1 else ""


def start(shop: Shop, out: Path, *more: str, jobs: int) -> Command:
    return divebatch(shop.log(), *WORDS, "--jobs", str(jobs), "--out", str(out), "--quiet", *more)


def records(out: Path, seed: int) -> Path:
    return out / "synthetic-nonconvex" / "sgd-small" / f"seed-{seed}.jsonl"


# Whom to kill


def kill_busy(command: Command, out: Path) -> bool:
    """Whichever has written a few epochs of the first run."""
    if not command.wait_for(lambda: num_records(records(out, 0)) > 2):
        return False
    busy = [pid for pid in workers(command) if str(records(out, 0)) in open_files(pid)]
    for pid in busy:
        os.kill(pid, signal.SIGKILL)
    return bool(busy)


def kill_parent(command: Command, out: Path) -> bool:
    if not command.wait_for(lambda: all(num_records(records(out, seed)) > 2 for seed in (0, 1))):
        return False
    of_it = workers(command)
    command.send(signal.SIGKILL)
    # They must end by themselves: one that went on would write into the files of the run that resumes its own.
    deadline = time.monotonic() + LIMIT
    while any(Path(f"/proc/{pid}").exists() for pid in of_it) and time.monotonic() < deadline:
        time.sleep(LOOK)
    return not any(Path(f"/proc/{pid}").exists() for pid in of_it)


def workers(command: Command) -> list[int]:
    """The children that execute runs; multiprocessing has another one, which tidies up."""
    pid = command.process.pid
    with suppress(OSError):
        # A child belongs to the thread that started it.
        children = [
            child for each in Path(f"/proc/{pid}/task").glob("*/children") for child in each.read_text().split()
        ]
        return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return []


def open_files(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(path))
    return found
