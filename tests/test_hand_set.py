"""A rate that the loop writes by itself is the schedule's own course, and the factor comes on top of it.

Expected is what was written, times f(batch size) counted by hand, at every step, as the optimizer saw it.
"""

import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from divebatch import AdaptiveLoader, Controller, Fixed
from divebatch.measurement import Decision, Measurement
from divebatch.policies import Policy
from reference.per_sample import dataset, mean_loss, mlp

FIRST, N, LR = 4, 40, 0.1
DATA = dataset(N)
SIZES = (4, 4, 8, 16, 12, 4)
"""Of each epoch."""


class BySizes(Policy):
    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=SIZES[seen.epoch % len(SIZES)])


class Run:
    """A loop that writes its rates; `used` are those that the optimizer stepped with."""

    def __init__(self, *, optimizer: Callable[..., Optimizer] = SGD, lr: Any = LR, **settings: Any) -> None:
        self.model = mlp()
        self.optimizer = optimizer(self.model.parameters(), lr=lr)
        self.loader = AdaptiveLoader(DATA, FIRST, seed=0)
        usual = {"policy": BySizes(), "lr_coupling": "linear", "schedule_in": "calls"} | settings
        self.control = Controller(self.model, self.optimizer, self.loader, **usual)
        self.used: list[float] = []
        self.optimizer.register_step_pre_hook(lambda *_: self.used.append(self.lr))

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def factor(self) -> float:
        return self.loader.current.batch_size / FIRST

    def write(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def batches(self) -> Iterator[int]:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            mean_loss(
                self.model(x.float() if next(self.model.parameters()).dtype == torch.float32 else x), y
            ).backward()
            yield self.loader.batches_delivered


def nano_gpt(step: int) -> float:
    """Warm-up, then a cosine."""
    return LR * (step + 1) / 6 if step < 5 else LR * (0.55 + 0.45 * math.cos(math.pi * step / 60))


COURSES: dict[str, Callable[[int], float]] = {
    "a constant": lambda step: 0.07,
    "warm-up and cosine": nano_gpt,
    "by ten at some steps": lambda step: LR * 0.1 ** (step // 17),
}


@pytest.mark.parametrize("lr", [LR, torch.tensor(LR)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", COURSES)
def test_the_factor_is_on_the_written_rate_when_the_optimizer_uses_it(name: str, lr: Any):
    run, expected, records = Run(lr=lr), [], []
    for _ in SIZES:
        for step in run.batches():
            rate = COURSES[name](step)
            run.write(rate)
            expected.append(rate * run.factor)
            run.optimizer.step()
        records.append(run.control.step())
    assert run.used == pytest.approx(expected, rel=1e-6)
    firsts = [sum(math.ceil(N / size) for size in SIZES[:epoch]) for epoch in range(len(SIZES))]
    assert [record.lr for record in records] == pytest.approx([expected[first] for first in firsts], rel=1e-6)


def test_a_rate_read_and_written_again_is_the_one_in_force():
    run, own = Run(), LR
    for _ in SIZES:
        for _ in run.batches():
            for group in run.optimizer.param_groups:
                group["lr"] *= 0.97
            own *= 0.97
            run.optimizer.step()
            assert run.used[-1] == pytest.approx(own * run.factor)
        run.control.step()


def test_a_scheduler_that_is_not_torchs_is_a_course_set_by_hand():
    class Theirs:
        def __init__(self, optimizer: Optimizer) -> None:
            self.groups, self.steps = optimizer.param_groups, 0

        def step(self) -> None:
            self.steps += 1
            for group in self.groups:
                group["lr"] = nano_gpt(self.steps)

    for passed in (False, True):
        model, loader = mlp(), AdaptiveLoader(DATA, FIRST, seed=0)
        optimizer = SGD(model.parameters(), nano_gpt(0))
        theirs, used = Theirs(optimizer), []
        settings = {"scheduler": theirs} if passed else {"schedule_in": "calls"}
        control = Controller(model, optimizer, loader, BySizes(), lr_coupling="linear", **settings)
        optimizer.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))  # noqa: B023
        samples = 0
        for size in SIZES:
            for x, _ in loader:
                optimizer.step()
                place = samples // FIRST if passed else len(used) - 1
                assert used[-1] == pytest.approx(nano_gpt(place) * size / FIRST), (passed, samples)
                samples += len(x)
                theirs.step()
            control.step()
        assert theirs.steps == (len(SIZES) * N / FIRST if passed else len(used))


# What a single write means


def test_a_single_write_while_a_factor_is_in_force_is_the_schedules_own_with_a_warning():
    run = grown()
    run.optimizer.param_groups[0]["lr"] *= 0.1
    told = r"set to 0\.02 by hand while the batch size multiplies it by 2: 0\.02 .* so 0\.04 is in force.*'in force'"
    with pytest.warns(UserWarning, match=told) as found:
        run.optimizer.step()
    assert [warning.filename for warning in found] == [__file__]
    assert run.used[-1] == pytest.approx(0.04)
    run.optimizer.step()
    assert run.used[-1] == pytest.approx(0.04)


@pytest.mark.parametrize(("hand_set_lr", "expected"), [("own", 0.04), ("in force", 0.02)])
def test_what_a_write_means_can_be_said(hand_set_lr: Any, expected: float):
    run = grown(hand_set_lr=hand_set_lr)
    run.write(0.02)
    run.optimizer.step()
    assert run.used[-1] == pytest.approx(expected)


def test_a_loop_that_follows_the_batch_size_by_itself_is_not_multiplied_again():
    run = Run()
    for _ in SIZES:
        for _ in run.batches():
            run.write(LR * run.factor)
            run.optimizer.step()
            assert run.used[-1] == pytest.approx(LR * run.factor)
        run.control.step()


def test_a_decay_seen_before_says_how_the_next_one_is_meant():
    run = Run()
    run.write(run.lr * 0.1)
    run.optimizer.step()
    list(run.loader), run.control.step(), list(run.loader), run.control.step()
    run.write(run.lr * 0.1)
    run.optimizer.step()
    assert run.used[-1] == pytest.approx(LR * 0.01 * 2)


def test_a_rate_of_zero_is_zero():
    run = grown()
    run.write(0.0)
    run.optimizer.step()
    assert run.used[-1] == 0.0


def grown(**settings: Any) -> Run:
    """A run at twice its first batch size."""
    run = Run(**settings)
    for _ in range(2):
        list(run.loader)
        run.control.step()
    next(run.batches())
    assert run.lr == pytest.approx(2 * LR)
    return run


def test_a_parameter_group_added_later_gets_the_factor():
    run = grown()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    run.optimizer.step()
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.2, 1.0, 0.2])
    list(run.loader), run.control.step()
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.4, 2.0, 0.4])


