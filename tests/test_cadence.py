"""Decisions every so many steps: the course, the windows, the records, and every state on the way."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import IterableDataset

import training
from divebatch import (
    AdaBatch,
    AdaptiveLoader,
    Decision,
    DiveBatch,
    Diversity,
    EpochRecord,
    Fixed,
    Measurement,
    Oracle,
)
from divebatch.data.order import Shuffled
from divebatch.errors import ArgumentError, UsageError
from divebatch.estimators import Moments, PerSample
from divebatch.policies import (
    CABS,
    GeoDamp,
    Goodput,
    GradientDamp,
    NoiseScale,
    PadaDamp,
    Plateau,
    Policy,
    SampleSchedule,
    Steady,
    WarmUp,
)
from reference import per_sample
from reference.per_sample import mean_loss, mlp
from saved import through_a_file
from training import DATA

SEED = 3

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@dataclass(frozen=True)
class ByStep(Policy):
    """The size that its table has for the step; keeps what it saw."""

    needs: ClassVar[frozenset[str]] = frozenset()
    decides_within_epochs: ClassVar[bool] = True
    sizes: tuple[tuple[int, int], ...]
    seen: Any = None

    def next(self, seen: Measurement) -> Decision:
        if self.seen is not None:
            self.seen.append(seen)
        return Decision(batch_size=dict(self.sizes).get(seen.step, seen.batch_size))


class Watching(ByStep):
    """The same, measured."""

    needs: ClassVar[frozenset[str]] = frozenset({"diversity"})


class Training(training.Training):
    def __init__(self, policy: Policy, **settings: Any) -> None:
        super().__init__(policy, optimizer=lambda parameters: SGD(parameters, 0.01, momentum=0.9), **settings)


# The course


def test_the_course_is_that_of_a_loop_cut_by_hand():
    run, twin = Training(ByStep(((2, 8), (4, 3), (10, 6))), lr_coupling="linear", every_steps=2), mlp()
    optimizer, place = SGD(twin.parameters(), 0.01, momentum=0.9), 0
    order, sizes = Shuffled(40, SEED).draw(0), [4, 4, 8, 8, 3, 3, 3, 3, 3, 1]
    for size in sizes:
        x, y = (tensor[order[place : place + size]] for tensor in DATA.tensors)
        place += size
        optimizer.param_groups[0]["lr"] = 0.01 * (3 if size == 1 else size) / 4
        optimizer.zero_grad()
        mean_loss(twin(x), y).backward()
        optimizer.step()
    assert [(size, run.lr) for size in run.batches()] == [
        (size, pytest.approx(0.01 * (3 if size == 1 else size) / 4)) for size in sizes
    ]
    for mine, theirs in zip(run.model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert run.control.step().next_batch_size == 6  # step 10 ended the epoch: decided there, once


def test_the_policy_sees_counters_of_now_and_an_epoch_that_stands_still():
    seen: list[Measurement] = []
    run = Training(ByStep(((6, 8),), seen), every_steps=3)
    run.epoch(), run.epoch()
    course = [(m.epoch, m.step, m.samples, m.batch_size, m.history.decisions_at_size) for m in seen]
    assert course == [
        *((1, 3, 12, 4, 1), (1, 6, 24, 4, 2), (1, 8, 40, 8, 1)),
        *((2, 11, 64, 8, 2), (2, 13, 80, 8, 3)),
    ]
    assert {m.first_batch_size for m in seen} == {4}
    assert seen[2].history.previous_batch_size == 4


@pytest.mark.parametrize("per_batch", [False, True])
def test_the_rate_follows_at_once_whatever_the_scheduler(per_batch: bool):
    def scheduler(optimizer: SGD) -> Any:
        return CosineAnnealingLR(optimizer, T_max=30, eta_min=0.001) if per_batch else StepLR(optimizer, 1, gamma=0.5)

    policy, unit = ByStep(((2, 8), (6, 16), (9, 4))), "step" if per_batch else "epoch"
    run = Training(policy, lr_coupling="sqrt", scheduler=scheduler, scheduler_unit=unit, every_steps=1)
    twin = scheduler(SGD([torch.ones(1)], 0.01))
    twin.optimizer.step()
    factors = {4: 1.0, 8: 2**0.5, 16: 2.0}
    for _ in range(3):
        for _ in run.batches():
            assert run.lr == pytest.approx(twin.optimizer.param_groups[0]["lr"] * factors[run.loader.batch_size])
            if per_batch:
                run.scheduler.step()
                while twin.last_epoch < math.ceil(run.loader.samples_delivered / 4):
                    twin.step()
        if not per_batch:
            run.scheduler.step(), twin.step()
        run.control.step()


def test_padadamp_and_a_sample_schedule_change_where_they_say():
    run = Training(PadaDamp(16, rate=1.0), every_steps=1)
    assert list(run.batches()) == [4, 5, 6, 7, 8, 9, 1]
    run = Training(SampleSchedule("0:4 10:8 25:2"), every_steps=1)
    assert list(run.batches()) == [4, 4, 4, 8, 8, 2, 2, 2, 2, 2, 2]


# What a window shows


def windows(steps: list[list[int]]) -> list[tuple[float, float]]:
    """(trace, sq_norm) of each window of batch sizes, all at the first weights, by the twin that keeps gradients."""
    order, place, pairs = Shuffled(40, SEED).draw(0), 0, []
    for sizes in steps:
        sums, total = [0.0, 0.0], 0
        for size in sizes:
            x, y = (tensor[order[place : place + size]] for tensor in DATA.tensors)
            rows = per_sample.gradients(mlp(), mean_loss, x, y)
            trace = float(rows.var(0).sum())
            sums[0] += size * trace
            sums[1] += size * (float(rows.mean(0).square().sum()) - trace / size)
            place, total = place + size, total + size
        pairs.append((sums[0] / total, sums[1] / total))
    return pairs


def still(policy: Policy, **settings: Any) -> Training:
    run = Training(policy, **settings)
    run.optimizer.param_groups[0]["lr"] = 0.0
    return run


def test_each_decision_sees_the_steps_since_the_last_one():
    seen: list[Measurement] = []
    still(Watching(((4, 8),), seen), estimator="per-sample", every_steps=2).epoch()
    expected = windows([[4, 4], [4, 4], [8, 8], [8]])
    assert [(m.diversity.trace, m.diversity.sq_norm) for m in seen] == [pytest.approx(p, rel=1e-9) for p in expected]


def test_an_exponential_mean_goes_on_through_decisions():
    seen: list[Measurement] = []
    still(Watching((), seen), estimator=PerSample(decay=0.5), every_steps=2).epoch()
    steps = windows([[4]] * 10)
    for measured, upto in zip(seen, (2, 4, 6, 8, 10), strict=True):
        weights = [0.5 ** (upto - 1 - i) for i in range(upto)]
        means = [sum(w * p[i] for w, p in zip(weights, steps, strict=False)) / sum(weights) for i in (0, 1)]
        assert (measured.diversity.trace, measured.diversity.sq_norm) == pytest.approx(means, rel=1e-9)


def test_a_window_that_ends_between_two_optimizer_steps_spoils_no_estimate():
    def seen_by(estimator: str) -> list[Measurement]:
        seen: list[Measurement] = []
        run = still(Watching((), seen), estimator=estimator, every_steps=3, accumulate=2)
        for number, (x, y) in enumerate(run.loader, 1):
            mean_loss(run.model(x), y).backward()  # accumulated over two batches
            if number % 2 == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()
        run.control.step()
        return seen

    for mine, theirs in zip(seen_by("ranks"), seen_by("split"), strict=True):
        assert mine.diversity.trace == pytest.approx(theirs.diversity.trace, rel=1e-5)
        assert mine.diversity.sq_norm == pytest.approx(theirs.diversity.sq_norm, rel=1e-4, abs=1e-7)


def test_a_window_in_which_nothing_can_be_seen_is_no_error_and_no_evidence():
    """A last batch of one sample after windows that could be measured; and two steps' moments asked after one."""
    seen: list[Measurement] = []
    still(Watching(((3, 9),), seen), estimator="per-sample", every_steps=3).epoch()  # 4 4 4, 9 9 9, 1
    assert seen[-1].diversity.noise_scale_interval() == (0.0, float("inf"))
    run = Training(NoiseScale(16), estimator="moments", every_steps=1)
    assert run.epoch().reason.endswith("no change")
    assert run.loader.batch_size <= 16


