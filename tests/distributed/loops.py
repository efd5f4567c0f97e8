"""The loops that users write, on any number of ranks: one function for one process, DDP and FSDP2."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from distributed import cpu_sync_batch_norm
from divebatch import AdaptiveLoader, Controller, DiveBatch, Diversity, Policy, micro_batches
from divebatch.estimators import ESTIMATORS, make_estimator
from divebatch.lab.models import ResNet, group_norm, small_stem
from divebatch.measurement import Decision, Measurement
from divebatch.ranks import Ranks
from reference.per_sample import whole


def sgd(parameters: Iterator[nn.Parameter], lr: float) -> Optimizer:
    return SGD(parameters, lr, momentum=0.5)


@dataclass(frozen=True)
class Problem:
    """Everything about a run but the ranks."""

    model: str = "mlp"
    num_samples: int = 1003
    batch_size: int = 50
    epochs: int = 3
    policy: Policy = field(default_factory=lambda: DiveBatch(0.2, 300))
    estimator: str = "trajectory"
    settings: dict[str, Any] = field(default_factory=dict)
    """The estimator's."""
    optimizer: Callable[..., Optimizer] = sgd
    frozen: tuple[str, ...] = ()
    """Names of parameters that are not trained."""
    fsdp: dict[str, Any] = field(default_factory=dict)
    """Settings of fully_shard."""
    reduction: str = "mean"
    micro: int | None = None
    sync_each: bool = True
    """Whether every micro-batch's gradients are averaged over ranks, and not only the last one's."""
    wrap: str = "ddp"
    give_inner: bool = False
    """The controller gets the model inside of the wrapper."""
    wrap_late: bool = False
    """DDP is put around the model after the controller has seen it."""
    ddp: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.1
    clip: float | None = None
    coupling: str = "linear"
    every_steps: int | None = None
    bad_sample: int | None = None
    """A sample of NaN: the loop skips the step on its batch, as loops with clipping do."""
    sets_to_none: bool = True
    """Whether gradients are dropped between steps, or written over with zeros."""


@dataclass(frozen=True)
class Restless(Policy):
    """Takes every measurement for a wish, whatever its error: another batch size at almost every decision."""

    needs: ClassVar[frozenset[str]] = frozenset({"diversity"})
    decides_within_epochs: ClassVar[bool] = True

    def next(self, seen: Measurement) -> Decision:
        """Between 20 and 59, by the second digit or so of tr(Sigma)."""
        assert seen.diversity is not None
        if not isfinite(seen.diversity.trace):  # a single step shows nothing
            return Decision(batch_size=seen.batch_size)
        return Decision(batch_size=20 + int(100 * abs(seen.diversity.trace)) % 40)


def keeping(estimator: Any) -> Any:
    """`estimator`, with what it measured in `measured`: a wrong scale would cancel in the records' ratio."""
    estimator.measured = []
    finish = estimator.finish

    def finish_and_keep() -> Diversity:
        estimator.measured.append(finish())
        return estimator.measured[-1]

    estimator.finish = finish_and_keep
    return estimator


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.LayerNorm(11), nn.ReLU(), nn.Linear(11, 3))


class Shared(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.head = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.first(x).tanh()).tanh()
        scores: Tensor = self.head(self.twice(x))
        return scores


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Linear(13, 3))


def resnet() -> nn.Module:
    return ResNet(small_stem(8, group_norm), (8, 16), 1, 3, group_norm)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (7,)),
    "resnet": (resnet, (3, 8, 8)),
    "batch norm": (normalised, (7,)),
    "shared": (Shared, (7,)),
}


def made(problem: Problem) -> nn.Module:
    torch.manual_seed(0)
    net = MODELS[problem.model][0]().double()
    for name in problem.frozen:
        net.get_parameter(name).requires_grad_(False)
    return net


