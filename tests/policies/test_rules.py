"""The decisions of each rule, by the numbers of its paper: a table a family, then evidence, goodput and wrong use."""

import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divebatch import AdaBatch, Decision, DiveBatch, DivebatchError, Diversity, Fixed, Measurement
from divebatch.errors import ArgumentError, UsageError
from divebatch.measurement import History, Spread
from divebatch.policies import (
    CABS,
    AdaDamp,
    GeoDamp,
    Goodput,
    GradientDamp,
    InnerProductTest,
    NoiseScale,
    NormTest,
    PadaDamp,
    Plateau,
    Policy,
    SampleSchedule,
    Seesaw,
    SimiGrad,
    SmithSchedule,
)
from divebatch.policies.by_noise import cosines
from divebatch.policies.goodput import step_line
from divebatch.policies.policy import ratio, wanted_size

CAP, N = 4096, 50_000
quickly = settings(max_examples=40, deadline=None)


def noise(noise_scale: float, *, sq_norm: float = 1.0, error: float | None = None, degrees: float = 1e6) -> Diversity:
    """A noise scale, with a relative error of both its parts where one is given."""
    trace, spread = noise_scale * sq_norm, None
    if error is not None:
        variances = {"trace_variance": (error * trace) ** 2, "sq_norm_variance": (error * sq_norm) ** 2}
        spread = Spread(**variances, covariance=0.0, degrees=degrees)
    return Diversity.from_noise(trace, sq_norm, N, spread=spread)


def seen(noise_scale: float | None = None, *, batch_size: int = 128, epoch: int = 1, **more) -> Measurement:
    error, value = more.pop("error", None), more.pop("value", None)
    diversity = None if noise_scale is None else noise(noise_scale, error=error)
    diversity = diversity if value is None else Diversity(value, 1.0, N)
    fields = {"first_batch_size": 128, "dataset_size": N, "diversity": diversity, **more}
    return Measurement(epoch=epoch, batch_size=batch_size, **fields)


def size(policy: Policy, *args, **fields) -> int:
    return policy.next(seen(*args, **fields)).batch_size


def inner(noise_scale: float, share: float) -> Measurement:
    """Noise of which a share is along the gradient."""
    diversity = replace(noise(noise_scale, sq_norm=2.0), inner_variance=share * noise_scale * 2.0 * 2.0)
    return replace(seen(), diversity=diversity)


def damped(sq_norm: float) -> Measurement:
    return replace(seen(history=History(first_sq_norm=3.0)), diversity=noise(10.0, sq_norm=sq_norm))


