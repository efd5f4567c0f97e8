"""What each of the published rules decides, by their own numbers."""

import math
from dataclasses import replace
from functools import partial

import pytest

from divebatch import DivebatchError, Diversity, Measurement
from divebatch.errors import ArgumentError, UsageError
from divebatch.measurement import History, Spread
from divebatch.policies import (
    CABS,
    AdaDamp,
    DiveBatch,
    GeoDamp,
    Goodput,
    GradientDamp,
    InnerProductTest,
    NoiseScale,
    NormTest,
    PadaDamp,
    Plateau,
    SampleSchedule,
    Seesaw,
    SimiGrad,
    SmithSchedule,
)
from divebatch.policies.by_noise import cosines
from divebatch.policies.goodput import step_line
from divebatch.policies.policy import ratio, wanted_size

CAP, N = 4096, 50_000


def noise(noise_scale: float, *, sq_norm: float = 1.0, error: float | None = None) -> Diversity:
    """A noise scale, with a relative error of both its parts where one is given."""
    trace = noise_scale * sq_norm
    spread = None
    if error is not None:
        variances = {"trace_variance": (error * trace) ** 2, "sq_norm_variance": (error * sq_norm) ** 2}
        spread = Spread(**variances, covariance=0.0, degrees=1e6)
    return Diversity.from_noise(trace, sq_norm, N, spread=spread)


def seen(noise_scale: float | None = None, *, batch_size: int = 128, epoch: int = 1, **more) -> Measurement:
    error = more.pop("error", None)
    diversity = None if noise_scale is None else noise(noise_scale, error=error)
    settings = {"first_batch_size": 128, "diversity": diversity, **more}
    return Measurement(epoch=epoch, batch_size=batch_size, dataset_size=N, **settings)


def size(policy, *args, **settings) -> int:
    return policy.next(seen(*args, **settings)).batch_size


# Rules of the noise scale, and what they would be as a delta


def test_the_noise_scale_is_the_batch_size():
    assert size(NoiseScale(CAP), 900.7) == 900
    assert size(NoiseScale(CAP), 9000.0) == CAP
    assert size(NoiseScale(CAP), 50.0) == 128
    assert size(NoiseScale(CAP, monotone=False), 50.0) == 50


def test_a_price_of_time_takes_the_root():
    assert size(NoiseScale(CAP, step_cost=1000), 900.0) == int(math.sqrt(900_000))


def test_the_norm_test_wants_noise_below_a_share_of_the_signal():
    policy = NormTest(CAP, eta=0.5)
    assert size(policy, 100.3) == math.ceil(100.3 / 0.25) == 402
    wanted = policy.wanted(100.3)
    assert math.sqrt(100.3 / wanted) <= 0.5 < math.sqrt(100.3 / (wanted - 1))
    assert size(policy, 10.0) == 128


@pytest.mark.parametrize("noise_scale", [30.0, 300.0, 700.0])
def test_the_rules_are_divebatch_at_a_delta(noise_scale: float):
    for delta, policy in {1.0: NoiseScale(CAP), 4.0: NormTest(CAP)}.items():
        divebatch = size(DiveBatch(delta, CAP), noise_scale)
        assert abs(size(policy, noise_scale) - divebatch) <= delta + 1


def test_simigrad_goes_a_tenth_up_or_down():
    def step(batch_size: int, noise_scale: float) -> int:
        return size(SimiGrad(CAP, target_cosine=0.5), noise_scale, batch_size=batch_size)

    assert (step(100, 1e6), step(100, 1.0), step(1, 1e6), step(1, 1e-9)) == (110, 90, 2, 1)
    assert step(5, 1e6) == 6
    assert step(CAP, 1e9) == CAP


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


def test_cabs_is_the_learning_rate_times_the_variance_over_the_loss():
    assert size(CABS(CAP), 1000.0, lr=0.5, loss=2.0) == 250
    assert size(CABS(CAP), 1001.0, lr=0.5, loss=2.0) == 250  # 250.25, and 251.5 rounds up
    assert size(CABS(CAP), 1006.0, lr=0.5, loss=2.0) == 252
    assert (size(CABS(2048), 1.0, lr=0.5, loss=2.0), size(CABS(2048), 1e9, lr=0.5, loss=2.0)) == (16, 2048)
    assert size(CABS(CAP), 1000.0, lr=0.5, loss=0.0) == CAP
    assert size(CABS(CAP), 1000.0, lr=0.5, loss=math.nan) == 128


def test_cabs_waits_where_its_interval_allows_the_present_size():
    policy = CABS(CAP)
    assert size(policy, 600.0, lr=0.5, loss=2.0, error=0.3) == 128
    assert size(policy, 600.0, lr=0.5, loss=2.0, error=0.05) == 150


