"""Every estimator under autocast, and under a GradScaler that grows its scale and skips a step."""

import math
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, Diversity, micro_batches
from divebatch.estimators import ESTIMATORS, Estimator, TrainingContext, make_estimator
from divebatch.policies import NoiseScale
from reference.delivery import Delivered, attach
from reference.per_sample import mean_loss, mlp, samples

SIZE, BATCHES, BAD = 8, 7, 3
LOST = {"split": {BAD, BAD + 1}, "ranks": {BAD, BAD + 1}}
"""Batches that are in no estimate where the scaler skips the step on one; of the others it is that one alone."""
TOLERANCE = {None: 1e-4, torch.bfloat16: 0.1, torch.float16: 1e-2}
WATCHING = sorted(ESTIMATORS.keys() - {"oracle"})  # which runs passes of its own, without scale and autocast


def batches() -> list[tuple[Tensor, Tensor]]:
    x, y = samples(SIZE * BATCHES, dtype=torch.float32)
    return list(zip(x.split(SIZE), y.split(SIZE), strict=True))


def made(name: str, scaler: GradScaler | None) -> Estimator:
    known = {} if scaler is None or not ESTIMATORS[name].takes("grad_scaler") else {"grad_scaler": scaler}
    return make_estimator(name, **known)


def measured(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    bad: Collection[int] = (),
    without: Collection[int] = (),
    kind: type[Optimizer] = SGD,
    is_used: bool = True,
    **settings: Any,
) -> Diversity:
    """At weights that stay where they are, so that a step left out changes nothing else."""
    model, delivered = mlp(dtype=torch.float32), 0
    optimizer = kind(model.parameters(), lr=0.0, **settings)
    estimator = made(name, scaler)
    delivery = Delivered(lambda: delivered)
    attach(estimator, TrainingContext(model, delivery, optimizer))
    estimator.start()
    scaler = scaler if scaler is not None and is_used else GradScaler("cpu", enabled=False)
    for number, (x, y) in enumerate(batches()):
        if number in without:
            continue
        delivered += len(x)
        delivery.look()
        optimizer.zero_grad()
        for (inputs, targets), weight in micro_batches((x, y), SIZE // 2):
            with torch.autocast("cpu", dtype) if dtype is not None else nullcontext():
                outputs = model(inputs)
            loss = mean_loss(outputs.float(), targets) * weight
            scaler.scale(loss * (math.inf if number in bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return estimator.finish()


def growing() -> GradScaler:
    return GradScaler("cpu", init_scale=64.0, growth_interval=2)


def assert_close(found: Diversity, expected: Diversity, tolerance: float) -> None:
    assert found.trace == pytest.approx(expected.trace, rel=tolerance)
    assert found.sq_norm == pytest.approx(expected.sq_norm, rel=tolerance, abs=tolerance * expected.trace)


@pytest.mark.parametrize("name", WATCHING)
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_estimates_are_those_without_scale_and_autocast(name: str, dtype: torch.dtype | None, is_scaled: bool) -> None:
    found = measured(name, dtype=dtype, scaler=growing() if is_scaled else None, momentum=0.9)
    assert_close(found, measured(name, momentum=0.9), TOLERANCE[dtype])


@pytest.mark.parametrize("name", WATCHING)
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_a_step_that_the_scaler_skips_is_in_no_estimate(name: str, dtype: torch.dtype | None) -> None:
    found = measured(name, dtype=dtype, scaler=growing(), bad=[BAD], momentum=0.9)
    expected = measured(name, without=LOST.get(name, {BAD}), momentum=0.9)
    assert math.isfinite(found.trace)
    assert_close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name", WATCHING)
def test_a_fused_optimizer_undoes_the_scale_and_skips_by_itself(name: str) -> None:
    found = measured(name, scaler=growing(), bad=[BAD], kind=Adam, fused=True)
    assert_close(found, measured(name, without={BAD}, kind=Adam, fused=True), TOLERANCE[None])


@pytest.mark.parametrize("name", ["split", "ranks"])
def test_a_scaler_that_is_never_used_changes_nothing(name: str) -> None:
    expected = measured(name, momentum=0.9)
    assert_close(measured(name, scaler=growing(), is_used=False, momentum=0.9), expected, 1e-9)


@pytest.mark.parametrize("name", ["split", "ranks"])
def test_in_a_plain_loop_the_scaler_is_passed(name: str) -> None:
    data = TensorDataset(*samples(SIZE * BATCHES, dtype=torch.float32))
    records = []
    for is_scaled in (False, True):
        model, scaler = mlp(dtype=torch.float32), growing() if is_scaled else GradScaler("cpu", enabled=False)
        optimizer, loader = SGD(model.parameters(), lr=0.01), AdaptiveLoader(data, SIZE, seed=0)
        with Controller(model, optimizer, loader, NoiseScale(64), estimator=name, grad_scaler=scaler) as control:
            for batch in loader:
                optimizer.zero_grad()
                for (x, y), weight in micro_batches(batch, SIZE // 2):
                    scaler.scale(mean_loss(model(x), y) * weight).backward()
                scaler.step(optimizer)
                scaler.update()
            records.append(control.step())
    assert records[0].diversity is not None
    assert records[1].diversity == pytest.approx(records[0].diversity, rel=1e-4)