SIMI, DOWN = SimiGrad(CAP, target_cosine=0.5), NoiseScale(CAP, monotone=False)
BY_64 = SimiGrad(CAP, target_cosine=0.5, multiple_of=64)
LOSS_2 = History(first_loss=2.0)
RULES: dict[str, list[tuple[Policy, Measurement, int]]] = {
    "divebatch": [
        (DiveBatch(0.1, 2048), seen(value=0.5), 2048),
        (DiveBatch(0.1, 2048), seen(value=0.02), 128),
        (DiveBatch.algorithm_1(0.1, 2048), seen(value=0.02), 100),
        (DiveBatch.as_published(0.1, 2048), seen(value=0.1, epoch=20), 500),
        (DiveBatch.as_published(0.1, 2048), seen(value=0.1, epoch=19), 128),
        (DiveBatch.with_extra_samples(0.5, CAP), seen(999.0), 500),
    ],
    "noise scale": [
        (NoiseScale(CAP), seen(900.7), 900),
        (NoiseScale(CAP), seen(9000.0), CAP),
        (NoiseScale(CAP), seen(50.0), 128),
        (DOWN, seen(50.0), 50),
        (NoiseScale(CAP, step_cost=1000), seen(900.0), int(math.sqrt(900_000))),
        (NormTest(CAP, eta=0.5), seen(100.3), 402),
        (NormTest(CAP, eta=0.5), seen(10.0), 128),
    ],
    "simigrad": [
        *((SIMI, seen(1e6, batch_size=b), wanted) for b, wanted in ((100, 110), (1, 2), (5, 6), (CAP, CAP))),
        *((SIMI, seen(1e-9, batch_size=b), wanted) for b, wanted in ((100, 90), (1, 1))),
        *((BY_64, seen(1e6, batch_size=b), wanted) for b, wanted in ((128, 192), (1024, 1088), (40, 64))),
        *((BY_64, seen(1.0, batch_size=b), wanted) for b, wanted in ((128, 64), (1024, 896), (64, 64), (40, 40))),
    ],
    "cabs": [
        *(
            (CABS(CAP), seen(b, lr=0.5, loss=2.0), wanted)
            for b, wanted in ((1000.0, 250), (1001.0, 250), (1006.0, 252))
        ),
        *((CABS(2048), seen(b, lr=0.5, loss=2.0), wanted) for b, wanted in ((1.0, 16), (1e9, 2048))),
        (CABS(CAP), seen(1000.0, lr=0.5, loss=0.0), CAP),
        (CABS(CAP), seen(1000.0, lr=0.5, loss=math.nan), 128),
        (CABS(CAP), seen(600.0, lr=0.5, loss=2.0, error=0.3), 128),
        (CABS(CAP), seen(600.0, lr=0.5, loss=2.0, error=0.05), 150),
    ],
    "inner product test": [
        (InnerProductTest(CAP, nu=None), inner(1000.0, 0.1), 400),
        (InnerProductTest(CAP, nu=None), inner(1000.0, 0.01), 128),
        (InnerProductTest(CAP, nu=None), inner(1000.0, 1.0), 4000),  # the norm test's
        (InnerProductTest(CAP), inner(1000.0, 0.1), 900),  # the rest, across the gradient, wants more
        (InnerProductTest(CAP), inner(1000.0, 0.5), 2000),
    ],
    "gradient damp": [(GradientDamp(CAP), damped(0.5), 768), (GradientDamp(CAP), damped(-0.5), 128)],
    "adadamp": [
        *(
            (AdaDamp(CAP), seen(loss=loss, history=LOSS_2), wanted)
            for loss, wanted in ((2.0, 128), (0.9, 285), (0.1, 2560), (3.0, 128), (1e-9, CAP), (0.0, CAP))
        ),
        (AdaDamp(CAP), seen(loss=0.7, history=History(first_loss=2.1)), 384),  # 2.1 / 0.7 is 3 and a rounding error
    ],
    "plateau": [
        *(
            (
                Plateau(CAP, patience=3),
                seen(loss=1.0, history=History(epochs_since_best=a, decisions_at_size=b)),
                wanted,
            )
            for a, b, wanted in ((2, 9, 128), (3, 9, 256), (9, 2, 128), (9, 3, 256))
        ),
        (Plateau(200), seen(loss=1.0, history=History(epochs_since_best=5, decisions_at_size=5)), 200),
    ],
    "schedule": [
        (policy, seen(lr_schedule_ratio=fallen, batch_size=640), wanted)
        for policy in (SmithSchedule(CAP), Seesaw(CAP))
        for fallen, wanted in (
            (0.1 * 0.2 / 0.1, 640),
            (0.5, 256),
            (1e-9, CAP),
            (0.0, CAP),
            (10.0, 128),
            (math.nan, 640),
        )
    ],
    "timetables": [
        *((PadaDamp(CAP, rate=0.5), seen(step=step), n) for step, n in ((0, 128), (1, 129), (100, 178), (10**6, CAP))),
        *((GeoDamp(CAP), seen(epoch=e), wanted) for e, wanted in ((4, 128), (5, 256), (9, 256), (10, 512), (60, CAP))),
        *(
            (SampleSchedule("0:128 1K:256 5K:512"), seen(samples=samples), wanted)
            for samples, wanted in ((0, 128), (999, 128), (1000, 256), (4999, 256), (5000, 512))
        ),
        (AdaBatch(300), seen(epoch=20, batch_size=256), 300),
        (AdaBatch(CAP, factor=1.5), seen(epoch=20, batch_size=1), 2),  # where the factor rounds to nothing
        (AdaBatch(CAP), seen(epoch=19), 128),
        (Fixed(), seen(), 128),
    ],
}


