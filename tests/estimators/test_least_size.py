"""The fewest samples that an estimator can see anything in: no policy goes below."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, Decision, Measurement, Policy, micro_batches
from divebatch.estimators import ESTIMATORS, TrainingContext, make_estimator
from divebatch.ranks import Ranks
from reference.delivery import Delivered

LEAST = {"trajectory": 1, "oracle": 1, "moments": 1, "per-sample": 2, "split": 2, "ranks": 2}


class ToOne(Policy):
    """Wants as few samples as there can be."""

    needs = frozenset({"diversity"})

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=1, reason="one")


def made(name: str):
    return make_estimator(name, **({"loss_fn": nn.functional.mse_loss} if ESTIMATORS[name].takes("loss_fn") else {}))


def test_every_estimator_has_its_row():
    assert set(LEAST) == set(ESTIMATORS)


@pytest.mark.parametrize("name", LEAST)
def test_a_policy_that_wants_one_sample_gets_what_the_estimator_needs(name: str):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loader = AdaptiveLoader(TensorDataset(torch.randn(12, 3), torch.randn(12, 1)), batch_size=4, seed=0)
    control = Controller(model, optimizer, loader, ToOne(), estimator=made(name), lr_coupling="linear")
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            for (x, y), weight in micro_batches(batch, -(-len(batch[0]) // control.plan().min_micro_batches)):
                (nn.functional.mse_loss(model(x), y) * weight).backward()
            optimizer.step()
        record = control.step()
    assert record.batch_size == record.next_batch_size == LEAST[name]
    assert record.measured
    assert record.lr == pytest.approx(1e-3 * LEAST[name] / 4)
    assert ("raised to the 2 samples" in record.reason) == (LEAST[name] == 2)


@pytest.mark.parametrize(("name", "least"), [("per-sample", 5), ("split", 5), ("ranks", 4), ("moments", 1)])
def test_ranks_share_a_batch(name: str, least: int):
    delivered = Delivered(lambda: 0)
    delivered.ranks = Ranks.alone()
    delivered.ranks.size = 4
    model, estimator = nn.Linear(3, 1), made(name)
    estimator.bind(TrainingContext(model, delivered, SGD(model.parameters(), lr=0.1)))
    assert estimator.min_batch_size == least
