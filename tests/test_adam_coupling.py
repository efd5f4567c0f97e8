"""`lr_coupling="adam"`: betas, eps and weight decay follow the batch size with the learning rate.

The twins are a loop that sets everything by hand from the formulas, and the same scheduler on an optimizer of its own.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adafactor, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, SparseAdam, lr_scheduler

from divebatch import AdaptiveLoader, Auto, Diversity, Fixed
from divebatch.errors import ArgumentError
from divebatch.estimators import Estimator
from divebatch.lr import Coupling, LrCoupling, Rates, scale_settings
from divebatch.measurement import Decision, Measurement
from divebatch.policies import NoiseDoubling, Policy
from reference.adam_by_hand import set_by_hand, train_by_hand
from reference.per_sample import mean_loss, mlp
from saved import through_a_file
from training import DATA, Training

FIRST = 4
SIZES = (4, 8, 16, 12, 2, 4)
"""Of each epoch."""
KNOBS = ("lr", "betas", "eps", "weight_decay", "momentum_decay")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda p: Adam(p, 0.01, weight_decay=0.1),
    "Adam, decoupled": lambda p: Adam(p, 0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "AMSGrad": lambda p: Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: AdamW(p, 0.01, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1),
    "AdamW, no momentum": lambda p: AdamW(p, 0.01, betas=(0.0, 0.99)),
    "AdamW, one at a time": lambda p: AdamW(p, 0.01, foreach=False),
    "Adamax": lambda p: Adamax(p, 0.01, weight_decay=0.1),
    "NAdam": lambda p: NAdam(p, 0.01, weight_decay=0.1),
    "NAdam, decoupled": lambda p: NAdam(p, 0.01, weight_decay=0.1, decoupled_weight_decay=True),
}
EVERY_OPTIMIZER = pytest.mark.parametrize("name", OPTIMIZERS)


class BySizes(Policy):
    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=SIZES[seen.epoch % len(SIZES)])


class Run(Training):
    def __init__(self, make: Callable[[Any], Optimizer] = OPTIMIZERS["AdamW"], **given: Any) -> None:
        super().__init__(**({"policy": BySizes(), "lr_coupling": "adam"} | given), optimizer=make)

    def epoch(self, *, batches: int | None = None, step: Callable[[], Any] | None = None) -> Any:
        for done, (x, y) in enumerate(self.loader, start=1):
            self.optimizer.zero_grad()
            mean_loss(self.model(x), y).backward()
            (step or self.optimizer.step)()
            if done == batches:
                return None
        if self.scheduler is not None:
            self.scheduler.step()
        return self.control.step()

    @property
    def knobs(self) -> dict[str, Any]:
        return in_force(self.control._rates.couplings[self.optimizer])


def in_force(coupling: LrCoupling, group: int = 0) -> dict[str, Any]:
    """The settings that a step has; afterwards those of before are there again."""
    before = plain(knobs_of(coupling.optimizer, group))
    coupling.put_in_force()
    found = copy.deepcopy(knobs_of(coupling.optimizer, group))
    coupling.put_back()
    assert plain(knobs_of(coupling.optimizer, group)) == before
    return found


def knobs_of(optimizer: Optimizer, group: int = 0) -> dict[str, Any]:
    return {name: value for name, value in optimizer.param_groups[group].items() if name in KNOBS}


def following(optimizer: Optimizer, kind: Coupling = "adam") -> LrCoupling:
    return LrCoupling(optimizer, kind=kind, first_batch_size=32)


def one_parameter() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


def same_weights(here: nn.Module, there: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(here.parameters(), there.parameters(), strict=True))


# The formulas


ROOT = math.sqrt(2)
NUMBERS = [
    ("AdamW", 64, {"lr": 0.01 * ROOT, "betas": (0.81, 0.9025), "eps": 1e-4 / ROOT, "weight_decay": 0.1 * ROOT}),
    ("AdamW", 128, {"lr": 0.02, "betas": (0.9**4, 0.95**4), "eps": 5e-5, "weight_decay": 0.2}),
    ("AdamW", 8, {"lr": 0.005, "betas": (0.9**0.25, 0.95**0.25), "eps": 2e-4, "weight_decay": 0.05}),
    ("Adam", 128, {"lr": 0.02, "betas": (0.9**4, 0.999**4), "eps": 5e-9, "weight_decay": 0.1}),
    ("Adam, decoupled", 128, {"lr": 0.02, "betas": (0.9**4, 0.999**4), "eps": 5e-9, "weight_decay": 0.2}),
    ("AdamW, no momentum", 128, {"lr": 0.02, "betas": (0.0, 0.99**4), "eps": 5e-9, "weight_decay": 0.02}),
    ("Adamax", 128, {"lr": 0.02, "betas": (0.9**4, 0.999**4), "eps": 5e-9, "weight_decay": 0.1}),
    (
        "NAdam",
        128,
        {"lr": 0.02, "betas": (0.9**4, 0.999**4), "eps": 5e-9, "weight_decay": 0.1, "momentum_decay": 0.016},
    ),
]


@pytest.mark.parametrize(("name", "size", "expected"), NUMBERS)
def test_every_setting_is_what_the_formula_says(name: str, size: int, expected: dict[str, Any]):
    coupling = following(OPTIMIZERS[name](one_parameter()))
    coupling.follow(size)
    found = in_force(coupling)
    assert set(found) == set(expected)
    for knob, value in expected.items():
        assert found[knob] == pytest.approx(value, rel=1e-14), knob


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 4096), max_size=6),
    beta=st.floats(0, 0.99999),
    eps=st.floats(0, 1),
    decay=st.floats(0, 10),
    tensors=st.booleans(),
)
def test_going_back_gives_the_same_bits_whatever_the_way(
    sizes: list[int], beta: float, eps: float, decay: float, tensors: bool
):
    def made() -> Optimizer:
        lr, *betas = map(torch.tensor, (0.1, beta, beta**0.5)) if tensors else (0.1, beta, beta**0.5)
        return AdamW(one_parameter(), lr, tuple(betas), eps, decay, foreach=False)

    optimizer, direct = made(), made()
    before = plain(knobs_of(optimizer))
    coupling = following(optimizer)
    for size in sizes:
        coupling.follow(size)
        optimizer.step()
    if sizes:
        other = following(direct)
        other.follow(sizes[-1])
        assert plain(in_force(coupling)) == plain(in_force(other))
    coupling.follow(32)
    assert plain(in_force(coupling)) == plain(knobs_of(optimizer)) == before


def plain(knobs: dict[str, Any]) -> dict[str, Any]:
    return {name: list(map(float, value)) if name == "betas" else float(value) for name, value in knobs.items()}


# The slow twin


@EVERY_OPTIMIZER
def test_the_weights_are_those_of_a_loop_that_sets_everything_by_hand(name: str):
    run, twin = Run(OPTIMIZERS[name]), mlp()
    for _ in SIZES:
        run.epoch()
    train_by_hand(twin, OPTIMIZERS[name](twin.parameters()), AdaptiveLoader(DATA, FIRST, seed=3), SIZES)
    assert same_weights(run.model, twin)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # of torch's own compiler
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_a_compiled_step_follows(tensors: bool):
    torch._dynamo.reset()
    run, twin = Run(of_tensors if tensors else OPTIMIZERS["AdamW"]), mlp()
    compiled = torch.compile(run.optimizer.step, backend="eager")
    for _ in SIZES:
        run.epoch(step=compiled)
    train_by_hand(twin, OPTIMIZERS["AdamW"](twin.parameters()), AdaptiveLoader(DATA, FIRST, seed=3), SIZES)
    for here, there in zip(run.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-6)


def of_tensors(parameters: Any, **given: Any) -> Optimizer:
    lr, *betas = map(torch.tensor, (0.01, 0.9, 0.95))
    return AdamW(parameters, lr, tuple(betas), eps=1e-4, weight_decay=0.1, **({"capturable": True} | given))


@pytest.mark.filterwarnings("ignore:epoch . was left after")
def test_tensors_follow_in_place():
    """As a captured step needs it."""
    run = Run(lambda p: of_tensors(p, capturable=False, foreach=False))
    group = run.optimizer.param_groups[0]
    held = [group["lr"], *group["betas"]]
    used: list[list[float]] = []
    run.optimizer.register_step_pre_hook(lambda *_: used.append([float(each) for each in held]))
    run.epoch(), run.epoch(batches=1)
    assert used[-1] == pytest.approx([0.01 * ROOT, 0.81, 0.9025])
    assert all(a is b for a, b in zip(held, [group["lr"], *group["betas"]], strict=True))
    assert [float(each) for each in held] == pytest.approx([0.01, 0.9, 0.95])
    group["betas"][0].fill_(0.5)  # by the loop, in place too; the other stays as it was
    run.epoch(), run.epoch(batches=1)
    assert used[-1] == pytest.approx([0.02, 0.5**4, 0.95**4])


# Adam's correction of means that begin at zero


@pytest.mark.parametrize("steps", [1, 10, 100, 1000])
@pytest.mark.parametrize("ratio", [2, 8, 0.5])
def test_a_change_of_betas_leaves_the_correction_exact(steps: int, ratio: float):
    """With gradients that never change, each step of Adam is the learning rate, if its means are corrected rightly."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Adam([parameter], lr=1e-3, eps=0.0)
    coupling = following(optimizer)
    parameter.grad = torch.ones_like(parameter)
    for _ in range(steps):
        optimizer.step()
    for size in (int(32 * ratio), 48, 32):
        coupling.follow(size)
        before = parameter.item()
        coupling.put_in_force()
        optimizer.step()
        coupling.put_back()
        assert before - parameter.item() == pytest.approx(coupling.lr, rel=1e-4)