@pytest.mark.parametrize("family", RULES)
def test_a_rule_decides_as_in_its_paper(family: str):
    for policy, measurement, wanted in RULES[family]:
        assert policy.next(measurement).batch_size == wanted, (policy, measurement)


def sizes(policy: Policy, *, batch_size: int = 128, epochs: int, **fields) -> list[int]:
    """The batch sizes of a run whose epochs all show the same."""
    run = [batch_size]
    for epoch in range(1, epochs + 1):
        run.append(size(policy, epoch=epoch, batch_size=run[-1], **fields))
    return run


def test_timetables_over_a_run():
    assert sizes(AdaBatch(512), epochs=80) == [128] * 20 + [256] * 20 + [512] * 41
    assert sizes(AdaBatch(CAP, factor=3, every_epochs=2), batch_size=10, epochs=6) == [10, 10, 30, 30, 90, 90, 270]
    assert sizes(Fixed(), epochs=60) == [128] * 61
    assert sizes(DiveBatch(0.1, 2048), value=0.1, epochs=2) == [128, 500, 500]
    assert sizes(DiveBatch.algorithm_1(0.1, 2048), value=0.02, epochs=2) == [128, 100, 100]
    assert sizes(DiveBatch.as_published(0.1, 2048), value=0.1, epochs=40) == [128] * 20 + [500] * 21


# AdaBatch's learning rate


def test_adabatch_goes_from_128_at_0_1_to_256_at_0_075_in_its_own_paper():
    assert AdaBatch(CAP).next(seen(epoch=20)) == Decision(batch_size=256, reason="epoch 20: times 2")
    original = AdaBatch(CAP, lr_decay=0.75)
    assert original.next(seen(epoch=20)).lr_factor == pytest.approx(0.75, rel=1e-12)
    for unchanged in (seen(epoch=19), seen(epoch=40, batch_size=CAP)):
        assert original.next(unchanged) == Decision(batch_size=unchanged.batch_size)


def test_adabatch_that_wants_more_than_the_data_takes_whole_first_batches_and_less_learning_rate():
    decision = AdaBatch(65_536).next(seen(epoch=20, batch_size=32_768))
    assert decision.batch_size == 390 * 128
    assert decision.lr_factor == pytest.approx(49_920 / 65_536)


# DiveBatch


@quickly
@given(value=st.floats(1e-9, 10), delta=st.floats(0.01, 1), batch_size=st.integers(1, 2048))
def test_divebatch_is_algorithm_1_line_11(value, delta, batch_size):
    by_hand = max(1, min(2048, int(delta * N * value)))
    assert size(DiveBatch.algorithm_1(delta, 2048), value=value, batch_size=batch_size) == by_hand
    assert size(DiveBatch(delta, 2048), value=value, batch_size=batch_size) == max(by_hand, batch_size)


def test_divebatch_says_what_it_computed_and_measures_only_what_it_needs():
    assert DiveBatch.algorithm_1(0.1, 2048).next(seen(value=0.02)).reason == "delta * n * diversity = 100.0"
    assert DiveBatch(0.1, 2048).next(seen(value=0.5)).reason == "delta * n * diversity = 2500.0, capped at 2048"
    published = DiveBatch.as_published(0.1, CAP)
    assert [epoch for epoch in range(1, 61) if published.measures(epoch, 128)] == [20, 40, 60]
    assert all(DiveBatch(0.1, CAP).measures(epoch, 128) for epoch in range(1, 61))
    assert published.next(seen(epoch=19)) == Decision(batch_size=128)
    assert published.next(seen(epoch=20, batch_size=CAP)) == Decision(batch_size=CAP)
    assert (published.every_epochs, published.monotone) == (20, True)
    extra = DiveBatch.with_extra_samples(0.1, CAP)
    assert (extra.delta, extra.max_batch_size, extra.estimator) == (0.1, CAP, "moments")


