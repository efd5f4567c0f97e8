"""What the adapters are compared with: a hand-written loop, and a policy with a course that is written down."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset, TensorDataset

from divebatch import AdaptiveLoader, Controller, Decision, Diversity, EpochRecord, Measurement, Policy, Trajectory
from reference.per_sample import mean_loss, samples

NUM_SAMPLES = 48
GROWS_AND_SHRINKS = (6, 12, 24, 12, 4)


class Numbered(Dataset[Any]):
    """Tells which sample is which: (number, inputs, targets)."""

    def __init__(self, size: int = NUM_SAMPLES) -> None:
        self.inputs, self.targets = samples(size, dtype=torch.float32)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.inputs[index], self.targets[index]


@dataclass(frozen=True)
class Course(Policy):
    """The size of each epoch, written down; measures nothing."""

    needs: ClassVar[frozenset[str]] = frozenset()
    sizes: tuple[int, ...]

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=self.sizes[min(seen.epoch, len(self.sizes) - 1)])


@dataclass(frozen=True)
class Watched(Course):
    """The same, with every epoch measured."""

    needs: ClassVar[frozenset[str]] = frozenset({"diversity"})
    estimator: ClassVar[str | None] = "trajectory"


UNEVEN = 47
"""Samples that two processes cannot share evenly."""


def uneven_course(gamma: float) -> tuple[list[EpochRecord], float]:
    """What the scripts that run in two processes do, in one: records, and the weight it ends with."""
    torch.manual_seed(0)
    net = nn.Linear(1, 1)
    optimizer = SGD(net.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, step_size=1, gamma=gamma)
    loader = AdaptiveLoader(TensorDataset(torch.arange(float(UNEVEN)).view(-1, 1)), 6, seed=0)
    policy, records = Watched(GROWS_AND_SHRINKS), []
    with Controller(net, optimizer, loader, policy, scheduler=scheduler, lr_coupling="linear") as control:
        for _ in GROWS_AND_SHRINKS:
            for (number,) in loader:
                optimizer.zero_grad()
                mse_loss(net(number / 48), (number / 48).square()).backward()
                optimizer.step()
            scheduler.step()
            records.append(control.step())
    return records, net.weight.item()


class Kept(Trajectory):
    """Keeps the sums themselves: a wrong scale cancels in their ratio."""

    sums: Diversity

    def finish(self) -> Diversity:
        self.sums = super().finish()
        return self.sums


def assert_same_sums(measured: Diversity, exact: Diversity, *, rel: float) -> None:
    assert measured.num_samples == exact.num_samples
    assert measured.sum_of_sq_norms == pytest.approx(exact.sum_of_sq_norms, rel=rel)
    assert measured.sq_norm_of_sum == pytest.approx(exact.sq_norm_of_sum, rel=rel)


def schedule(optimizer: Any) -> StepLR:
    return StepLR(optimizer, step_size=2, gamma=0.5)


def plain_records(
    model: nn.Module, policy: Policy, *, epochs: int, lr: float = 0.03, **settings: Any
) -> list[EpochRecord]:
    """The course of the README's loop."""
    optimizer = SGD(model.parameters(), lr=lr)
    scheduler = schedule(optimizer)
    loader = AdaptiveLoader(Numbered(), 6, seed=3)
    with Controller(model, optimizer, loader, policy, scheduler=scheduler, **settings) as control:
        records = []
        for _ in range(epochs):
            for _, x, y in loader:
                optimizer.zero_grad()
                mean_loss(model(x), y).backward()
                optimizer.step()
            scheduler.step()
            records.append(control.step())
    return records


def each_once(epochs: Iterable[list[int]], size: int = NUM_SAMPLES) -> bool:
    return all(sorted(numbers) == list(range(size)) for numbers in epochs)
