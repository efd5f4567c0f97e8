"""Branches of a critical batch size probe, and the verdict on them."""

import copy
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from divebatch.errors import ArgumentError, BatchTooLargeError, DivergedError
from divebatch.lab.probe import (
    Branch,
    Critical,
    Outcome,
    Probe,
    interval,
    probe_critical_batch,
    smoothed,
)


class Descent:
    """Plain gradient descent on w^2 / 2 without noise: what any batch does is known."""

    def __init__(self, lr=0.1):
        self.lr, self.weight, self.branches = lr, 1.0, []

    def train(self, branch):
        self.branches.append(branch)
        for _ in range(branch.steps):
            yield 0.5 * self.weight * self.weight  # a power would not overflow to infinity
            self.weight *= 1 - self.lr * branch.lr_factor

    def save(self):
        return self.weight

    def restore(self, weight):
        self.weight = weight


def probe(training, **settings):
    defaults = {"window": 256, "coupling": "linear", "repeats": 2, "factors": [1, 2, 4, 8, 16, 32]}
    return probe_critical_batch(
        4, training.train, save=training.save, restore=training.restore, **{**defaults, **settings}
    )


def test_without_noise_the_linear_rule_holds_until_the_steps_overshoot():
    training = Descent()
    found = probe(training, evaluate=lambda: 0.5 * training.weight**2, window=128)
    # A branch of factor k ends at (1 - k/10)^(32/k): smaller with k up to 10, then back up, and k = 32 diverges.
    assert [gap.loss for gap in found.gaps] == pytest.approx(
        [0.5 * (1 - 0.1 * k) ** (2 * 32 / k) for k in (1, 2, 4, 8, 16, 32)]
    )
    assert found.critical.size == 8 * 4
    assert found.critical.high == 8 * 4


def test_every_branch_gets_the_same_samples_rates_and_start():
    training = Descent()
    found = probe(training, factors=[8, 2], coupling="sqrt", window=250)
    assert found.window == 224  # whole steps of 32
    assert {branch.samples for branch in training.branches} == {224}
    assert [branch.lr_factor for branch in training.branches[::2]] == pytest.approx([1, math.sqrt(2), math.sqrt(8)])
    assert [(branch.factor, branch.repeat) for branch in training.branches] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
        (8, 0),
        (8, 1),
    ]
    assert all(outcome.course[0] == pytest.approx(0.5) for outcome in found.outcomes)
    assert training.weight == 1.0


def test_the_start_is_restored_after_an_error_too():
    training = Descent()

    def failing(branch):
        training.weight = 7.0
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        probe_critical_batch(4, failing, save=training.save, restore=training.restore, window=64)
    assert training.weight == 1.0


def test_a_branch_that_does_not_fit_ends_the_factors():
    training = Descent()

    def train(branch):
        if branch.factor > 4:
            raise BatchTooLargeError("out of memory: batch of 32")
        return training.train(branch)

    found = probe_critical_batch(4, train, save=training.save, restore=training.restore, window=256, factors=[2, 4, 8])
    assert [gap.factor for gap in found.gaps] == [1, 2, 4]
    assert found.problem == "factor 8 and above: out of memory: batch of 32"


def test_divergence_at_the_present_batch_is_an_error():
    training = Descent(lr=1e200)
    with pytest.raises(DivergedError, match="at the present batch size 4"):
        probe(training)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 100}, "window of 100 samples is shorter than one step of factor 32"),
        ({"window": 8, "factors": None}, "nothing to compare"),
        ({"factors": [1]}, "nothing to compare"),
        ({"factors": [0]}, "factors must be an integer of at least 1"),
        ({"coupling": "cubic"}, "unknown coupling 'cubic'; known: none, linear, sqrt"),
        ({"repeats": 0}, "repeats must be"),
        ({"tolerance": -1}, "tolerance must be positive"),
        ({"smoothing": 0}, "smoothing must be positive"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ArgumentError, match=message):
        probe(Descent(), **settings)


def test_smoothing_looks_back_over_samples_and_not_steps():
    fine = smoothed([1.0] * 80 + [0.0] * 80, 1, 40.0)[-1]
    coarse = smoothed([1.0] * 10 + [0.0] * 10, 8, 40.0)[-1]
    assert fine == pytest.approx(coarse, abs=1e-12)