@pytest.mark.parametrize("every", [1, 20])
def test_measuring_ends_at_the_cap_only_where_nothing_could_follow(every):
    for make in (partial(DiveBatch, 0.1), NoiseScale, NormTest):
        assert not make(CAP, every_epochs=every).measures(20, CAP)
        assert make(CAP, every_epochs=every, monotone=False).measures(20, CAP)
        assert make(CAP, every_epochs=every).measures(20, CAP - 1)


UNDEFINED = {
    "zero sum": (Diversity(3.0, 0.0, N), "sum to zero"),
    "all zero": (Diversity(0.0, 0.0, N), "sum to zero"),
    "NaN": (Diversity(math.nan, 1.0, N), "nan"),
    "NaN sum": (Diversity(1.0, math.nan, N), "nan"),
    "infinite": (Diversity(math.inf, 1.0, N), "inf"),
    "infinite sum": (Diversity(1.0, math.inf, N), "inf"),
    "infinite ratio": (Diversity(1.0, 5e-324, N), ""),
}


@pytest.mark.parametrize(("diversity", "problem"), UNDEFINED.values(), ids=UNDEFINED)
@pytest.mark.parametrize("make", [DiveBatch, DiveBatch.algorithm_1, DiveBatch.as_published])
def test_a_diversity_that_cannot_be_formed_gives_the_cap_and_says_why(make, diversity, problem):
    decision = make(0.1, CAP).next(seen(epoch=20, diversity=diversity))
    assert decision.batch_size == CAP
    assert "undefined" in decision.reason
    assert problem in decision.reason


# Rules of the noise scale, and what they would be as a delta


@pytest.mark.parametrize("noise_scale", [30.0, 300.0, 700.0])
def test_the_rules_are_divebatch_at_a_delta(noise_scale: float):
    for delta, policy in {1.0: NoiseScale(CAP), 4.0: NormTest(CAP)}.items():
        assert abs(size(policy, noise_scale) - size(DiveBatch(delta, CAP), noise_scale)) <= delta + 1


def test_simigrad_comes_to_rest_where_its_target_is():
    policy, batch_size = SimiGrad(CAP, target_cosine=0.4), 128
    for _ in range(60):
        batch_size = size(policy, 600.0, batch_size=batch_size)
    assert batch_size == pytest.approx(2 * 600 * 0.4 / 0.6, rel=0.11)


def test_the_likeness_of_halves_follows_from_the_noise_scale_and_has_its_interval():
    assert cosines(noise(600.0), 800) == pytest.approx((0.4, 0.4))
    low, high = cosines(noise(600.0, error=0.1), 800)
    assert 0.3 < low < 0.4 < high < 0.5
    assert size(SimiGrad(CAP, target_cosine=0.38), 600.0, batch_size=800, error=0.1) == 800
    assert size(SimiGrad(CAP, target_cosine=0.38), 600.0, batch_size=800, error=0.001) == 720


def test_the_inner_product_test_stays_where_nothing_was_seen():
    spread = Spread(trace_variance=math.inf, sq_norm_variance=math.inf, covariance=0.0, degrees=0.0)
    nothing = Diversity(math.nan, math.nan, 128, spread)  # what "moments" says of an epoch with one step
    decision = InnerProductTest(CAP).next(replace(seen(), diversity=nothing))
    assert (decision.batch_size, decision.reason) == (128, "nothing was seen that would justify a change")


# Evidence


def test_no_rule_acts_on_an_interval_that_holds_the_present_size():
    for policy in (NoiseScale(CAP), NormTest(CAP, eta=1.0), DiveBatch(1.0, CAP)):
        unsure, sure = (policy.next(seen(200.0, error=error)) for error in (0.4, 0.02))
        assert unsure.batch_size == 128
        assert "no change" in unsure.reason
        assert 200 <= sure.batch_size <= 201
        assert "95 % confidence" in sure.reason
    assert [size(DOWN, 100.0, error=error) for error in (0.5, 0.01)] == [128, 100]  # down needs evidence too


