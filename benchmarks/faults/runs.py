"""Runs that get SIGKILL or SIGTERM at random instants and are resumed: do they end in the same bits?

Each run is killed again and again, sometimes while it starts, mostly right after a checkpoint, and resumed until it
reaches its end. The rows say where the kills struck, as the disk tells.
"""

import pickle
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from divebatch.lab.checkpoint import load_newest
from faults.courses import CPU, num_records, same_bits, version
from faults.outcome import Outcome, Verdict, worst
from faults.processes import LOOK, Command, divebatch
from faults.shop import Shop

START_SECONDS = 1.0
"""Until a process trains, about."""
SHARE_AT_START = 0.2
"""Of the kills that may strike before the first new checkpoint."""


@dataclass(frozen=True)
class Case:
    """A command and where its files are."""

    name: str
    words: tuple[str, ...]
    records: str

    def start(self, shop: Shop, out: Path) -> Command:
        return divebatch(shop.log(), "run", *self.words, "--jobs", "1", "--resume", "--out", str(out))

    def records_path(self, out: Path) -> Path:
        return out / self.records

    def checkpoint_path(self, out: Path) -> Path:
        return self.records_path(out).with_suffix(".ckpt")


def write_images(folder: Path, per_file: int, *, seed: int = 0) -> None:
    """A small set in the format of CIFAR-10."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = [int(label) for label in rng.integers(0, 10, per_file)]
        images = rng.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"labels": labels, "data": images}, protocol=2))


def cases(shop: Shop) -> list[Case]:
    data = shop.fresh("data")
    write_images(data / "cifar-10-batches-py", per_file=60)
    synthetic = ("synthetic-nonconvex", "--methods", "divebatch", "--epochs", "60", "--checkpoint-steps", "3")
    images = (
        *("cifar10", "--model", "resnet20", "--data-dir", str(data), "--epochs", str(shop.tries(quick=4, full=12))),
        *("--methods", "divebatch-every-epoch", "--checkpoint-steps", "1"),
    )
    return [
        Case("synthetic", (*synthetic, "--trials", "1"), "synthetic-nonconvex/divebatch/seed-0.jsonl"),
        Case("images", (*images, "--trials", "1"), "cifar10/divebatch-every-epoch/seed-0.jsonl"),
    ]


def tries(shop: Shop) -> Iterator[Outcome]:
    for case in cases(shop):
        whole = shop.fresh("whole")
        if case.start(shop, whole).end() != 0:
            yield Outcome("run: undisturbed", "lost", case.name)
            continue
        left = shop.tries(quick=5, full=30)
        while left > 0:
            outcomes = list(one_run(shop, case, whole, left))
            left -= len(outcomes)
            yield from outcomes


def one_run(shop: Shop, case: Case, whole: Path, most: int) -> Iterator[Outcome]:
    """Signal by signal, until the run reaches its end; at most so many, and then it is let go."""
    out, struck = shop.fresh(case.name), []
    while len(struck) < most:
        command = case.start(shop, out)
        wait_for_instant(case, out, command, shop.chance)
        number = shop.chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        command.send(number)
        sent = time.monotonic()
        code = command.end()
        if code == 0:
            break
        struck.append((command, number, code, where(case, out), time.monotonic() - sent))
    last = case.start(shop, out)
    end = verdict_of(last, last.end(), case.records_path(out), case.records_path(whole))
    for command, number, code, place, seconds in struck:
        verdict = worst(end, verdict_of_signal(command, number, code))
        yield Outcome(f"run: {number.name} {place[0]}", verdict, f"{case.name} {place[1]}", seconds)


def wait_for_instant(case: Case, out: Path, command: Command, chance: random.Random) -> None:
    """Until a random moment of its start, or shortly after one of its next checkpoints; or its end."""
    at_start = chance.random() < SHARE_AT_START
    saves, deadline = chance.randint(1, 12), time.monotonic() + chance.uniform(0, START_SECONDS)
    seen = {version(case.checkpoint_path(out))}
    while command.is_running and (time.monotonic() < deadline if at_start else len(seen) <= saves):
        time.sleep(LOOK / 2)
        seen.add(version(case.checkpoint_path(out)))
    time.sleep(0 if at_start else chance.uniform(0, 0.03))


def where(case: Case, out: Path) -> tuple[str, str]:
    """Where a signal struck: in short, and in numbers of the newest checkpoint."""
    saved = load_newest(case.checkpoint_path(out), device=CPU)
    if saved is None:
        return "before its first checkpoint", ""
    control = saved[1]["control"]
    under_way = control["loader"]["pass"] or {}
    steps, size = under_way.get("batches", 0), under_way.get("batch_size", control["loader"]["batch_size"])
    numbers = f"epoch {control['epoch']}, step {steps}, batch {size}, {num_records(case.records_path(out))} records"
    if any(out.rglob("*.tmp")):
        return "while it saves", numbers
    return ("within an epoch" if steps else "between epochs"), numbers


def verdict_of(last: Command, code: int | None, records: Path, whole: Path) -> Verdict:
    """What the resumed run came to."""
    if code is None:
        return "hung"
    if code != 0:
        return "traceback" if last.has_traceback else "lost"
    return "whole" if same_bits(records, whole) else "mixed up"


def verdict_of_signal(command: Command, number: signal.Signals, code: int | None) -> Verdict:
    """Whether the process ended as it should; SIGTERM saves and says how to go on, unless nothing was begun yet."""
    if code is None:
        return "hung"
    says_how = "--resume" in command.output or code == -signal.SIGTERM
    is_clear = not command.has_traceback and (number == signal.SIGKILL or says_how)
    return "whole" if is_clear else "traceback"