def test_an_epoch_in_which_nothing_was_seen_is_still_an_error():
    run = Training(NoiseScale(16), estimator="split", every_steps=100)
    list(run.batches())
    with pytest.raises(UsageError, match="two or more backward passes"):
        run.control.step()


def test_where_measuring_ends_at_the_cap_it_ends_within_the_epoch():
    run = Training(DiveBatch(1e9, 8), estimator=Oracle(mean_loss), every_steps=2)
    measuring = [run.control.plan().measuring for _ in run.batches()]
    assert measuring == [True, True] + [False] * 4
    assert run.control.step().diversity is None


# Records


def test_a_record_holds_the_changes_and_the_size_that_the_epoch_ended_with():
    run = Training(ByStep(((2, 8), (4, 3), (13, 40))), lr_coupling="linear", every_steps=2)
    first, second, third = run.epoch(), run.epoch(), run.epoch()
    assert first.changes == [(2, 8, pytest.approx(0.02)), (4, 3, pytest.approx(0.0075))]
    assert (first.batch_size, first.lr, first.next_batch_size) == (3, pytest.approx(0.0075), 3)
    assert (second.batch_size, second.steps, second.changes) == (3, 24, None)
    assert third.changes is None
    assert EpochRecord.from_dict({"epoch": 1, "batch_size": 3, "lr": 1.0, "steps": 1, "samples": 3}).changes is None


