"""A batch size that the user sets is followed by the rate as soon as it is in force: at every step, by both counts."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch.optim import SGD

from divebatch import Fixed
from divebatch.measurement import Decision, Measurement
from divebatch.policies import Policy
from training import Training

FIRST, LR = 4, 0.1


class Doubling(Policy):
    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=2 * seen.batch_size)


class Run(Training):
    def __init__(self, policy: Policy | None = None, **settings: Any) -> None:
        sgd = {"optimizer": lambda parameters: SGD(parameters, LR), "lr_coupling": "linear"}
        super().__init__(policy or Fixed(), **sgd, **settings)

    def steps(self) -> Iterator[int]:
        """Each batch's size; the rate goes with the full size of the batches at hand."""
        for x, _ in self.loader:
            full = self.loader.current.batch_size
            assert self.control.lr == pytest.approx(LR * full / FIRST)
            yield len(x)
            self.optimizer.step()


def test_a_size_set_between_epochs():
    run = Run()
    assert list(run.steps()) == [4] * 10
    run.control.step()
    run.loader.batch_size = 8
    assert list(run.steps()) == [8] * 5
    record = run.control.step()
    assert (record.batch_size, record.lr, record.next_lr) == (8, pytest.approx(0.2), pytest.approx(0.2))


def test_a_size_set_over_a_decision():
    run = Run(Doubling())
    list(run.steps())
    assert run.control.step().next_batch_size == 8
    run.loader.batch_size = 20
    assert list(run.steps()) == [20, 20]


def test_a_size_set_within_an_epoch_waits_for_the_next_one():
    run = Run()
    for size in run.steps():
        run.loader.batch_size = 8
        assert size == 4
    run.control.step()
    run.loader.batch_size = 8
    assert list(run.steps()) == [8] * 5


@pytest.mark.parametrize("every_steps", [None, 2])
def test_a_size_set_for_the_rest_of_an_epoch(every_steps: int | None):
    run, sizes = Run(every_steps=every_steps), []
    for size in run.steps():
        sizes.append(size)
        if len(sizes) == 3:
            run.loader.resize_now(16)
    assert sizes == [4, 4, 4, 16, 12]
    record = run.control.step()
    assert record.changes == [(3, 16, pytest.approx(0.4))]
    assert (record.batch_size, record.lr) == (16, pytest.approx(0.4))


def test_a_size_set_after_a_resume():
    run = Run()
    for index, _ in enumerate(run.steps()):
        if index == 4:
            break
    fresh = Run()
    fresh.control.load_state_dict(run.control.state_dict())
    fresh.loader.batch_size = 8
    assert list(fresh.steps()) == [4] * 5  # the epoch goes on as it began
    fresh.control.step()
    fresh.loader.batch_size = 8
    assert list(fresh.steps()) == [8] * 5
    again = Run()
    again.control.load_state_dict(run.control.state_dict())
    again.loader.resize_now(10)
    assert list(again.steps()) == [10, 10]