def inner(noise_scale: float, share: float) -> Measurement:
    """Noise of which a share is along the gradient."""
    diversity = replace(noise(noise_scale, sq_norm=2.0), inner_variance=share * noise_scale * 2.0 * 2.0)
    return replace(seen(), diversity=diversity)


def test_the_inner_product_test_counts_noise_along_the_gradient():
    plain, augmented = InnerProductTest(CAP, nu=None), InnerProductTest(CAP)
    assert plain.next(inner(1000.0, 0.1)).batch_size == math.ceil(0.1 * 1000 / 0.25) == 400
    assert augmented.next(inner(1000.0, 0.1)).batch_size == 900  # the rest, across it, wants more
    assert augmented.next(inner(1000.0, 0.5)).batch_size == 2000
    assert plain.next(inner(1000.0, 1.0)).batch_size == size(NormTest(CAP), 1000.0)
    assert plain.next(inner(1000.0, 0.01)).batch_size == 128


def test_the_inner_product_test_is_the_variance_over_the_fourth_power():
    measurement = inner(700.0, 0.3)
    variance, sq_norm = measurement.diversity.inner_variance, measurement.diversity.sq_norm
    wanted = math.ceil(variance / (0.5**2 * sq_norm**2))
    assert InnerProductTest(CAP, nu=None).next(measurement).batch_size == wanted


def test_the_inner_product_test_says_what_it_needs():
    with pytest.raises(UsageError, match=r"the noise along the gradient, .*: use estimator='split' or 'moments'"):
        InnerProductTest(CAP).next(seen(100.0))


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


@pytest.mark.parametrize("sq_norm", [-0.05, 1e-9, 0.05])
def test_a_gradient_lost_in_noise_moves_the_batch_to_what_is_certain_and_not_to_the_cap(sq_norm: float):
    spread = Spread(trace_variance=1.0, sq_norm_variance=0.01, covariance=0.0, degrees=1e6)
    lost = Diversity.from_noise(100.0, sq_norm, N, spread=spread)
    low, high = lost.noise_scale_interval()
    assert 100 < low < high == math.inf
    decision = DiveBatch(1.0, CAP).next(replace(seen(), diversity=lost))
    assert decision.batch_size == int(1 + low) < CAP
    assert DiveBatch(0.1, CAP).next(replace(seen(), diversity=lost)).batch_size == 128


def test_where_nothing_is_known_nothing_changes():
    nothing = Spread(trace_variance=math.inf, sq_norm_variance=math.inf, covariance=0.0, degrees=0.0)
    unknown = Diversity(math.nan, math.nan, N, nothing)
    for policy in (NoiseScale(CAP), NormTest(CAP), DiveBatch(1.0, CAP), SimiGrad(CAP), GradientDamp(CAP)):
        assert policy.next(replace(seen(), diversity=unknown)).batch_size == 128
    cabs = CABS(CAP).next(replace(seen(lr=0.1, loss=1.0), diversity=unknown))
    assert cabs.batch_size == 128


def test_a_smaller_size_needs_evidence_too():
    policy = NoiseScale(CAP, monotone=False)
    assert size(policy, 100.0, error=0.5) == 128
    assert size(policy, 100.0, error=0.01) == 100


def test_what_is_asked_without_an_interval_is_the_rule_or_infinite():
    assert wanted_size(noise(10.0), 128, lambda b: 3 * b) == (pytest.approx(30.0), "")
    assert wanted_size(Diversity(1.0, 0.0, 10), 128, lambda b: 3 * b) == (
        math.inf,
        "the gradients of 10 samples sum to zero",
    )


def test_extra_samples_are_a_part_of_the_noise_scale():
    policy = DiveBatch.with_extra_samples(0.1, CAP)
    assert (policy.delta, policy.max_batch_size, policy.estimator) == (0.1, CAP, "moments")
    assert size(DiveBatch.with_extra_samples(0.5, CAP), 999.0) == 500


def test_safe_ratios():
    assert ratio(6, 3) == 2
    assert ratio(1, 0) == ratio(1, -1) == ratio(1e308, 1e-308) == math.inf
    for pair in [(0, 0), (math.nan, 1), (1, math.nan), (-1, 1), (1, math.inf)]:
        assert math.isnan(ratio(*pair))


# The schedule's course


def test_smith_and_seesaw_grow_where_the_schedule_falls():
    for policy in (SmithSchedule(CAP), Seesaw(CAP)):
        assert size(policy, lr_schedule_ratio=0.1 * 0.2 / 0.1) == 640  # a course of 0.20000000000000004
        assert size(policy, lr_schedule_ratio=0.5, batch_size=640) == 256
        assert size(policy, lr_schedule_ratio=1e-9) == size(policy, lr_schedule_ratio=0.0) == CAP
        assert size(policy, lr_schedule_ratio=10.0) == 128
        assert size(policy, lr_schedule_ratio=math.nan) == 128
        with pytest.raises(UsageError, match="the schedule's own rate"):
            size(policy)


