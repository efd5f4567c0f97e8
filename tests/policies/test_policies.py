"""Policies: what all of them promise, then what each decides."""

import math
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divebatch import AdaBatch, Decision, DiveBatch, Diversity, Fixed, Measurement
from divebatch.errors import ArgumentError
from divebatch.measurement import History, Spread
from divebatch.policies import (
    CABS,
    POLICIES,
    AdaDamp,
    Auto,
    GeoDamp,
    Goodput,
    GradientDamp,
    InnerProductTest,
    NoiseDoubling,
    NoiseScale,
    NormTest,
    PadaDamp,
    Plateau,
    SampleSchedule,
    Seesaw,
    SimiGrad,
    SmithSchedule,
    make_policy,
)
from divebatch.policies.divebatch import ExtraSamples
from divebatch.policies.policy import clamp

CAP = 2048
CASES = {
    "fixed": Fixed(),
    "adabatch": AdaBatch(CAP),
    "adabatch, original": AdaBatch(CAP, lr_decay=0.75),
    "adabatch, slow": AdaBatch(CAP, factor=1.5, every_epochs=3),
    "divebatch": DiveBatch(0.1, CAP),
    "divebatch, text": DiveBatch.algorithm_1(0.1, CAP),
    "divebatch, code": DiveBatch.as_published(0.1, CAP),
    "divebatch, with a floor": DiveBatch(0.1, CAP, min_batch_size=8, monotone=False),
    "divebatch, every second": DiveBatch(0.1, CAP, every_epochs=2),
    "divebatch, extra samples": DiveBatch.with_extra_samples(0.1, CAP, monotone=False),
    "auto": Auto(CAP),
    "auto, with a horizon": Auto(CAP, total_samples=10**15),
    "noise-doubling": NoiseDoubling(CAP),
    "noise-doubling, priced": NoiseDoubling(CAP, step_cost=200),
    "noise-scale": NoiseScale(CAP),
    "noise-scale, priced": NoiseScale(CAP, step_cost=2.5, every_epochs=2, monotone=False),
    "norm-test": NormTest(CAP),
    "inner-product-test": InnerProductTest(CAP, theta=0.7, nu=None),
    "simigrad": SimiGrad(CAP, target_cosine=0.4),
    "cabs": CABS(CAP),
    "smith": SmithSchedule(CAP),
    "seesaw": Seesaw(CAP),
    "adadamp": AdaDamp(CAP),
    "gradient-damp": GradientDamp(CAP),
    "padadamp": PadaDamp(CAP, rate=0.01),
    "geodamp": GeoDamp(CAP),
    "goodput": Goodput(CAP),
    "sample-schedule": SampleSchedule("0:64 1K:128 1.5M:2048"),
    "plateau": Plateau(CAP),
}
MAY_SHRINK = {
    "divebatch, text",
    "divebatch, with a floor",
    "divebatch, extra samples",
    "noise-scale, priced",
    "simigrad",
    "cabs",
    "smith",
    "seesaw",
    "adadamp",
    "gradient-damp",
    "padadamp",
    "geodamp",
    "goodput",
    "sample-schedule",
}
any_policy = pytest.mark.parametrize("policy", CASES.values(), ids=CASES)

SUMS = st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, 5e-324, 1e308, math.inf, math.nan]))
SPREADS = st.builds(
    Spread,
    trace_variance=SUMS,
    sq_norm_variance=SUMS,
    covariance=st.floats(-1e6, 1e6),
    degrees=st.floats(0, 1e6),
)
MEASUREMENTS = st.builds(
    Measurement,
    epoch=st.integers(1, 60),
    batch_size=st.integers(1, CAP),
    dataset_size=st.just(50_000),
    diversity=st.builds(Diversity, SUMS, SUMS, st.just(50_000), st.none() | SPREADS, SUMS),
    first_batch_size=st.none() | st.integers(1, CAP),
    samples=st.integers(0, 10_000_000),
    step=st.integers(0, 10_000_000),
    lr=st.floats(0, 10),
    lr_schedule_ratio=SUMS,
    loss=SUMS,
    history=st.builds(
        History,
        decisions_at_size=st.integers(1, 60),
        first_loss=SUMS,
        best_loss=SUMS,
        epochs_since_best=st.integers(0, 60),
        first_sq_norm=SUMS,
        throughputs=st.just(((64, 100.0), (128, 150.0))),
    ),
)
quickly = settings(max_examples=40, deadline=None)


def seen(*, diversity=0.02, epoch=20, batch_size=128, dataset_size=50_000):
    measured = None if diversity is None else Diversity(diversity, 1.0, dataset_size, inner_variance=1e-10)
    return Measurement(
        epoch=epoch,
        batch_size=batch_size,
        dataset_size=dataset_size,
        diversity=measured,
        lr=0.1,
        lr_schedule_ratio=0.5,
        loss=1.0,
        history=History(decisions_at_size=5, epochs_since_best=5, first_loss=2.0, throughputs=((batch_size, 100.0),)),
    )