# Schedulers


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6, eta_min=1e-3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.OneCycleLR(o, 0.1, total_steps=20)], milestones=[3]
    ),
}
EVERY_SCHEDULER = pytest.mark.parametrize("case", SCHEDULERS)
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own


@EVERY_SCHEDULER
def test_the_schedulers_own_course_of_everything_is_what_is_scaled(case: str):
    """OneCycleLR and CyclicLR move betas: those are the own ones, and their power is in force."""
    optimizer, twin = (OPTIMIZERS["AdamW"](one_parameter()) for _ in range(2))
    scheduler, own = SCHEDULERS[case](optimizer), SCHEDULERS[case](twin)
    loader = AdaptiveLoader(range(1024), 32)
    rates = Rates([optimizer], schedulers=[scheduler], kinds=["adam"], loader=loader, first_batch_size=32)
    coupling = rates.couplings[optimizer]
    seen = set()
    for step, size in enumerate([32, 32, 64, 128, 96, 96, 16, 32, 32, 64] * 2):
        if step:
            coupling.follow(size)
        expected: dict[str, Any] = {}
        set_by_hand(expected, twin.param_groups[0], size / 32)
        for knob, value in in_force(coupling).items():
            assert value == pytest.approx(expected[knob], rel=1e-12), (step, knob)
        seen.add(twin.param_groups[0]["betas"])
        for each, its in ((optimizer, scheduler), (twin, own)):
            each.step()
            if step < 18:
                its.step()
    assert (len(seen) > 5) == (case in ("one cycle", "cyclic", "sequential"))
    assert state_of(scheduler) == state_of(own)