@pytest.mark.parametrize("sq_norm", [-0.05, 1e-9, 0.05])
def test_a_gradient_lost_in_noise_moves_the_batch_to_what_is_certain_and_not_to_the_cap(sq_norm: float):
    spread = Spread(trace_variance=1.0, sq_norm_variance=0.01, covariance=0.0, degrees=1e6)
    lost = Diversity.from_noise(100.0, sq_norm, N, spread=spread)
    low, high = lost.noise_scale_interval()
    assert 100 < low < high == math.inf
    assert size(DiveBatch(1.0, CAP), diversity=lost) == int(1 + low) < CAP
    assert size(DiveBatch(0.1, CAP), diversity=lost) == 128


def test_where_nothing_is_known_nothing_changes():
    nothing = Spread(trace_variance=math.inf, sq_norm_variance=math.inf, covariance=0.0, degrees=0.0)
    unknown = Diversity(math.nan, math.nan, N, nothing)
    for policy in (NoiseScale(CAP), NormTest(CAP), DiveBatch(1.0, CAP), SimiGrad(CAP), GradientDamp(CAP), CABS(CAP)):
        assert size(policy, diversity=unknown, lr=0.1, loss=1.0) == 128


TIMED = History(decisions_at_size=2, throughputs=tuple((b, b / (1.0 + 0.002 * b)) for b in (128, 256)))


@pytest.mark.parametrize(
    "policy",
    [NoiseScale(CAP), NormTest(CAP), DiveBatch(1.0, CAP), SimiGrad(CAP, target_cosine=0.9), CABS(CAP), Goodput(CAP)],
    ids=lambda policy: type(policy).__name__,
)
def test_a_single_estimate_moves_nothing(policy: Policy):
    """It shows no scatter, so its error is not zero but unknown: no degree of freedom is left."""
    fields = {"lr": 0.1, "loss": 1.0, "history": TIMED}
    assert size(policy, diversity=noise(5000.0, error=0.0), **fields) > 128
    decision = policy.next(seen(diversity=noise(5000.0, error=0.0, degrees=0.0), **fields))
    assert decision.batch_size == 128
    assert decision.reason


def test_a_noise_scale_that_is_not_positive_is_no_noise():
    spread = Spread(trace_variance=1.0, sq_norm_variance=1e-4, covariance=0.0, degrees=1e6)
    none = Diversity.from_noise(-0.1, 1.0, 1000, spread=spread)
    assert none.noise_scale == 0.0
    assert size(CABS(CAP), diversity=none, lr=0.1, loss=1.0) == 16
    assert size(NoiseScale(CAP, monotone=False, min_batch_size=8), diversity=none) == 8
    assert size(Goodput(CAP), diversity=none, history=TIMED) == 128


def test_what_is_wanted_without_an_interval_is_the_rule_or_infinite():
    assert wanted_size(noise(10.0), 128, lambda b: 3 * b) == (pytest.approx(30.0), "")
    wanted, remark = wanted_size(Diversity(1.0, 0.0, 10), 128, lambda b: 3 * b)
    assert (wanted, remark) == (math.inf, "the gradients of 10 samples sum to zero")


def test_safe_ratios():
    assert ratio(6, 3) == 2
    assert ratio(1, 0) == ratio(1, -1) == ratio(1e308, 1e-308) == math.inf
    for pair in [(0, 0), (math.nan, 1), (1, math.nan), (-1, 1), (1, math.inf)]:
        assert math.isnan(ratio(*pair))


# Goodput


def test_step_time_is_a_line_through_what_was_measured():
    assert step_line([(b, 0.5 + 0.01 * b) for b in (64, 128, 512)]) == pytest.approx((0.5, 0.01))
    assert step_line([(100, 10.0), (200, 20.0)]) == pytest.approx((0.0, 0.1))
    assert step_line([(100, 1.0), (200, 0.5)])[1] == 0.0  # larger batches that take less time: noise


