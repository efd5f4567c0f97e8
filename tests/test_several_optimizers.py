"""Several optimizers: one estimate, and all rates follow, each by its own coupling.

The twin has one optimizer with a parameter group for each of theirs.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from divebatch import AdaptiveLoader, Controller, Fixed, micro_batches
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.estimators import Moments, Split
from divebatch.measurement import Decision, Measurement
from divebatch.policies import NoiseDoubling, Policy
from reference.per_sample import dataset, mean_loss, mlp
from saved import through_a_file

FIRST, DATA = 4, dataset(40)
SIZES = (4, 8, 16, 12)


class BySizes(Policy):
    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=SIZES[seen.epoch % len(SIZES)])


def matrices_and_rest(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2]


class Run:
    def __init__(self, optimizers: Any, policy: Policy | None = None, *, gammas: Any = (0.9, 0.7), **settings: Any):
        self.model = mlp(dtype=torch.float32)
        self.optimizers: Sequence[Optimizer] = optimizers(*matrices_and_rest(self.model))
        self.loader = AdaptiveLoader(DATA, FIRST, seed=0)
        self.schedulers = [ExponentialLR(*pair) for pair in zip(self.optimizers, gammas, strict=False)]
        parts = self.model, self.optimizers, self.loader, policy or BySizes()
        self.control = Controller(*parts, scheduler=self.schedulers, **settings)

    @property
    def rates(self) -> list[float]:
        return [each.lr for each in self.control._rates.couplings.values()]

    def epoch(self, *, cut: int = 1, zero_at_once: bool = False) -> Any:
        for x, y in self.loader:
            for each in self.optimizers:
                each.zero_grad()
            for (px, py), factor in micro_batches((x.float(), y.float()), -(-len(x) // cut)):
                (factor * mean_loss(self.model(px), py)).backward()
            for each in self.optimizers:
                each.step()
                if zero_at_once:
                    each.zero_grad()
        for each in self.schedulers:
            each.step()
        return self.control.step()


def muon_and_adamw(matrices: Any, rest: Any) -> list[Optimizer]:
    return [Muon(matrices, lr=0.02), AdamW(rest, lr=0.003)]


def sgd_and_adamw(matrices: Any, rest: Any) -> list[Optimizer]:
    return [SGD(matrices, lr=0.02), AdamW(rest, lr=0.003)]


class NoTorchOptimizer(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None: ...


def sgd_and_theirs(matrices: Any, rest: Any) -> list[Optimizer]:
    return [SGD(matrices, lr=0.02), NoTorchOptimizer(rest)]


# Rates


@pytest.mark.parametrize(
    ("optimizers", "coupling", "powers"),
    [
        (muon_and_adamw, "sqrt", (0.5, 0.5)),
        (sgd_and_adamw, ["linear", "sqrt"], (1.0, 0.5)),
        (sgd_and_adamw, "linear", (1.0, 1.0)),
        (sgd_and_theirs, ["linear", "none"], (1.0, 0.0)),
    ],
)
def test_each_rate_is_its_own_schedules_times_its_own_factor(
    optimizers: Any, coupling: Any, powers: tuple[float, float]
):
    run = Run(optimizers, lr_coupling=coupling)
    first = run.rates
    for epoch, size in enumerate(SIZES):
        own = [rate * gamma**epoch for rate, gamma in zip(first, (0.9, 0.7), strict=True)]
        expected = [rate * (size / FIRST) ** power for rate, power in zip(own, powers, strict=True)]
        assert run.rates == pytest.approx(expected)
        record = run.epoch()
        assert (record.batch_size, record.lr) == (size, pytest.approx(expected[0]))


@pytest.mark.parametrize(("optimizers", "kinds"), [(muon_and_adamw, ["sqrt"] * 2), (sgd_and_adamw, ["linear", "sqrt"])])
def test_auto_takes_the_coupling_that_suits_each(optimizers: Any, kinds: list[str]):
    run = Run(optimizers, NoiseDoubling(40))
    assert run.control.state_dict()["settings"]["lr_coupling"] == kinds
    run.epoch()


def test_one_that_is_not_known_needs_a_word():
    told = r"NoTorchOptimizer .* lr_coupling='sqrt'\) if .* a list with a name for each"
    with pytest.raises(ArgumentError, match=told):
        Run(sgd_and_theirs, NoiseDoubling(40))
    run = Run(sgd_and_theirs, NoiseDoubling(40), lr_coupling=["linear", "sqrt"])
    assert run.control.state_dict()["settings"]["lr_coupling"] == ["linear", "sqrt"]
    with pytest.raises(ArgumentError, match="one name for each of the 2 optimizers, got 1"):
        Run(sgd_and_adamw, lr_coupling=["linear"])


# The estimate


def one_of_both(matrices: Any, rest: Any) -> list[Optimizer]:
    return [SGD([{"params": matrices, "lr": 0.02}, {"params": rest, "lr": 0.02}], momentum=0.9)]


def two(matrices: Any, rest: Any) -> list[Optimizer]:
    return [SGD(matrices, 0.02, momentum=0.9), SGD(rest, 0.02, momentum=0.9)]


def two_in_another_order(matrices: Any, rest: Any) -> list[Optimizer]:
    return two(matrices, rest)[::-1]


ESTIMATORS: dict[str, tuple[Any, int]] = {
    "moments": (lambda: "moments", 1),
    "split": (lambda: "split", 2),
    "split of every second batch": (lambda: Split(every_steps=2), 2),
    "per-sample": (lambda: "per-sample", 1),
    "trajectory": (lambda: "trajectory", 1),
}


@pytest.mark.parametrize("zero_at_once", [False, True])
@pytest.mark.parametrize("optimizers", [two, two_in_another_order])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_of_several_optimizers_on_one_batch_is_one_step(name: str, optimizers: Any, zero_at_once: bool):
    make, cut = ESTIMATORS[name]
    runs = [
        Run(each, gammas=(), lr_coupling="linear", measure_always=True, estimator=make())
        for each in (optimizers, one_of_both)
    ]
    seen = []
    for _ in SIZES:
        mine, theirs = (run.epoch(cut=cut, zero_at_once=zero_at_once) for run in runs)
        assert (mine.steps, mine.batch_size) == (theirs.steps, theirs.batch_size)
        assert numbers(mine) == pytest.approx(numbers(theirs), rel=1e-5, nan_ok=True)
        seen.append(mine.diversity)
    assert any(seen)


def numbers(record: Any) -> list[float]:
    """What was measured; nan where nothing could be said."""
    values = (record.diversity, record.diversity_low, record.diversity_high)
    return [math.nan if value is None else value for value in values]


def test_preconditioning_is_for_one_optimizer():
    with pytest.raises(ArgumentError, match=r"preconditioned=True is for one optimizer .* got AdamW, AdamW"):
        Run(lambda m, r: [AdamW(m), AdamW(r)], estimator=Moments(preconditioned=True), measure_always=True)


@pytest.mark.parametrize("at_once", [True, False])
def test_gradients_that_are_unscaled_one_optimizer_after_the_other_get_a_warning(at_once: bool):
    run = Run(two, gammas=(), measure_always=True, estimator="moments")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step() -> None:
        for x, y in run.loader:
            for each in run.optimizers:
                each.zero_grad()
            scaler.scale(mean_loss(run.model(x.float()), y.float())).backward()
            for each in run.optimizers if at_once else ():
                scaler.unscale_(each)
            for each in run.optimizers:
                scaler.step(each)
            scaler.update()

    if at_once:
        step()
    else:
        with pytest.warns(
            UserWarning, match=r"gradients of SGD changed .* unscale \(scaler.unscale_\) and clip"
        ) as found:
            step()
        assert [each.filename for each in found] == [__file__]
    run.control.step()


class Gan:
    """A discriminator that is measured, and a generator that steps on other gradients at other times."""

    def __init__(self, *, with_generators: bool) -> None:
        torch.manual_seed(0)
        self.discriminator, self.generator = nn.Linear(4, 1), nn.Linear(2, 4)
        self.d, self.g = SGD(self.discriminator.parameters(), 0.05), AdamW(self.generator.parameters(), 0.01)
        self.loader = AdaptiveLoader(DATA, FIRST, seed=0)
        optimizers = [self.d, self.g] if with_generators else self.d
        coupling = ["linear", "sqrt"] if with_generators else "linear"
        self.control = Controller(
            self.discriminator, optimizers, self.loader, BySizes(), lr_coupling=coupling, measure_always=True
        )

    def epoch(self) -> Any:
        for index, (x, _) in enumerate(self.loader):
            noise = torch.randn(len(x), 2)
            self.d.zero_grad()
            real, fake = self.discriminator(x.float()), self.discriminator(self.generator(noise).detach())
            (nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()).backward()
            self.d.step()
            if index % 2:
                self.g.zero_grad()
                nn.functional.softplus(-self.discriminator(self.generator(noise))).mean().backward()
                self.g.step()
        return self.control.step()


def test_a_generator_beside_the_model_changes_nothing_in_the_estimate_and_its_rate_follows():
    both, alone = Gan(with_generators=True), Gan(with_generators=False)
    for epoch, size in enumerate(SIZES):
        assert both.control.lr == pytest.approx(0.05 * size / FIRST)
        rate = both.control._rates.couplings[both.g].lr
        assert rate == pytest.approx(0.01 * (size / FIRST) ** 0.5)
        alone.g.param_groups[0]["lr"] = rate  # by hand, so that both train the same
        torch.manual_seed(epoch)
        mine = both.epoch()
        torch.manual_seed(epoch)
        theirs = alone.epoch()
        assert (mine.steps, mine.diversity) == (theirs.steps, theirs.diversity)
        assert mine.diversity is not None


def test_an_optimizer_of_another_model_is_an_error_at_once():
    model, loader = mlp(), AdaptiveLoader(DATA, FIRST, seed=0)
    told = r"the optimizer \(SGD\) holds no parameter of the model \(Sequential\): pass one that was made with"
    for optimizer in (SGD(mlp().parameters(), 0.1), [SGD(mlp().parameters(), 0.1)]):
        with pytest.raises(ArgumentError, match=told):
            Controller(model, optimizer, loader, Fixed())
    with pytest.raises(ArgumentError, match="optimizer must be a torch optimizer or a list of such, got NoneType"):
        Controller(model, [], loader, Fixed())


# State


def test_fresh_objects_carry_on():
    def make() -> Run:
        return Run(sgd_and_adamw, lr_coupling=["linear", "sqrt"], measure_always=True)

    run, whole = make(), make()
    records = [whole.epoch() for _ in SIZES]
    assert [run.epoch() for _ in range(2)] == records[:2]
    fresh = make()
    for name in ("model", "control"):
        getattr(fresh, name).load_state_dict(through_a_file(getattr(run, name).state_dict()))
    for name in ("optimizers", "schedulers"):
        for mine, theirs in zip(getattr(fresh, name), getattr(run, name), strict=True):
            mine.load_state_dict(through_a_file(theirs.state_dict()))
    assert fresh.rates == run.rates
    assert [fresh.epoch() for _ in range(2)] == records[2:]


def test_a_state_of_more_optimizers_is_refused():
    run, other = Run(sgd_and_adamw), Run(one_of_both)
    with pytest.raises(CheckpointError, match=r"settings.lr_coupling is .* in the checkpoint"):
        other.control.load_state_dict(run.control.state_dict())
