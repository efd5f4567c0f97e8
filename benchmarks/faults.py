"""Real runs killed by SIGKILL at random instants and resumed: do they end in the same bits as undisturbed ones?

    python benchmarks/faults.py [--kills 30] [--seed 0] [--json FILE]

Each case is one `python -m divebatch run ...` command. Its process is killed again and again, sometimes while it
starts, mostly right after a checkpoint, and started again with --resume. Where a run reaches its end, its records
(costs left out) and its last weights are compared with those of a run that nobody disturbed. A table says where each
kill struck: epoch and step of the newest checkpoint, the batch size in force, and the records on disk. Exits with 1 if
anything differs. CPU, one thread, about five minutes.
"""

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from divebatch.lab.training import load_checkpoint
from divebatch.lab.training.checkpoint_store import open_newest
from divebatch.ranks import Ranks
from divebatch.records import EpochRecord, read_run

COSTS = {
    *("train_seconds", "total_seconds", "eval_seconds", "measure_seconds", "compile_seconds"),
    "peak_memory_bytes",
}
CPU = torch.device("cpu")
START_SECONDS = 4.0
"""Until a process trains, about."""
SHARE_AT_START = 0.2
"""Of the kills that may strike before the first new checkpoint."""


@dataclass(frozen=True)
class Case:
    """A command and where its files are."""

    name: str
    words: tuple[str, ...]
    records: str

    def start(self, out: Path) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "divebatch", "run", *self.words, "--jobs", "1", "--resume", "--out", str(out)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def records_path(self, out: Path) -> Path:
        return out / self.records

    def checkpoint_path(self, out: Path) -> Path:
        return self.records_path(out).with_suffix(".ckpt")


@dataclass(frozen=True)
class Kill:
    """Where one struck, as the disk tells."""

    case: str
    run: int
    seconds: float
    """Since the process was started."""
    epoch: int | None
    """Complete ones of the newest checkpoint; None where there is none yet."""
    step: int | None
    """Steps into the next epoch."""
    batch_size: int | None
    records: int
    scratch: bool
    """Whether a half-made file was left."""


@dataclass
class Outcome:
    """All kills of a case, and for each of its runs whether it ended as the undisturbed one."""

    case: str
    kills: list[Kill] = field(default_factory=list)
    same_records: list[bool] = field(default_factory=list)
    same_weights: list[bool] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return all(self.same_records) and all(self.same_weights)