def test_a_course_that_counts_steps_gets_a_warning_at_the_first_change_of_size():
    run = Run(schedule_in=None)
    for _ in range(2):
        for step in run.batches():
            run.write(nano_gpt(step))
            run.optimizer.step()
        if run.control.epoch == 0:
            run.control.step()
    told = r"goes from 4 to 8, and your loop writes group\['lr'\] at every step.*samples_delivered // 4"
    with pytest.warns(UserWarning, match=told) as found:
        run.control.step()
    assert [warning.filename for warning in found] == [__file__]


# Other ways to step


def test_a_scheduler_goes_on_from_a_rate_set_by_hand():
    model, loader = mlp(), AdaptiveLoader(DATA, FIRST, seed=0)
    optimizer = SGD(model.parameters(), LR)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    control = Controller(
        model, optimizer, loader, Fixed(), scheduler=scheduler, lr_coupling="linear", base_batch_size=2
    )
    optimizer.param_groups[0]["lr"] = LR  # the own rate once more
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2 * LR)
    optimizer.param_groups[0]["lr"] = 0.3
    list(loader)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
    control.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)


def test_closures_and_grad_scalers():
    for by_closure in (True, False):
        run, scaler = Run(), torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in SIZES[:4]:
            for x, y in run.loader:

                def backward(x: Any = x, y: Any = y, run: Run = run, scaler: Any = scaler) -> Any:
                    run.optimizer.zero_grad()
                    loss = mean_loss(run.model(x), y)
                    (loss if by_closure else scaler.scale(loss)).backward()  # noqa: B023
                    return loss

                run.write(nano_gpt(run.loader.batches_delivered))
                if by_closure:
                    run.optimizer.step(backward)
                else:
                    backward(), scaler.step(run.optimizer), scaler.update()
                assert run.used[-1] == pytest.approx(nano_gpt(run.loader.batches_delivered) * run.factor)
            run.control.step()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # of torch's own compiler
@pytest.mark.parametrize("lr", [LR, torch.tensor(LR)], ids=["number", "tensor"])
def test_a_compiled_optimizer_step(lr: Any):
    torch._dynamo.reset()
    run = Run(optimizer=SGD, lr=lr)
    step = torch.compile(run.optimizer.step, backend="eager")
    for _ in SIZES[:4]:
        for index in run.batches():
            run.write(nano_gpt(index))
            before, gradient = run.model[0].weight.detach().clone(), run.model[0].weight.grad.clone()
            step()
            moved = (before - run.model[0].weight.detach()).norm() / gradient.norm()
            assert moved.item() == pytest.approx(nano_gpt(index) * run.factor, rel=1e-4)
        run.control.step()


# State


@pytest.mark.parametrize("control_first", [False, True])
def test_a_resume_reads_writes_as_before(control_first: bool):
    run = Run(optimizer=AdamW)
    for _ in range(3):
        for step in run.batches():
            run.write(nano_gpt(step))
            run.optimizer.step()
        run.control.step()
    fresh = Run(optimizer=AdamW)
    names = ["control", "optimizer", "model"] if control_first else ["model", "optimizer", "control"]
    for name in names:
        getattr(fresh, name).load_state_dict(through_a_file(getattr(run, name).state_dict()))
    assert fresh.lr == run.lr
    for step in fresh.batches():
        fresh.write(nano_gpt(step) * 1e-3)  # so far off that only a reading that is known can take it
        fresh.optimizer.step()
        assert fresh.used[-1] == pytest.approx(nano_gpt(step) * 1e-3 * 4)


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
