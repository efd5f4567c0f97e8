"""When a pass is recorded and what a recording serves, with a stand-in for the GPU's own recording."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from divebatch.training import Clock, Passes, Setup
from divebatch.training import passes as module
from divebatch.training.distributed import Parallel


class Remembered:
    """Counts how often it is made; gives the loss of the pass it was made from."""

    made = 0

    def __init__(self, parameters, run, inputs, targets):
        Remembered.made += 1
        self.loss = run(inputs, targets).detach()

    def __call__(self, inputs, targets):
        return self.loss


@pytest.fixture
def passes(monkeypatch):
    Remembered.made = 0
    monkeypatch.setattr(module, "Recording", Remembered)
    monkeypatch.setattr(Passes, "_may_record", lambda self, variant: variant[0] == self.full_size)
    made = Passes(Parallel.alone(nn.Linear(3, 1)), mse_loss, Setup(), Clock(torch.device("cpu")))
    made.begin_epoch(4)
    return made


def run(passes: Passes, size: int = 4, *, share: float = 1.0, measuring: bool = False, token: object = True) -> bool:
    """One pass; whether it came from a recording, which leaves no gradient here."""
    passes.parallel.model.zero_grad()
    passes(torch.ones(size, 3), torch.ones(size, 1), share=share, measuring=measuring, token=token)
    return passes.parallel.model.weight.grad is None


def test_the_second_pass_is_recorded_and_a_short_or_cut_batch_is_not(passes):
    assert [run(passes), run(passes)] == [False, True]
    assert [run(passes, 3), run(passes), run(passes, share=0.5), run(passes)] == [False, True, False, True]
    assert Remembered.made == 1


def test_sums_that_begin_anew_run_once_kernel_by_kernel_before_they_are_recorded(passes):
    first, second = object(), object()
    assert [run(passes, measuring=True, token=first) for _ in range(3)] == [False, True, True]
    assert [run(passes, measuring=True, token=second) for _ in range(3)] == [False, True, True]
    assert Remembered.made == 2


def test_without_a_token_nothing_is_recorded(passes):
    assert not any(run(passes, measuring=True, token=None) for _ in range(3))


def test_another_size_drops_the_recording(passes):
    assert [run(passes), run(passes)] == [False, True]
    passes.expect(5)
    assert passes._recording is None
    assert [run(passes, 5), run(passes, 5)] == [False, True]
