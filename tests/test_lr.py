"""A step is made with the schedule's own rate times the factors, and groups hold the schedule's own in between.

The twin is the same optimizer and scheduler with nothing coupled to it.
"""

import ast
import copy
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from divebatch import AdaptiveLoader, Auto, Controller, Decision, Fixed, Measurement
from divebatch.errors import ArgumentError
from divebatch.lr import COUPLINGS, LrCoupling, Rates
from divebatch.policies import Policy
from reference.per_sample import dataset, mean_loss, mlp
from saved import through_a_file

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


def coupled(
    optimizer: Optimizer, schedulers: Any = (), *, kind: Any, batch_size: int = FIRST, **settings: Any
) -> Rates:
    loader = AdaptiveLoader(range(1024), batch_size)
    return Rates(
        [optimizer], kinds=[kind], loader=loader, first_batch_size=batch_size, schedulers=schedulers, **settings
    )


class Run:
    """An optimizer with its scheduler, coupled by the two hooks of a controller; `used` are the rates of the steps."""

    def __init__(self, case: str, *, kind: Any = None, **settings: Any) -> None:
        self.optimizer = two_groups(**settings)
        self.scheduler = SCHEDULERS[case](self.optimizer) if case in SCHEDULERS else None
        schedulers = [] if self.scheduler is None else [self.scheduler]
        self.used: list[list[float]] = []
        if kind is not None:
            self.coupling = coupled(self.optimizer, schedulers, kind=kind)
            each = self.coupling.couplings[self.optimizer]
            self.optimizer.register_step_pre_hook(lambda *_: self.coupling.before_step(each, -1, 0, 0))
            self.optimizer.register_step_post_hook(lambda *_: self.coupling.after_step(each, 0))
        self.optimizer.register_step_pre_hook(lambda *_: self.used.append(self.rates))

    def advance(self, step: int) -> None:
        self.optimizer.step()
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(1.0 if step % 7 else 1.0 / (step + 1))
        elif self.scheduler is not None:
            self.scheduler.step()

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]


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
    done = [change for at, change in CHANGES.items() if at < step]
    size = done[-1][0] if done else FIRST
    return SHAPES[kind](size / FIRST) * math.prod(lr_factor for _, lr_factor in done)


# The course


@EVERY_CASE
@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_step_uses_the_own_rate_times_the_factors_and_leaves_the_own_one(case: str, kind: Any, tensors: bool):
    run, twin = Run(case, kind=kind, tensors=tensors), Run(case, tensors=tensors)
    held = [group["lr"] for group in run.optimizer.param_groups]
    for step in range(STEPS):
        run.advance(step)
        twin.advance(step)
        assert run.used[-1] == times(twin.used[-1], factor_after(step, kind), rel=1e-6 if tensors else 1e-12), step
        assert run.rates == twin.rates  # to the bit
        if step in CHANGES:
            size, lr_factor = CHANGES[step]
            run.coupling.follow(size, lr_factor=lr_factor)
            assert run.coupling.first.lr == pytest.approx(run.rates[0] * factor_after(step + 1, kind))
    if run.scheduler is not None:
        assert twin.rates != Run(case).rates
        assert through_a_file(run.scheduler.state_dict()) == through_a_file(twin.scheduler.state_dict())
    elif tensors:
        assert all(a is group["lr"] for a, group in zip(held, run.optimizer.param_groups, strict=True))


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
@pytest.mark.parametrize("kind", ["linear", "sqrt", 0.6])
def test_the_gradient_of_a_summed_loss_grows_by_itself(optimizer: type[Optimizer], kind: Any):
    follows = LrCoupling(two_groups(optimizer=optimizer), kind=kind, first_batch_size=8, loss_reduction="sum")
    follows.follow(32)
    assert follows.factor == pytest.approx(SHAPES[kind](4.0) / (4.0 if optimizer is SGD else 1.0))


def test_a_summed_loss_trains_as_its_mean_with_the_rate_of_the_first_batch():
    """The gradient of a sum over b samples at rate r is that of a mean at rate b r."""

    def weights(reduction: str, lr: float) -> list[torch.Tensor]:
        model = mlp()
        optimizer = SGD(model.parameters(), lr)
        loader = AdaptiveLoader(dataset(32), 4, seed=0, drop_last=True)
        control = Controller(model, optimizer, loader, Doubling(), lr_coupling="linear", loss_reduction=reduction)
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                (mean_loss(model(x), y) * (len(x) if reduction == "sum" else 1)).backward()
                optimizer.step()
            control.step()
        return list(model.parameters())

    for summed, mean in zip(weights("sum", 0.01), weights("mean", 0.04), strict=True):
        assert torch.allclose(summed, mean, rtol=1e-10)


