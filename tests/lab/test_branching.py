"""Branches of a critical batch size probe, and the verdict on them."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divebatch.errors import ArgumentError, BatchTooLargeError, DivergedError
from divebatch.lab.probe import Branch, Critical, Probe, chosen_factors, interval, probe_critical_batch, smoothed


class Descent:
    """Plain gradient descent on w^2 / 2 without noise, in a trainer's place: what any batch does is known."""

    batch_size = 4

    def __init__(self, lr=0.1, judge="train"):
        self.judge = judge
        self.lr, self.weight, self.branches = lr, 1.0, []

    def train(self, branch):
        self.branches.append(branch)
        for _ in range(branch.steps):
            yield 0.5 * self.weight * self.weight  # a power would not overflow to infinity
            self.weight *= 1 - self.lr * branch.lr_factor

    def evaluate(self):
        return 0.5 * self.weight**2

    def save(self):
        return self.weight

    def restore(self, weight):
        self.weight = weight


def probe(training, **settings):
    defaults = {"window": 256, "coupling": "linear", "repeats": 2, "factors": [1, 2, 4, 8, 16, 32]}
    return probe_critical_batch(training, **{**defaults, **settings})


def test_without_noise_the_linear_rule_holds_until_the_steps_overshoot():
    found = probe(Descent(judge="validation"), window=128)
    # A branch of factor k ends at (1 - k/10)^(32/k): smaller with k up to 10, then back up, and k = 32 diverges.
    assert [gap.loss for gap in found.gaps] == pytest.approx(
        [0.5 * (1 - 0.1 * k) ** (2 * 32 / k) for k in (1, 2, 4, 8, 16, 32)]
    )
    assert found.critical.size == 8 * 4
    assert found.critical.high == 8 * 4


def test_every_branch_gets_the_same_samples_rates_and_start():
    training = Descent()
    found = probe(training, factors=[1, 2, 8], coupling="sqrt", window=250)
    assert found.window == 224  # whole steps of 32
    assert {branch.steps * branch.batch_size for branch in training.branches} == {224}
    assert [branch.lr_factor for branch in training.branches[::2]] == pytest.approx([1, math.sqrt(2), math.sqrt(8)])
    order = [(factor, repeat) for factor in (1, 2, 8) for repeat in (0, 1)]
    assert [(branch.factor, branch.repeat) for branch in training.branches] == order
    assert all(branch.course[0] == pytest.approx(0.5) for branch in found.branches)
    assert training.weight == 1.0


def test_the_start_is_restored_after_an_error_too():
    training = Descent()

    def failing(branch):
        training.weight = 7.0
        raise RuntimeError("broken")

    training.train = failing
    with pytest.raises(RuntimeError, match="broken"):
        probe(training)
    assert training.weight == 1.0


def test_a_branch_that_does_not_fit_ends_the_factors():
    class Small(Descent):
        def train(self, branch):
            if branch.factor > 4:
                raise BatchTooLargeError("out of memory: batch of 32")
            return super().train(branch)

    found = probe(Small(), factors=[1, 2, 4, 8])
    assert [gap.factor for gap in found.gaps] == [1, 2, 4]
    assert found.problem == "factor 8 and above: out of memory: batch of 32"


def test_divergence_at_the_present_batch_is_an_error():
    training = Descent(lr=1e200)
    with pytest.raises(DivergedError, match="at the current batch size 4"):
        probe(training)


@pytest.mark.parametrize(
    ("factors", "window", "message"),
    [([32], 100, "window of 100 samples is shorter than one step of factor 32"), (None, 8, "nothing to compare")],
)
def test_wrong_factors_are_named(factors, window, message):
    with pytest.raises(ArgumentError, match=message):
        chosen_factors(factors, 4, window, 1000)


def test_smoothing_looks_back_over_samples_and_not_steps():
    fine = smoothed([1.0] * 80 + [0.0] * 80, 1, 40.0)[-1]
    coarse = smoothed([1.0] * 10 + [0.0] * 10, 8, 40.0)[-1]
    assert fine == pytest.approx(coarse, abs=1e-12)


# The verdict


def probe_of(losses, *, tolerance=0.02):
    """From {factor: loss of each repeat}, at batch size 10."""

    def branch(factor, repeat, loss):
        size, rate = 10 * factor, math.sqrt(factor)
        return Branch(factor=factor, batch_size=size, lr_factor=rate, steps=800 // size, repeat=repeat, loss=loss)

    branches = [branch(factor, *each) for factor, values in losses.items() for each in enumerate(values)]
    return Probe(10, 800, "sqrt", tolerance, tuple(branches))


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
