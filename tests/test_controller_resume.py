"""Stop anywhere, load into fresh objects, go on: the same run bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

from divebatch import AdaptiveLoader, Controller, DiveBatch, EpochRecord, Oracle
from divebatch.errors import CheckpointError
from reference.per_sample import dataset, mean_loss, mlp, num_hooks
from saved import through_a_file

# Torch counts a fresh optimizer's own steps and cannot know that the epoch's were made before the stop.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
EPOCHS = 5
DATA = dataset(24, dtype=torch.float32)


class SgdLinear:
    """Momentum, a schedule per epoch, linear coupling, measured every epoch."""

    policy, lr_coupling, per_batch = DiveBatch(0.4, 12), "linear", False

    def optimizer(self, model: nn.Module) -> Optimizer:
        groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in ((model[0], 0.01), (model[2], 0.003))]
        return SGD(groups, momentum=0.9)

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        return StepLR(optimizer, step_size=2, gamma=0.5)


class AdamWSqrt:
    """A schedule per batch, sqrt coupling, measured every second epoch."""

    policy, lr_coupling, per_batch = DiveBatch(0.4, 12, every_epochs=2, monotone=False), "sqrt", True

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01)

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        return CosineAnnealingLR(optimizer, T_max=30, eta_min=0.001)


SETUPS = [SgdLinear(), AdamWSqrt()]
EVERY_SETUP = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: type(setup).__name__)


class Training:
    def __init__(self, setup: Any, *, seed: int = 0, batch_size: int = 4, **other: Any) -> None:
        self.setup = setup
        self.model = other.pop("model", None) or mlp(seed=seed, dtype=torch.float32)
        self.optimizer = setup.optimizer(self.model)
        self.scheduler = setup.scheduler(self.optimizer)
        self.loader = AdaptiveLoader(other.pop("data", DATA), batch_size, seed=seed)
        settings = {"policy": setup.policy, "lr_coupling": setup.lr_coupling, "scheduler": self.scheduler} | other
        settings["scheduler_unit"] = "step" if setup.per_batch else "epoch"
        self.control = Controller(self.model, self.optimizer, self.loader, **settings)
        self.steps, self.records = 0, list[EpochRecord]()

    def train(self, *, epochs: int = EPOCHS, stop_after_step: int | None = None) -> None:
        while len(self.records) < epochs:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                mean_loss(self.model(x), y).backward()
                self.optimizer.step()
                if self.setup.per_batch:
                    self.scheduler.step()
                self.steps += 1
                if self.steps == stop_after_step:
                    return
            if not self.setup.per_batch:
                self.scheduler.step()
            self.records.append(self.control.step())

    def save(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler", "control")}
        return through_a_file(parts)

    def load(self, states: dict[str, Any], *, control_first: bool = False) -> None:
        for name in sorted(states, reverse=not control_first):
            getattr(self, name).load_state_dict(states[name])

    def resumed(self, *, control_first: bool = False) -> "Training":
        """Fresh objects that knew nothing of this run, with this run's state."""
        fresh = Training(self.setup, seed=7, batch_size=3)
        fresh.load(self.save(), control_first=control_first)
        fresh.records = list(self.records)
        return fresh


def assert_same_run(run: Training, whole: Training) -> None:
    assert run.records == whole.records
    assert equal(run.save(), whole.save())


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, at any depth."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: type(setup).__name__)
def whole(request: pytest.FixtureRequest) -> Training:
    """A run that nobody stopped."""
    run = Training(request.param)
    run.train()
    return run


# Going on


def test_batch_size_and_rate_change_in_the_run_that_is_stopped(whole: Training):
    assert len({record.batch_size for record in whole.records}) > 2
    assert len({record.lr for record in whole.records}) > 2


