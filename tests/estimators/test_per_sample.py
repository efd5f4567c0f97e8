"""The per-sample estimate where a pass's scale lies on the device: compiled, or under a GradScaler."""

from typing import Any

import pytest
import torch
from torch.optim import SGD

from divebatch import Diversity
from divebatch.estimators import PerSample, TrainingContext
from reference.delivery import Delivered, attach
from reference.per_sample import mean_loss, mlp, samples

SIZES = (6, 6, 4)


class Scaler:
    """Like torch's, with a scale that changes now and then."""

    def __init__(self) -> None:
        self._scale = torch.tensor(1.0)


def measured(scaler: Scaler | None = None, **settings: Any) -> Diversity:
    model, delivered = mlp(), 0
    optimizer = SGD(model.parameters(), 0.01)
    estimator = PerSample(**settings, **({"grad_scaler": scaler} if scaler else {}))
    attach(estimator, TrainingContext(model, Delivered(lambda: delivered), optimizer))
    estimator.start()
    for number, (x, y) in enumerate(zip(*(part.split(SIZES) for part in samples(sum(SIZES))), strict=True)):
        delivered += len(x)
        factor = 1.0 if scaler is None else float(scaler._scale.fill_(8.0 * 2**number))
        optimizer.zero_grad()
        (mean_loss(model(x), y) * factor).backward()
        for parameter in model.parameters():
            parameter.grad /= factor
        optimizer.step()
    return estimator.finish()


@pytest.mark.parametrize("case", ["compiled", "scaled", "both"])
def test_it_is_the_plain_one(case: str):
    """The taps of a compiled meter work without a compiler."""
    found = measured(None if case == "compiled" else Scaler(), compiled=case != "scaled")
    plain = measured()
    assert (found.trace, found.sq_norm) == pytest.approx((plain.trace, plain.sq_norm), rel=1e-6)
    assert found.num_samples == plain.num_samples == sum(SIZES)
