"""What a controller takes where it is told nothing, and which parts it refuses."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from divebatch import (
    AdaptiveLoader,
    Controller,
    Decision,
    DiveBatch,
    EpochRecord,
    Fixed,
    Measurement,
    Oracle,
    Policy,
    Trajectory,
)
from divebatch.errors import ArgumentError
from divebatch.estimators import ESTIMATORS, Moments, PerSample, Split
from divebatch.lr import coupling_for, couplings_of
from divebatch.parts import resolve_estimator
from divebatch.policies import POLICIES, InnerProductTest, NoiseDoubling, NoiseScale, Seesaw, SmithSchedule
from reference.per_sample import dataset, mean_loss, mlp
from training import Training

LINEAR = ("SGD", "ASGD")
SQRT = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")


def optimizer(name: str) -> Optimizer:
    made: Optimizer = getattr(torch.optim, name)(mlp().parameters(), lr=0.01)
    return made


class NoTorchOptimizer(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None: ...


@pytest.mark.parametrize("name", LINEAR + SQRT)
def test_the_coupling_of_auto_follows_the_optimizer(name: str):
    expected = "linear" if name in LINEAR else "sqrt"
    assert coupling_for(optimizer(name)) == expected
    assert couplings_of(NoiseDoubling(64), None, [optimizer(name)]) == [expected]


def test_an_optimizer_that_is_not_known_needs_a_word():
    unknown = NoTorchOptimizer(mlp().parameters())
    with pytest.raises(ArgumentError, match=r"NoTorchOptimizer .* pass Controller\(\.\.\., lr_coupling='sqrt'\) if"):
        couplings_of(NoiseDoubling(64), None, [unknown])
    assert couplings_of(NoiseDoubling(64), "sqrt", [unknown]) == ["sqrt"]
    assert couplings_of(Fixed(), None, [unknown]) == ["none"]


def test_a_coupling_is_the_policys_own_else_none():
    sgd = optimizer("SGD")
    assert [couplings_of(policy(64), None, [sgd]) for policy in (SmithSchedule, Seesaw, NoiseScale)] == [
        ["linear"],
        ["sqrt"],
        ["none"],
    ]
    assert couplings_of(NoiseScale(64), "adascale", [sgd]) == ["adascale"]
    with pytest.raises(ArgumentError, match="unknown lr_coupling 'cubic'; known: none, linear"):
        couplings_of(NoiseScale(64), "cubic", [sgd])


def test_only_the_papers_rule_gets_the_papers_estimate():
    assert isinstance(resolve_estimator(DiveBatch(0.1, 64), None), Trajectory)
    named = {name: kind.estimator for name, kind in POLICIES.items() if "diversity" in kind.needs}
    assert {name for name, estimator in named.items() if estimator == "trajectory"} == {"divebatch"}
    assert all(ESTIMATORS[estimator].at_fixed_weights for name, estimator in named.items() if name != "divebatch")
    assert isinstance(resolve_estimator(DiveBatch.with_extra_samples(0.1, 64), None), Moments)
    assert isinstance(resolve_estimator(Fixed(), None, shadows={"paper": DiveBatch(0.1, 64)}), Moments)


class Scaler:
    """Stands for a GradScaler: nobody asks it anything here."""


def test_under_a_grad_scaler_an_estimator_is_right_or_refused():
    assert isinstance(resolve_estimator(NoiseDoubling(64), None, grad_scaler=Scaler()), Moments)
    assert isinstance(resolve_estimator(NoiseDoubling(64), "moments", grad_scaler=Scaler()), Moments)
    assert isinstance(resolve_estimator(DiveBatch(0.1, 64), None, grad_scaler=Scaler()), Trajectory)
    given = Oracle(mean_loss)
    assert resolve_estimator(NoiseDoubling(64), given, grad_scaler=Scaler()) is given
    assert isinstance(resolve_estimator(NoiseDoubling(64), "split", grad_scaler=Scaler()), Split)


def records_of_auto(name: str, *, is_scaled: bool, **settings: Any) -> list[EpochRecord]:
    torch.manual_seed(0)
    model = mlp(dtype=torch.float32)
    driver = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=is_scaled, growth_interval=7)
    loader = AdaptiveLoader(dataset(240, dtype=torch.float32), 4, seed=0)
    control = Controller(model, driver, loader, NoiseDoubling(64), grad_scaler=scaler, **settings)
    records = []
    for _ in range(3):
        for x, y in loader:
            driver.zero_grad()
            scaler.scale(mean_loss(model(x), y)).backward()
            scaler.step(driver)
            scaler.update()
        records.append(control.step())
    return records


@pytest.mark.parametrize("settings", [{}, {"every_steps": 8}])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_auto_needs_no_choice_within_epochs_and_under_a_scaler(name: str, settings: dict[str, Any]):
    plain, scaled = (records_of_auto(name, is_scaled=is_scaled, **settings) for is_scaled in (False, True))
    assert all(record.measured for record in plain)
    assert [record.next_batch_size for record in scaled] == [record.next_batch_size for record in plain]
    assert [record.next_lr for record in scaled] == pytest.approx([record.next_lr for record in plain])
    found, expected = ([record.diversity or 0.0 for record in records] for records in (scaled, plain))
    assert found == pytest.approx(expected, rel=1e-3)


@dataclass(frozen=True)
class Doubling(Policy):
    """`next` is all there is."""

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=2 * seen.batch_size)


def control_of(policy: Any, **settings: Any) -> Controller:
    model = mlp()
    return Controller(model, SGD(model.parameters(), 0.01), AdaptiveLoader(dataset(24), 4, seed=0), policy, **settings)


@pytest.mark.filterwarnings("ignore:epoch . has ended, no step")
def test_a_policy_of_ones_own_needs_next_alone():
    control = control_of(Doubling())
    for _ in control.loader:
        pass
    assert control.step().next_batch_size == 8
    with pytest.raises(TypeError, match="abstract method"):
        type("Nothing", (Policy,), {})()


def test_what_is_no_policy_is_told_so():
    class NoPolicy:
        def next(self, seen: Measurement) -> Decision:
            return Decision(batch_size=4)

    with pytest.raises(ArgumentError, match=r"got policy=.*NoPolicy.*a subclass of divebatch\.Policy with a method"):
        control_of(NoPolicy())
    with pytest.raises(ArgumentError, match="got the class Doubling"):
        control_of(Doubling)
    with pytest.raises(ArgumentError, match="got policy=3"):
        control_of(Fixed(), shadows={"three": 3})


def test_a_need_that_nobody_knows_is_an_error_at_once():
    with pytest.raises(ArgumentError, match=r"Wrong\.needs must be a set of some of 'diversity', .*'divrsity'"):

        class Wrong(Policy):
            needs: ClassVar[frozenset[str]] = frozenset({"divrsity"})

            def next(self, seen: Measurement) -> Decision:
                return Decision(batch_size=4)

    with pytest.raises(ArgumentError, match=r"Word\.needs must be a set"):
        type("Word", (Policy,), {"needs": "loss"})

    class Late(Doubling):
        @property
        def needs(self) -> Any:
            return {"lossy"}

    with pytest.raises(ArgumentError, match=r"Late\.needs must be a set of .*'lossy'"):
        control_of(Late())


@pytest.mark.parametrize("kind", [Trajectory, PerSample, Split, Moments])
def test_a_wrong_argument_of_an_estimator_is_an_error_where_it_is_written(kind: Any):
    with pytest.raises(TypeError, match="mod"):
        kind(mod="sketch")
    if kind.takes("compiled"):
        with pytest.raises(ArgumentError, match="unknown mode 'sketchy'; known: exact, sketch"):
            kind(mode="sketchy")


def test_a_policy_gets_no_estimator_that_lacks_what_it_needs():
    told = (
        r"InnerProductTest needs the noise along the gradient, which PerSample does not measure: .*'split', 'moments'"
    )
    with pytest.raises(ArgumentError, match=told):
        control_of(InnerProductTest(64), estimator="per-sample")
    with pytest.raises(ArgumentError, match="InnerProductTest needs the noise"):
        control_of(Fixed(), shadows={"inner": InnerProductTest(64)}, estimator="per-sample")


def test_what_is_no_estimator_is_told_so():
    with pytest.raises(ArgumentError, match=r"estimator must be a name or an Estimator such as Split\(\), got 3"):
        control_of(Fixed(), estimator=3)
    with pytest.raises(ArgumentError, match=r"such as Split\(\), got the class"):
        control_of(Fixed(), estimator=Split)
    with pytest.raises(ArgumentError, match="needs the loss: pass estimator=Oracle"):
        control_of(DiveBatch(0.1, 64), estimator="oracle")


class OwnLayer(nn.Module):
    """Without a norm rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