@pytest.mark.parametrize("control_first", [False, True])
def test_stopped_after_any_epoch(whole: Training, control_first: bool):
    for epochs in range(EPOCHS):
        stopped = Training(whole.setup)
        stopped.train(epochs=epochs)
        resumed = stopped.resumed(control_first=control_first)
        resumed.train()
        assert_same_run(resumed, whole)


def test_stopped_after_any_step(whole: Training):
    for step in range(1, whole.steps + 1):
        stopped = Training(whole.setup)
        stopped.train(stop_after_step=step)
        resumed = stopped.resumed()
        resumed.train()
        assert_same_run(resumed, whole)


def test_stopped_many_times(whole: Training):
    run = Training(whole.setup)
    while len(run.records) < EPOCHS:
        run = run.resumed(control_first=len(run.records) % 2 == 0)
        run.train(stop_after_step=3)
    assert_same_run(run, whole)


@pytest.mark.filterwarnings("ignore:epoch . was left after")
def test_loading_into_a_run_under_way_goes_back(whole: Training):
    run = Training(whole.setup)
    run.train(stop_after_step=3)
    states, records = run.save(), list(run.records)
    run.train(epochs=3)
    run.load(states)
    run.records = records
    run.train()
    assert_same_run(run, whole)


@EVERY_SETUP
@pytest.mark.filterwarnings("ignore:epoch . was left after")
def test_the_state_is_what_it_was_when_it_was_taken(setup: Any):
    run = Training(setup)
    run.train(stop_after_step=2)
    taken = run.control.state_dict()
    kept = through_a_file(taken)
    run.train()
    assert equal(taken, kept)


# States that do not fit


def other_policy() -> Training:
    return Training(SgdLinear(), policy=DiveBatch(0.5, 12))


def other_data() -> Training:
    return Training(SgdLinear(), data=dataset(25, dtype=torch.float32))


def other_coupling() -> Training:
    return Training(SgdLinear(), lr_coupling="sqrt")


def other_groups() -> Training:
    setup = SgdLinear()
    setup.optimizer = AdamWSqrt().optimizer
    return Training(setup)


def other_estimator() -> Training:
    return Training(SgdLinear(), estimator=Oracle(mean_loss))


def other_model() -> Training:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return Training(SgdLinear(), model=model)


def one_layer_more() -> Training:
    return Training(SgdLinear(), model=mlp(dtype=torch.float32).append(nn.Linear(3, 3)))


def assert_refused(run: Training, state: dict[str, Any], message: str | None = None) -> None:
    before, hooks = run.save(), num_hooks(run.model)
    with pytest.raises(CheckpointError, match=message):
        run.control.load_state_dict(state)
    assert equal(run.save(), before)
    assert num_hooks(run.model) == hooks
    run.train(epochs=1)


OTHERS: dict[str, Callable[[], Training]] = {
    "control.settings.policy.delta is 0.4 in the checkpoint, and ": other_policy,
    "control.loader.dataset_size is 24 in the checkpoint, and 25 in this run": other_data,
    "control.settings.lr_coupling.0 is 'linear' in the checkpoint, and 'sqrt' in this run": other_coupling,
    "control.settings.parameter_groups.0 is 2 in the checkpoint, and 1 in this run": other_groups,
}


@pytest.mark.parametrize("stop_after_step", [2, 7])
@pytest.mark.parametrize("message", OTHERS)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(message: str, stop_after_step: int):
    run = Training(SgdLinear())
    run.train(stop_after_step=stop_after_step)
    assert_refused(OTHERS[message](), run.save()["control"], message)


@pytest.mark.parametrize("make", [other_estimator, other_model, one_layer_more])
def test_sums_of_another_estimator_or_model_are_refused_and_change_nothing(make: Callable[[], Training]):
    run = Training(SgdLinear())
    run.train(stop_after_step=2)
    assert_refused(make(), run.save()["control"])


@pytest.mark.parametrize("state", [{}, {"version": 99}])
def test_a_state_of_another_version_is_refused(state: dict[str, Any]):
    assert_refused(Training(SgdLinear()), state, "version")
