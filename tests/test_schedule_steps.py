"""A scheduler stepped per batch reaches its end whatever the batch sizes.

The twin is a plain loop of torch's own at the first batch size: its rates, in the order of its steps, are the course.
Where a run must stand on it is counted from the samples that the loop itself has seen.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from divebatch import AdaptiveLoader, Controller, Fixed
from divebatch.errors import UsageError
from divebatch.measurement import Decision, Measurement
from divebatch.policies import Policy
from reference.per_sample import dataset, mlp
from saved import through_a_file

N, FIRST, EPOCHS, LR = 42, 4, 3, 0.1
DATA = dataset(N)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


def warm_up_and_cosine(optimizer: Optimizer, total: int) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=total // 5),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - total // 5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[total // 5])


def chained(optimizer: Optimizer, total: int) -> Any:
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=total // 6),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.ChainedScheduler(parts)


def wsd(optimizer: Optimizer, total: int) -> Any:
    def rate(step: int) -> float:
        return min(1.0, (step + 1) / (total // 10), max(0.0, (total - step) / (total // 3)))

    return lr_scheduler.LambdaLR(optimizer, rate)


SCHEDULES: dict[str, Callable[[Optimizer, int], Any]] = {
    "cosine": lambda o, total: lr_scheduler.CosineAnnealingLR(o, T_max=total),
    "one cycle": lambda o, total: lr_scheduler.OneCycleLR(o, max_lr=0.4, total_steps=total + 1),
    "warm-up and cosine": warm_up_and_cosine,
    "chained": chained,
    "wsd": wsd,
    "by step": lambda o, total: lr_scheduler.StepLR(o, step_size=7, gamma=0.7),
    "cyclic": lambda o, total: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=5),
}


@dataclass(frozen=True)
class Sizes(Policy):
    """One size after the other, one for each decision."""

    sizes: tuple[int, ...]
    decides_within_epochs = True

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=self.sizes[seen.step % len(self.sizes)])


@dataclass
class Loop:
    """The kinds of loops that there are: how many batches a step takes, and what becomes of the rest of an epoch."""

    passes: int = 1
    rest: str = "own step"
    carried: int = field(default=0)

    def steps_after(self, batch: int, is_last: bool) -> bool:
        """Whether a step is made after the batch with that index in its epoch."""
        if self.rest == "carried over":
            self.carried += 1
            return self.carried % self.passes == 0
        return (batch + 1) % self.passes == 0 or (self.rest == "own step" and is_last)


def course(schedule: Callable[[Optimizer, int], Any], loop: Loop, drop_last: bool) -> tuple[list[float], float]:
    """The rates of a loop without a controller, and its steps in an epoch, which may be no whole number."""
    loader, made = DataLoader(DATA, FIRST, drop_last=drop_last), []
    for real in (False, True):  # the first time only to count the steps, for the schedule's length
        optimizer = SGD([torch.ones(1, requires_grad=True)], LR)
        scheduler = schedule(optimizer, sum(made) if real else 99)
        rates, made, again = [rate_of(optimizer)], [], Loop(loop.passes, loop.rest)
        for _ in range(EPOCHS):
            made.append(0)
            for index, _ in enumerate(loader):
                if again.steps_after(index, index + 1 == len(loader)):
                    optimizer.step(), scheduler.step()
                    made[-1] += 1
                    rates.append(rate_of(optimizer))
    return rates, len(loader) / loop.passes if loop.rest == "carried over" else sum(made) / EPOCHS


def rate_of(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


class Run:
    def __init__(self, schedule: Any, total: int, policy: Policy, *, drop_last: bool = False, **settings: Any) -> None:
        self.model = mlp()
        self.optimizer = SGD(self.model.parameters(), LR)
        self.scheduler = schedule(self.optimizer, total)
        of_loader = {"delivery_size": settings.pop("delivery_size", None)}
        self.loader = AdaptiveLoader(
            settings.pop("data", DATA), settings.pop("batch_size", FIRST), seed=0, drop_last=drop_last, **of_loader
        )
        settings = {"lr_coupling": "sqrt", "scheduler": self.scheduler, "scheduler_unit": "step"} | settings
        self.control = Controller(self.model, self.optimizer, self.loader, policy, **settings)
        self.used: list[tuple[int, float]] = []
        """The scheduler's place and the rate of each step."""
        self.optimizer.register_step_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.used.append((getattr(self.scheduler, "last_epoch", 0), rate_of(self.optimizer)))

    def batches(self) -> Iterator[int]:
        for x, _ in self.loader:
            yield len(x)

    def step(self) -> tuple[int, float]:
        """Step both; return where the scheduler stood in the step, and its rate."""
        self.optimizer.step()
        self.scheduler.step()
        return self.used[-1]


