"""Measured passes over more samples than were delivered are an error: a second backward pass is not another batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, DiveBatch, micro_batches
from divebatch.errors import CoverageError
from divebatch.estimators import Trajectory
from divebatch.norms import DiversityMeter
from reference.per_sample import dataset, mean_loss, mlp

Step = Callable[[nn.Module, Tensor, Tensor], None]


def plain(model: nn.Module, x: Tensor, y: Tensor) -> None:
    mean_loss(model(x), y).backward()


def in_parts(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for (part_x, part_y), weight in micro_batches((x, y), 2):
        (mean_loss(model(part_x), part_y) * weight).backward()


def attacked(model: nn.Module, x: Tensor, y: Tensor) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(mean_loss(model(x), y), x)
    plain(model, x.detach() + 0.1 * slope.sign(), y)


def two_losses(model: nn.Module, x: Tensor, y: Tensor) -> None:
    outputs = model(x)
    outputs.square().mean().backward(retain_graph=True)
    mean_loss(outputs, y).backward()


def attacked_by_backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    x = x.clone().requires_grad_()
    plain(model, x, y)
    model.zero_grad()
    plain(model, (x + 0.1 * x.grad.sign()).detach(), y)


def two_views(model: nn.Module, x: Tensor, y: Tensor) -> None:
    plain(model, torch.cat([x, -x]), torch.cat([y, y]))


def epoch(step: Step, *, compiled: bool = False) -> int:
    model = mlp()
    optimizer, loader = SGD(model.parameters(), 0.01), AdaptiveLoader(dataset(12), 4, seed=0)
    policy, estimator = DiveBatch(delta=0.1, max_batch_size=8), Trajectory(compiled=compiled)
    with Controller(model, optimizer, loader, policy, estimator=estimator) as control:
        for x, y in loader:
            optimizer.zero_grad()
            step(model, x, y)
            optimizer.step()
        return control.step().samples


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("step", [plain, in_parts, attacked])
def test_passes_over_what_was_delivered_are_right(step: Step, compiled: bool):
    assert epoch(step, compiled=compiled) == 12


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("step", [two_losses, attacked_by_backward, two_views])
def test_a_second_pass_on_a_batch_is_an_error(step: Step, compiled: bool):
    # Compiled passes but the first have their samples on the device, read at the end of the epoch.
    with pytest.raises(CoverageError, match=r"(8 samples .* delivered 4|24 samples .* delivered 12): .*'moments'"):
        epoch(step, compiled=compiled)


def without_its_weight(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for (part_x, part_y), weight in micro_batches((x, y), 2):
        (mean_loss(model(part_x), part_y) * float(weight)).backward()


def a_part(model: nn.Module, x: Tensor, y: Tensor) -> None:
    plain(model, x[:3], y[:3])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("step", [without_its_weight, a_part])
def test_a_pass_over_fewer_samples_than_its_batch_is_an_error(step: Step, compiled: bool):
    with pytest.raises(CoverageError, match=r"went through \d samples, and its batch has 4: .*weight"):
        epoch(step, compiled=compiled)


class TimeFirst(nn.Module):
    """Sequences (time, batch, features) through layers that take the first dimension for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.transpose(0, 1)).mean(0)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_with_the_time_first_is_an_error(compiled: bool):
    model, data = TimeFirst(), TensorDataset(torch.randn(12, 6, 4).double(), torch.randn(12, 1).double())
    optimizer, loader = SGD(model.parameters(), 0.01), AdaptiveLoader(data, 4, seed=0)
    estimator = Trajectory(compiled=compiled)
    with Controller(model, optimizer, loader, DiveBatch(delta=0.1, max_batch_size=8), estimator=estimator):
        x, y = next(iter(loader))
        with pytest.raises(CoverageError, match=r"6 samples .* 4"):
            (model(x) - y).square().mean().backward()


def test_a_loop_that_fetches_a_batch_ahead_is_right():
    model = mlp()
    optimizer, loader = SGD(model.parameters(), 0.01), AdaptiveLoader(dataset(6), 4, seed=0)
    meter = DiversityMeter(model, rank_shard=lambda: loader.rank_shard, delivered=lambda: loader.samples_delivered)
    with meter:
        for _ in range(2):
            for x, y in list(loader):
                optimizer.zero_grad()
                mean_loss(model(x), y).backward()
                optimizer.step()
        assert meter.diversity().num_samples == 12
