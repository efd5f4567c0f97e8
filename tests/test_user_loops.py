"""What happens in loops that are not quite the README's: nothing may go wrong without a word."""

import copy
import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.optim import SGD

from divebatch import AdaptiveLoader, Controller, Decision, DiveBatch, Fixed, Measurement, Policy, Trajectory
from divebatch.errors import ArgumentError, UsageError
from divebatch.norms import gradient_diversity
from reference.per_sample import dataset, mean_loss, mlp


class Loop:
    def __init__(self, policy: Policy, *, batch_size: int = 10, lr: float = 0.1, **settings: object) -> None:
        self.model = mlp()
        self.optimizer = SGD(self.model.parameters(), lr=lr)
        self.loader = AdaptiveLoader(dataset(40), batch_size, seed=0)
        self.control = Controller(self.model, self.optimizer, self.loader, policy, **settings)

    def train(self) -> None:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            mean_loss(self.model(x), y).backward()
            self.optimizer.step()

    def exact(self) -> float:
        return gradient_diversity(self.model, mean_loss, self.loader.full_pass()).value


def test_a_pass_within_a_pass_is_refused():
    loader = AdaptiveLoader(dataset(40), 10, seed=0)
    outer = iter(loader)
    next(outer)
    list(loader)
    with pytest.raises(UsageError, match=r"another pass over this loader began .* loader.full_pass\(\)"):
        next(outer)


def test_a_full_pass_within_a_pass_changes_nothing():
    quiet, curious = Loop(DiveBatch(1.0, 40)), Loop(DiveBatch(1.0, 40))
    quiet.train()
    for x, y in curious.loader:
        assert sum(len(labels) for _, labels in curious.loader.full_pass()) == 40
        curious.optimizer.zero_grad()
        mean_loss(curious.model(x), y).backward()
        curious.optimizer.step()
    assert curious.control.step() == quiet.control.step()


@pytest.mark.parametrize("policy", [Fixed(), DiveBatch(1.0, 2000)])
def test_a_first_batch_beyond_the_data_is_the_data(policy):
    loop = Loop(policy, batch_size=1000, lr_coupling="linear")
    loop.train()
    record = loop.control.step()
    assert (record.batch_size, record.next_batch_size, record.next_lr) == (40, 40, 0.1)


@pytest.mark.parametrize("frozen_first", [True, False])
def test_layers_frozen_or_set_free_between_epochs_are_counted_as_they_are(frozen_first):
    loop = Loop(DiveBatch(1.0, 40), lr=0.0)
    for is_frozen in (frozen_first, not frozen_first, frozen_first):
        loop.model[0].requires_grad_(not is_frozen)
        loop.train()
        assert loop.control.step().diversity == pytest.approx(loop.exact())


@dataclass(frozen=True)
class Moody(Policy):
    estimator: ClassVar[str] = "trajectory"
    needs: ClassVar[frozenset[str]] = frozenset({"diversity"})
    is_bad: ClassVar[bool] = True

    def next(self, seen: Measurement) -> Decision:
        assert seen.diversity is not None
        if Moody.is_bad:
            raise RuntimeError("not today")
        return Decision(batch_size=20)


def test_a_step_that_failed_can_be_called_again():
    loop = Loop(Moody())
    loop.train()
    with pytest.raises(RuntimeError, match="not today"):
        loop.control.step()
    Moody.is_bad = False
    record = loop.control.step()
    assert (record.epoch, record.next_batch_size) == (1, 20)
    assert record.diversity is not None
    loop.train()
    assert loop.control.step().epoch == 2


def test_a_deep_copy_of_the_model_is_not_counted():
    loop = Loop(DiveBatch(1.0, 40), lr=0.0)
    twin = copy.deepcopy(loop.model)
    loop.train()
    mean_loss(twin(torch.ones(3, 4).double()), torch.ones(3, 3).double()).backward()
    assert loop.control.step().diversity == pytest.approx(loop.exact())


def test_an_estimator_serves_one_controller():
    estimator = Trajectory()
    Loop(DiveBatch(1.0, 40), estimator=estimator)
    with pytest.raises(UsageError, match="belongs to another controller"):
        Loop(DiveBatch(1.0, 40), estimator=estimator)


@pytest.mark.filterwarnings("ignore:epoch . has ended, no step")
def test_an_epoch_without_a_backward_pass_is_no_reason_for_the_cap():
    loop = Loop(DiveBatch(1.0, 40))
    list(loop.loader)
    with pytest.raises(UsageError, match="no backward pass through the model was seen"):
        loop.control.step()


def test_an_epoch_left_early_again_and_again_is_a_warning_once():
    loop, seen = Loop(Fixed()), []

    def train() -> None:
        for x, y in itertools.islice(loop.loader, 2):
            seen.append(x.tolist())
            mean_loss(loop.model(x), y).backward()
            loop.optimizer.step()

    train()
    with pytest.warns(UserWarning, match=r"epoch 1 was left after 2 optimizer steps.*same samples.*epoch_samples"):
        train()
    train()
    assert seen[:2] == seen[2:4] == seen[4:]


def test_a_loss_that_is_told_is_in_the_record():
    loop = Loop(Fixed())
    loop.train()
    assert loop.control.step(loss=torch.tensor(0.5)).train_loss == 0.5
    loop.train()
    assert loop.control.step().train_loss is None


def test_parts_of_the_wrong_kind_are_named():
    loader, model = AdaptiveLoader(dataset(40), 10, seed=0), nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"policy must be a policy object .* got policy='divebatch'"):
        Controller(model, optimizer, loader, "divebatch")
    with pytest.raises(ArgumentError, match="policy must be a policy object"):
        Controller(model, optimizer, loader, DiveBatch)
    with pytest.raises(ArgumentError, match="optimizer must be a torch optimizer or a list of such, got Linear"):
        Controller(model, model, loader, Fixed())
    with pytest.raises(ArgumentError, match=r"estimator must be a name or an object such as Trajectory\(\)"):
        Controller(model, optimizer, loader, Fixed(), estimator=Trajectory)
    with pytest.raises(ArgumentError, match="unknown estimator 'orcle': did you mean 'oracle'"):
        Controller(model, optimizer, loader, Fixed(), estimator="orcle")