def timed(fixed: float, each: float, *tried: int) -> History:
    return History(decisions_at_size=2, throughputs=tuple((b, b / (fixed + each * b)) for b in tried))


@pytest.mark.parametrize("noise_scale", [20.0, 200.0, 5000.0])
def test_goodput_is_the_most_progress_in_time(noise_scale: float):
    """Noise-free steps a second: McCandlish's worth of a step over its time."""
    candidates = Goodput(CAP)._candidates(128)
    by_hand = max(candidates, key=lambda b: 1 / (1 + noise_scale / b) / (1.0 + 0.002 * b))
    assert size(Goodput(CAP), noise_scale, history=timed(1.0, 0.002, 128, 256)) == by_hand


def test_goodput_stays_where_little_is_to_be_gained_or_nothing_is_known():
    found = [size(Goodput(CAP), 2000.0, history=timed(fixed, 0.01, 128, 256)) for fixed in (0.0, 0.01, 5.0)]
    assert found[:2] == [128, 128]
    assert found[2] > 500
    assert "promises only" in Goodput(CAP).next(seen(2000.0, history=timed(0.0, 0.01, 128, 256))).reason
    assert size(Goodput(CAP), 2000.0, history=timed(0.0, 0.01, 128)) > 128  # a second size is tried
    assert size(Goodput(CAP), 2000.0, history=History(decisions_at_size=2)) == 128  # no speed is known


@pytest.mark.parametrize("batch_size", [128, 1024])
def test_goodput_makes_no_change_that_may_be_a_loss(batch_size: int):
    """Up on a noise scale that may be small, down on one that may be large."""
    noise_scale = 900.0 if batch_size == 128 else 15.0
    sure, unsure = (
        Goodput(CAP).next(seen(noise_scale, error=error, batch_size=batch_size, history=TIMED)) for error in (0.02, 5.0)
    )
    assert sure.batch_size != batch_size
    assert unsure.batch_size == batch_size
    assert "with 95 % confidence only -" in unsure.reason


def test_goodput_is_not_misled_by_what_a_compiler_does_in_the_first_epoch_at_a_size():
    """At 1024, in truth the fastest, ten times the time: by that alone 128 would be the best."""
    fair = timed(1.0, 0.001, 128, 1024)
    misled = replace(fair, throughputs=((128, fair.throughputs[0][1]), (1024, fair.throughputs[1][1] / 10)))
    measured = partial(seen, 2000.0, batch_size=1024)
    assert Goodput(CAP).next(measured(history=misled)).batch_size == 128
    first = Goodput(CAP).next(measured(history=replace(misled, decisions_at_size=1)))
    assert (first.batch_size, first.reason) == (1024, "the first epoch at a size does not tell its speed")
    assert Goodput(CAP).next(measured(history=fair.with_throughput(1024, 1.0))).batch_size >= 1024


# Timetables by samples


def test_the_megatron_grammar():
    assert SampleSchedule("0:768 250B:1536", sequence_length=2048).entries() == [(0, 768), (122_070_312, 1536)]
    assert SampleSchedule("0:8 1.5K:16 2M:32 1T:64").entries() == [(0, 8), (1500, 16), (2 * 10**6, 32), (10**12, 64)]
    assert SampleSchedule("0:16 75%:40", total_samples=1000).entries() == [(0, 16), (750, 40)]
    assert SampleSchedule("0:16 12.5%:40 50%:64", total_samples=800).entries() == [(0, 16), (100, 40), (400, 64)]


@pytest.mark.parametrize(
    "text", ["", "768", "1:768", "0:768 0:800", "0:768 5K:800 2K:900", "0:0", "0:-5", "0:7.5", "0:8 2G:9"]
)
def test_a_wrong_schedule_is_named(text: str):
    with pytest.raises(ArgumentError, match=f"schedule={text!r}"):
        SampleSchedule(text)


def test_a_schedule_that_does_not_fit_is_named():
    SampleSchedule("0:128").check_start(128)
    with pytest.raises(ArgumentError, match="starts with batch size 128, the loader with 64"):
        SampleSchedule("0:128").check_start(64)
    with pytest.raises(ArgumentError, match=r"'75%:40' is a part of the training: pass total_samples="):
        SampleSchedule("0:16 75%:40")