# AdaDamp and kin


def test_adadamp_follows_the_loss():
    history = History(first_loss=2.0)
    assert [size(AdaDamp(CAP), loss=loss, history=history) for loss in (2.0, 0.9, 0.1)] == [128, 285, 2560]
    assert size(AdaDamp(CAP), loss=3.0, history=history) == 128
    assert size(AdaDamp(CAP), loss=1e-9, history=history) == size(AdaDamp(CAP), loss=0.0, history=history) == CAP


def test_gradient_damp_follows_the_squared_gradient_norm():
    measurement = replace(seen(history=History(first_sq_norm=3.0)), diversity=noise(10.0, sq_norm=0.5))
    assert GradientDamp(CAP).next(measurement).batch_size == 768
    assert GradientDamp(CAP).next(replace(measurement, diversity=noise(10.0, sq_norm=-0.5))).batch_size == 128


def test_padadamp_is_a_straight_line_and_geodamp_doubles():
    assert [size(PadaDamp(CAP, rate=0.5), step=step) for step in (0, 1, 100, 10**6)] == [128, 129, 178, CAP]
    assert [size(GeoDamp(CAP), epoch=epoch) for epoch in (4, 5, 9, 10, 60)] == [128, 256, 256, 512, CAP]
    assert GeoDamp(CAP).next(seen(epoch=60)).unclamped == 128 * 2**12


# Goodput


def test_step_time_is_a_line_through_what_was_measured():
    truth = [(b, 0.5 + 0.01 * b) for b in (64, 128, 512)]
    assert step_line(truth) == pytest.approx((0.5, 0.01))
    assert step_line([(100, 10.0), (200, 20.0)]) == pytest.approx((0.0, 0.1))
    assert step_line([(100, 1.0), (200, 0.5)])[1] == 0.0  # larger batches that take less time: noise


def timed(fixed: float, each: float, *sizes: int) -> History:
    return History(decisions_at_size=2, throughputs=tuple((b, b / (fixed + each * b)) for b in sizes))


def by_hand(fixed: float, each: float, noise_scale: float, candidates: list[int]) -> int:
    def progress(b: int) -> float:
        """In units of noise-free steps a second: McCandlish's worth of a step over its time."""
        return 1 / (1 + noise_scale / b) / (fixed + each * b)

    return max(candidates, key=progress)


@pytest.mark.parametrize("noise_scale", [20.0, 200.0, 5000.0])
def test_goodput_is_the_most_progress_in_time(noise_scale: float):
    history, policy = timed(1.0, 0.002, 128, 256), Goodput(CAP)
    candidates = list(policy._candidates(128))
    assert candidates[:5] == [128, 181, 256, 362, 512]
    assert candidates[-1] == CAP
    assert size(policy, noise_scale, history=history) == by_hand(1.0, 0.002, noise_scale, candidates)


def test_goodputs_candidates_go_from_the_first_batch_to_the_cap():
    assert Goodput(1000)._candidates(128) == [128, 181, 256, 362, 512, 724, 1000]
    assert Goodput(128)._candidates(128) == [128]


def test_goodput_stays_where_little_is_to_be_gained():
    sizes = [size(Goodput(CAP), 2000.0, history=timed(fixed, 0.01, 128, 256)) for fixed in (0.0, 0.01, 5.0)]
    assert sizes[:2] == [128, 128]
    assert sizes[2] > 500
    assert "promises only" in Goodput(CAP).next(seen(2000.0, history=timed(0.0, 0.01, 128, 256))).reason


def test_goodput_tries_a_second_size_and_none_before_it_knows_a_speed():
    assert size(Goodput(CAP), 2000.0, history=timed(0.0, 0.01, 128)) > 128
    assert size(Goodput(CAP), 2000.0, history=History(decisions_at_size=2)) == 128


def test_goodput_is_not_misled_by_what_a_compiler_does_in_the_first_epoch_at_a_size():
    """At 1024, in truth the fastest, ten times the time: by that alone 128 would be the best."""
    fair = timed(1.0, 0.001, 128, 1024)
    misled = replace(fair, throughputs=((128, fair.throughputs[0][1]), (1024, fair.throughputs[1][1] / 10)))
    measured = partial(seen, 2000.0, batch_size=1024)
    assert Goodput(CAP).next(measured(history=misled)).batch_size == 128
    first = Goodput(CAP).next(measured(history=replace(misled, decisions_at_size=1)))
    assert (first.batch_size, first.reason) == (1024, "the first epoch at a size does not tell its speed")
    assert Goodput(CAP).next(measured(history=fair.with_throughput(1024, 1.0))).batch_size >= 1024