# All policies


@any_policy
@quickly
@given(measurement=MEASUREMENTS)
def test_equal_measurements_give_equal_decisions(policy, measurement):
    first = policy.next(measurement)
    policy.next(replace(measurement, epoch=measurement.epoch + 1))
    assert policy.next(measurement) == policy.next(replace(measurement)) == first


@pytest.mark.parametrize(("name", "policy"), CASES.items(), ids=CASES)
@quickly
@given(measurement=MEASUREMENTS)
def test_a_decision_is_a_whole_size_within_the_bounds(name, policy, measurement):
    decision = policy.next(measurement)
    assert type(decision) is Decision
    assert type(decision.batch_size) is int
    assert (1 if name in MAY_SHRINK else measurement.batch_size) <= decision.batch_size <= CAP
    assert decision.lr_factor > 0


@any_policy
@quickly
@given(measurement=MEASUREMENTS)
def test_a_decision_rests_on_what_the_policy_says_it_needs(policy, measurement):
    is_measured = policy.measures(measurement.epoch, measurement.batch_size)
    for name in ("diversity", "loss"):
        if name not in policy.needs or not is_measured:
            without, decision = policy.next(replace(measurement, **{name: None})), policy.next(measurement)
            assert (without.batch_size, without.lr_factor) == (decision.batch_size, decision.lr_factor)


@any_policy
def test_a_change_has_a_reason_and_no_change_no_factor(policy):
    for epoch, batch_size in [(20, 128), (60, 128), (60, CAP), (7, 128)]:
        decision = policy.next(seen(diversity=0.5, epoch=epoch, batch_size=batch_size))
        if decision.batch_size != batch_size:
            assert decision.reason
        else:
            assert decision.lr_factor == 1.0


@any_policy
def test_a_policy_is_frozen_and_its_repr_shows_every_setting(policy):
    for entry in fields(policy):
        with pytest.raises(FrozenInstanceError):
            setattr(policy, entry.name, 1)
    assert eval(repr(policy)) == policy
    assert hash(policy) == hash(replace(policy))


@pytest.mark.parametrize("policy", [case for case in CASES.values() if hasattr(case, "max_batch_size")])
def test_training_cannot_start_above_the_cap(policy):
    policy.check_start(CAP)
    with pytest.raises(ArgumentError, match="max_batch_size=2048 is below the first batch size 2049"):
        policy.check_start(CAP + 1)


def test_the_catalog_builds_every_policy_by_name():
    assert make_policy("fixed") == Fixed()
    assert make_policy("adabatch", max_batch_size=CAP, every_epochs=5) == AdaBatch(CAP, every_epochs=5)
    assert make_policy("divebatch", delta=0.1, max_batch_size=CAP) == DiveBatch(0.1, CAP)
    assert set(POLICIES.values()) == {type(policy) for policy in CASES.values()} - {ExtraSamples}


def test_the_catalog_says_what_it_does_not_know():
    with pytest.raises(ArgumentError, match=f"'magic'; known: {', '.join(POLICIES)}"):
        make_policy("magic")
    with pytest.raises(ArgumentError, match="detla"):
        make_policy("divebatch", detla=0.1, max_batch_size=CAP)
    with pytest.raises(ArgumentError, match="delta=0"):
        make_policy("divebatch", delta=0, max_batch_size=CAP)


# Bounds


def slow_clamp(proposal, cap, at_least, multiple_of):
    """Try every allowed size; the lowest one is allowed even if it is no multiple."""
    lowest = min(at_least, cap)
    allowed = [size for size in range(lowest, cap + 1) if size % multiple_of == 0 or size == lowest]
    return max((size for size in allowed if size <= proposal), default=lowest)


@quickly
@given(
    proposal=st.one_of(st.floats(0, 1e4), st.just(math.inf)),
    cap=st.integers(1, 260),
    at_least=st.integers(1, 300),
    multiple_of=st.integers(1, 40),
)
def test_clamp_finds_the_largest_allowed_size_that_is_not_above_the_proposal(proposal, cap, at_least, multiple_of):
    size = clamp(proposal, cap, at_least=at_least, multiple_of=multiple_of)
    assert size == slow_clamp(proposal, cap, at_least, multiple_of)
    assert type(size) is int


def test_the_cap_must_not_be_below_the_floor():
    assert DiveBatch(0.1, 8, min_batch_size=8).next(seen(batch_size=8)).batch_size == 8
    for make in (partial(DiveBatch, 0.1), NoiseScale):
        with pytest.raises(ArgumentError, match="max_batch_size=7 is below min_batch_size=8"):
            make(7, min_batch_size=8)