def test_a_summed_loss_under_auto_trains_as_its_mean():
    def rates(reduction: str) -> list[float]:
        model = mlp()
        optimizer = SGD(model.parameters(), 0.01)
        loader = AdaptiveLoader(dataset(640), 4, seed=0, drop_last=True)
        policy = Auto(32, total_samples=5 * 640)
        control = Controller(model, optimizer, loader, policy, loss_reduction=reduction)
        found = []
        for _ in range(5):
            for _ in loader:
                optimizer.step()
            record = control.step()
            found.append(record.next_lr * (record.next_batch_size / 4 if reduction == "sum" else 1))
        assert loader.batch_size > 8
        return found

    assert rates("sum") == pytest.approx(rates("mean"))


@pytest.mark.parametrize("measured", [{}, {"measure_always": True, "estimator": "per-sample"}])
@pytest.mark.parametrize(
    ("is_sum", "settings", "optimizer", "is_asked"),
    [
        (True, {}, SGD, True),
        (False, {}, SGD, False),
        (True, {"loss_reduction": "sum"}, SGD, False),
        (True, {"lr_coupling": "none"}, SGD, False),
        (True, {"lr_coupling": "sqrt"}, AdamW, False),
    ],
    ids=["a sum", "a mean", "declared", "fixed rate", "Adam-like"],
)
def test_a_summed_loss_that_nobody_declared_is_asked_about(is_sum, settings, optimizer, is_asked, measured):
    model = mlp()
    used = optimizer(model.parameters(), 1e-5, **({"momentum": 0.9} if optimizer is SGD else {}))
    loader = AdaptiveLoader(dataset(128), 4, seed=0)
    settings = {"lr_coupling": "linear", **measured, **settings}
    control = Controller(model, used, loader, Doubling(), **settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            for x, y in loader:
                used.zero_grad()
                (mean_loss(model(x), y) * (len(x) if is_sum else 1)).backward()
                used.step()
            control.step()
    assert ["pass loss_reduction='sum'" in str(each.message) for each in told] == [True] * is_asked


def test_the_schedules_own_ratio_leaves_the_factors_out():
    run = Run("cosine", kind="linear")
    first_rates = run.rates
    for step in range(STEPS):
        run.advance(step)
        run.coupling.follow(2 * FIRST)
    fallen_to = [rate / first for rate, first in zip(run.rates, first_rates, strict=True)]
    assert len(set(fallen_to)) == 2
    assert run.coupling.schedule_ratio() == pytest.approx(max(fallen_to), rel=1e-12)


def test_the_schedules_own_ratio_is_that_to_the_rate_a_warm_up_leads_to():
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 4, 1.0) * (1.0 if step < 6 else 0.25))
    coupling = coupled(optimizer, [scheduler], kind="sqrt")
    ratios = []
    for _ in range(8):
        coupling.follow(2 * FIRST)
        ratios.append(coupling.first.schedule_ratio())
        optimizer.step()
        scheduler.step()
    assert ratios == pytest.approx([1.0] * 6 + [0.25] * 2)


# Whatever the loop does with its rates


class Doubling(Policy):
    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=2 * seen.batch_size)


class Sizes(Policy):
    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=(4, 8, 16, 2, 4)[seen.epoch % 5])


class Loop:
    """A controlled loop; `used` are pairs of the batch size in force and the rate of the step."""

    def __init__(self, policy: Policy | None = None, *, optimizer: Any = SGD, lr: Any = 0.1, **settings: Any) -> None:
        self.model = mlp(dtype=torch.float32)
        self.optimizer: Optimizer = optimizer(self.model.parameters(), lr=lr)
        self.loader = AdaptiveLoader(dataset(40, dtype=torch.float32), 4, seed=0)
        settings = {"scheduler_unit": "call", "lr_coupling": "linear"} | settings
        self.control = Controller(self.model, self.optimizer, self.loader, policy or Sizes(), **settings)
        self.used: list[tuple[int, float]] = []
        self.optimizer.register_step_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        current = self.loader.current
        self.used.append((current.batch_size if current else 0, float(self.group["lr"])))

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = mean_loss(self.model(x), y)
        loss.backward()
        return loss


def formula(step: int) -> float:
    """Warm-up, then a cosine."""
    return 0.1 * (step + 1) / 6 if step < 5 else 0.1 * (0.55 + 0.45 * math.cos(math.pi * step / 60))


