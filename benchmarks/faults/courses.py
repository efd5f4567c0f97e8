"""What a run has left on disk, and whether two of them took the same course."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from divebatch.lab import load_checkpoint
from divebatch.records import read_run

COSTS = {
    *("train_seconds", "total_seconds", "eval_seconds", "measure_seconds", "compile_seconds"),
    "peak_memory_bytes",
}
CPU = torch.device("cpu")


def version(path: Path) -> tuple[int, int] | None:
    """Changes whenever the file or folder is replaced; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def num_records(path: Path) -> int:
    """Complete lines after the first."""
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def costless_epochs(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in asdict(record).items() if key not in COSTS} for record in read_run(path)[1]]


def weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_checkpoint(path, device=CPU)["model"]
    return found


def same_bits(records: Path, other: Path) -> bool:
    """Whether two runs ended with equal records, costs left out, and equal weights."""
    one, two = weights(records.with_suffix(".ckpt")), weights(other.with_suffix(".ckpt"))
    same_weights = one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    return same_weights and costless_epochs(records) == costless_epochs(other)


def differences(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> list[str]:
    """Where two courses in float64 part by more than rounding."""
    found = [] if len(one) == len(two) else [f"{len(one)} epochs and {len(two)}"]
    for mine, other in zip(one, two, strict=False):
        for key, value in other.items():
            is_close = isinstance(value, float) and abs(mine[key] - value) <= 1e-9 * abs(value)
            if not is_close and mine[key] != value and key != "reason":
                found.append(f"epoch {other['epoch']}: {key} is {mine[key]!r} and not {value!r}")
    return found
