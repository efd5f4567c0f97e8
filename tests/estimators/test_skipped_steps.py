"""Moments where a batch's gradient is thrown away: by a GradScaler that met an overflow, or by the loop itself."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer

from divebatch import AdaptiveLoader, Controller, Diversity
from divebatch.estimators import Moments, Scene
from divebatch.policies import NoiseScale
from reference.delivery import Delivered, tell
from reference.per_sample import dataset, mean_loss, mlp, samples

pytestmark = pytest.mark.filterwarnings("ignore:.* goes by the noise scale, and .moments.")  # plain SGD has no momentum

SIZE = 4
BAD = (0, 3, 4, 7)
"""Of eight batches: the first, as with a scale that starts too high, two in a row, and the last."""
any_clearing = pytest.mark.parametrize("set_to_none", [True, False])


class Loop:
    """Weights that stand still, so that a skipped batch must be as if it had never been there."""

    def __init__(
        self, optimizer: type[Optimizer] = SGD, *, accumulate: int = 1, delivered: int = 0, **settings
    ) -> None:
        self.model, self.delivered = mlp(), delivered
        self.optimizer = optimizer(self.model.parameters(), lr=0.0, **settings)
        self.estimator, self.delivery = Moments(), Delivered(lambda: self.delivered)
        scene = Scene(self.model, self.delivery, self.optimizer)
        self.estimator.bind(scene)
        tell(lambda: self.estimator, scene, accumulate=lambda: accumulate)
        self.estimator.start()

    def loss(self, index: int) -> Tensor:
        self.delivered += SIZE
        self.delivery.look()
        x, y = samples(64)
        part = slice(SIZE * index, SIZE * (index + 1))
        return mean_loss(self.model(x[part]), y[part])


def kept(indices, **settings) -> Diversity:
    loop = Loop(**settings)
    for index in indices:
        loop.optimizer.zero_grad()
        loop.loss(index).backward()
        loop.optimizer.step()
    return loop.estimator.finish()


def assert_same(measured: Diversity, expected: Diversity) -> None:
    assert measured.num_samples == expected.num_samples
    assert (measured.trace, measured.sq_norm) == pytest.approx((expected.trace, expected.sq_norm), rel=1e-9)


def scaled(loop: Loop, *, before: bool, set_to_none: bool) -> Diversity:
    scaler = GradScaler("cpu", init_scale=1024.0)
    for index in range(8):
        loss = loop.loss(index) * (math.inf if index in BAD else 1.0)
        if before:
            loop.optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(loss).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        if not before:
            loop.optimizer.zero_grad(set_to_none=set_to_none)
    return loop.estimator.finish()


@any_clearing
@pytest.mark.parametrize("before", [True, False])
def test_a_batch_whose_step_a_scaler_skipped_is_in_no_estimate(before: bool, set_to_none: bool):
    for settings in ({}, {"momentum": 0.9}):
        expected = kept([1, 2, 5, 6], **settings)
        assert_same(scaled(Loop(**settings), before=before, set_to_none=set_to_none), expected)


def test_a_fused_optimizer_skips_by_itself_and_finds_gradients_scaled():
    expected = kept([1, 2, 5, 6], momentum=0.9)
    measured = scaled(Loop(Adam, fused=True), before=True, set_to_none=True)
    assert_same(measured, expected)


@any_clearing
def test_a_batch_that_the_loop_dropped_is_in_no_estimate(set_to_none: bool):
    loop = Loop()
    for index in range(4):
        loop.loss(index).backward()
        if index in (1, 2):
            loop.optimizer.zero_grad(set_to_none=set_to_none)
            continue
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=set_to_none)
    assert_same(loop.estimator.finish(), kept([0, 3]))


@pytest.mark.parametrize("touch", [False, True])
def test_batches_that_are_accumulated_count_all(touch: bool):
    loop = Loop(accumulate=2)
    for index in range(4):
        (loop.loss(index) / 2).backward()
        if touch:
            nn.utils.clip_grad_norm_(loop.model.parameters(), 1e9)
        if index % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad(set_to_none=False)
    measured = loop.estimator.finish()
    assert measured.num_samples == 4 * SIZE
    first, second = (gradient_of(range(start, start + 2)) for start in (0, 2))
    assert measured.trace == pytest.approx(float((second - first) @ second) * 2 * SIZE, rel=1e-9)


def gradient_of(indices) -> Tensor:
    loop = Loop()
    gradients = [torch.autograd.grad(loop.loss(index), list(loop.model.parameters())) for index in indices]
    return torch.stack([torch.cat([part.flatten() for part in each]) for each in gradients]).mean(0)


def test_a_look_at_gradients_drops_nothing():
    loop = Loop()
    for index in range(4):
        loop.optimizer.zero_grad()
        loss = loop.loss(index)
        torch.autograd.grad(loss, list(loop.model.parameters()), retain_graph=True)
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, list(loop.model.parameters()))
        loop.optimizer.step()
    assert_same(loop.estimator.finish(), kept(range(4)))


def test_a_state_after_a_skipped_step_goes_on_without_its_batch():
    loop = Loop()
    for index in range(3):
        loop.optimizer.zero_grad()
        loop.loss(index).backward()
        if index < 2:
            loop.optimizer.step()
    state, resumed = loop.estimator.state_dict(), Loop(delivered=loop.delivered)
    resumed.estimator.load_state_dict(state)
    for index in (3, 4):
        resumed.optimizer.zero_grad()
        resumed.loss(index).backward()
        resumed.optimizer.step()
    assert_same(resumed.estimator.finish(), kept([0, 1, 3, 4]))


def test_a_controller_decides_on_the_batches_that_were_used():
    model, data = mlp(), dataset(32)
    optimizer, loader = SGD(model.parameters(), lr=0.0), AdaptiveLoader(data, SIZE, shuffle=False)
    control = Controller(model, optimizer, loader, NoiseScale(16), estimator="moments")
    scaler, used = GradScaler("cpu"), []
    for index, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        used += [] if index in (1, 6) else [(x, y)]
        scaler.scale(mean_loss(model(x), y) * (math.inf if index in (1, 6) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    record = control.step()
    loop = Loop()
    for x, y in used:
        loop.delivered += len(x)
        loop.delivery.look()
        loop.optimizer.zero_grad()
        mean_loss(loop.model(x), y).backward()
        loop.optimizer.step()
    assert record.diversity == pytest.approx(loop.estimator.finish().of(32).value, rel=1e-9)
