"""What divebatch adds to plain DDP on two ranks: seconds as ratios, collectives and bytes counted.

Three loops train the same DDP model on the same data over gloo: by hand (each rank takes its half of each batch of a
permutation), with a Controller that never measures (Fixed), and with one that measures every step (DiveBatch held at
its cap). Epochs are interleaved and timed: their steps alone, the same in CPU seconds of the training thread (which
neither waits nor shares its core in that count), and with `control.step()`. Ratios are medians over repeats, taken in
each repeat on its own. Collectives are those the profiler saw in one epoch on rank 0.

    python benchmarks/many_ranks.py [--repeats 31] [--check] [--json FILE]
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, DiveBatch, Fixed, Policy

RANKS, NUM_SAMPLES, NUM_FEATURES, WIDTH, BATCH_SIZE = 2, 16384, 256, 512, 512
LIMIT = 1.02
"""Largest allowed time ratio of steps that do not measure."""

WAYS = ("steps", "steps, CPU", "epochs")

Epoch = Callable[[], tuple[float, float]]
"""Trains for an epoch; the seconds its steps took, by the clock and of this thread."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of one epoch on one rank."""

    steps: int
    collectives: int
    own_bytes: int
    """What the rank hands in beside DDP's own."""
    kinds: dict[str, int]


def make_model() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(NUM_FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
    return DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches) -> tuple[float, float]:
    started, worked = time.perf_counter(), time.thread_time()
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return time.perf_counter() - started, time.thread_time() - worked


def by_hand(data: TensorDataset) -> Epoch:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    features, labels = data.tensors
    generator = torch.Generator().manual_seed(0)

    def epoch() -> tuple[float, float]:
        order = torch.randperm(NUM_SAMPLES, generator=generator).split(BATCH_SIZE)
        mine = (batch.tensor_split(RANKS)[dist.get_rank()] for batch in order)
        return train(model, optimizer, ((features.index_select(0, i), labels.index_select(0, i)) for i in mine))

    return epoch


def with_divebatch(data: TensorDataset, policy: Policy) -> Epoch:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = AdaptiveLoader(data, BATCH_SIZE, seed=0)
    control = Controller(model, optimizer, loader, policy)

    def epoch() -> tuple[float, float]:
        seconds = train(model, optimizer, loader)
        control.step()
        return seconds

    return epoch


def loops() -> dict[str, Epoch]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(NUM_SAMPLES, NUM_FEATURES), torch.randint(10, (NUM_SAMPLES,)))
    return {
        "plain DDP": by_hand(data),
        "not measuring": with_divebatch(data, Fixed()),
        "measuring": with_divebatch(data, DiveBatch(1.0, BATCH_SIZE)),
    }


def time_ratios(epochs: dict[str, Epoch], repeats: int) -> dict[str, dict[str, float]]:
    """Of the steps and of whole epochs."""
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in epochs}
    for repeat in range(-3, repeats):  # three rounds to warm up
        for name, epoch in epochs.items():
            dist.barrier()
            started = time.perf_counter()
            of_steps = epoch()
            if repeat >= 0:
                seconds[name].append((*of_steps, time.perf_counter() - started))
    plain = seconds["plain DDP"]
    return {
        name: {
            what: statistics.median(mine[place] / base[place] for mine, base in zip(taken, plain, strict=True))
            for place, what in enumerate(WAYS)
        }
        | {"ms a step": 1e3 * statistics.median(mine[0] for mine in taken) * BATCH_SIZE / NUM_SAMPLES}
        for name, taken in seconds.items()
    }


def traffic(epoch: Epoch) -> Traffic:
    """Of one epoch, as the profiler saw it."""
    dist.barrier()
    own_bytes = []
    all_reduce = dist.all_reduce

    def counted(tensor, **settings):
        own_bytes.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, **settings)

    with patch.object(dist, "all_reduce", counted), profile(activities=[ProfilerActivity.CPU]) as seen:
        epoch()
    kinds = Counter(event.name.removeprefix("gloo:") for event in seen.events() if event.name.startswith("gloo:"))
    return Traffic(-(-NUM_SAMPLES // BATCH_SIZE), sum(kinds.values()), sum(own_bytes), dict(kinds))


def work(rank: int, folder: str, repeats: int, answers) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    epochs = loops()
    ratios = time_ratios(epochs, repeats)
    counted = {name: asdict(traffic(epoch)) for name, epoch in epochs.items()}
    if rank == 0:
        model = make_model()
        answers.put((ratios, counted, sum(p.numel() * p.element_size() for p in model.parameters())))
    else:
        make_model()
    dist.barrier()
    os._exit(0)


def measure(repeats: int):
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=work, args=(rank, folder, repeats, answers)) for rank in range(RANKS)]
        for worker in workers:
            worker.start()
        found = answers.get()
        for worker in workers:
            worker.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--check", action="store_true", help=f"exit with 1 over {LIMIT}, or if steps communicate more")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    ratios, counted, model_bytes = measure(options.repeats)
    plain = counted["plain DDP"]
    print(f"{RANKS} ranks, gloo, model of {model_bytes:,} bytes, {plain['steps']} steps an epoch")
    heads = {
        "ms a step": 9,
        "steps": 6,
        "steps, CPU": 10,
        "epochs": 6,
        "collectives": 12,
        "more": 5,
        "own bytes": 10,
        "in models": 10,
    }
    print(f"{'loop':>14}", *(f"{head:>{width}}" for head, width in heads.items()), " kinds")
    for name, ratio in ratios.items():
        mine = counted[name]
        more, own_bytes = mine["collectives"] - plain["collectives"], mine["own_bytes"]
        print(
            f"{name:>14} {ratio['ms a step']:9.2f} {ratio['steps']:6.3f} {ratio['steps, CPU']:10.3f} "
            f"{ratio['epochs']:6.3f} {mine['collectives']:12} {more:5} "
            f"{own_bytes:10,} {own_bytes / model_bytes:10.3f}  {mine['kinds']}"
        )
    if options.json:
        options.json.write_text(json.dumps({"ratios": ratios, "traffic": counted, "model_bytes": model_bytes}) + "\n")
    is_frugal = all(
        mine["own_bytes"] < 1.1 * model_bytes and mine["collectives"] - plain["collectives"] < plain["steps"]
        for mine in counted.values()
    )
    if options.check and (ratios["not measuring"]["steps, CPU"] > LIMIT or not is_frugal):
        raise SystemExit(f"over the limit: {ratios}, {counted}")


if __name__ == "__main__":
    main()
