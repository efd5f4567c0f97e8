from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from divebatch.data.micro_batches import BatchPlan
from divebatch.errors import BatchTooLargeError
from divebatch.lab import Clock, DeviceOptions, Tally, TrainStep, train_epoch
from divebatch.lab import step as module
from divebatch.lab.ranks import Parallel

CPU = torch.device("cpu")


def make_step(model: nn.Module, **options: Any) -> TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return TrainStep(Parallel.alone(model), mse_loss, optimizer, DeviceOptions(**options), Clock(CPU))


def twins() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 1), nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    return model, twin


@pytest.mark.parametrize("micro_batch_size", [None, 1, 2, 3, 100])
def test_an_epoch_is_plain_sgd_and_its_loss_the_mean_over_samples(micro_batch_size):
    model, twin = twins()
    batches = [(torch.randn(n, 3), torch.randn(n, 1)) for n in (5, 2)]
    heard = []
    loss = train_epoch(make_step(model, micro_batch_size=micro_batch_size), batches, Tally(), lambda: heard.append(1))
    total = 0.0
    for x, y in batches:
        mean = (twin(x) - y).square().mean()
        total += mean.item() * len(y)
        gradients = torch.autograd.grad(mean, list(twin.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    assert loss == pytest.approx(total / 7)
    torch.testing.assert_close(model.weight, twin.weight)
    assert len(heard) == 2


def test_a_gradient_over_the_limit_is_scaled_down_for_the_step_and_estimators_see_it_whole():
    model, twin = twins()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(Parallel.alone(model), mse_loss, optimizer, DeviceOptions(), Clock(CPU), clip_norm=1.0)
    seen = []

    def norm() -> float:
        return float(torch.stack([each.grad.square().sum() for each in model.parameters()]).sum().sqrt())

    optimizer.register_step_pre_hook(lambda *_: seen.append(norm()))
    for size in (10.0, 0.01):
        x, y = size * torch.randn(4, 3), size * torch.randn(4, 1)
        step((x, y))
        mean = (twin(x) - y).square().mean()
        gradients = torch.autograd.grad(mean, list(twin.parameters()))
        whole = torch.cat([each.flatten() for each in gradients]).norm().item()
        assert seen[-1] == pytest.approx(whole)
        assert norm() == pytest.approx(min(whole, 1.0), rel=1e-4)
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient * min(1.0, 1.0 / whole)
        torch.testing.assert_close(model.weight, twin.weight)
    assert seen[0] > 1.0 > seen[1]


class SmallMemory(nn.Module):
    """Takes at most `fits` samples at once."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        self.fits, self.layer = fits, nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.layer(x)


@pytest.mark.parametrize(
    ("fits", "micro_batch_size", "message"),
    [
        (20, None, "batch of 64 samples in micro-batches of 64. Try micro_batch_size=32"),
        (5, 16, "batch of 64 samples in micro-batches of 16. Try micro_batch_size=8"),
        (0, 1, "batch of 64 samples in micro-batches of 1. Not even one sample fits"),
    ],
)
def test_out_of_memory_names_the_sizes_and_what_to_try(fits, micro_batch_size, message):
    step = make_step(SmallMemory(fits), micro_batch_size=micro_batch_size)
    with pytest.raises(BatchTooLargeError) as caught:
        step((torch.randn(64, 3), torch.randn(64, 1)))
    assert message in str(caught.value)


@pytest.mark.parametrize("compiles", [True, False])
def test_the_first_pass_of_each_size_is_compiling_where_it_is_compiled(compiles, monkeypatch):
    monkeypatch.setattr(module, "compiled_loss_of", lambda **_: module.loss_of)
    step = make_step(nn.Linear(3, 1), compile=compiles).under(lambda: BatchPlan(batch_size=4))
    laps = []
    monkeypatch.setattr(step.clock, "lap", lambda name: laps.append(name) or nullcontext())
    for size in (4, 4, 3, 4, 3, 2):
        step((torch.ones(size, 3), torch.ones(size, 1)))
    assert laps == ["compile" if compiles else "train"] * 3
    assert step.num_compiled == (1 if compiles else 0)  # a short batch is not


@pytest.mark.parametrize(("micro_batch_size", "cuts", "sizes"), [(None, 1, [7]), (None, 2, [4, 3]), (3, 2, [3, 3, 1])])
def test_a_batch_is_cut_as_the_options_and_the_plan_want_it(micro_batch_size, cuts, sizes, monkeypatch):
    step = make_step(nn.Linear(3, 1), micro_batch_size=micro_batch_size)
    step.plan = lambda: BatchPlan(min_micro_batches=cuts)
    ran = []
    monkeypatch.setattr(step.graphs, "run", lambda part, plan: ran.append(part) or step._run(part, plan))
    step((torch.ones(7, 3), torch.ones(7, 1)))
    assert [len(part.targets) for part in ran] == sizes
    assert [part.is_last for part in ran] == [False] * (len(sizes) - 1) + [True]
    assert [part.is_full for part in ran] == [size == sizes[0] for size in sizes]


def test_a_step_under_another_plan_keeps_what_was_compiled():
    step = make_step(nn.Linear(3, 1))
    step((torch.ones(4, 3), torch.ones(4, 1)))
    other = step.under(lambda: BatchPlan(batch_size=9))
    assert (other.variants, other.graphs) == (step.variants, step.graphs)
    other((torch.ones(4, 3), torch.ones(4, 1)))
    assert (other.full_size, step.full_size) == (9, 4)