def test_a_torch_loop_of_ones_own_with_batch_noise():
    torch.manual_seed(0)
    x = torch.randn(1024, 8)
    y = x @ torch.ones(8, 1) + torch.randn(1024, 1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def save():
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def restore(state):
        model.load_state_dict(state[0])
        optimizer.load_state_dict(copy.deepcopy(state[1]))

    def train(branch):
        for group in optimizer.param_groups:
            group["lr"] *= branch.lr_factor
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(branch.repeat))
        for rows in order.split(branch.batch_size)[: branch.steps]:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            yield loss.item()

    before = model.weight.clone()
    first, second = (
        probe_critical_batch(8, train, save=save, restore=restore, window=1024, factors=[2, 64], repeats=3)
        for _ in range(2)
    )
    assert first == second
    assert first.critical.size < 512  # two steps do not do the work of 128
    assert torch.equal(model.weight, before)


# The verdict


def probe_of(losses, *, tolerance=0.02):
    """From {factor: loss of each repeat}, at batch size 10."""

    def outcome(factor, repeat, loss):
        size, rate = 10 * factor, math.sqrt(factor)
        return Outcome(Branch(factor=factor, batch_size=size, lr_factor=rate, steps=800 // size, repeat=repeat), loss)

    outcomes = [outcome(factor, *each) for factor, values in losses.items() for each in enumerate(values)]
    return Probe(10, 800, "sqrt", tolerance, tuple(outcomes))


def test_the_critical_batch_is_the_last_that_keeps_up():
    found = probe_of({1: [1.0, 2.0], 2: [1.0, 2.0], 4: [1.015, 2.03], 8: [1.2, 2.4], 16: [1.0, 2.0]})
    assert found.critical == Critical(size=40, low=40, high=40, is_open=False)  # 16 keeps up by chance: 8 did not
    assert str(found.critical) == "40 (surely 40, surely no more)"
    assert [gap.verdict for gap in found.gaps[1:]] == ["keeps up", "keeps up", "falls behind", "keeps up"]
    assert [gap.mean for gap in found.gaps] == pytest.approx([0, 0, 0.015, 0.2, 0])


def test_repeats_that_disagree_leave_it_open():
    found = probe_of({1: [1.0, 1.0], 2: [1.0, 1.03], 4: [1.0, 1.08], 8: [1.5, 1.52]})
    assert found.critical == Critical(size=20, low=10, high=40, is_open=False)
    assert [gap.verdict for gap in found.gaps[1:]] == ["perhaps keeps up", "perhaps falls behind", "falls behind"]
    assert str(found.critical) == "20 (surely 10, perhaps up to 40)"


def test_where_all_keep_up_the_end_is_open():
    found = probe_of({1: [1.0, 1.0], 2: [0.9, 0.91], 4: [0.8, 0.81]})
    assert str(found.critical) == "at least 40 (surely 40, no upper end found)"


def test_one_repeat_proves_nothing():
    found = probe_of({1: [1.0], 2: [1.0], 4: [2.0]})
    assert found.critical == Critical(size=20, low=10, high=None, is_open=False)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_branch_that_diverged_falls_behind(broken):
    found = probe_of({1: [1.0, 1.0], 2: [1.0, broken]})
    assert found.gaps[1].verdict == "falls behind"
    assert found.critical.size == 10


def test_a_negative_loss_is_compared_by_its_size():
    found = probe_of({1: [-1.0, -1.0], 2: [-0.9, -0.9], 4: [-1.1, -1.1]})
    assert [gap.mean for gap in found.gaps] == pytest.approx([0, 0.1, -0.1])


def test_the_interval_covers_its_mean_about_as_often_as_it_says():
    draw = random.Random(0)
    hits = 0
    for _ in range(400):
        _, low, high = interval([draw.gauss(1.0, 2.0) for _ in range(4)])
        hits += low <= 1.0 <= high
    assert 0.92 <= hits / 400 <= 0.98


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=5), st.floats(0.001, 0.5))
def test_size_lies_between_low_and_high(losses, tolerance):
    found = probe_of({2**k: [loss, loss * 1.01, loss * 0.98] for k, loss in enumerate(losses)}, tolerance=tolerance)
    critical = found.critical
    assert critical.low <= critical.size
    assert critical.high is None or critical.size <= critical.high