def by_formula(group: dict[str, Any], step: int) -> None:
    group["lr"] = formula(step)


def by_formula_in_place(group: dict[str, Any], step: int) -> None:
    group["lr"].fill_(formula(step))


def by_product(factor: float, every: int = 5) -> Callable[[dict[str, Any], int], None]:
    def write(group: dict[str, Any], step: int) -> None:
        if step % every == every - 1:
            group["lr"] *= factor

    return write


def set_aside(group: dict[str, Any], step: int) -> None:
    """As a loop does that looks at something with a rate of zero."""
    lr, group["lr"] = group["lr"], 0.0
    assert group["lr"] == 0.0
    group["lr"] = lr


WRITES: dict[str, tuple[Callable[[dict[str, Any], int], None], Any]] = {
    "a formula": (by_formula, 0.1),
    "a formula, in a tensor": (by_formula_in_place, torch.tensor(0.1)),
    "halved": (by_product(0.5), 0.1),
    "divided by four": (by_product(0.25), 0.1),
    "doubled": (by_product(2.0), 0.1),
    "a bit less at every step": (by_product(0.97, every=1), 0.1),
    "a bit less at every step, in a tensor": (by_product(0.97, every=1), torch.tensor(0.1)),
    "set aside": (set_aside, 0.1),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_the_loop_writes_is_the_schedules_own(name: str):
    write, lr = WRITES[name]
    loop, group = Loop(lr=lr.clone() if isinstance(lr, torch.Tensor) else lr), {"lr": 0.1 * torch.ones(())}
    expected, step = [], 0
    for _ in range(5):
        for x, y in loop.loader:
            write(loop.group, step)
            write(group, step) if name != "a formula" else group.update(lr=formula(step))
            loop.backward(x, y)
            loop.optimizer.step()
            expected.append((loop.used[-1][0], float(group["lr"]) * loop.used[-1][0] / 4))
            assert float(loop.group["lr"]) == pytest.approx(float(group["lr"]), rel=1e-5)
            step += 1
        loop.control.step()
    assert {size for size, _ in loop.used} == {2, 4, 8, 16}
    assert [rate for _, rate in loop.used] == pytest.approx([rate for _, rate in expected], rel=1e-5)


def test_a_step_that_raises_is_put_right_before_the_next():
    class Failing(SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("out of memory")
            return super().step(closure)

    loop = Loop(Doubling(), optimizer=Failing)
    for epoch in range(3):
        for number, (x, y) in enumerate(loop.loader):
            loop.backward(x, y)
            loop.optimizer.fails = epoch > 0 and number == 1
            if loop.optimizer.fails:
                with pytest.raises(RuntimeError):
                    loop.optimizer.step()
                loop.optimizer.fails = False
            loop.optimizer.step()
            assert loop.used[-1][1] == pytest.approx(0.1 * loop.used[-1][0] / 4)
            assert loop.group["lr"] == 0.1
        loop.control.step()


@pytest.mark.parametrize("optimizer", [SGD, torch.optim.LBFGS])
def test_a_closure_sees_its_own_rates(optimizer: Any):
    loop = Loop(Doubling(), optimizer=optimizer)
    seen: list[float] = []
    for epoch in range(3):
        for x, y in loop.loader:

            def closure(x: Any = x, y: Any = y, lr: float = 0.1 * 0.5**epoch) -> torch.Tensor:
                seen.append(loop.group["lr"])
                loop.group["lr"] = lr
                return loop.backward(x, y)

            before = [p.detach().clone() for p in loop.model.parameters()]
            loop.optimizer.step(closure)
            if optimizer is SGD:  # it reads its rate after the closure
                factor = 0.1 * 0.5**epoch * loop.loader.current.batch_size / 4
                for old, new in zip(before, loop.model.parameters(), strict=True):
                    assert torch.allclose(new, old - factor * new.grad, rtol=1e-4, atol=1e-7)
        loop.control.step()
    assert set(seen) <= {0.1, 0.05, 0.025}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # of torch's own compiler
@pytest.mark.parametrize("closely", [64, 0], ids=["looking", "seldom"])  # what the hooks do decides what is traced
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_compiled_optimizer_step(lr: Any, closely: int, monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    monkeypatch.setattr("divebatch.lr.CLOSELY", closely)
    loop = Loop(lr=lr)
    step = torch.compile(loop.optimizer.step, backend="eager")
    for _ in range(4):
        for x, y in loop.loader:
            loop.backward(x, y)
            before = [p.detach().clone() for p in loop.model.parameters()]
            step()
            rate = 0.1 * loop.loader.current.batch_size / 4
            for old, new in zip(before, loop.model.parameters(), strict=True):
                assert torch.allclose(new, old - rate * new.grad, rtol=1e-4, atol=1e-7)
            assert float(loop.group["lr"]) == pytest.approx(0.1)
        loop.control.step()


@pytest.mark.parametrize("settings", [{"foreach": True, "lr": 0.1}, {"fused": True}, {}])
def test_optimizers_that_step_all_parameters_at_once(settings: dict[str, Any]):
    settings = {"lr": torch.tensor(0.1)} | settings
    loop = Loop(Doubling(), optimizer=lambda p, lr: AdamW(p, **settings), lr_coupling="sqrt")
    for _ in range(3):
        for x, y in loop.loader:
            loop.backward(x, y)
            loop.optimizer.step()
        loop.control.step()
    assert sorted({round(rate / 0.1, 4) for _, rate in loop.used}) == [1.0, round(2**0.5, 4), 2.0]
    assert float(loop.group["lr"]) == pytest.approx(0.1)


def test_a_replayed_step_is_made_around():
    """A recorded step runs no hook, and reads the tensors that it was recorded with."""
    loop = Loop(Doubling(), lr=torch.tensor(0.1))
    rate, gradients = loop.group["lr"], [p.grad for p in loop.model.parameters()]
    assert gradients == [None] * 4
    for epoch in range(3):
        for x, y in loop.loader:
            loop.backward(x, y)
            before = [p.detach().clone() for p in loop.model.parameters()]
            with loop.control.around_step(), torch.no_grad():  # what a graph's replay does
                for p in loop.model.parameters():
                    p -= rate * p.grad
            for old, new in zip(before, loop.model.parameters(), strict=True):
                assert torch.allclose(new, old - 0.1 * 2**epoch * new.grad, rtol=1e-4, atol=1e-7)
        record = loop.control.step()
    assert record.steps == 10 + 5 + 3
    assert float(rate) == pytest.approx(0.1)


def test_a_parameter_group_added_later_gets_the_factor():
    loop = Loop(Doubling())
    extra = nn.Parameter(torch.ones(2))
    for epoch in range(2):
        if epoch:
            loop.optimizer.add_param_group({"params": [extra], "lr": 0.3})
            extra.grad = torch.ones(2)
        for x, y in loop.loader:
            loop.backward(x, y)
            if epoch:
                extra.grad = torch.ones(2)
            loop.optimizer.step()
        loop.control.step()
    assert torch.allclose(extra, torch.ones(2) - 5 * 0.6)


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # of the copy's scheduler
def test_copies_of_optimizer_and_scheduler_are_let_alone():
    loop = Loop(Doubling())
    scheduler = lr_scheduler.StepLR(loop.optimizer, 1, gamma=0.5)
    for x, y in loop.loader:
        loop.backward(x, y)
        loop.optimizer.step()
    loop.control.step()
    twin = copy.deepcopy(scheduler)
    twin.step()
    assert (twin.get_last_lr(), loop.group["lr"], loop.control.lr) == ([0.05], 0.1, 0.2)
    through_a_file(loop.optimizer.state_dict())


def test_a_resume_without_the_controllers_state_starts_at_the_schedules_rate_and_warns():
    def make() -> tuple[Loop, Any]:
        loop = Loop(Doubling(), optimizer=lambda p, lr: SGD(p, lr=lr, momentum=0.9))
        return loop, lr_scheduler.StepLR(loop.optimizer, 1, gamma=0.5)

    loop, scheduler = make()
    for _ in range(2):
        for x, y in loop.loader:
            loop.backward(x, y)
            loop.optimizer.step()
        scheduler.step()
        loop.control.step()
    fresh, its_scheduler = make()
    fresh.optimizer.load_state_dict(through_a_file(loop.optimizer.state_dict()))
    its_scheduler.load_state_dict(through_a_file(scheduler.state_dict()))
    with pytest.warns(UserWarning, match=r"begins anew.*control\.state_dict\(\).*control\.load_state_dict"):
        x, y = next(iter(fresh.loader))
    fresh.backward(x, y)
    fresh.optimizer.step()
    assert fresh.used == [(4, 0.025)]


# Courses by steps


@pytest.mark.parametrize("settings", [{}, {"scheduler": None}])
def test_a_course_within_the_epoch_while_batches_have_grown_is_a_warning(settings: Any):
    loop = Loop(Doubling(), scheduler_unit="epoch", **settings)

    def train() -> None:
        for _ in range(2):
            for step, (x, y) in enumerate(loop.loader):
                by_formula(loop.group, step)
                loop.backward(x, y)
                loop.optimizer.step()
            loop.control.step()

    with pytest.warns(UserWarning, match=r"scheduler=scheduler, scheduler_unit='step'.*delivered // 4") as found:
        train()
    assert [each.filename for each in found] == [__file__]


def test_a_rate_written_once_in_a_while_is_no_course():
    loop = Loop(Doubling(), scheduler_unit="epoch")
    for _ in range(2):
        for step, (x, y) in enumerate(loop.loader):
            by_product(0.5, every=2)(loop.group, step)
            loop.backward(x, y)
            loop.optimizer.step()
        loop.control.step()


@pytest.mark.parametrize("is_late", [True, False])
def test_a_scheduler_stepped_after_the_decision_gets_a_warning(is_late: bool, recwarn: pytest.WarningsRecorder):
    loop = Loop(scheduler_unit="epoch", optimizer=lambda p, lr: SGD(p, lr=lr))
    loop.control.close()
    scheduler = lr_scheduler.ExponentialLR(loop.optimizer, 0.7)
    control = Controller(loop.model, loop.optimizer, loop.loader, Sizes(), scheduler=scheduler)
    for _ in range(3):
        for x, y in loop.loader:
            loop.backward(x, y)
            loop.optimizer.step()
        calls: list[Callable[[], Any]] = [control.step, scheduler.step]
        for call in calls if is_late else calls[::-1]:
            call()
    found = [str(each.message) for each in recwarn if "control.step()" in str(each.message)]
    assert len(found) == is_late
    assert all("ExponentialLR.step() is called after control.step()" in each for each in found)


# The documentation's table


PAGE = Path(__file__).parents[1] / "docs" / "learning-rate.md"
SIZES = (256, 64, 512, 2048)


def documented() -> list[tuple[Any, str, list[str]]]:
    """Coupling, setting, and the numbers at `SIZES`, of each row."""
    section = PAGE.read_text().split("## The couplings in numbers")[1].split("\n## ")[0]
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
        follows.put_in_force()
        group = optimizer.param_groups[0]
        values = {**group, "beta1": group["betas"][0], "beta2": group["betas"][1]}
        found.append(f"{values[name]:.4g}")
        follows.put_back()
    assert found == numbers


def test_the_documented_table_has_every_coupling():
    assert {coupling for coupling, *_ in documented()} == {*COUPLINGS, 0.6}


# What does not fit


@EVERY_SCHEDULER
def test_a_scheduler_of_another_optimizer_gets_an_error(case: str):
    other = Run(case)
    with pytest.raises(ArgumentError, match=f"{type(other.scheduler).__name__} does not drive the optimizer"):
        coupled(two_groups(), [other.scheduler], kind="linear")


def test_what_is_no_scheduler_gets_an_error():
    with pytest.raises(ArgumentError, match=r"an object with a method step\(\), or a list of such, got int"):
        coupled(two_groups(), [3], kind="none")
    loop_settings: dict[str, Any] = {"scheduler_unit": "steps"}
    with pytest.raises(ArgumentError, match="unknown scheduler_unit 'steps'; known: epoch, step, call"):
        Loop(Fixed(), **loop_settings)
    optimizer = two_groups()
    with pytest.raises(ArgumentError, match="ReduceLROnPlateau cannot be stepped by samples"):
        coupled(optimizer, [plateau(optimizer)], kind="none", scheduler_unit="step")
    with pytest.raises(ArgumentError, match="one for each of the 1 schedulers"):
        coupled(optimizer, [halving(optimizer)], kind="none", scheduler_unit=["step", "epoch"])


@pytest.mark.parametrize("kind", ["cubic", -0.5, 0, 0.0, 1.5, float("nan"), float("inf"), True, [0.5], "0.6", ""])
def test_what_is_no_coupling_gets_an_error_with_what_is_one(kind: Any):
    told = r"known: none, linear, sqrt.*such as 0\.6" if isinstance(kind, str) else r"\^p, above 0 and at most 1"
    with pytest.raises(ArgumentError, match=told):
        Run("none", kind=kind)


@pytest.mark.parametrize("lr_factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_cannot_be_gets_an_error_and_changes_nothing(lr_factor: float):
    run = Run("none", kind="linear")
    with pytest.raises(ArgumentError, match="lr_factor must be positive and finite"):
        run.coupling.follow(2 * FIRST, lr_factor=lr_factor)
    run.advance(0)
    assert run.used == [[0.1, 0.02]]