@pytest.mark.filterwarnings("ignore:epoch . was left after")
def test_a_pass_that_starts_again_forgets_its_changes():
    run = Training(ByStep(((2, 8),)), every_steps=2)
    for _, _ in zip(range(3), run.batches(), strict=False):
        pass
    assert run.loader.batch_size == 8  # decided is decided: the weights have moved too
    record = run.epoch()
    assert (record.changes, record.batch_size, record.steps) == (None, 8, 5)


# What goes around a policy


def test_dwell_and_warm_up_count_decisions():
    table = ((1, 8), (2, 8), (3, 8), (4, 16), (5, 16))
    run = Training(Steady(ByStep(table), dwell=3), every_steps=1)
    assert list(run.batches()) == [4, 4, 4, 8, 8, 8, 4]
    run = Training(WarmUp(ByStep(((2, 16),)), epochs=2), lr_coupling="linear", every_steps=1)
    rates = [run.lr for _ in run.batches()]
    assert rates == pytest.approx([0.01, 0.01, 0.01, 0.02])
    assert run.control.step().next_lr == pytest.approx(0.04)


# Resuming


CASES: dict[str, Callable[[], Training]] = {
    "by step": lambda: Training(
        Steady(ByStep(((3, 8), (6, 16), (7, 5), (12, 4)))), every_steps=1, lr_coupling="linear"
    ),
    "moments": lambda: Training(GradientDamp(16), every_steps=3, lr_coupling="sqrt", estimator=Moments(decay=0.9)),
    "per-sample": lambda: Training(GradientDamp(16), every_steps=2, lr_coupling="adascale", estimator="per-sample"),
    "to the cap": lambda: Training(DiveBatch(1e9, 8), every_steps=2, estimator="per-sample"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_state_taken_after_any_step_continues_to_the_same_bits(case: str):
    def go(run: Training, records: list[EpochRecord], stop: int = 10**9) -> int:
        steps = run.loader.batches_delivered
        while len(records) < 3:
            for _ in run.batches():
                steps += 1
                if steps == stop:
                    return steps
            records.append(run.control.step())
        return steps

    whole, expected = CASES[case](), list[EpochRecord]()
    total = go(whole, expected)
    assert any(record.changes for record in expected)
    for stop in range(1, total, 2):
        run, records = CASES[case](), list[EpochRecord]()
        go(run, records, stop)
        parts = through_a_file({name: getattr(run, name).state_dict() for name in ("model", "optimizer", "control")})
        fresh = CASES[case]()
        fresh.control.load_state_dict(parts["control"])
        fresh.model.load_state_dict(parts["model"])
        fresh.optimizer.load_state_dict(parts["optimizer"])
        go(fresh, records)
        assert records == expected
        for mine, theirs in zip(fresh.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_resumed_epoch_knows_that_earlier_steps_were_measured():
    def make() -> Training:
        return still(Watching(((3, 9),)), estimator="per-sample", every_steps=3)  # 4 4 4, 9 9 9, 1

    run, fresh = make(), make()
    batches = run.batches()
    for _ in range(7):
        next(batches)
    fresh.control.load_state_dict(through_a_file(run.control.state_dict()))
    assert list(fresh.batches()) == []
    assert fresh.control.step().diversity is None


# What is refused


@pytest.mark.parametrize(
    "policy", [AdaBatch(16), GeoDamp(16), Plateau(16), CABS(16, min_batch_size=1), Goodput(16), Steady(AdaBatch(16))]
)
def test_policies_that_go_by_epochs_are_refused(policy: Policy):
    with pytest.raises(ArgumentError, match=rf"{type(policy).__name__} decides after whole epochs.*every_steps=5 out"):
        Training(policy, every_steps=5, estimator="moments")


def test_the_papers_estimate_is_refused_with_the_others_named():
    with pytest.raises(ArgumentError, match=r"Trajectory sums over whole epochs.*'split', 'moments'"):
        Training(DiveBatch(0.1, 16), every_steps=5)


# Streams


class Samples(IterableDataset):
    """`DATA` in its own order, once or for ever."""

    def __init__(self, *, endless: bool) -> None:
        self.endless = endless

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from DATA
            if not self.endless:
                return


def on_stream(policy: Policy, *, endless: bool, epoch_samples: int | None = None, **settings: Any) -> Training:
    loader = AdaptiveLoader(Samples(endless=endless), 4, epoch_samples=epoch_samples, seed=SEED)
    return Training(policy, data=loader, **settings)


@pytest.mark.parametrize(("endless", "epoch_samples"), [(False, None), (True, 40), (True, None)])
def test_a_stream_is_decided_on_within_epochs_at_every_step(endless: bool, epoch_samples: int | None):
    seen: list[Measurement] = []
    run = on_stream(
        ByStep(((2, 8), (4, 3), (10, 6)), seen),
        endless=endless,
        epoch_samples=epoch_samples,
        every_steps=2,
        lr_coupling="linear",
    )
    held = [(size, run.lr) for size, _ in zip(run.batches(), range(10), strict=False)]
    sizes = [4, 4, 8, 8, 3, 3, 3, 3, 3, 1 if epoch_samples or not endless else 3]
    assert [size for size, _ in held] == sizes
    assert [lr for _, lr in held] == pytest.approx([0.01 * (3 if size == 1 else size) / 4 for size in sizes])
    assert [(m.step, m.batch_size, m.dataset_size) for m in seen[:3]] == [
        (2, 4, epoch_samples),
        (4, 8, epoch_samples),
        (6, 3, epoch_samples),
    ]
    if endless and not epoch_samples:
        with pytest.raises(UsageError, match=r"has not ended.*epoch_samples=N"):
            run.control.step()
    else:
        record = run.control.step()
        at_end = 3 if epoch_samples else 6  # a stream of unknown length is asked for one batch more, and decided on
        assert (record.batch_size, record.steps, record.samples, record.next_batch_size) == (at_end, 10, 40, 6)


def test_a_stream_that_goes_on_and_on_without_a_decision_is_a_warning_at_the_loops_line(monkeypatch):
    monkeypatch.setattr("divebatch.data.loader.MANY_BATCHES", 5)
    run = on_stream(Fixed(), endless=True)
    with pytest.warns(UserWarning, match=r"5 batches .* epoch_samples=N.* every_steps=N") as caught:
        for _ in zip(run.loader, range(20), strict=False):
            pass
    assert [warning.filename for warning in caught] == [__file__]
    finite = on_stream(Fixed(), endless=False)
    with pytest.warns(UserWarning, match="its end is not known"):
        finite.epoch()
    finite.epoch()  # told once


def test_a_policy_that_goes_by_the_noise_scale_needs_no_length():
    run = on_stream(NoiseScale(16), endless=True, every_steps=3, estimator="per-sample")
    held = [size for size, _ in zip(run.batches(), range(30), strict=False)]
    assert max(held) > 4
    assert set(held) <= set(range(4, 17))


def test_a_policy_that_needs_the_length_of_a_stream_says_so():
    run = on_stream(DiveBatch(0.1, 16), endless=True, every_steps=3, estimator=Oracle(mean_loss))
    seen = Measurement(epoch=1, batch_size=4, dataset_size=None, diversity=Diversity(1.0, 2.0, 40))
    with pytest.raises(UsageError, match=r"needs the number of samples of an epoch.*epoch_samples=N"):
        run.control.policy.next(seen)
