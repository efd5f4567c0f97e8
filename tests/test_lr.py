"""The learning rate in force is always the schedule's own course times the factors.

The twin is the same scheduler on a second optimizer that nothing is coupled to.
"""

import ast
import io
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from divebatch import AdaptiveLoader
from divebatch.errors import ArgumentError
from divebatch.lr import COUPLINGS, LrCoupling, Rates

FIRST = 32
# After which scheduler step: batch size and lr_factor of the decision.
CHANGES = {3: (64, 1.0), 4: (64, 0.75), 9: (48, 1.0), 10: (256, 0.5), 17: (16, 2.0)}
STEPS = 24


def halving(optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def sequential(optimizer: Optimizer) -> LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=15, eta_min=1e-3),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[6])


def chained(optimizer: Optimizer) -> LRScheduler:
    parts = [
        lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=4),
        lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
    ]
    return lr_scheduler.ChainedScheduler(parts)


def plateau(optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1, min_lr=[0.004, 0.001])


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "step": halving,
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, milestones=[3, 8, 8, 15], gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20, eta_min=0.005),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda k: 1 / (1 + k), lambda k: 0.9**k]),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.95),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=20, power=2.0),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.4, 0.1], total_steps=STEPS + 1),
    "sequential": sequential,
    "chained": chained,
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2, eta_min=0.001),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, [0.01, 0.002], [0.1, 0.02], step_size_up=5, mode="triangular2"),
    "plateau": plateau,
}
EVERY_CASE = pytest.mark.parametrize("case", ["none", *SCHEDULERS])
EVERY_SCHEDULER = pytest.mark.parametrize("case", SCHEDULERS)
# SequentialLR itself uses the argument that torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")


def two_groups(*, optimizer: type[Optimizer] = SGD, tensors: bool = False) -> Optimizer:
    rates = [torch.tensor(0.1), torch.tensor(0.02)] if tensors else [0.1, 0.02]
    settings = {"momentum": 0.9} if optimizer is SGD else {}
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    return optimizer(groups, **settings)


def coupled(optimizer: Optimizer, schedulers: Any, *, kind: Any, batch_size: int = FIRST) -> Rates:
    return Rates(
        [optimizer],
        schedulers,
        kinds=[kind],
        loader=AdaptiveLoader(range(1024), batch_size),
        first_batch_size=batch_size,
    )


class Run:
    """An optimizer with its scheduler, and the coupling where it has one."""

    def __init__(self, case: str, *, kind: Any = None, **settings: Any) -> None:
        self.optimizer = two_groups(**settings)
        self.scheduler = SCHEDULERS[case](self.optimizer) if case in SCHEDULERS else None
        schedulers = [] if self.scheduler is None else [self.scheduler]
        if kind is not None:
            self.coupling = coupled(self.optimizer, schedulers, kind=kind)

    def advance(self, step: int) -> None:
        self.optimizer.step()
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(1.0 if step % 7 else 1.0 / (step + 1))
        elif self.scheduler is not None:
            self.scheduler.step()

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def states(self) -> dict[str, Any]:
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "coupling": self.coupling}
        return through_a_file({name: part.state_dict() for name, part in parts.items() if part is not None})

    def load(self, states: dict[str, Any], order: tuple[str, ...]) -> None:
        for name in order:
            if name in states:
                getattr(self, name).load_state_dict(states[name])


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def times(rates: list[float], factor: float, *, rel: float = 1e-12) -> Any:
    return pytest.approx([rate * factor for rate in rates], rel=rel, abs=0)


SHAPES: dict[Any, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": lambda ratio: ratio**0.5,
    0.6: lambda ratio: math.exp(0.6 * math.log(ratio)),
}


def factor_after(step: int, kind: Any) -> float:
    """f of the latest batch size, times every `lr_factor` so far."""
    done = [change for at, change in CHANGES.items() if at <= step]
    size = done[-1][0] if done else FIRST
    return SHAPES[kind](size / FIRST) * math.prod(lr_factor for _, lr_factor in done)


def follow_course(run: Run, twin: Run, kind: Any, steps: Iterable[int] = range(STEPS), **rel: float) -> None:
    """Advance both and compare after every scheduler step and every change of the batch size."""
    for step in steps:
        run.advance(step)
        twin.advance(step)
        assert run.rates == times(twin.rates, factor_after(step - 1, kind), **rel), step
        if step in CHANGES:
            size, lr_factor = CHANGES[step]
            run.coupling.follow(size, lr_factor=lr_factor)
            assert run.rates == times(twin.rates, factor_after(step, kind), **rel), step


# The course


