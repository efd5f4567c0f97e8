"""What a change of the batch size within an epoch costs, and the memory that an epoch's order takes.

    python benchmarks/size_changes.py

Each row is measured in a process of its own. A change is `resize_now` and the batch that follows it.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader

SIZES = (10**6, 10**7)
SOURCES = ("tensors", "dataset", "2 workers", "2 kept workers")
CHANGES = 9
PAGE_BYTES = 4096


def loader_over(source: str, num_samples: int) -> AdaptiveLoader:
    if source == "tensors":
        return AdaptiveLoader(TensorDataset(torch.zeros(num_samples, 1)), 128, seed=0)
    workers: dict[str, Any] = {} if source == "dataset" else {"num_workers": 2}
    kept = {"persistent_workers": True} if source == "2 kept workers" else {}
    return AdaptiveLoader(range(num_samples), 128, seed=0, **workers, **kept)


def resident_megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES / 1e6


def milliseconds_of_next(batches: Iterator[Any]) -> float:
    begin = time.perf_counter()
    next(batches)
    return (time.perf_counter() - begin) * 1e3


def measure(source: str, num_samples: int) -> None:
    loader = loader_over(source, num_samples)
    before = resident_megabytes()
    batches = iter(loader)
    next(batches)
    held = resident_megabytes() - before
    changes, plain = [], []
    for number in range(CHANGES):
        loader.resize_now(64 if number % 2 else 128)
        changes.append(milliseconds_of_next(batches))
        plain.append(milliseconds_of_next(batches))
    print(f"| {num_samples:,} | {source} | {median(changes):.2f} | {median(plain):.2f} | {held:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs=2, metavar=("SOURCE", "SAMPLES"), help="one row, in this process")
    chosen = parser.parse_args()
    if chosen.only:
        measure(chosen.only[0], int(chosen.only[1]))
        return
    print("| samples | source | change of size, ms | next batch, ms | order, MB |\n|---|---|---|---|---|", flush=True)
    for num_samples in SIZES:
        for source in SOURCES:
            subprocess.run([sys.executable, __file__, "--only", source, str(num_samples)], check=True)


if __name__ == "__main__":
    main()
