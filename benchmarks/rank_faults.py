"""Ranks of real jobs killed by SIGKILL at random instants, and other numbers of ranks that go on: the same course?

    python benchmarks/rank_faults.py [--kills 8] [--seed 0] [--json FILE]

Each life is `torchrun --nproc-per-node W ... run`, or one plain process, with W from 1 to 4 and DDP or FSDP2 drawn
anew. Shortly after one of its next checkpoints one rank is killed; the job must come down by itself, and the seconds
that takes are noted. The last life goes on to the end, and its records are compared with those of one process that
nobody disturbed: all computation is in float64, numbers must agree to 1e-9 and batch sizes exactly. Exits with 1 if
anything differs. CPU, one thread a rank, about ten seconds a kill.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from divebatch.__main__ import main as divebatch
from divebatch.lab.experiments.datasets.synthetic import Synthetic
from faults import costless_epochs, version

EXPERIMENT = "synthetic-nonconvex"
WORDS = ("run", EXPERIMENT, "--methods", "divebatch", "--trials", "1", "--epochs", "30", "--checkpoint-steps", "5")
RANK = "--be-a-rank"
LONGEST_END = 60.0
"""Seconds after which a job that does not come down counts as hanging."""


@dataclass(frozen=True)
class Kill:
    """One life and its end."""

    ranks: int
    sharding: str
    victim: int
    epochs: int
    """Records on disk."""
    seconds_to_end: float


def be_a_rank() -> None:
    """What each process does: `divebatch` in float64."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    draw = Synthetic._draw
    Synthetic._draw = lambda self, generator: tuple(map(torch.Tensor.double, draw(self, generator)))
    sys.argv = ["divebatch", *sys.argv[2:]]
    divebatch()


def start(ranks: int, sharding: str, out: Path) -> "subprocess.Popen[bytes]":
    words = [__file__, RANK, *WORDS, "--out", str(out), "--resume", "--quiet", "--sharding", sharding]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher = torchrun if ranks > 1 else ["-u"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *launcher, *words], stderr=subprocess.DEVNULL, env=environment)


def ranks_of(process: "subprocess.Popen[bytes]", count: int) -> list[int]:
    """Their process ids."""
    if count == 1:
        return [process.pid]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


def live(out: Path, chance: random.Random) -> Kill | None:
    """Until the kill, or None where the run came to its end before."""
    ranks, checkpoint = chance.randint(1, 4), records_path(out).with_suffix(".ckpt")
    sharding = chance.choice(["ddp", "fsdp"])
    process = start(ranks, sharding, out)
    seen, saves = {version(checkpoint)}, chance.randint(2, 10)
    while process.poll() is None and len(seen) <= saves:
        time.sleep(0.002)
        seen.add(version(checkpoint))
    time.sleep(chance.uniform(0, 0.1))
    if process.poll() is not None:
        require(process.returncode == 0, f"{ranks} ranks ended with {process.returncode}")
        return None
    victim = chance.randrange(ranks)
    os.kill(ranks_of(process, ranks)[victim], signal.SIGKILL)
    struck = time.monotonic()
    process.wait(LONGEST_END)
    path = records_path(out)
    return Kill(ranks, sharding, victim, path.read_bytes().count(b"\n") - 1, round(time.monotonic() - struck, 2))


def records_path(out: Path) -> Path:
    return out / EXPERIMENT / "divebatch" / "seed-0.jsonl"


def differences(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> list[str]:
    found = [] if len(one) == len(two) else [f"{len(one)} epochs and {len(two)}"]
    for mine, other in zip(one, two, strict=False):
        for key, value in other.items():
            is_close = isinstance(value, float) and abs(mine[key] - value) <= 1e-9 * abs(value)
            if not is_close and mine[key] != value and key != "reason":
                found.append(f"epoch {other['epoch']}: {key} is {mine[key]!r} and not {value!r}")
    return found


def require(holds: bool, message: str) -> None:
    if not holds:
        raise SystemExit(message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    chance, kills = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as folder:
        whole, out, runs = Path(folder) / "whole", Path(folder) / "0", 1
        require(start(1, "ddp", whole).wait() == 0, "the undisturbed run failed")
        print(f"{'ranks':>6} {'sharding':>9} {'victim':>7} {'epochs':>7} {'down after, s':>14}")
        while len(kills) < options.kills:
            kill = live(out, chance)
            if kill is None:  # came to its end: compare, and begin anew
                compare(out, whole)
                out, runs = Path(folder) / str(runs), runs + 1
                continue
            kills.append(kill)
            places = f"{kill.ranks:6} {kill.sharding:>9} {kill.victim:7} {kill.epochs:7}"
            print(f"{places} {kill.seconds_to_end:14}", flush=True)
        require(start(2, "ddp", out).wait() == 0, "the last life failed")
        compare(out, whole)
        sizes = sorted({epoch["batch_size"] for epoch in costless_epochs(records_path(whole))})
    print(f"{len(kills)} kills over {runs} runs, batch sizes {sizes}: the same course to 1e-9")
    if options.json:
        options.json.write_text(json.dumps([asdict(kill) for kill in kills], indent=1) + "\n")


def compare(out: Path, whole: Path) -> None:
    found = differences(costless_epochs(records_path(out)), costless_epochs(records_path(whole)))
    require(not found, "\n".join(found[:5]))


if __name__ == "__main__":
    be_a_rank() if RANK in sys.argv else main()