def write_images(folder: Path, per_file: int) -> None:
    """A small set in the format of CIFAR-10."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = [int(label) for label in rng.integers(0, 10, per_file)]
        images = rng.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"labels": labels, "data": images}, protocol=2))


def cases(scratch: Path) -> list[Case]:
    write_images(scratch / "data" / "cifar-10-batches-py", per_file=60)
    synthetic = ("synthetic-nonconvex", "--methods", "divebatch", "--epochs", "60", "--checkpoint-steps", "3")
    images = (
        *("cifar10", "--model", "resnet20", "--data-dir", str(scratch / "data"), "--epochs", "12"),
        *("--methods", "divebatch-every-epoch", "--checkpoint-steps", "1"),
    )
    return [
        Case("synthetic", (*synthetic, "--trials", "1"), "synthetic-nonconvex/divebatch/seed-0.jsonl"),
        Case("images", (*images, "--trials", "1"), "cifar10/divebatch-every-epoch/seed-0.jsonl"),
    ]


def version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def wait_for_instant(case: Case, out: Path, process: "subprocess.Popen[bytes]", chance: random.Random) -> None:
    """Until a random moment of its start, or shortly after one of its next checkpoints; or its end."""
    at_start = chance.random() < SHARE_AT_START
    saves, deadline = chance.randint(1, 12), time.monotonic() + chance.uniform(0, START_SECONDS)
    seen = {version(case.checkpoint_path(out))}
    while process.poll() is None and (time.monotonic() < deadline if at_start else len(seen) <= saves):
        time.sleep(0.0005)
        seen.add(version(case.checkpoint_path(out)))
    time.sleep(0 if at_start else chance.uniform(0, 0.03))


def look(case: Case, out: Path, run: int, seconds: float) -> Kill:
    """What a kill left on disk."""
    saved = open_newest(case.checkpoint_path(out), device=CPU, ranks=Ranks.alone())
    state = None if saved is None else saved.rest
    loader = state["control"]["loader"] if state else {}
    under_way = loader.get("pass") or {}
    path = case.records_path(out)
    lines = path.read_bytes().count(b"\n") if path.exists() else 0
    return Kill(
        case=case.name,
        run=run,
        seconds=round(seconds, 2),
        epoch=state["control"]["epoch"] if state else None,
        step=under_way.get("batches", 0) if state else None,
        batch_size=under_way.get("batch_size", loader.get("batch_size")),
        records=max(0, lines - 1),
        scratch=any(out.rglob("*.tmp")),
    )


def costless_epochs(path: Path) -> list[dict[str, Any]]:
    records: list[EpochRecord] = read_run(path)[1]
    return [{key: value for key, value in asdict(record).items() if key not in COSTS} for record in records]


def has_same_weights(case: Case, one: Path, two: Path) -> bool:
    models = [load_checkpoint(case.checkpoint_path(out), device=CPU)["model"] for out in (one, two)]
    return models[0].keys() == models[1].keys() and all(
        torch.equal(models[0][key], models[1][key]) for key in models[0]
    )


def lives(case: Case, out: Path, run: int, chance: random.Random) -> Iterator[Kill]:
    """Kill by kill, until the run reaches its end or nobody asks for more."""
    while True:
        started = time.monotonic()
        process = case.start(out)
        wait_for_instant(case, out, process, chance)
        process.kill()
        if process.wait() == 0:
            return
        yield look(case, out, run, time.monotonic() - started)


def finish(case: Case, out: Path) -> None:
    if case.start(out).wait() != 0:
        raise SystemExit(f"{case.name}: a resume failed; its files are in {out}")


def judge(case: Case, scratch: Path, kills: int, chance: random.Random) -> Outcome:
    whole, outcome = scratch / case.name / "whole", Outcome(case.name)
    finish(case, whole)
    outcome.batch_sizes = sorted({record["batch_size"] for record in costless_epochs(case.records_path(whole))})
    while len(outcome.kills) < kills:
        run = len(outcome.same_records)
        out = scratch / case.name / str(run)
        for kill in lives(case, out, run, chance):
            outcome.kills.append(kill)
            show(kill)
            if len(outcome.kills) == kills:
                break
        finish(case, out)
        outcome.same_records.append(
            costless_epochs(case.records_path(out)) == costless_epochs(case.records_path(whole))
        )
        outcome.same_weights.append(has_same_weights(case, out, whole))
    return outcome


def show(kill: Kill) -> None:
    places = (kill.case, kill.run, f"{kill.seconds:.2f}", kill.epoch, kill.step, kill.batch_size, kill.records)
    print(
        *(f"{'-' if place is None else place:>10}" for place in places),
        "  scratch left" if kill.scratch else "",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="in all, shared between the cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    print(*(f"{head:>10}" for head in ("case", "run", "seconds", "epoch", "step", "batch", "records")))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        planned = cases(scratch)
        outcomes = [judge(case, scratch, -(-options.kills // len(planned)), chance) for case in planned]
    for outcome in outcomes:
        mid_epoch = sum(bool(kill.step) for kill in outcome.kills)
        print(
            f"{outcome.case}: {len(outcome.kills)} kills ({mid_epoch} with a checkpoint within an epoch) over "
            f"{len(outcome.same_records)} runs, batch sizes {outcome.batch_sizes}; same records "
            f"{sum(outcome.same_records)}, same weights {sum(outcome.same_weights)} of {len(outcome.same_records)}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    if not all(outcome.is_good for outcome in outcomes):
        raise SystemExit("a resumed run differs from the undisturbed one")


if __name__ == "__main__":
    main()