def expected_place(epoch: int, samples: int, per_epoch: float, loop: Loop, drop_last: bool) -> int:
    """Where the loop at the first size stands after so many epochs and so many samples of the next one."""
    before = epoch * per_epoch + 1e-9
    batches = min(math.ceil(samples / FIRST), N // FIRST if drop_last else math.ceil(N / FIRST))
    within = batches / loop.passes
    end = math.floor((epoch + 1) * per_epoch + 1e-9)
    return min(
        math.ceil(before - 2e-9 + within) if loop.rest == "carried over" else int(before) + math.ceil(within), end
    )


# Every step


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_at_every_step_is_the_courses_at_as_many_samples(name: str, drop_last: bool):
    rates, per_epoch = course(SCHEDULES[name], Loop(), drop_last)
    run = Run(SCHEDULES[name], len(rates) - 1, Sizes((4, 8, 7, 16, 3, 40, 4, 1)), drop_last=drop_last, every_steps=3)
    sizes, places = set(), []
    for epoch in range(EPOCHS):
        seen = 0
        for size in run.batches():
            full = run.loader.current.batch_size
            place = expected_place(epoch, seen, per_epoch, Loop(), drop_last)
            _, rate = run.step()
            assert rate == pytest.approx(rates[place] * math.sqrt(full / FIRST), rel=1e-9), (epoch, seen)
            seen += size
            sizes.add(size)
            places.append(place)
        run.control.step()
    assert len(sizes) > 3
    assert run.scheduler.last_epoch == EPOCHS * per_epoch if hasattr(run.scheduler, "last_epoch") else True
    assert run.control.lr == pytest.approx(rates[-1] * math.sqrt(run.loader.batch_size / FIRST), abs=1e-12)


@pytest.mark.parametrize("rest", ["own step", "left out", "carried over"])
@pytest.mark.parametrize("passes", [2, 3, 4])
def test_accumulated_gradients(passes: int, rest: str):
    loop, again = Loop(passes, rest), Loop(passes, rest)
    rates, per_epoch = course(SCHEDULES["cosine"], loop, False)
    run = Run(SCHEDULES["cosine"], len(rates) - 1, Fixed(), accumulate=passes)
    for epoch in range(EPOCHS):
        seen, before, length = 0, 0, len(run.loader)
        for index, size in enumerate(run.batches()):
            seen += size
            if not again.steps_after(index, index + 1 == length):
                continue
            place, _ = run.step()
            if epoch == 0:
                assert place == index // passes
            elif before or rest != "carried over":  # what was carried over shows in the epoch's first step
                assert place == expected_place(epoch, before, per_epoch, again, False)
            before = seen
        run.control.step()
        run.loader.batch_size = (6, 5, 4)[epoch]
    assert run.scheduler.last_epoch >= int(EPOCHS * per_epoch) - 1  # the last rest may stay without a call
    assert run.scheduler.last_epoch <= len(rates) - 1


def test_accumulated_gradients_whose_steps_a_policy_sizes():
    run = Run(SCHEDULES["one cycle"], 33, Sizes((22, 44, 12)), every_steps=None, accumulate=2)
    seen, places, made = 0, [], 0
    for epoch in range(EPOCHS):
        for index, size in enumerate(run.batches()):
            seen += size
            if index % 2 or run.loader.is_at_end:
                places.append((run.step()[0], epoch, seen))
                made += 1
        seen = 0
        run.control.step()
    assert made < 18  # the steps grew
    for (place, epoch, _), (_, before_epoch, before) in zip(places[1:], places, strict=False):
        assert place == min(6 * before_epoch + math.ceil(before / (2 * FIRST)), 6 * epoch + 6)
    assert run.scheduler.last_epoch == 18


def test_passes_of_a_delivery_size_count_as_the_step_that_they_make():
    """The loader's batches stay as they are, and the number that makes a step changes, already in the first epoch."""
    policy = Sizes((4, 8, 16, 6))
    run = Run(SCHEDULES["one cycle"], math.ceil(N / FIRST) * EPOCHS, policy, every_steps=2, delivery_size=2)
    for epoch in range(EPOCHS):
        seen = held = before = 0
        for size in run.batches():
            seen, held = seen + size, held + size
            if held < run.loader.batch_size and seen < N:
                continue
            place, _ = run.step()
            assert place == epoch * math.ceil(N / FIRST) + math.ceil(before / FIRST)
            held, before = 0, seen
        run.control.step()
    assert run.scheduler.last_epoch == math.ceil(N / FIRST) * EPOCHS
    assert run.loader.batches_delivered == N // 2 * EPOCHS


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 45), min_size=1, max_size=6),
    every_steps=st.integers(1, 5),
    drop_last=st.booleans(),
    stop=st.integers(1, 40),
)
def test_one_cycle_never_overruns_and_ends_at_its_end_also_after_a_resume(
    sizes: list[int], every_steps: int, drop_last: bool, stop: int
):
    rates, _ = course(SCHEDULES["one cycle"], Loop(), drop_last)

    def make() -> Run:
        total = len(rates) - 1
        return Run(SCHEDULES["one cycle"], total, Sizes(tuple(sizes)), drop_last=drop_last, every_steps=every_steps)

    whole, run = driven(make)
    stopped, resumed = driven(make, stop=stop)
    assert stopped == whole
    assert run.scheduler.last_epoch == resumed.scheduler.last_epoch == len(rates) - 1