MODELS: dict[str, Callable[[], nn.Module]] = {
    "covered": mlp,
    "BatchNorm": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
    "no rule": lambda: nn.Sequential(nn.Linear(4, 3), OwnLayer()),
    "compiled": lambda: torch.compile(mlp()),
}


def chosen(model: nn.Module, policy: Policy, *, momentum: float = 0.0, batch_size: int = 4, **settings: Any) -> str:
    """The class of the estimator that a controller takes; a warning is an error where it is not expected."""
    driver = SGD(model.parameters(), 0.01, momentum=momentum)
    control = Controller(model, driver, AdaptiveLoader(dataset(24), batch_size, seed=0), policy, **settings)
    return str(control.state_dict()["settings"]["estimator"])


TOLD = r"cannot grow .* momentum such as .* estimator='per-sample'"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("momentum", [0.0, 0.3])
def test_without_momentum_single_samples_are_measured_where_they_can_be(momentum: float):
    assert chosen(mlp(), NoiseDoubling(16), momentum=momentum) == "PerSample"
    assert chosen(mlp(), NoiseScale(16), momentum=momentum) == "PerSample"
    assert chosen(mlp(), NoiseDoubling(16), momentum=0.9) == "Moments"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["BatchNorm", "no rule", "compiled"])
def test_where_they_cannot_be_the_warning_says_what_to_change(name: str):
    with warnings.catch_warnings(action="ignore"):  # of torch's own compiler
        model = MODELS[name]()
    with pytest.warns(UserWarning, match=TOLD):
        assert chosen(model, NoiseDoubling(16)) == "Moments"


