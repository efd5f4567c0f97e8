import pytest
import torch

from divebatch.advice.timing import LEAST, MOST, WARM, time_steps
from divebatch.errors import BatchTooLargeError


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


def test_warm_steps_are_not_timed_and_the_line_comes_out():
    device = FakeDevice(slow_start=50.0)
    times = timed(device)
    assert times.line() == pytest.approx((0.1, 0.001))
    assert times.balance == pytest.approx(100)
    assert times.stopped == "the largest asked for"
    assert all(WARM + LEAST <= steps <= WARM + MOST for steps in device.steps.values())


def test_each_size_is_told_as_soon_as_it_is_known():
    told, device = [], FakeDevice()
    times = timed(device, on_time=lambda size, seconds: told.append((size, seconds, len(device.steps))))
    assert told == [(size, seconds, index + 1) for index, (size, seconds) in enumerate(times.measured)]


def test_one_slow_step_among_many_changes_nothing():
    device = FakeDevice()
    plain = device.step

    def disturbed(size):
        plain(size)
        device.now += 10.0 if device.steps[size] == WARM + 2 else 0.0

    device.step = disturbed
    assert timed(device).line() == pytest.approx((0.1, 0.001))


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


def test_compiling_each_size_takes_nothing_off_the_budget():
    times = timed(FakeDevice(slow_start=1000.0), budget=5.0)
    assert times.sizes == (8, 16, 32, 64)
    assert times.stopped == "the largest asked for"
