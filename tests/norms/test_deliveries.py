"""Measured passes over more samples than were delivered are an error: a second backward pass is not another batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from divebatch import AdaptiveLoader, Controller, DiveBatch, micro_batches
from divebatch.errors import CoverageError
from divebatch.estimators import Trajectory
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
    seen = 24 if compiled else 8  # compiled passes have their samples on the device, read at the end of the epoch
    with pytest.raises(CoverageError, match=f"{seen} samples .* delivered {seen // 2}: .*estimator='moments'"):
        epoch(step, compiled=compiled)