def driven(make: Callable[[], Run], *, stop: int | None = None) -> tuple[list[tuple[int, float]], Run]:
    """Size and rate of every step of a run, which after step `stop` fresh objects carry on."""
    run, done = make(), list[tuple[int, float]]()
    while run.control.epoch < EPOCHS:
        for size in run.batches():
            done.append((size, run.step()[1]))
            if len(done) == stop:
                fresh = make()
                for name in ("optimizer", "scheduler", "control"):
                    getattr(fresh, name).load_state_dict(through_a_file(getattr(run, name).state_dict()))
                run = fresh
                break
        else:
            run.control.step()
    return done, run


def test_a_resume_counts_in_steps_of_the_first_batch_size_whatever_the_new_loader_begins_with():
    def make(batch_size: int) -> Run:
        return Run(SCHEDULES["cosine"], 33, Sizes((8,)), delivery_size=2, batch_size=batch_size)

    def epoch(run: Run) -> None:
        held = 0
        for size in run.batches():
            held += size
            if held >= run.loader.batch_size or run.loader.is_at_end:
                run.step()
                held = 0
        run.control.step()

    run, fresh = make(FIRST), make(2 * FIRST)
    epoch(run)
    for name in ("optimizer", "scheduler", "control"):
        getattr(fresh, name).load_state_dict(through_a_file(getattr(run, name).state_dict()))
    epoch(fresh)
    assert fresh.scheduler.last_epoch == 2 * math.ceil(N / FIRST)


# Steps of the loop's own


def test_while_the_size_stays_each_call_is_one_step_even_where_calls_are_left_out():
    run = Run(SCHEDULES["cosine"], 33, Fixed())
    calls = 0
    for _ in range(2):
        for index, _ in enumerate(run.batches()):
            if index not in (0, 5):  # as a GradScaler's overflow leaves a step out
                run.step()
                calls += 1
        run.control.step()
    assert run.scheduler.last_epoch == calls == 18


def test_steps_left_out_before_the_size_changed_stay_left_out_and_later_ones_are_made_up_for():
    run = Run(SCHEDULES["cosine"], 33, Sizes((8,)))
    for index, _ in enumerate(run.batches()):
        if index not in (0, 5):
            run.step()
    run.control.step()
    for index, _ in enumerate(run.batches()):
        if index != 2:
            run.step()
    assert run.scheduler.last_epoch == 9 + 11


def test_schedules_per_epoch_and_per_step_side_by_side():
    model, loader = mlp(), AdaptiveLoader(DATA, FIRST, seed=0)
    optimizer = SGD(model.parameters(), LR)
    warm_up, steps = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=22), lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    units = ["step", "epoch"]
    control = Controller(model, optimizer, loader, Sizes((8, 16)), scheduler=[warm_up, steps], scheduler_unit=units)
    for epoch in range(EPOCHS):
        for _ in loader:
            optimizer.step()
            warm_up.step()
        steps.step()
        control.step()
        assert (warm_up.last_epoch, steps.last_epoch) == (11 * (epoch + 1), epoch + 1)


