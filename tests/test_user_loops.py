"""What happens in loops that are not quite the README's: nothing may go wrong without a word."""

import copy
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch.optim import SGD

from divebatch import AdaptiveLoader, Decision, DiveBatch, Fixed, Measurement, Policy, Trajectory
from divebatch.errors import UsageError
from divebatch.norms import gradient_diversity
from reference.per_sample import dataset, mean_loss
from training import Training


class Loop(Training):
    def __init__(self, policy: Policy, *, lr: float = 0.1, **settings: Any) -> None:
        super().__init__(policy, batch_size=10, optimizer=lambda parameters: SGD(parameters, lr), **settings)

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
