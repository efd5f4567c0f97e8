"""The choice among kernels, on a clock that stands still except where a kernel moves it."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from divebatch.norms.rules import tuning

SAMPLES = slice(0, 2)


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def kernel(self, seconds: Sequence[float]) -> tuning.Kernel:
        """Takes the next of these at each call."""
        left: Iterator[float] = iter(seconds)

        def run(samples: slice) -> Tensor:
            self.now += next(left)
            return torch.zeros(samples.stop)

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tuning, "time", clock)
    monkeypatch.setattr(tuning, "_CHOSEN", {})
    return clock


def test_neither_the_first_call_nor_a_disturbed_one_decides(clock: Clock):
    quick, slow = clock.kernel([9.0, 1.0, 5.0, 5.0]), clock.kernel([0.5, 2.0, 2.0, 2.0])
    assert tuning.fastest({"slow": slow, "quick": quick}, SAMPLES, key="shape") is quick


def test_a_key_is_measured_once(clock: Clock):
    tuning.fastest({"slow": clock.kernel([2.0] * 4), "quick": clock.kernel([1.0] * 4)}, SAMPLES, key="shape")
    never_run = {"slow": clock.kernel([]), "quick": clock.kernel([])}
    assert tuning.fastest(never_run, SAMPLES, key="shape") is never_run["quick"]
    others = {"slow": clock.kernel([1.0] * 4), "quick": clock.kernel([2.0] * 4)}
    assert tuning.fastest(others, SAMPLES, key="another shape") is others["slow"]