def state_of(scheduler: Any) -> Any:
    return through_a_file({k: v for k, v in scheduler.state_dict().items() if not k.startswith("_s")})


# Written by hand


def test_what_the_loop_writes_is_the_own_value_from_then_on():
    run = Run()
    run.epoch()
    group = run.optimizer.param_groups[0]
    group["weight_decay"], group["betas"], group["eps"] = 0.3, (0.5, 0.8), 1e-3
    run.epoch()
    assert run.knobs["weight_decay"] == pytest.approx(0.3 * 2)
    assert run.knobs["betas"] == pytest.approx((0.5**4, 0.8**4))
    assert run.knobs["eps"] == pytest.approx(1e-3 / 2)
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.3, (0.5, 0.8), 1e-3)


def test_a_parameter_group_added_later_has_own_values_too():
    run = Run()
    run.epoch()
    run.optimizer.add_param_group({"params": one_parameter(), "betas": (0.8, 0.9)})
    coupling = run.control._rates.couplings[run.optimizer]
    added = in_force(coupling, 1)
    assert added["betas"] == pytest.approx((0.64, 0.81))
    assert added["weight_decay"] == pytest.approx(0.1 * ROOT)
    run.epoch()
    assert in_force(coupling, 1)["betas"] == pytest.approx((0.8**4, 0.9**4))


# Several optimizers, and those that it is not for


class Foreign(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.99)})

    def step(self, closure: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda p: SGD(p, 0.1), "linear"),
        (lambda p: Muon([each for each in p if each.ndim == 2]), "sqrt"),
        (Adafactor, "sqrt"),
        (RAdam, "sqrt"),
        (SparseAdam, "sqrt"),
        (Foreign, "sqrt"),
    ],
)
def test_an_optimizer_that_is_not_known_gets_an_error_that_says_what_to_pass(make: Any, instead: str):
    told = rf"for torch's Adam, AdamW, Adamax, NAdam, and .* is none of them: pass lr_coupling='{instead}'"
    with pytest.raises(ArgumentError, match=told):
        Run(make)
    with pytest.raises(ArgumentError, match=told):
        Run(make, policy=NoiseDoubling(40), lr_coupling="adam")


# State


ORDERS = [("model", "optimizer", "scheduler", "control"), ("control", "scheduler", "optimizer", "model")]