def test_a_first_batch_that_holds_all_samples():
    model, loader = mlp(), AdaptiveLoader(DATA, N, seed=0)
    optimizer = SGD(model.parameters(), LR)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    control = Controller(model, optimizer, loader, Sizes((21, 10)), scheduler=scheduler, scheduler_unit="step")
    for epoch in range(EPOCHS):
        for _ in loader:
            optimizer.step()
            scheduler.step()
        control.step()
        assert scheduler.last_epoch == epoch + 1
    assert rate_of(optimizer) == pytest.approx(0, abs=1e-12)


def test_an_inner_scheduler_that_is_passed_too_steps_once():
    model, loader = mlp(), AdaptiveLoader(DATA, FIRST, seed=0)
    optimizer = SGD(model.parameters(), LR)
    inner = [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    both = lr_scheduler.ChainedScheduler(inner)
    control = Controller(model, optimizer, loader, Sizes((8,)), scheduler=[both, *inner], scheduler_unit="step")
    for epoch in range(2):
        for _ in loader:
            optimizer.step()
            both.step()
        control.step()
        assert [part.last_epoch for part in inner] == [11 * (epoch + 1)] * 2


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from DATA


def test_a_stream_of_unknown_length_goes_by_samples_too():
    run = Run(SCHEDULES["cosine"], 33, Sizes((8, 16)), data=Stream())
    for epoch in range(EPOCHS):
        for _ in run.batches():
            run.step()
        run.control.step()
        assert run.scheduler.last_epoch == 11 * (epoch + 1)


@pytest.mark.filterwarnings("ignore:epoch . was left after")
def test_an_epoch_that_is_broken_off_and_begun_again_ends_where_its_samples_do():
    run = Run(SCHEDULES["cosine"], 33, Sizes((8,)))
    for _ in run.batches():
        run.step()
    run.control.step()
    for index, _ in enumerate(run.batches()):
        run.step()
        if index == 2:
            break
    for _ in run.batches():
        run.step()
    assert run.scheduler.last_epoch == 22


# Said and checked


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "stepped with every batch, and nothing said": ({"scheduler_unit": "epoch"}, "pass .*scheduler_unit='step'"),
    "one of two": ({"scheduler_unit": ["epoch"]}, "scheduler_unit='call' if each call"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_call_within_an_epoch_is_an_error_where_epochs_were_said(name: str):
    said, told = WRONG[name]
    run = Run(SCHEDULES["cosine"], 33, Fixed(), **said)
    batches = run.batches()
    for _ in range(2):
        next(batches), run.step()
    next(batches)
    with pytest.raises(UsageError, match=rf"CosineAnnealingLR.step\(\) is called within the epoch.*{told}"):
        run.step()


def test_a_call_within_an_epoch_of_two_steps_is_found_at_its_end():
    run = Run(SCHEDULES["cosine"], 33, Fixed(), scheduler_unit="epoch", data=dataset(8))
    for _ in run.batches():
        run.step()
    with pytest.raises(UsageError, match="within the epoch"):
        run.control.step()


def test_one_call_an_epoch_is_an_error_where_steps_were_said():
    run = Run(SCHEDULES["cosine"], 33, Fixed())
    for _ in run.batches():
        run.optimizer.step()
    run.scheduler.step()
    with pytest.raises(UsageError, match=r"called once in an epoch of 11 optimizer steps.*scheduler_unit='epoch'"):
        run.control.step()


def test_a_call_with_every_pass_is_an_error_where_steps_were_said():
    run = Run(SCHEDULES["cosine"], 99, Fixed(), accumulate=2)
    for index, _ in enumerate(run.batches()):
        run.scheduler.step()
        if index % 2:
            run.optimizer.step()
    with pytest.raises(UsageError, match=r"called .* times in an epoch of 5 .*after each optimizer step"):
        run.control.step()


def test_a_call_is_one_step_where_that_was_said():
    run = Run(SCHEDULES["cosine"], 33, Sizes((8,)), scheduler_unit="call")
    for _ in range(2):
        for _ in run.batches():
            run.step()
        run.control.step()
    assert run.scheduler.last_epoch == 11 + 6


def test_a_scheduler_that_is_told_a_part_of_an_epoch_needs_no_help():
    run = Run(
        lambda o, _: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=EPOCHS), 0, Sizes((8,)), scheduler_unit="epoch"
    )
    for epoch in range(EPOCHS):
        length = len(run.loader)
        for index, _ in enumerate(run.batches()):
            run.optimizer.step()
            run.scheduler.step(epoch + index / length)
        run.control.step()
    assert run.scheduler.last_epoch == 2