# Timetables


def test_the_megatron_grammar():
    assert SampleSchedule("0:768 250B:1536", sequence_length=2048).entries() == [(0, 768), (122_070_312, 1536)]
    assert SampleSchedule("0:8 1.5K:16 2M:32 1T:64").entries() == [(0, 8), (1500, 16), (2 * 10**6, 32), (10**12, 64)]


def test_a_schedule_goes_by_the_samples_seen():
    policy = SampleSchedule("0:128 1K:256 5K:512")
    assert [size(policy, samples=samples) for samples in (0, 999, 1000, 4999, 5000)] == [128, 128, 256, 256, 512]
    policy.check_start(128)
    with pytest.raises(ArgumentError, match="starts with batch size 128, the loader with 64"):
        policy.check_start(64)


@pytest.mark.parametrize(
    "text", ["", "768", "1:768", "0:768 0:800", "0:768 5K:800 2K:900", "0:0", "0:-5", "0:7.5", "0:8 2G:9"]
)
def test_a_wrong_schedule_is_named(text: str):
    with pytest.raises(ArgumentError, match=f"schedule={text!r}"):
        SampleSchedule(text)


def test_plateau_grows_after_its_patience_at_one_size():
    def after(since_best: int, at_size: int) -> int:
        history = History(epochs_since_best=since_best, decisions_at_size=at_size)
        return size(Plateau(CAP, patience=3), loss=1.0, history=history)

    assert [after(2, 9), after(3, 9), after(9, 2), after(9, 3)] == [128, 256, 128, 256]
    assert size(Plateau(200), loss=1.0, history=History(epochs_since_best=5, decisions_at_size=5)) == 200


# Wrong use


def test_what_is_missing_is_named():
    for policy in (NoiseScale(CAP), NormTest(CAP), SimiGrad(CAP), CABS(CAP), GradientDamp(CAP)):
        with pytest.raises(UsageError, match=f"{type(policy).__name__} needs the diversity of epoch 7"):
            policy.next(seen(epoch=7))
    for policy in (CABS(CAP), AdaDamp(CAP), Plateau(CAP)):
        with pytest.raises(UsageError, match=rf"{type(policy).__name__} needs the loss of epoch 7.*step\(loss"):
            policy.next(seen(5.0, epoch=7))


WRONG = {
    "step_cost": (lambda value: NoiseScale(CAP, step_cost=value), [0, -1, math.nan, True]),
    "eta": (lambda value: NormTest(CAP, eta=value), [0, -1, math.nan, "1"]),
    "target_cosine": (lambda value: SimiGrad(CAP, target_cosine=value), [0, 1, 1.5, math.nan]),
    "theta": (lambda value: InnerProductTest(CAP, theta=value), [0, math.nan]),
    "nu": (lambda value: InnerProductTest(CAP, nu=value), [0, math.nan]),
    "rate": (lambda value: PadaDamp(CAP, rate=value), [0, -1, math.inf]),
    "factor": (lambda value: Plateau(CAP, factor=value), [1, 0.5, math.nan]),
    "patience": (lambda value: Plateau(CAP, patience=value), [0, 1.5, True]),
    "min_improvement": (lambda value: Goodput(CAP, min_improvement=value), [0, -1, math.nan]),
    "sequence_length": (lambda value: SampleSchedule("0:8", sequence_length=value), [0, 1.5]),
    "every_epochs": (lambda value: NoiseScale(CAP, every_epochs=value), [0, 1.5]),
    "max_batch_size": (SmithSchedule, [0, 2.5, None]),
}


@pytest.mark.parametrize(
    ("name", "make", "value"), [(name, make, value) for name, (make, values) in WRONG.items() for value in values]
)
def test_a_wrong_setting_is_named_with_its_value(name: str, make, value: object):
    with pytest.raises(ValueError, match=f"{name}={value!r}") as caught:
        make(value)
    assert isinstance(caught.value, DivebatchError)


def test_a_timetable_in_percent_is_of_the_whole_training():
    policy = SampleSchedule("0:16 75%:40", total_samples=1000)
    assert policy.entries() == [(0, 16), (750, 40)]
    assert SampleSchedule("0:16 12.5%:40 50%:64", total_samples=800).entries() == [(0, 16), (100, 40), (400, 64)]
    with pytest.raises(ArgumentError, match=r"'75%:40' is a part of the training: pass total_samples="):
        SampleSchedule("0:16 75%:40")
    with pytest.raises(ArgumentError, match=r"total_samples must be an integer of at least 1"):
        SampleSchedule("0:16", total_samples=0)