@pytest.mark.parametrize("order", ORDERS, ids=["control last", "control first"])
@pytest.mark.parametrize("batches", [None, 2], ids=["between epochs", "within an epoch"])
@pytest.mark.parametrize("case", ["one cycle", "cosine"])
def test_a_resumed_run_is_the_whole_run(case: str, batches: int | None, order: tuple[str, ...]):
    whole, first = (Run(scheduler=SCHEDULERS[case]) for _ in range(2))
    for _ in SIZES:
        whole.epoch()
    first.epoch(), first.epoch()
    if batches:
        first.epoch(batches=batches)
    fresh = Run(scheduler=SCHEDULERS[case])
    for name in order:
        getattr(fresh, name).load_state_dict(through_a_file(getattr(first, name).state_dict()))
    assert fresh.knobs == first.knobs
    while fresh.loader.epoch < len(SIZES):
        fresh.epoch()
    assert fresh.knobs == whole.knobs
    assert same_weights(fresh.model, whole.model)


def plain_at(k: float) -> dict[str, Any]:
    group = dict(OPTIMIZERS["AdamW"](one_parameter()).param_groups[0])
    set_by_hand(group, dict(group), k)
    return {name: value for name, value in group.items() if name in KNOBS}


# With NoiseDoubling, and with an estimate that reads the momentum


class Grows(Estimator):
    """Asks NoiseDoubling for a doubling, once."""

    def __init__(self) -> None:
        self.answers = [16.0, 4.0]

    def bind(self, context: Any) -> None: ...

    def finish(self) -> Diversity:
        return Diversity.from_noise(self.answers.pop(0), 1.0, 40)


def test_auto_takes_it_and_lets_the_rate_come_one_decision_later():
    run = Run(policy=NoiseDoubling(40), lr_coupling="adam", estimator=Grows())
    record = run.epoch()
    assert record.next_batch_size == 8
    assert run.knobs == {**plain_at(2), "lr": pytest.approx(0.01)}
    run.epoch()
    assert run.knobs == {**plain_at(2), "lr": pytest.approx(0.01 * ROOT)}


def test_momentum_that_falls_too_low_for_the_estimate_gets_a_warning_and_no_growth():
    run = Run(lambda p: AdamW(p, 0.001), policy=NoiseDoubling(4096), lr_coupling="adam")
    run.epoch()
    run.loader.batch_size = 32  # 0.9^8 = 0.43
    run.epoch()
    run.loader.batch_size = 40  # 0.9^10 = 0.35
    with pytest.warns(UserWarning, match="lr_coupling='adam' may have lowered"):
        record = run.epoch()
    assert record.diversity_low in (None, 1 / 40)  # a noise scale of zero is possible
    run.epoch()  # and is not warned of again


def test_momentum_that_falls_within_an_epoch_takes_the_lower_bound_away():
    run = Run(lambda p: AdamW(p, 0.001), policy=Fixed(), estimator="moments", measure_always=True)
    lows = []
    for betas in ((0.9, 0.999), (0.3, 0.999)):
        run.optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        for done, (x, y) in enumerate(run.loader):
            if done == 5:
                run.optimizer.param_groups[0]["betas"] = betas
            run.optimizer.zero_grad()
            mean_loss(run.model(x), y).backward()
            run.optimizer.step()
        estimates = run.control._estimator.state_dict()["estimates"]
        lows.append(estimates["bounds_below"])
        run.control.step()
    assert lows == [True, False]


# For branches of a probe


def test_settings_can_be_scaled_once_without_a_coupling():
    optimizer, parameter = OPTIMIZERS["AdamW"](parameters := one_parameter()), parameters[0]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = dict(knobs_of(optimizer))
    scale_settings(optimizer, 4)
    assert knobs_of(optimizer) == {**plain_at(4), "lr": before["lr"]}
    assert optimizer.state[parameter]["step"] == 0.25
    with pytest.raises(ArgumentError, match="SGD is none of them"):
        scale_settings(SGD(one_parameter(), 0.1), 2)


# beta1 alone


def test_beta1_alone_follows_beside_the_rate_and_comes_back():
    optimizer = OPTIMIZERS["AdamW"](one_parameter())
    before, coupling = plain(knobs_of(optimizer)), following(optimizer, "adam-beta1")
    coupling.follow(128)
    found = in_force(coupling)
    assert found["lr"] == pytest.approx(0.02)
    assert found["betas"] == (pytest.approx(0.9**4), 0.95)
    assert (found["eps"], found["weight_decay"]) == (1e-4, 0.1)
    coupling.follow(32)
    assert plain(in_force(coupling)) == before


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (OPTIMIZERS["AdamW"], "adam-beta1"),
        (OPTIMIZERS["NAdam"], "adam-beta1"),
        (lambda p: torch.optim.RMSprop(p, 0.01), "sqrt"),
        (lambda p: torch.optim.SGD(p, 0.01), "linear"),
    ],
)
def test_auto_takes_it_for_adam(make: Any, kind: str):
    run = Run(make, policy=Auto(40), lr_coupling=None)
    assert run.control.state_dict()["settings"]["lr_coupling"] == [kind]
    run.epoch()