@pytest.mark.filterwarnings("error")
def test_a_sample_a_pass_and_policies_that_need_more_keep_the_policys_own():
    with pytest.warns(UserWarning, match=TOLD):
        assert chosen(mlp(), NoiseDoubling(16), batch_size=1) == "Moments"
    with pytest.warns(UserWarning, match=TOLD):
        assert chosen(mlp(), InnerProductTest(16)) == "Moments"
    with pytest.warns(UserWarning, match=TOLD):
        assert chosen(mlp(), NoiseDoubling(16), shadows={"inner": InnerProductTest(16)}) == "Moments"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("estimator", ["moments", Moments(every_steps=2)])
def test_an_estimate_that_was_asked_for_stays_and_is_told_about(estimator: Any):
    with pytest.warns(UserWarning, match=TOLD):
        assert chosen(mlp(), NoiseDoubling(16), momentum=0.0, estimator=estimator) == "Moments"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("momentum", "estimator"), [(0.9, None), (0.0, "per-sample"), (0.0, "split")])
def test_an_estimate_that_policies_grow_on_is_no_reason_for_a_warning(momentum, estimator):
    chosen(mlp(), NoiseDoubling(16), momentum=momentum, estimator=estimator)


def test_auto_grows_with_plain_sgd_and_nothing_chosen():
    *_, record = Training(NoiseDoubling(64), data=dataset(400), batch_size=2).epochs(4)
    assert record.next_batch_size > 2
    assert record.diversity_low > 0


@pytest.mark.filterwarnings("error")
def test_policies_that_only_watch_are_no_reason_for_a_warning():
    model = mlp()
    loader = AdaptiveLoader(dataset(24), 4, seed=0)
    Controller(model, SGD(model.parameters(), 0.01), loader, Fixed(), shadows={"auto": NoiseDoubling(16)})