@EVERY_CASE
@pytest.mark.parametrize("kind", SHAPES)
def test_the_rate_in_force_is_the_own_course_times_the_factors(case: str, kind: Any):
    twin = Run(case)
    follow_course(Run(case, kind=kind), twin, kind)
    assert case == "none" or twin.rates != Run(case).rates


@EVERY_CASE
def test_rates_that_are_tensors_follow_in_place(case: str):
    run, twin = Run(case, kind="linear", tensors=True), Run(case, tensors=True)
    tensors = [group["lr"] for group in run.optimizer.param_groups]
    follow_course(run, twin, "linear", rel=1e-5)
    assert all(isinstance(group["lr"], torch.Tensor) for group in run.optimizer.param_groups)
    if case == "none":
        assert all(a is group["lr"] for a, group in zip(tensors, run.optimizer.param_groups, strict=True))


@pytest.mark.parametrize(("power", "factor"), [(1, 4.0), (0.5, 2.0), (0.6, 4**0.6), (0.25, math.sqrt(2))])
def test_a_power_of_the_batch_size_and_back_to_the_bit(power: float, factor: float):
    run = Run("none", kind=power)
    run.coupling.follow(4 * FIRST)
    assert run.rates == pytest.approx([0.1 * factor, 0.02 * factor], rel=1e-14)
    run.coupling.follow(FIRST)
    assert run.rates == [0.1, 0.02]


def test_adamw_with_the_square_root():
    follow_course(Run("cosine", kind="sqrt", optimizer=AdamW), Run("cosine", optimizer=AdamW), "sqrt")


@EVERY_SCHEDULER
def test_a_schedulers_state_is_the_one_it_has_uncoupled(case: str):
    run, twin = Run(case, kind="linear"), Run(case)
    follow_course(run, twin, "linear")
    assert through_a_file(run.scheduler.state_dict()) == through_a_file(twin.scheduler.state_dict())


def test_the_schedules_own_ratio_leaves_the_factors_out():
    run, twin = Run("cosine", kind="linear"), Run("cosine")
    follow_course(run, twin, "linear")
    assert run.coupling.schedule_ratio() == pytest.approx(twin.rates[0] / 0.1, rel=1e-12)


def test_a_scheduler_that_fails_leaves_the_rates_in_force():
    run = Run("plateau", kind="linear")
    run.coupling.follow(2 * FIRST)
    with pytest.raises(ValueError, match="could not convert"):
        run.scheduler.step("not a number")
    assert run.rates == [0.2, 0.04]


def test_two_schedulers_of_one_optimizer():
    run, twin = Run("none"), Run("none")
    pairs = [(halving(r.optimizer), lr_scheduler.ExponentialLR(r.optimizer, 0.9)) for r in (run, twin)]
    coupling = coupled(run.optimizer, pairs[0], kind="linear")
    coupling.follow(3 * FIRST)
    for _ in range(6):
        for r, pair in zip((run, twin), pairs, strict=True):
            r.optimizer.step()
            for scheduler in pair:
                scheduler.step()
        assert run.rates == times(twin.rates, 3.0)


# The documentation's table


PAGE = Path(__file__).parents[1] / "docs" / "learning-rate.md"
SIZES = (256, 64, 512, 2048)


def documented() -> list[tuple[Any, str, list[str]]]:
    """Coupling, setting, and the numbers at `SIZES`, of each row."""
    section = PAGE.read_text().split("## Which learning rate at my batch")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    (_, _, *sizes), _, *rows = cells
    assert sizes == list(map(str, SIZES))
    found, coupling = [], None
    for name, setting, *numbers in rows:
        coupling = ast.literal_eval(name.strip("`")) if name else coupling
        found.append((coupling, setting, numbers))
    return found


@pytest.mark.parametrize(("coupling", "setting", "numbers"), documented())
def test_every_number_of_the_documented_table(coupling: Any, setting: str, numbers: list[str]):
    rate = 0.1 if coupling in ("none", "linear", "adascale", "1/(1+B/b)") else 0.001
    own = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = AdamW([nn.Parameter(torch.ones(1))], lr=rate, **own)
    follows = LrCoupling(optimizer, kind=coupling, first_batch_size=256)
    name, _, at = setting.partition(" at ")
    for noise in reversed(re.findall(r"\d+", at)):  # what was measured first stands last
        follows.follow(256, noise_scale=float(noise))
    found = []
    for size in SIZES:
        follows.follow(size)
        group = optimizer.param_groups[0]
        values = {**group, "beta1": group["betas"][0], "beta2": group["betas"][1]}
        found.append(f"{values[name]:.4g}")
    assert found == numbers


