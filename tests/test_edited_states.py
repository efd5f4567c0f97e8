"""A state with one odd field is refused with an error that names the field, or training goes on from it as ever."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from divebatch import AdaptiveLoader, Auto, Controller, DiveBatch, micro_batches
from divebatch.errors import CheckpointError
from divebatch.policies import Goodput, NoiseScale, NormTest
from reference.edited_states import Edit, edits
from reference.per_sample import dataset, mlp

# Torch counts a fresh optimizer's own steps and cannot know that the epoch's were made before the stop.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
DATA = dataset(24, dtype=torch.float32)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


class Training:
    """The paper's rule on momentum, with a schedule."""

    parts = 1
    """Backward passes of a batch."""
    per_batch = False

    def __init__(self) -> None:
        self.model: nn.Module = mlp(dtype=torch.float32)
        self.optimizer = self.make_optimizer()
        self.scheduler = self.make_scheduler()
        self.loader = self.make_loader()
        self.control = self.make_control(scheduler=self.scheduler)

    def make_optimizer(self) -> Optimizer:
        return SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def make_scheduler(self) -> LRScheduler | None:
        return StepLR(self.optimizer, 2, 0.5)

    def make_loader(self) -> AdaptiveLoader:
        return AdaptiveLoader(DATA, 4, seed=0)

    def make_control(self, **settings: Any) -> Controller:
        return Controller(self.model, self.optimizer, self.loader, DiveBatch(0.4, 12), lr_coupling="linear", **settings)

    def train(self, *, stop_after: int | None = None) -> None:
        """To the end of the epoch, or to a step within the second one."""
        for _ in range(1 if stop_after is None else 2):
            for number, batch in enumerate(self.loader, 1):
                self.step(batch)
                if self.control.epoch and number == stop_after:
                    return
            if self.scheduler is not None and not self.per_batch:
                self.scheduler.step()
            self.control.step(loss=1.0)

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        for (x, y), weight in micro_batches(tuple(batch), -(-len(batch[0]) // self.parts)):
            (cross_entropy(self.model(x), y) * weight).backward()
        self.optimizer.step()
        if self.scheduler is not None and self.per_batch:
            self.scheduler.step()

    def save(self) -> dict[str, Any]:
        file = io.BytesIO()
        parts = {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "control")}
        torch.save({name: part.state_dict() for name, part in parts.items() if part is not None}, file)
        file.seek(0)
        state: dict[str, Any] = torch.load(file, weights_only=True)
        return state

    def load(self, state: dict[str, Any]) -> None:
        for name, saved in copy.deepcopy(state).items():
            getattr(self, name).load_state_dict(saved)


class AutoOnAdam(Training):
    per_batch = True

    def make_optimizer(self) -> Optimizer:
        return AdamW(self.model.parameters(), lr=0.01)

    def make_scheduler(self) -> LRScheduler:
        return CosineAnnealingLR(self.optimizer, 40, eta_min=1e-4)

    def make_control(self, **settings: Any) -> Controller:
        return Controller(self.model, self.optimizer, self.loader, Auto(12), every_steps=2, **settings)


class AdaScale(Training):
    """Rates that the loop writes, estimates by pairs."""

    def make_optimizer(self) -> Optimizer:
        return SGD(self.model.parameters(), lr=0.05)

    def make_scheduler(self) -> None:
        return None

    def make_control(self, **settings: Any) -> Controller:
        policy = NoiseScale(max_batch_size=12)
        settings |= {"lr_coupling": "adascale", "estimator": "moments", "hand_set_lr": "in force"}
        with pytest.warns(UserWarning, match="momentum"):
            return Controller(self.model, self.optimizer, self.loader, policy, **settings)

    def step(self, batch: Any) -> None:
        super().step(batch)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.99


class BySplit(Training):
    parts, estimator = 2, "split"

    def make_control(self, **settings: Any) -> Controller:
        policy = NormTest(max_batch_size=12)
        return Controller(self.model, self.optimizer, self.loader, policy, estimator=self.estimator, **settings)


class ByRanks(BySplit):
    estimator = "ranks"


class BySamples(BySplit):
    parts, estimator = 1, "per-sample"


class OfAStream(Training):
    def make_loader(self) -> AdaptiveLoader:
        return AdaptiveLoader(Stream(), 4, epoch_samples=12)


class OwnSampler(Training):
    def make_loader(self) -> AdaptiveLoader:
        sampler = WeightedRandomSampler([1.0] * 24, 24, generator=torch.Generator().manual_seed(3))
        return AdaptiveLoader.wrap(DataLoader(DATA, 4, sampler=sampler, generator=torch.Generator().manual_seed(5)))


class Timed(Training):
    def make_control(self, **settings: Any) -> Controller:
        return Controller(self.model, self.optimizer, self.loader, Goodput(max_batch_size=12), **settings)


SETUPS = {
    "all of DiveBatch's": (Training, ()),
    "all of Auto's": (AutoOnAdam, ()),
    "AdaScale's rates": (AdaScale, ("rates",)),
    "sums of pairs": (AdaScale, ("measuring",)),
    "sums of halves": (BySplit, ("measuring",)),
    "rows of ranks": (ByRanks, ("measuring",)),
    "sums of samples": (BySamples, ("measuring",)),
    "a stream's loader": (OfAStream, ("loader",)),
    "an own sampler's loader": (OwnSampler, ("loader",)),
    "a history with speeds": (Timed, ("history",)),
}
"""Which training, and which part of its controller's state is edited."""
ALWAYS_ODD = {"gone", "a list", "a table", "one more key", "true"}
"""What no field may be changed to. A word, None, NaN or another number is odd in most fields, but not in all."""


class Outcomes:
    """Loads edited states into one run until it accepts one: a state that is refused must change nothing."""

    def __init__(self, setup: type[Training]) -> None:
        self.setup, self.run = setup, setup()
        self.before = self.run.save()

    def of(self, state: dict[str, Any], edit: Edit) -> str:
        """The error's message; empty where the state was accepted and the epoch came to its end."""
        edited = {**state, **edit.applied({"control": state["control"]})}
        try:
            self.run.control.load_state_dict(edited["control"])
        except CheckpointError as error:
            return str(error)
        self.run.control.close()
        self.run = self.setup()
        self.run.load(edited)
        self.run.train()
        self.run.control.close()
        self.run = self.setup()
        return ""


@pytest.mark.parametrize(("setup", "part"), SETUPS.values(), ids=SETUPS)
def test_an_odd_field_is_named_or_training_goes_on(monkeypatch, setup: type[Training], part: tuple[str, ...]):
    monkeypatch.setattr("divebatch.lr.rates.require_all_schedulers", lambda *_: None)  # it looks at all objects
    begun = setup()
    begun.train(stop_after=2)
    state, outcomes, accepted = begun.save(), Outcomes(setup), dict[str, Edit]()
    for edit in edits(inner(state, "control", *part), ("control", *part)):
        if message := outcomes.of(state, edit):
            assert message.startswith("control."), edit
        elif not (edit.what == "gone" and isinstance(edit.path[-1], int)):  # of counts by number any may be missing
            accepted[edit.what] = edit
    assert not [str(edit) for what, edit in accepted.items() if what in ALWAYS_ODD]
    assert "one more" in accepted  # or nothing was loaded at all


def inner(state: Any, *keys: str) -> Any:
    for key in keys:
        state = state[key]
    return state
