"""Ranks that are killed, stopped, or killed while they save, and other numbers of ranks that go on: the same course?

Each life is one to four ranks, DDP or FSDP2 drawn anew, without a launcher. One rank is struck; the others must end by
themselves and name it. The last life goes on to the end, and its records are compared with those of one process that
nobody disturbed: all is computed in float64, numbers must agree to 1e-9 and batch sizes exactly.
"""

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from faults import rank_in_double
from faults.courses import costless_epochs, differences, num_records, version
from faults.outcome import Outcome, Verdict, worst
from faults.processes import Command, start
from faults.shop import Shop

EXPERIMENT = "synthetic-nonconvex"
WORDS = ("run", EXPERIMENT, "--methods", "divebatch", "--trials", "1", "--epochs", "30", "--checkpoint-steps", "5")
FAULTS = ("killed", "stopped", "killed while saving")
SIZES = {"killed": (2, 4), "stopped": (2, 3), "killed while saving": (1, 3)}
"""Fewest and most ranks of a life."""


@dataclass(frozen=True)
class Life:
    """The ranks of one start."""

    ranks: list[Command]
    sharding: str

    def codes(self) -> list[int | None]:
        return [rank.end() for rank in self.ranks]


def tries(shop: Shop) -> Iterator[Outcome]:
    whole = shop.fresh("whole")
    if set(begin(shop, 1, "ddp", whole).codes()) != {0}:
        yield Outcome("rank: undisturbed", "lost")
        return
    left = shop.tries(quick=4, full=16)
    while left > 0:
        outcomes = list(one_run(shop, whole, left))
        left -= len(outcomes)
        yield from outcomes
    for _ in range(shop.tries(quick=1, full=2)):
        yield restarted(shop, whole)


def one_run(shop: Shop, whole: Path, most: int) -> Iterator[Outcome]:
    """Life by life, until the run reaches its end."""
    out, outcomes = shop.fresh("ranks"), []
    while len(outcomes) < most:
        # Each kind in turn, so that few tries have all of them.
        outcome = live(shop, out, FAULTS[len(outcomes) % len(FAULTS)])
        if outcome is None:
            break
        outcomes.append(outcome)
    last = begin(shop, 2, "ddp", out)
    end = verdict_of(last, records_path(out), records_path(whole))
    for each in outcomes:
        yield Outcome(each.fault, worst(each.verdict, end), each.detail, each.seconds)


def live(shop: Shop, out: Path, fault: str) -> Outcome | None:
    """Until one rank was struck and the others have ended; None where the run came to its end before."""
    size, sharding = shop.chance.randint(*SIZES[fault]), shop.chance.choice(["ddp", "fsdp"])
    life = begin(shop, size, sharding, out)
    victim = 0 if fault == "killed while saving" else shop.chance.randrange(size)
    if not wait_for_instant(out, life.ranks[0], fault, shop.chance):
        codes = life.codes()
        return None if set(codes) == {0} else Outcome(f"rank: {fault}", "lost", f"ended before with {codes}")
    life.ranks[victim].send(signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
    struck = time.monotonic()
    others = [rank for rank in life.ranks if rank is not life.ranks[victim]]
    codes = [rank.end() for rank in others]
    seconds = time.monotonic() - struck
    life.ranks[victim].kill()
    detail = f"rank {victim} of {size}, {sharding}, {num_records(records_path(out))} records; {said(others)}"
    return Outcome(f"rank: {fault}", judged(others, codes, victim), detail, seconds)


def wait_for_instant(out: Path, rank: Command, fault: str, chance: random.Random) -> bool:
    """Shortly after one of the next checkpoints, or in the middle of one."""
    path = records_path(out).with_suffix(".ckpt")
    seen, saves, scratch = {version(path)}, chance.randint(2, 8), path.with_name(f"{path.name}.tmp")
    if not rank.wait_for(lambda: seen.add(version(path)) or len(seen) > saves):
        return False
    if fault == "killed while saving":
        return rank.wait_for(scratch.exists)
    time.sleep(chance.uniform(0, 0.1))
    return rank.is_running


def judged(others: list[Command], codes: list[int | None], victim: int) -> Verdict:
    """Whether those that are left ended in time, and one of them said whom they lost."""
    if None in codes:
        return "hung"
    is_named = not others or any(f"rank {victim}" in line for line in said(others).split("; "))
    return "whole" if is_named and not any(rank.has_traceback for rank in others) else "traceback"


def said(ranks: list[Command]) -> str:
    """What ranks said of others, each thing once."""
    told = [
        line.split(": ") for rank in ranks for line in rank.output.splitlines() if line.startswith("divebatch: rank")
    ]
    return "; ".join(dict.fromkeys(words[2] for words in told if len(words) > 2))


def verdict_of(last: Life, records: Path, whole: Path) -> Verdict:
    codes = last.codes()
    if None in codes:
        return "hung"
    if set(codes) != {0}:
        return "lost"
    return "mixed up" if differences(costless_epochs(records), costless_epochs(whole)) else "whole"


def begin(shop: Shop, size: int, sharding: str, out: Path) -> Life:
    """As somebody would who sets the environment by hand."""
    words = [*WORDS, "--out", str(out), "--resume", "--quiet", "--sharding", sharding]
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **place} for rank in range(size)]
    return Life([start(shop.log(), rank_in_double.be_a_rank, words, **number) for number in numbers], sharding)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def records_path(out: Path) -> Path:
    return out / EXPERIMENT / "divebatch" / "seed-0.jsonl"


# Under torchrun


def restarted(shop: Shop, whole: Path) -> Outcome:
    """A rank is killed, torchrun starts the job anew, and it goes on by itself."""
    out, fault = shop.fresh("torchrun"), "rank: killed under torchrun --max-restarts 1"
    launcher = start(shop.log(), be_torchrun, [*WORDS, "--out", str(out), "--quiet"])
    if not launcher.wait_for(lambda: num_records(records_path(out)) > 2):
        launcher.kill()
        return Outcome(fault, "lost", launcher.last_words)
    pid = launcher.process.pid
    victim = int(shop.chance.choice(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    os.kill(victim, signal.SIGKILL)
    struck = time.monotonic()
    code = launcher.end()
    seconds = time.monotonic() - struck
    if code != 0:
        return Outcome(fault, "hung" if code is None else "lost", launcher.last_words, seconds)
    is_same = not differences(costless_epochs(records_path(out)), costless_epochs(records_path(whole)))
    return Outcome(fault, "whole" if is_same else "mixed up", "", seconds)


def be_torchrun(words: list[str]) -> None:
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    program = [sys.executable, "-m", "torch.distributed.run", *options, rank_in_double.__file__, *words]
    os.execv(program[0], program)
