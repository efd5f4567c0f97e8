"""Couplings that go by the noise: AdaScale's gain by definition, measured on the way, summed; and 1 / (1 + B / b)."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import training
from divebatch import DiveBatch, Diversity, Fixed, Oracle, gradient_diversity
from divebatch.errors import ArgumentError
from divebatch.estimators import Estimator
from divebatch.lr import GainSum, LrCoupling
from divebatch.measurement import gain
from divebatch.policies import PadaDamp, Policy
from reference.per_sample import mean_loss
from training import DATA


class Says(Estimator):
    """An estimator that has one answer after the other."""

    def __init__(self, *answers: tuple[float, float]) -> None:
        self.answers = list(answers)

    def bind(self, context: Any) -> None: ...

    def finish(self) -> Diversity:
        return Diversity.from_noise(*self.answers.pop(0), 40)

    window = finish


class Training(training.Training):
    def __init__(self, policy: Policy, *, kind: str = "adascale", **settings: Any) -> None:
        super().__init__(policy, batch_size=8, lr_coupling=kind, **settings)


# The gain


@given(trace=st.floats(0, 1e6), sq_norm=st.floats(1e-6, 1e6), ratio=st.floats(1, 1e4), base=st.integers(1, 1000))
def test_the_gain_is_the_papers_and_between_one_and_the_ratio(trace: float, sq_norm: float, ratio: float, base: int):
    var = trace / base  # of the base batch's gradient
    by_definition = (var + sq_norm) / (var / ratio + sq_norm)
    assert gain(ratio, trace / sq_norm / base) == pytest.approx(by_definition, rel=1e-9)
    assert 1 - 1e-12 <= by_definition <= ratio * (1 + 1e-12)


@pytest.mark.parametrize(
    ("trace", "sq_norm", "expected"),
    [
        (0.0, 1.0, 1.0),  # no noise: a larger batch gains nothing
        (1.0, 0.0, 4.0),  # nothing but noise: all of it
        (1.0, -0.1, 4.0),  # an unbiased estimate of no signal
        (-0.1, 1.0, 1.0),  # and of no noise
        (2.0, 1.0, (1 + 1) / (1 / 4 + 1)),
        (math.nan, math.nan, 1.0),  # nothing known: the base batch's rate
    ],
)
def test_the_rate_is_the_gain_of_what_was_measured(trace: float, sq_norm: float, expected: float):
    run = Training(Fixed(), base_batch_size=2, estimator=Says((trace, sq_norm)))
    assert run.lr == 0.01
    record = run.epoch()
    assert (record.measured, record.next_lr) == (True, pytest.approx(0.01 * expected))
    root = Training(Fixed(), kind="adascale-sqrt", base_batch_size=2, estimator=Says((trace, sq_norm)))
    assert root.epoch().next_lr == pytest.approx(0.01 * math.sqrt(expected))


@pytest.mark.filterwarnings("ignore:epoch . has ended, no step")
def test_it_follows_the_size_and_the_measured_noise_together():
    run = Training(DiveBatch(0.5, 32), estimator=Oracle(mean_loss))
    for _ in range(3):
        list(run.loader)
        noise = gradient_diversity(run.model, mean_loss, [DATA.tensors]).noise_scale
        record = run.control.step()
        assert record.next_lr == pytest.approx(0.01 * gain(record.next_batch_size / 8, noise / 8), rel=1e-9)
    assert record.next_batch_size > 8


# Beside it: 1 / (1 + B / b), which also goes by the noise at a constant batch


NOISES = [(3.0, 1.0), (3.0, 1.0), (12.0, 1.0), (1.0, 2.0), (0.0, 1.0)]
"""tr(Sigma) and ||G||^2 as they are measured after each epoch."""


@pytest.mark.parametrize("base", [None, 2, 10**9], ids=["first batch", "smaller batch", "no noise"])
def test_the_rate_is_what_the_formula_says_at_every_noise(base: int | None):
    run = Training(PadaDamp(16, rate=0.4), kind="1/(1+B/b)", base_batch_size=base, estimator=Says(*NOISES))
    assert run.lr == 0.01
    base = base or 8
    highest = 0.01 * (1 + 3.0 / base)  # the best rate without noise, of which 0.01 is the best at the base
    for trace, sq_norm in NOISES:
        record = run.epoch()
        noise, size = trace / sq_norm, record.next_batch_size
        assert record.next_lr == pytest.approx(highest / (1 + noise / size), rel=1e-14)
        assert run.control.effective_steps == run.control.steps
    assert record.next_batch_size > 8


@given(noise=st.floats(0, 1e6), first=st.floats(0, 1e6), size=st.integers(1, 4096), base=st.integers(1, 4096))
def test_it_is_adascales_gain_times_what_the_noise_has_changed(noise: float, first: float, size: int, base: int):
    """So at a noise that stays it is AdaScale, and only the rate without a norm at the base is a rule of its own."""
    factors = []
    for kind in ("1/(1+B/b)", "adascale"):
        coupling = LrCoupling(SGD([torch.ones(1)], 1.0), kind=kind, first_batch_size=base)
        for measured in (first, noise):
            coupling.follow(size, noise_scale=measured)
        factors.append(coupling.factor)
    assert factors[0] == pytest.approx(factors[1] * (1 + first / base) / (1 + noise / base), rel=1e-12)


def test_a_noise_without_end_says_nothing_of_the_rate():
    answers = [(1.0, 0.0), (8.0, 1.0), (1.0, -1.0), (math.nan, math.nan), (24.0, 1.0)]
    run = Training(Fixed(), kind="1/(1+B/b)", estimator=Says(*answers))
    assert [run.epoch().next_lr for _ in answers] == pytest.approx([0.01, 0.01, 0.01, 0.01, 0.01 * 2 / 4])


def test_the_noise_first_measured_survives_a_resume():
    run = Training(Fixed(), kind="1/(1+B/b)", estimator=Says((8.0, 1.0), (24.0, 1.0)))
    run.epoch(), run.epoch()
    fresh = Training(Fixed(), kind="1/(1+B/b)", estimator=Says((56.0, 1.0)))
    fresh.control.load_state_dict(run.control.state_dict())
    assert fresh.lr == run.lr == pytest.approx(0.01 * 2 / 4)
    assert fresh.epoch().next_lr == pytest.approx(0.01 * 2 / 8)


# The base batch


@pytest.mark.parametrize(("kind", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0), ("adascale", 1.0)])
def test_a_rate_chosen_for_another_batch_is_scaled_from_the_start(kind: str, factor: float):
    run = Training(PadaDamp(16, rate=1e-9), kind=kind, base_batch_size=2, estimator="moments")
    assert run.lr == pytest.approx(0.01 * factor)
    assert run.epoch().lr == pytest.approx(0.01 * factor)


def test_the_policy_still_counts_from_the_batch_that_training_started_with():
    run = Training(PadaDamp(16, rate=0.2), kind="linear", base_batch_size=2)
    assert run.epoch().next_batch_size == 9  # 8 + 5 steps * 0.2


@pytest.mark.parametrize("base", [0, -2, 1.5, True])
def test_a_base_batch_that_cannot_be_is_refused(base: Any):
    with pytest.raises(ArgumentError, match="base_batch_size must be an integer of at least 1"):
        Training(Fixed(), base_batch_size=base)


# Scale-invariant steps


def test_the_sum_of_gains_counts_steps_at_the_base_batch():
    run = Training(Fixed(), base_batch_size=2, estimator=Says((1.0, 0.0), (2.0, 1.0)))
    sums = [run.control.effective_steps]
    for _ in range(2):
        run.epoch()
        sums.append(run.control.effective_steps)
    for _ in run.loader:
        run.optimizer.step()
    sums.append(run.control.effective_steps)
    assert sums == pytest.approx([0, 5, 5 + 5 * 4, 5 + 20 + 5 * 1.6])


def test_a_scheduler_stepped_as_often_as_said_goes_by_the_sum_of_gains():
    def course(optimizer: SGD) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))

    run = Training(Fixed(), base_batch_size=2, estimator=Says(*[(2.0, 1.0)] * 9), scheduler=course, every_steps=2)
    places = []
    for x, y in run.loader:
        run.optimizer.zero_grad()
        mean_loss(run.model(x), y).backward()
        run.optimizer.step()
        for _ in range(run.control.take_scheduler_steps()):
            run.scheduler.step()
        places.append(run.scheduler.last_epoch)
        assert places[-1] == math.floor(run.control.effective_steps + 1e-9)
        assert run.scheduler.get_last_lr()[0] == pytest.approx(0.01 / (1 + places[-1]))
    assert places == [1, 2, 3, 5, 6]  # gains of 1, 1, then 1.6 each


def test_the_sum_survives_a_resume():
    run = Training(Fixed(), base_batch_size=2, estimator=Says((2.0, 1.0), (2.0, 1.0)))
    run.epoch(), run.epoch()
    handed = run.control.take_scheduler_steps()
    fresh = Training(Fixed(), estimator=Says((math.nan, math.nan), (0.0, 1.0)))
    fresh.control.load_state_dict(run.control.state_dict())
    assert handed == 13
    assert fresh.control.effective_steps == run.control.effective_steps == pytest.approx(13.0)
    assert fresh.control.take_scheduler_steps() == 0
    assert fresh.epoch().next_lr == pytest.approx(0.016)  # what was measured before is remembered
    assert fresh.epoch().lr == pytest.approx(0.016)
    assert fresh.lr == pytest.approx(0.01)


def test_an_epoch_that_begins_again_takes_nothing_from_the_sum():
    gains = GainSum(1.0)
    gains.change(8.0, 50)  # within an epoch that is then broken off
    assert [gains.at(step) for step in (0, 10, 50, 51)] == [0.0, 10.0, 50.0, 58.0]
    gains.change(4.0, 10)
    assert gains.at(12) == 18.0


def test_no_step_is_lost_to_rounding():
    gains, due = GainSum(0.1), []
    for step in range(1, 11):
        gains.change(0.1, step)  # ten tenths, added one by one, are a little less than one
        due.append(gains.due(step))
    assert gains.before < 1
    assert due == [0] * 9 + [1]
