"""Policies: what all of them promise, then what each decides."""

import math
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divebatch import AdaBatch, Decision, DiveBatch, DivebatchError, Diversity, Fixed, Measurement
from divebatch.errors import ArgumentError, UsageError
from divebatch.measurement import History, Spread
from divebatch.policies import (
    CABS,
    POLICIES,
    AdaDamp,
    AnnealToBatch,
    Auto,
    GeoDamp,
    Goodput,
    GradientDamp,
    HorizonRamp,
    InnerProductTest,
    NoiseScale,
    NormTest,
    PadaDamp,
    Plateau,
    Rounded,
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
    "auto, for Adam": Auto(CAP, step_cost=200, lr_coupling="sqrt"),
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
    "anneal-to-batch": AnnealToBatch(CAP),
    "anneal-to-batch, with a horizon": AnnealToBatch(CAP, total_samples=2_000_000),
    "horizon-ramp": HorizonRamp(CAP, total_samples=2_000_000),
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


def sizes(policy, diversity, *, batch_size=128, epochs=60):
    """The batch sizes of a run whose epochs all have the same diversity."""
    run = [batch_size]
    for epoch in range(1, epochs + 1):
        run.append(policy.next(seen(diversity=diversity, epoch=epoch, batch_size=run[-1])).batch_size)
    return run


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


@any_policy
def test_a_policy_needs_fields_of_a_measurement(policy):
    assert policy.needs <= {entry.name for kind in (Measurement, Diversity, History) for entry in fields(kind)}


@pytest.mark.parametrize("policy", [case for case in CASES.values() if hasattr(case, "max_batch_size")])
def test_training_cannot_start_above_the_cap(policy):
    policy.check_start(CAP)
    with pytest.raises(ArgumentError, match="max_batch_size=2048 is below the first batch size 2049"):
        policy.check_start(CAP + 1)


WRONG = {
    "delta": (lambda value: DiveBatch(value, CAP), [0, -0.1, math.nan, math.inf, True, "0.1"]),
    "max_batch_size": (lambda value: DiveBatch(0.1, value), [0, -1, 2.5, math.nan, math.inf, True, "3", None]),
    "min_batch_size": (lambda value: DiveBatch(0.1, CAP, min_batch_size=value), [0, -1, 2.5, math.nan, True]),
    "every_epochs": (lambda value: DiveBatch(0.1, CAP, every_epochs=value), [0, -1, 2.5, math.nan, True]),
    "multiple_of": (lambda value: SimiGrad(CAP, multiple_of=value), [0, -1, 2.5, True]),
    "adabatch max_batch_size": (AdaBatch, [0, -1, 2.5, math.nan, True, None]),
    "adabatch every_epochs": (lambda value: AdaBatch(CAP, every_epochs=value), [0, -1, 2.5, math.nan, True]),
    "factor": (lambda value: AdaBatch(CAP, factor=value), [0, 1, -2, 0.5, math.nan, math.inf, True]),
    "lr_decay": (lambda value: AdaBatch(CAP, lr_decay=value), [0, -0.75, math.nan, math.inf, True]),
}


@pytest.mark.parametrize(
    ("name", "make", "value"),
    [(name, make, value) for name, (make, values) in WRONG.items() for value in values],
)
def test_a_wrong_setting_is_named_with_its_value(name, make, value):
    with pytest.raises(ValueError, match=f"{name.split()[-1]}={value!r}") as caught:
        make(value)
    assert isinstance(caught.value, DivebatchError)


def test_settings_with_a_default_go_by_name():
    for make in (lambda: DiveBatch(0.1, CAP, 1), lambda: AdaBatch(CAP, 2)):
        with pytest.raises(TypeError):
            make()


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


# Fixed


def test_fixed_never_changes_and_needs_nothing():
    assert Fixed.needs == frozenset()
    assert sizes(Fixed(), None) == [128] * 61


# AdaBatch


def test_adabatch_doubles_every_twentieth_epoch_up_to_its_cap():
    assert AdaBatch.needs == frozenset()
    assert sizes(AdaBatch(512), None, epochs=80) == [128] * 20 + [256] * 20 + [512] * 41


def test_adabatch_in_the_divebatch_paper_leaves_the_learning_rate_alone():
    assert AdaBatch(CAP).next(seen()).lr_factor == 1.0


def test_adabatch_in_its_own_paper_goes_from_128_at_0_1_to_256_at_0_075():
    decision = AdaBatch(CAP, lr_decay=0.75).next(seen(epoch=20, batch_size=128))
    assert decision.batch_size == 256
    assert 0.1 * decision.lr_factor == pytest.approx(0.075, rel=1e-12)


def test_adabatch_changes_no_learning_rate_where_it_changes_no_size():
    policy = AdaBatch(CAP, lr_decay=0.75)
    assert policy.next(seen(epoch=19)) == Decision(batch_size=128)
    assert policy.next(seen(epoch=40, batch_size=CAP)) == Decision(batch_size=CAP)


def test_adabatch_ends_at_a_cap_that_is_no_multiple_and_always_grows():
    assert AdaBatch(300).next(seen(batch_size=256)).batch_size == 300
    assert AdaBatch(CAP, factor=1.5).next(seen(batch_size=1)).batch_size == 2  # where the factor rounds to nothing


def test_adabatch_takes_other_factors_and_timetables():
    assert sizes(AdaBatch(CAP, factor=3, every_epochs=2), None, batch_size=10, epochs=6) == [
        10,
        10,
        30,
        30,
        90,
        90,
        270,
    ]


def test_adabatch_that_wants_more_than_the_data_takes_whole_first_batches_and_less_learning_rate():
    measurement = replace(seen(batch_size=32_768, dataset_size=50_000), first_batch_size=128)
    decision = AdaBatch(65_536).next(measurement)
    assert decision.batch_size == 390 * 128
    assert decision.lr_factor == pytest.approx(49_920 / 65_536)


# DiveBatch


def test_divebatch_needs_the_diversity():
    assert DiveBatch.needs == {"diversity"}
    with pytest.raises(UsageError, match="diversity of epoch 20"):
        DiveBatch(0.1, CAP).next(seen(diversity=None))


def test_divebatch_takes_delta_times_n_times_diversity_up_to_the_cap():
    assert DiveBatch(0.1, CAP).next(seen(diversity=0.5)).batch_size == 2048
    assert DiveBatch.algorithm_1(0.1, CAP).next(seen(diversity=0.02)).batch_size == 100
    assert DiveBatch(0.1, CAP).next(seen(diversity=0.02)).batch_size == 128


@quickly
@given(diversity=st.floats(1e-9, 10), delta=st.floats(0.01, 1), batch_size=st.integers(1, CAP))
def test_divebatch_is_algorithm_1_line_11(diversity, delta, batch_size):
    measurement = seen(diversity=diversity, batch_size=batch_size)
    by_hand = max(1, min(CAP, int(delta * 50_000 * diversity)))
    assert DiveBatch.algorithm_1(delta, CAP).next(measurement).batch_size == by_hand
    assert DiveBatch(delta, CAP).next(measurement).batch_size == max(by_hand, batch_size)


def test_divebatch_says_what_it_computed():
    assert DiveBatch.algorithm_1(0.1, CAP).next(seen(diversity=0.02)).reason == "delta * n * diversity = 100.0"
    assert DiveBatch(0.1, CAP).next(seen(diversity=0.5)).reason == "delta * n * diversity = 2500.0, capped at 2048"


def test_the_three_readings_of_the_paper():
    default, text, code = (make(0.1, CAP) for make in (DiveBatch, DiveBatch.algorithm_1, DiveBatch.as_published))
    assert (default.every_epochs, default.monotone) == (1, True)
    assert (text.every_epochs, text.monotone) == (1, False)
    assert (code.every_epochs, code.monotone) == (20, True)
    assert DiveBatch.as_published(0.1, CAP, every_epochs=5).every_epochs == 5
    assert sizes(default, 0.1, epochs=2) == [128, 500, 500]
    assert sizes(text, 0.02, epochs=2) == [128, 100, 100]
    assert sizes(code, 0.1, epochs=40) == [128] * 20 + [500] * 21


def test_divebatch_measures_every_so_often():
    assert [epoch for epoch in range(1, 61) if DiveBatch.as_published(0.1, CAP).measures(epoch, 128)] == [20, 40, 60]
    assert all(DiveBatch(0.1, CAP).measures(epoch, 128) for epoch in range(1, 61))


@pytest.mark.parametrize("every", [1, 20])
def test_measuring_ends_at_the_cap_only_where_nothing_could_follow(every):
    at_cap = {"epoch": 20, "batch_size": CAP}
    for make in (partial(DiveBatch, 0.1), NoiseScale, NormTest):
        assert not make(CAP, every_epochs=every).measures(**at_cap)
        assert make(CAP, every_epochs=every, monotone=False).measures(**at_cap)
        assert make(CAP, every_epochs=every).measures(20, CAP - 1)


def test_divebatch_keeps_the_size_without_a_diversity_where_none_is_due():
    policy = DiveBatch.as_published(0.1, CAP)
    assert policy.next(seen(diversity=None, epoch=19)) == Decision(batch_size=128)
    assert policy.next(seen(diversity=None, epoch=20, batch_size=CAP)) == Decision(batch_size=CAP)


def test_divebatch_keeps_floor_and_multiple():
    free = Rounded(DiveBatch(0.1, CAP, min_batch_size=48, monotone=False), 32)
    assert [free.next(seen(diversity=d)).batch_size for d in (1e-6, 0.02, 0.0255, 1.0)] == [32, 96, 96, 2048]
    rounded = Rounded(DiveBatch(0.1, CAP), 32)
    assert rounded.next(seen(diversity=0.03, batch_size=100)).batch_size == 128
    assert rounded.next(seen(diversity=0.02, batch_size=100)).batch_size == 100


UNDEFINED = {
    "zero sum": (Diversity(3.0, 0.0, 50_000), "sum to zero"),
    "all zero": (Diversity(0.0, 0.0, 50_000), "sum to zero"),
    "NaN": (Diversity(math.nan, 1.0, 50_000), "nan"),
    "NaN sum": (Diversity(1.0, math.nan, 50_000), "nan"),
    "infinite": (Diversity(math.inf, 1.0, 50_000), "inf"),
    "infinite sum": (Diversity(1.0, math.inf, 50_000), "inf"),
    "infinite ratio": (Diversity(1.0, 5e-324, 50_000), ""),
}


@pytest.mark.parametrize(("diversity", "problem"), UNDEFINED.values(), ids=UNDEFINED)
@pytest.mark.parametrize("make", [DiveBatch, DiveBatch.algorithm_1, DiveBatch.as_published])
def test_a_diversity_that_cannot_be_formed_gives_the_cap_and_says_why(make, diversity, problem):
    measurement = Measurement(epoch=20, batch_size=128, dataset_size=50_000, diversity=diversity)
    decision = make(0.1, CAP).next(measurement)
    assert decision.batch_size == CAP
    assert "undefined" in decision.reason
    assert problem in decision.reason
