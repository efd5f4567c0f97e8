"""Estimates for Adam-like optimizers against all gradients kept, each coordinate divided by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop

from divebatch import Diversity
from divebatch.errors import ArgumentError
from divebatch.estimators import Estimator, Moments, PerSample, Split
from divebatch.estimators.moments import extrapolation
from divebatch.estimators.second_moment import Preconditioner, StepGradients
from reference import per_sample
from reference.delivery import Loop, cut
from reference.per_sample import mean_loss, mlp, pair_of

EPS, BETA = 1e-3, 0.9
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda p: Adam(p, lr=0.0, betas=(0.5, BETA), eps=EPS),
    "AdamW": lambda p: AdamW(p, lr=0.0, betas=(0.5, BETA), eps=EPS, weight_decay=0.1),
    "AMSGrad": lambda p: Adam(p, lr=0.0, betas=(0.5, BETA), eps=EPS, amsgrad=True),
    "NAdam": lambda p: NAdam(p, lr=0.0, betas=(0.5, BETA), eps=EPS),
    "RMSprop": lambda p: RMSprop(p, lr=0.0, alpha=BETA, eps=EPS),
}
any_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def batches() -> list[tuple[Tensor, Tensor]]:
    return cut(32, 8)


def looped(estimator: Estimator, optimizer: Callable[[Any], Optimizer]) -> Loop:
    """Steps at weights that stand still; only the optimizer's moments move."""
    return Loop(estimator, optimizer, parts_of=3)


def divided_rows(kind: str, *, own: bool = False) -> list[tuple[Tensor, Tensor]]:
    """For each batch its per-sample gradients, and what divides them: the moments by their definition.

    Those before the batch's step, or with its `own` square in them.
    """
    moment, largest, result = torch.zeros(()), torch.zeros(()), []
    for step, (x, y) in enumerate(batches()):
        rows = per_sample.gradients(mlp(), mean_loss, x, y)
        before = moment, largest
        moment = BETA * moment + (1 - BETA) * rows.mean(0).square()
        largest = torch.maximum(largest, moment)
        held = (moment, largest) if own else before
        correction = 1.0 if kind == "RMSprop" else 1 - BETA ** (step + own)
        result.append((rows, (held[kind == "AMSGrad"] / correction).sqrt() + EPS if step else torch.tensor(torch.nan)))
    return result


def assert_means(measured: Diversity, pairs: list[tuple[float, float]]) -> None:
    """Of equal weights."""
    expected = [sum(pair[i] for pair in pairs) / len(pairs) for i in (0, 1)]
    assert (measured.trace, measured.sq_norm) == pytest.approx(expected, rel=1e-9)


@any_optimizer
def test_split_equals_the_plain_estimate_of_the_divided_gradients(kind: str):
    loop = looped(Split(preconditioned=True), OPTIMIZERS[kind])
    for batch in batches():
        loop.step(batch)
    pairs = [pair_of(list((rows / by).split(3))) for rows, by in divided_rows(kind)[1:]]
    measured = loop.estimator.finish()
    assert_means(measured, pairs)
    assert measured.num_samples == 24  # nothing divides the first batch yet


@any_optimizer
def test_moments_divide_each_step_by_what_the_optimizer_will(kind: str):
    loop = looped(Moments(preconditioned=True), OPTIMIZERS[kind])
    factor = extrapolation(loop.optimizer)
    for batch in batches():
        loop.step(batch)
    means = [(rows / by).mean(0) for rows, by in divided_rows(kind, own=True)[1:]]
    pairs = []
    for newest in range(2 if factor else 1, len(means)):
        one, two = (float(means[newest] @ means[newest - lag]) for lag in (1, 2))
        sq_norm = one + factor * (one - two)
        pairs.append((8 * (float(means[newest].square().sum()) - sq_norm), sq_norm))
    assert_means(loop.estimator.finish(), pairs)


def test_a_coordinate_that_was_never_seen_is_not_all_of_the_noise():
    """Divided by the moments before its step, an entry without any would count by 1 / eps."""
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([weights], lr=0.0, betas=(0.5, BETA))
    for gradient in ([1.0, 0.0], [1.0, 1.0]):
        step = StepGradients({"": torch.tensor(gradient)}, preconditioner=Preconditioner(optimizer, {"": weights}))
        found = [each.tolist() for _, each in step]
        weights.grad = torch.tensor(gradient)
        optimizer.step()
    assert found == [pytest.approx([1.0, math.sqrt((1 - BETA**2) / (1 - BETA))])]


def test_a_grad_scaler_left_to_the_optimizer_is_undone_before_the_division():
    weights = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([weights], lr=0.0)
    weights.grad = torch.tensor([1.0, 2.0, 3.0])
    optimizer.step()
    divides = Preconditioner(optimizer, {"": weights})
    ((_, plain),) = StepGradients({"": torch.tensor([3.0, 1.0, 0.5])}, preconditioner=divides)
    ((_, scaled),) = StepGradients({"": torch.tensor([24.0, 8.0, 4.0])}, grad_scale=8.0, preconditioner=divides)
    torch.testing.assert_close(scaled, plain)


@pytest.mark.parametrize("make", [Split, Moments], ids=["split", "moments"])
def test_a_state_within_a_window_carries_on(make: Callable[..., Estimator]):
    results = []
    for interrupted in (False, True):
        loop = looped(make(preconditioned=True), OPTIMIZERS["AdamW"])
        for index, batch in enumerate(batches()):
            loop.step(batch)
            if interrupted and index == 2:
                loop.resume(make(preconditioned=True))
        results.append(loop.estimator.finish())
    assert results[0] == results[1]


# What is refused


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: SGD(p, 0.1), lambda p: RMSprop(p, centered=True), Adadelta],
    ids=["SGD", "centered RMSprop", "Adadelta"],
)
@pytest.mark.parametrize("make", [Split, Moments])
def test_an_optimizer_that_divides_by_nothing_we_know_is_refused_at_once(make: type, optimizer: Any):
    with pytest.raises(
        ArgumentError, match=r"preconditioned=True is for optimizers that divide.*got (SGD|RMSprop|Adadelta)"
    ):
        looped(make(preconditioned=True), optimizer)


@pytest.mark.parametrize(("optimizer", "key"), [(Adamax, "exp_inf"), (Adagrad, "sum")])
def test_one_with_another_kind_of_moment_is_refused_where_it_shows(optimizer: Any, key: str):
    loop = looped(Moments(preconditioned=True), optimizer)
    with pytest.raises(ArgumentError, match=f"keeps no running second moment.*{key}"):
        [loop.step(batch) for batch in batches()]


def test_per_sample_norms_cannot_be_divided_and_say_so():
    with pytest.raises(ArgumentError, match=r"coordinate by coordinate: use Split\(preconditioned=True\)"):
        PerSample(preconditioned=True)