def dataset(problem: Problem) -> TensorDataset:
    """Inputs; labels, with the sample's number beside each."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(problem.num_samples, *MODELS[problem.model][1], generator=generator, dtype=torch.float64)
    if problem.bad_sample is not None:
        x[problem.bad_sample] = torch.nan
    labels = torch.randint(3, (problem.num_samples,), generator=generator)
    return TensorDataset(x, torch.stack([labels, torch.arange(problem.num_samples)], 1))


def wrapped(net: nn.Module, ranks: Ranks, problem: Problem) -> nn.Module:
    if ranks.is_alone or problem.wrap == "none":
        return net
    if problem.wrap == "ddp":
        return DistributedDataParallel(net, process_group=ranks._group, **problem.ddp)
    assert ranks._group is not None
    if problem.wrap == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    else:
        mesh = DeviceMesh.from_group(ranks._group, "cpu")
    if problem.wrap != "root":
        for child in [module for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear)][1:]:
            fully_shard(child, mesh=mesh, **problem.fsdp)
    fully_shard(net, mesh=mesh, **problem.fsdp)
    return net


class Run:
    """A model in training, with its controller."""

    def __init__(self, ranks: Ranks, problem: Problem) -> None:
        self.ranks, self.problem = ranks, problem
        self.net = made(problem)
        if problem.model == "batch norm" and not ranks.is_alone:
            cpu_sync_batch_norm.install()
            self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net, ranks._group)
        self.model = self.net if problem.wrap_late else wrapped(self.net, ranks, problem)
        self.optimizer = problem.optimizer(self.net.parameters(), lr=problem.lr)
        self.scheduler = StepLR(self.optimizer, 2, 0.5)
        self.loader = AdaptiveLoader(
            dataset(problem), problem.batch_size, seed=5, process_group=ranks._group or "alone"
        )
        settings: dict[str, Any] = {"loss_fn": self.loss} if ESTIMATORS[problem.estimator].takes("loss_fn") else {}
        self.estimator = keeping(make_estimator(problem.estimator, **settings, **problem.settings))
        self.control = Controller(
            self.net if problem.give_inner else self.model,
            self.optimizer,
            self.loader,
            problem.policy,
            estimator=self.estimator,
            lr_coupling=problem.coupling,
            scheduler=self.scheduler,
            loss_reduction=problem.reduction,
            every_steps=problem.every_steps,
            measure_always="diversity" in problem.policy.needs,
        )
        if problem.wrap_late:
            self.model = wrapped(self.net, ranks, problem)
        self.seen: list[int] = []

    def load(self, state: dict[str, Any]) -> None:
        """Before the wrapper spreads the weights: models here are built alike on all ranks."""
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.control.load_state_dict(state["control"])

    def state(self) -> dict[str, Any]:
        """Of a model that is not sharded."""
        parts = {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler, "control": self.control}
        return {name: part.state_dict() for name, part in parts.items()}

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(scores, targets[:, 0], reduction=self.problem.reduction)

    def epoch(self) -> dict[str, Any]:
        for batch in self.loader:
            self.step(batch)
        self.scheduler.step()
        return asdict(self.control.step())

    def step(self, batch: Any) -> None:
        self.seen += batch[1][: self.loader.rank_shard.mine, 1].tolist()
        self.optimizer.zero_grad(set_to_none=self.problem.sets_to_none)
        for x, y, factor, waits in self.parts(batch):
            with self.syncing(not waits):
                (self.loss(self.model(x), y) * factor).backward()
        if self.problem.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.problem.clip)
        if self.problem.bad_sample is None or all(map(has_finite_gradient, self.net.parameters())):
            self.optimizer.step()

    def parts(self, batch: Any) -> Iterator[tuple[Tensor, Tensor, float, bool]]:
        """Micro-batches; all ranks have as many, or the one that has more would wait for the others' gradients."""
        size = self.problem.micro
        if size is None:
            yield *batch, 1.0, False
            return
        count = -(-len(batch[1]) // size)
        for number, ((x, y), factor) in enumerate(micro_batches(batch, size, loss_reduction=self.problem.reduction)):
            yield x, y, factor, number < count - 1 and not self.problem.sync_each

    def syncing(self, now: bool) -> Any:
        """Whether the backward passes within average over ranks."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(now)
        is_ddp = isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync() if is_ddp and not now else nullcontext()

    def weights(self) -> list[float]:
        return torch.cat([whole(p).detach().flatten() for p in self.net.parameters()]).tolist()

    @property
    def sums(self) -> list[tuple[float, float, int]]:
        measured = self.estimator.measured
        return [(each.sum_of_sq_norms, each.sq_norm_of_sum, each.num_samples) for each in measured]


def has_finite_gradient(parameter: nn.Parameter) -> bool:
    assert parameter.grad is not None
    return bool(whole(parameter.grad).isfinite().all())


def trained(ranks: Ranks, problem: Problem) -> dict[str, Any]:
    """What a run leaves: records, the sums measured, final weights."""
    run = Run(ranks, problem)
    with run.control:
        records = [run.epoch() for _ in range(problem.epochs)]
    return {"records": records, "sums": run.sums, "weights": run.weights()}
