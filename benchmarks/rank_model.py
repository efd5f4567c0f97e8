"""Step time against ranks, up to thousands: a model from a few constants, printed as a table.

    python benchmarks/rank_model.py            # the table; nothing is run
    python benchmarks/rank_model.py --measure  # first the two constants of gloo between two processes of this machine

Compute: seconds of a step on one GPU, a constant and a part for each sample, through the two batch sizes in
`results/benchmarks/trainer-h200-before-graphs.jsonl` (measured, one H200).

Network: assumed constants. An all-reduce of B bytes over n devices takes 2 (n-1) a + 2 (n-1)/n B/w in a ring and
2 log2(n) a + 2 B/w in a tree, whichever is less; a is the seconds of a hop and w the bytes a second of a link. Machines
of eight devices add up inside, then across, then hand out.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

RECORDS = Path(__file__).parents[1] / "results" / "benchmarks" / "trainer-h200-before-graphs.jsonl"
NUM_SAMPLES, NUM_PARAMETERS, LOCAL_BATCH = 50_000, 11_173_962, 128
EPOCH_SAMPLES = 1_281_167
"""Of the table: ImageNet's. CIFAR-10's fifty thousand are one batch of the last rows."""

DEVICES_OF_A_MACHINE = 8
EFFICIENCY = 0.8
"""Assumed: of a link's nominal bandwidth."""
BACKWARD_SHARE = 2 / 3
"""Assumed: of a step's compute, behind which an all-reduce is hidden."""
BYTES_OF_A_GRADIENT = 4
"""Assumed: of each parameter, in float32."""


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds of a hop and bytes a second in one direction."""

    hop: float
    bandwidth: float

    def all_reduce(self, devices: int, num_bytes: float) -> float:
        """Seconds by the quicker of a ring and a tree."""
        if devices == 1:
            return 0.0
        ring = 2 * (devices - 1) * self.hop + 2 * (devices - 1) / devices * num_bytes / self.bandwidth
        tree = 2 * math.log2(devices) * self.hop + 2 * num_bytes / self.bandwidth
        return min(ring, tree)

    def spread(self, devices: int, num_bytes: float) -> float:
        """Seconds of a reduce-scatter, or of an all-gather."""
        return (devices - 1) * self.hop + (devices - 1) / devices * num_bytes / self.bandwidth


# Bandwidths of NVIDIA's data sheets: NVLink 4 with 900 GB/s in both directions together, NDR InfiniBand with 400 Gb/s
# a port and one port a GPU. Hops are assumptions of the usual size, measured by nobody here.
NVLINK = Link(3e-6, EFFICIENCY * 450e9)
INFINIBAND = Link(8e-6, EFFICIENCY * 50e9)


def all_reduce(devices: int, num_bytes: float) -> float:
    """Seconds of an all-reduce: within one machine, or inside, across, inside.

    Args:
        devices: How many take part.
        num_bytes: What each of them has to add.
    """
    if devices <= DEVICES_OF_A_MACHINE:
        return NVLINK.all_reduce(devices, num_bytes)
    machines = math.ceil(devices / DEVICES_OF_A_MACHINE)
    across = INFINIBAND.all_reduce(machines, num_bytes / DEVICES_OF_A_MACHINE)
    return 2 * NVLINK.spread(DEVICES_OF_A_MACHINE, num_bytes) + across


def overlapped(compute: float, network: float) -> float:
    """Seconds of a step whose all-reduce runs behind the backward pass: the network adds what goes beyond that.

    Args:
        compute: Seconds of forward and backward pass and update on one device.
        network: Seconds of the all-reduce.
    """
    return compute + max(0.0, network - BACKWARD_SHARE * compute)


def step_compute() -> tuple[float, float]:
    """(seconds of any step, seconds more for each sample), through two measured batch sizes."""
    rows = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    points = {
        row["batch_size"]: row["seconds_per_epoch"] / math.ceil(NUM_SAMPLES / row["batch_size"])
        for row in rows
        if row["row"] == "trainer"
    }
    (small, fast), (large, slow) = sorted(points.items())
    each = (slow - fast) / (large - small)
    return fast - each * small, each


def row(ranks: int, local_batch: int) -> list[str]:
    fixed, each = step_compute()
    compute, num_bytes = fixed + each * local_batch, float(BYTES_OF_A_GRADIENT * NUM_PARAMETERS)
    network = all_reduce(ranks, num_bytes)
    step = overlapped(compute, network)
    steps = math.ceil(EPOCH_SAMPLES / (ranks * local_batch))
    measuring = network + 5 * all_reduce(ranks, 64)
    return [
        f"{ranks}",
        f"{ranks * local_batch:,}",
        f"{1e3 * network:.2f}",
        f"{1e3 * step:.2f}",
        f"{1e3 * (compute + network):.2f}",
        f"{ranks * local_batch / step / 1e3:,.0f}k",
        f"{100 * measuring / (steps * step):.1f} %",
    ]


def print_table(local_batch: int) -> None:
    heads = (
        "ranks",
        "global batch",
        "all-reduce, ms",
        "step, ms",
        "without overlap, ms",
        "samples/s",
        "epoch's end adds",
    )
    print("| " + " | ".join(heads) + " |")
    print("|" + "---:|" * len(heads))
    for ranks in (1, 2, 4, 8, 16, 64, 256, 1024, 4096):
        print("| " + " | ".join(row(ranks, local_batch)) + " |")


def work(rank: int, folder: str, answers) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    found = {}
    for numel in (1, 1 << 12, 1 << 16, 1 << 20, 1 << 22):
        values, seconds = torch.zeros(numel), []
        for _ in range(30):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(values)
            seconds.append(time.perf_counter() - started)
        found[4 * numel] = statistics.median(seconds)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    os._exit(0)


def measure() -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=work, args=(rank, folder, answers)) for rank in range(2)]
        for worker in workers:
            worker.start()
        found = answers.get()
        for worker in workers:
            worker.join()
    largest = max(found)
    print("gloo, two processes:", ", ".join(f"{size:,} B {1e6 * s:,.0f} us" for size, s in found.items()))
    print(f"a hop {1e6 * found[4] / 2:.0f} us, a link {largest / (found[largest] - found[4]) / 1e9:.2f} GB/s\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="the constants of gloo here, too")
    parser.add_argument("--local-batch", type=int, default=LOCAL_BATCH)
    options = parser.parse_args()
    if options.measure:
        measure()
    fixed, each = step_compute()
    print(f"compute of a step: {1e3 * fixed:.2f} ms + {1e6 * each:.2f} us a sample")
    print_table(options.local_batch)


if __name__ == "__main__":
    main()
