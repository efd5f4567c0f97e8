"""Processes as a launcher such as torchrun starts them, without the seconds that importing torch takes each time."""

import itertools
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from divebatch.lab import Experiment, Run, execute, parse_experiment
from divebatch.lab.models import MODELS, ModelSettings, ResNet, group_norm, small_stem
from divebatch.lab.ranks import process_group, spread
from divebatch.lab.step import TrainStep
from divebatch.ranks import Ranks
from lab.helpers import StopAfter

PATIENCE = 60.0
"""Seconds until a wait for another process is given up."""
GRACE = 10.0
"""Seconds that ranks have to find out by themselves that another one has failed."""
PRELOADED = ["divebatch.cli", "torch.distributed.fsdp", "torch._dynamo", "PIL.Image"]


@dataclass
class Job:
    """The ranks of one launch."""

    processes: list[Any]
    log: Path
    store: dist.TCPStore | None
    """Kept alive here, as torchrun keeps it; None where rank 0 keeps it."""

    def ends(self) -> list[int]:
        """The exit codes. When one rank has failed, the others are ended too, as torchrun does."""
        deadline = time.monotonic() + PATIENCE
        while any(process.exitcode is None for process in self.processes):
            assert time.monotonic() < deadline, f"hangs: {self.log.read_text()}"
            if any(process.exitcode for process in self.processes):
                self._wait(GRACE)
                self.kill()
            time.sleep(0.01)
        return [int(process.exitcode) for process in self.processes]

    def ends_of(self, *ranks: int) -> list[int | None]:
        """The exit codes of these, which must end by themselves; the others are killed then."""
        for rank in ranks:
            self.processes[rank].join(PATIENCE)
        found = [self.processes[rank].exitcode for rank in ranks]
        self.kill()
        return found

    def _wait(self, seconds: float) -> None:
        """For all to end, or so long."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def launch(log: Path, size: int, function: Callable[..., None], *arguments: Any, by_hand: bool = False) -> Job:
    """Start the ranks; `by_hand` leaves it to rank 0 to keep their store, as where no launcher does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    log.touch()
    store = None if by_hand else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free_port() if store is None else store.port
    places = [(rank, size, port, by_hand, log) for rank in range(size)]
    processes = [context.Process(target=_be_a_rank, args=(*place, function, arguments)) for place in places]
    for process in processes:
        process.start()
    return Job(processes, log, store)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _be_a_rank(
    rank: int, size: int, port: int, by_hand: bool, log: Path, function: Callable[..., None], arguments: Any
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    place.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, TORCHELASTIC_USE_AGENT_STORE=not by_hand)
    os.environ.update({key: str(value) for key, value in place.items()})
    function(*arguments)


# What the ranks do


class InDouble(nn.Module):
    """A network that takes images as they come and computes in float64."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.double()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.network(x.double())
        return scores


@dataclass(frozen=True)
class TinyResNet(ModelSettings):
    """Eight and sixteen channels, GroupNorm, one block a stage."""

    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return InDouble(ResNet(small_stem(8, group_norm), (8, 16), 1, num_classes, group_norm))


def train(
    runs: list[Run],
    stop_after: dict[int, int] | None = None,
    seen: Path | None = None,
    dies_at: tuple[int, int] = (-1, 0),
) -> None:
    """One run after the other, in float64, resuming what there is.

    `stop_after` is steps by rank: when each rank gets its signal. `seen` is where each rank notes which samples it
    trained on. `dies_at` is a rank and the step in which it is killed.
    """
    compute_in_double()
    if seen is not None:
        note_samples(seen)
    if os.environ["RANK"] == str(dies_at[0]):
        die_in_step(dies_at[1])
    with process_group("cpu"):
        ranks = Ranks.here()
        for run in runs:
            stop = StopAfter((stop_after or {}).get(ranks.rank), ranks) if not ranks.is_alone else None
            execute(run, resume=True, stop=stop)


def compute_in_double() -> None:
    torch.set_default_dtype(torch.float64)
    MODELS["tiny-resnet"] = TinyResNet


def average_of_buffers() -> None:
    """BatchNorm's statistics are the ranks' own until they are averaged; counts and weights are left alone."""
    with process_group("cpu"):
        ranks = Ranks.here()
        parallel = spread(nn.BatchNorm1d(3), ranks)
        parallel.module(torch.full((4, 3), float(ranks.rank)) + torch.arange(4.0)[:, None])
        before = parallel.model.running_mean.clone()
        parallel.average_buffers()
        assert parallel.model.num_batches_tracked == 1
        assert torch.allclose(before, torch.full((3,), 0.1 * (1.5 + ranks.rank)))
        assert torch.allclose(parallel.model.running_mean, torch.full((3,), 0.1 * (1.5 + (ranks.size - 1) / 2)))


def die_in_step(number: int) -> None:
    """SIGKILL before that step's gradients, for which the other ranks wait."""
    backward, steps = TrainStep._backward, itertools.count(1)

    def last(self: TrainStep, batch: Any) -> Tensor:
        if next(steps) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(self, batch)

    TrainStep._backward = last  # type: ignore[method-assign]


def note_samples(folder: Path) -> None:
    """Append a line to a file of this process for every step: the first feature of each sample."""
    step = TrainStep.__call__
    rank = os.environ["RANK"]
    notes = (folder / f"{os.getpid()}").open("a", buffering=1)

    def noted(self: TrainStep, batch: Any) -> Tensor:
        shard = self.plan().rank_shard
        features = [] if shard is not None and shard.is_stand_in else batch[0][:, 0].tolist()
        notes.write(f"{rank} step {' '.join(map(repr, features))}\n")
        return step(self, batch)

    TrainStep.__call__ = noted  # type: ignore[method-assign]


# What they do it to

BASICS: dict[str, Any] = {"summary": "", "paper": "", "trials": 1, "schedule": {"kind": "constant"}}


def synthetic(epochs: int = 4) -> Experiment:
    """1003 samples in batches of 37 and then more: nothing that 2 or 4 divide."""
    data = {"kind": "synthetic", "num_samples": 1254, "num_features": 12, "noise_variance": 0.1, "train_fraction": 0.8}
    policy = {"kind": "divebatch", "delta": 1.0, "max_batch_size": 300}
    method = {"label": "it", "batch_size": 37, "lr": 0.2, "lr_coupling": "linear", "policy": policy}
    table = {"name": "synthetic", "epochs": epochs, "data": data, "model": {"kind": "mlp", "hidden_width": 6}}
    return parse_experiment({**BASICS, **table, "optimizer": {"momentum": 0.9}, "methods": {"it": method}}, "test")


def images() -> Experiment:
    """65 images, first in batches of 9: the last one, of two, leaves two of four ranks without any."""
    policy = {"kind": "divebatch", "delta": 0.2, "max_batch_size": 40}
    method = {"label": "it", "batch_size": 9, "lr": 0.05, "policy": policy}
    table = {"name": "images", "epochs": 3, "data": {"kind": "cifar10", "eval_batch_size": 5}}
    return parse_experiment({**BASICS, **table, "model": {"kind": "tiny-resnet"}, "methods": {"it": method}}, "test")


def runs_in(folder: Path, data_dir: Path, sharding: str = "ddp") -> list[Run]:
    found = [Run(synthetic(), "it", 0, folder / sharding), Run(images(), "it", 0, folder / sharding)]
    return [replace(run, data_dir=data_dir, sharding=sharding, log_exact=sharding == "ddp") for run in found]