def test_the_documented_table_has_every_coupling():
    assert {coupling for coupling, *_ in documented()} == {*COUPLINGS, 0.6}


# State


@EVERY_CASE
@pytest.mark.parametrize(
    "order",
    [("coupling", "optimizer", "scheduler"), ("scheduler", "optimizer", "coupling")],
    ids=["coupling first", "coupling last"],
)
def test_fresh_objects_carry_on(case: str, order: tuple[str, ...]):
    run, twin = Run(case, kind="linear"), Run(case)
    follow_course(run, twin, "linear", range(11))
    fresh = Run(case, kind="linear")
    fresh.load(run.states(), order)
    assert fresh.rates == run.rates
    assert fresh.coupling.schedule_ratio() == run.coupling.schedule_ratio()
    follow_course(fresh, twin, "linear", range(11, STEPS))


# Schedulers that do not fit


@EVERY_SCHEDULER
def test_a_scheduler_that_was_not_passed_gets_an_error(case: str):
    run = Run(case)
    name = type(run.scheduler).__name__
    with pytest.raises(ArgumentError, match=f"has a scheduler that was not passed: .*{name}.*Pass scheduler="):
        coupled(run.optimizer, [], kind="linear")


def test_one_of_two_schedulers_not_passed_gets_an_error():
    optimizer = two_groups()
    passed, missing = halving(optimizer), plateau(optimizer)
    with pytest.raises(ArgumentError, match=f"not passed: {type(missing).__name__}\\."):
        coupled(optimizer, [passed], kind="none")


@EVERY_SCHEDULER
def test_a_scheduler_that_is_gone_is_not_missed(case: str):
    run = Run(case)
    run.scheduler = None
    coupled(run.optimizer, [], kind="linear")


@EVERY_SCHEDULER
def test_a_scheduler_of_another_optimizer_gets_an_error(case: str):
    other = Run(case)
    with pytest.raises(ArgumentError, match=f"{type(other.scheduler).__name__} does not drive the optimizer"):
        coupled(two_groups(), [other.scheduler], kind="linear")


def test_an_unknown_coupling_gets_an_error_that_lists_the_known_ones():
    with pytest.raises(ArgumentError, match="'cubic'; known: none, linear, sqrt"):
        Run("none", kind="cubic")


@pytest.mark.parametrize("kind", [-0.5, 0, 0.0, 1.5, float("nan"), float("inf"), True, [0.5]])
def test_a_power_that_cannot_be_gets_an_error(kind: Any):
    with pytest.raises(ArgumentError, match=r"\^p, above 0 and at most 1, got lr_coupling=.*'none'"):
        Run("none", kind=kind)


@pytest.mark.parametrize("text", ["0.6", "power:0.6", ""])
def test_a_power_as_text_gets_an_error_that_says_to_pass_a_number(text: str):
    with pytest.raises(ArgumentError, match=rf"unknown lr_coupling '{text}'; known: .*, or a power .* such as 0\.6"):
        Run("none", kind=text)


@pytest.mark.parametrize("lr_factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_cannot_be_gets_an_error_and_changes_nothing(lr_factor: float):
    run = Run("none", kind="linear")
    with pytest.raises(ArgumentError, match="lr_factor must be positive and finite"):
        run.coupling.follow(2 * FIRST, lr_factor=lr_factor)
    run.advance(0)
    assert run.rates == [0.1, 0.02]


# Closing


@EVERY_SCHEDULER
def test_close_gives_the_scheduler_back(case: str):
    run, kind = Run(case, kind="linear"), type(Run(case).scheduler)
    assert type(run.scheduler) is not kind
    assert isinstance(run.scheduler, kind)
    run.coupling.close()
    run.coupling.close()
    assert type(run.scheduler) is kind


def test_after_close_the_rates_stay_and_the_scheduler_works_on_them():
    run = Run("step", kind="linear")
    run.coupling.follow(2 * FIRST)
    run.coupling.close()
    assert run.rates == [0.2, 0.04]
    for step in range(4):
        run.advance(step)
    assert run.rates == [0.1, 0.02]


def test_the_schedules_own_ratio_is_that_to_the_rate_a_warm_up_leads_to():
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 4, 1.0) * (1.0 if step < 6 else 0.25))
    coupling = coupled(optimizer, [scheduler], kind="sqrt")
    ratios = []
    for _ in range(8):
        coupling.follow(2 * FIRST)
        ratios.append(coupling.schedule_ratio())
        optimizer.step()
        scheduler.step()
    assert ratios == pytest.approx([1.0] * 6 + [0.25] * 2)