# Wrong use


def test_what_is_missing_is_named():
    for policy in (NoiseScale(CAP), NormTest(CAP), SimiGrad(CAP), CABS(CAP), GradientDamp(CAP), DiveBatch(0.1, CAP)):
        with pytest.raises(UsageError, match=f"{type(policy).__name__} needs the diversity of epoch 7"):
            policy.next(seen(epoch=7))
    for policy in (CABS(CAP), AdaDamp(CAP), Plateau(CAP)):
        with pytest.raises(UsageError, match=rf"{type(policy).__name__} needs the loss of epoch 7.*step\(loss"):
            policy.next(seen(5.0, epoch=7))
    for policy in (SmithSchedule(CAP), Seesaw(CAP)):
        with pytest.raises(UsageError, match="the schedule's own rate"):
            policy.next(seen())
    with pytest.raises(UsageError, match=r"the noise along the gradient, .*: use estimator='split' or 'moments'"):
        InnerProductTest(CAP).next(seen(100.0))


WRONG = {
    "delta": (lambda value: DiveBatch(value, CAP), [0, -0.1, math.nan, math.inf, True, "0.1"]),
    "max_batch_size": (lambda value: DiveBatch(0.1, value), [0, -1, 2.5, math.nan, math.inf, True, "3", None]),
    "min_batch_size": (lambda value: DiveBatch(0.1, CAP, min_batch_size=value), [0, -1, 2.5, math.nan, True]),
    "every_epochs": (lambda value: DiveBatch(0.1, CAP, every_epochs=value), [0, -1, 2.5, math.nan, True]),
    "multiple_of": (lambda value: SimiGrad(CAP, multiple_of=value), [0, -1, 2.5, True]),
    "factor": (lambda value: AdaBatch(CAP, factor=value), [0, 1, -2, 0.5, math.nan, math.inf, True]),
    "lr_decay": (lambda value: AdaBatch(CAP, lr_decay=value), [0, -0.75, math.nan, math.inf, True]),
    "step_cost": (lambda value: NoiseScale(CAP, step_cost=value), [0, -1, math.nan, True]),
    "eta": (lambda value: NormTest(CAP, eta=value), [0, -1, math.nan, "1"]),
    "target_cosine": (lambda value: SimiGrad(CAP, target_cosine=value), [0, 1, 1.5, math.nan]),
    "theta": (lambda value: InnerProductTest(CAP, theta=value), [0, math.nan]),
    "nu": (lambda value: InnerProductTest(CAP, nu=value), [0, math.nan]),
    "rate": (lambda value: PadaDamp(CAP, rate=value), [0, -1, math.inf]),
    "patience": (lambda value: Plateau(CAP, patience=value), [0, 1.5, True]),
    "min_improvement": (lambda value: Goodput(CAP, min_improvement=value), [0, -1, math.nan]),
    "sequence_length": (lambda value: SampleSchedule("0:8", sequence_length=value), [0, 1.5]),
    "total_samples": (lambda value: SampleSchedule("0:8", total_samples=value), [0, 1.5]),
}
OTHERS = {
    "max_batch_size": [AdaBatch, NoiseScale, SmithSchedule, GeoDamp, Goodput],
    "every_epochs": [
        lambda value, kind=kind: kind(CAP, every_epochs=value) for kind in (AdaBatch, NoiseScale, GeoDamp, Goodput)
    ],
    "factor": [lambda value: Plateau(CAP, factor=value), lambda value: GeoDamp(CAP, factor=value)],
}
"""Other rules that have a setting of the same name; the value 0 is wrong for all."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_named_with_its_value(name: str):
    make, values = WRONG[name]
    for made, value in [*((make, value) for value in values), *((other, 0) for other in OTHERS.get(name, []))]:
        with pytest.raises(ValueError, match=f"{name}={value!r}") as caught:
            made(value)
        assert isinstance(caught.value, DivebatchError)
