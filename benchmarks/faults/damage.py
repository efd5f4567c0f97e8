"""Bits flipped in checkpoints and records, and files cut short: is it noticed?"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from divebatch.errors import CheckpointError
from divebatch.lab import Run, load_checkpoint
from faults.courses import CPU
from faults.outcome import Outcome, Verdict
from faults.processes import in_child
from faults.shop import Shop
from faults.small import begin, copied, resumed, small

Damage = Callable[[bytes, random.Random], bytes]


def tries(shop: Shop) -> Iterator[Outcome]:
    seed = shop.chance.randrange(2**32)
    for family, count in (
        (checkpoints, shop.tries(quick=500, full=2500)),
        (records, shop.tries(quick=40, full=300)),
        (runs, shop.tries(quick=5, full=20)),
    ):
        yield from in_child(shop.log(), family, shop.fresh("damage"), count, seed)


def checkpoints(folder: Path, count: int, seed: int) -> Iterator[Outcome]:
    run, chance = begin(Run(small(), "divebatch", 0, folder)), random.Random(seed)
    good, state = run.checkpoint_path.read_bytes(), load_checkpoint(run.checkpoint_path, device=CPU)
    for name, damage in DAMAGES.items():
        verdicts = [_read(run.checkpoint_path, damage(good, chance), state) for _ in range(count)]
        yield from counted(f"checkpoint: {name}", verdicts)


def records(folder: Path, count: int, seed: int) -> Iterator[Outcome]:
    run, whole, chance = *_run_and_whole(folder), random.Random(seed)
    for name, damage in DAMAGES.items():
        verdicts = [_resumed_with(run, whole, ".jsonl", damage, chance) for _ in range(count)]
        yield from counted(f"records: {name}", verdicts)


def runs(folder: Path, count: int, seed: int) -> Iterator[Outcome]:
    """The newest checkpoint is damaged, and the run goes on from the one before it."""
    run, whole, chance = *_run_and_whole(folder), random.Random(seed)
    for name, damage in DAMAGES.items():
        verdicts = [_resumed_with(run, whole, ".ckpt", damage, chance) for _ in range(count)]
        yield from counted(f"run with its newest checkpoint damaged: {name}", verdicts)


def counted(fault: str, verdicts: Iterable[Verdict]) -> Iterator[Outcome]:
    for verdict, count in Counter(verdicts).items():
        yield Outcome(fault, verdict, tries=count)


# The damage


def one_bit_flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut_short(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


DAMAGES: dict[str, Damage] = {"one bit flipped": one_bit_flipped, "cut short": cut_short}


def _run_and_whole(folder: Path) -> tuple[Run, Run]:
    run = begin(Run(small(), "divebatch", 0, folder / "run"))
    return run, begin(replace(run, folder=folder / "whole"), epochs=run.experiment.epochs)


def _resumed_with(run: Run, whole: Run, suffix: str, damage: Damage, chance: random.Random) -> Verdict:
    mixed = copied(run, run.folder.parent / "mixed")
    path = mixed.records_path.with_suffix(suffix)
    path.write_bytes(damage(path.read_bytes(), chance))
    return resumed(mixed, whole)[0]


def _read(path: Path, content: bytes, good: Any) -> Verdict:
    """Read a damaged checkpoint; a bit that no reader looks at does no harm."""
    path.write_bytes(content)
    try:
        found = load_checkpoint(path, device=CPU)
    except CheckpointError:
        return "refused"
    except Exception:
        return "traceback"
    return "whole" if _are_same(found, good) else "mixed up"


def _are_same(one: Any, two: Any) -> bool:
    if isinstance(two, dict):
        return list(one) == list(two) and all(_are_same(one[key], two[key]) for key in two)
    if isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(_are_same, one, two))
    return torch.equal(one, two) if isinstance(two, torch.Tensor) else bool(one == two)
