"""The formulas of an advice, and the timing of steps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from divebatch.advice.advice import SLACK, StepTimes, good_size, lr_factor, time_to_progress
from divebatch.advice.measure import LEAST, MOST, WARM, time_steps
from divebatch.errors import ArgumentError, BatchTooLargeError

SIZES = tuple(2**power for power in range(3, 14))
noise_scales = st.floats(min_value=0.0, max_value=1e6)
seconds = st.lists(st.floats(min_value=1e-4, max_value=10.0), min_size=len(SIZES), max_size=len(SIZES))


def on_a_line(fixed: float, per_sample: float) -> StepTimes:
    return StepTimes(tuple((size, fixed + size * per_sample) for size in SIZES))


@given(fixed=st.floats(1e-4, 1.0), per_sample=st.floats(1e-6, 1e-2))
def test_the_line_is_found_where_there_is_one(fixed, per_sample):
    times = on_a_line(fixed, per_sample)
    assert times.line() == pytest.approx((fixed, per_sample), rel=1e-3)
    assert times.misfit < 1e-3


@given(noise=st.floats(50, 5000), balance=st.floats(50, 5000))
def test_the_fastest_batch_is_the_geometric_mean_of_noise_scale_and_balance(noise, balance):
    times = on_a_line(1.0, 1 / balance)
    fastest = min(time_to_progress(times, noise), key=time_to_progress(times, noise).get)
    best = math.sqrt(noise * balance)  # sizes are powers of two
    assert best / 1.5 <= fastest <= best * 1.5
    assert good_size(times, noise) <= fastest


@given(seconds, noise_scales, noise_scales)
def test_the_good_size_is_the_smallest_within_the_slack_and_grows_with_the_noise(values, first, second):
    times = StepTimes(tuple(zip(SIZES, values, strict=True)))
    low, high = sorted([first, second])
    assert good_size(times, low) <= good_size(times, high) <= good_size(times, math.inf)
    took, chosen = time_to_progress(times, low), good_size(times, low)
    assert min(took.values()) == 1
    assert took[chosen] <= 1 + SLACK
    assert all(took[size] > 1 + SLACK for size in SIZES if size < chosen)


def test_without_end_to_the_noise_only_throughput_counts():
    times = StepTimes(((10, 1.0), (100, 2.0), (1000, 40.0)))  # 10, 50 and 25 samples a second
    assert good_size(times, math.inf) == 100
    assert time_to_progress(times, math.inf) == pytest.approx({10: 5.0, 100: 1.0, 1000: 2.0})


@given(noise_scales, st.integers(1, 10_000), st.integers(1, 100))
def test_the_learning_rate_grows_with_the_batch_but_never_faster(noise, reference, times):
    size = reference * times
    plain, root = (lr_factor(size, reference, noise, adaptive=adaptive) for adaptive in (False, True))
    assert 1 - 1e-12 <= plain <= times * (1 + 1e-12)
    assert root == pytest.approx(math.sqrt(plain))
    assert lr_factor(reference, size, noise) == pytest.approx(1 / plain)


def test_the_learning_rate_is_linear_far_below_the_noise_scale_and_flat_far_above():
    assert lr_factor(64, 32, 1e9) == pytest.approx(2.0)
    assert lr_factor(640_000, 320_000, 10.0) == pytest.approx(1.0, abs=1e-4)
    assert lr_factor(128, 32, 96.0) == pytest.approx((1 + 3) / (1 + 0.75))


@pytest.mark.parametrize("measured", [(), ((8, 1.0), (4, 1.0)), ((8, math.nan),)])
def test_step_times_that_make_no_sense_are_refused(measured):
    with pytest.raises(ArgumentError):
        StepTimes(measured)


# Timing


class FakeDevice:
    """Time passes only in its steps: `slow_start` times longer in the first ones of a size."""

    def __init__(self, *, slow_start=1.0, most=10**9, error=None):
        self.now, self.steps = 0.0, {}
        self.slow_start, self.most, self.error = slow_start, most, error or BatchTooLargeError("out of memory")

    def clock(self):
        return self.now

    def prepare(self, size):
        self.steps[size] = 0
        return lambda: self.step(size)

    def step(self, size):
        if size > self.most:
            raise self.error
        seconds = 0.1 + 0.001 * size
        self.now += seconds * (self.slow_start if self.steps[size] < WARM else 1.0)
        self.steps[size] += 1


def timed(device, sizes=(8, 16, 32, 64), budget=1e9, **settings):
    return time_steps(device.prepare, sizes, budget=budget, clock=device.clock, **settings)


@pytest.mark.parametrize(("slow_start", "budget"), [(50.0, 1e9), (1000.0, 5.0)])
def test_warm_steps_are_neither_timed_nor_taken_off_the_budget(slow_start, budget):
    told, device = [], FakeDevice(slow_start=slow_start)
    times = timed(device, budget=budget, on_time=lambda *found: told.append((*found, len(device.steps))))
    assert times.line() == pytest.approx((0.1, 0.001))
    assert times.balance == pytest.approx(100)
    assert (times.sizes, times.stopped) == ((8, 16, 32, 64), "the largest asked for")
    assert all(WARM + LEAST <= steps <= WARM + MOST for steps in device.steps.values())
    # Each as soon as it is known.
    assert told == [(size, seconds, index + 1) for index, (size, seconds) in enumerate(times.measured)]


@pytest.mark.parametrize(
    "error",
    [
        BatchTooLargeError("out of memory: batch of 32"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_sizes_end_where_memory_does(error):
    times = timed(FakeDevice(most=16, error=error))
    assert times.sizes == (8, 16)
    assert times.stopped == "batch 32 does not fit into memory"


def test_other_errors_and_a_first_size_that_does_not_fit_are_errors():
    with pytest.raises(RuntimeError, match="shapes"):
        timed(FakeDevice(most=16, error=RuntimeError("shapes do not fit")))
    with pytest.raises(BatchTooLargeError):
        timed(FakeDevice(most=4))


def test_the_budget_is_kept():
    device = FakeDevice()
    times = timed(device, sizes=(8, 16, 1024, 2048), budget=5.0)
    assert times.sizes == (8, 16)
    assert "batch 1024 would have taken the timing beyond 5 s" in times.stopped
    assert device.now < 5.0
    assert timed(FakeDevice(), budget=2.4).sizes == (8, 16, 32)  # 0.5 to 0.7 s each: their sum counts
