"""How often an interval holds the noise scale that it should: at fixed weights and in training, where weights move."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from divebatch.estimators import Moments, TrainingContext
from divebatch.estimators.average import PairAverage, unbiased
from divebatch.measurement import Diversity, Measurement
from divebatch.policies import CABS, NoiseScale
from reference.delivery import Delivered, attach

DIMENSION = 10


def drawn(
    make: Callable[..., Diversity], *, draws: int, batch_size: int, steps: int, lr: float, start: float = 0.5
) -> tuple[float, float]:
    """The share of intervals that lie above the truth, and below it, over courses of SGD on new data.

    The problem is a linear regression with normal inputs and targets of pure noise, so G is the weights themselves.
    """
    generator = np.random.default_rng(1)
    weights = np.full((draws, DIMENSION), start / math.sqrt(DIMENSION))
    traces, sq_norms, gradients = 0.0, 0.0, []
    for _ in range(steps):
        sq_norm = (weights**2).sum(1)
        sq_norms, traces = sq_norms + sq_norm, traces + (DIMENSION + 1) * sq_norm + DIMENSION
        x = generator.standard_normal((draws, batch_size, DIMENSION))
        errors = np.einsum("kbd,kd->kb", x, weights) - generator.standard_normal((draws, batch_size))
        gradients.append(errors[..., None] * x)
        weights = weights - lr * gradients[-1].mean(1)
    truth, above, below = traces / sq_norms, 0, 0
    for course in range(draws):
        low, high = make([each[course] for each in gradients]).noise_scale_interval()
        above, below = above + (low > truth[course]), below + (high < truth[course])
    return above / draws, below / draws


def per_sample(batches: list[np.ndarray]) -> Diversity:
    """As `PerSample` averages: each sample is a chunk of one."""
    average = PairAverage()
    rows = [((g**2).sum(), (g.mean(0) ** 2).sum(), len(g), len(g)) for g in batches]
    average.num_samples = sum(row[3] for row in rows)
    average.extend([unbiased(*row) for row in rows], [row[3] for row in rows])
    return average.diversity()


def in_pairs(batches: list[np.ndarray]) -> Diversity:
    """As `Moments` compares gradients without momentum."""
    average = PairAverage(overlap=2, trusts_negative=False)
    average.bounds_below = False
    average.num_samples = sum(map(len, batches))
    for one, other in itertools.pairwise(batches):
        size, sq_norm = len(other), one.mean(0) @ other.mean(0)
        average.extend([(size * ((other.mean(0) ** 2).sum() - sq_norm), sq_norm)], [size])
    return average.diversity()


@pytest.mark.parametrize(("batch_size", "steps", "lr"), [(8, 16, 0.0), (8, 16, 0.2), (32, 16, 0.03)])
def test_misses_do_not_crowd_on_the_side_that_lets_batches_grow(batch_size: int, steps: int, lr: float):
    above, below = drawn(per_sample, draws=1500, batch_size=batch_size, steps=steps, lr=lr)
    # With equal tails 3.7 to 4.7 % lay above. A chance of 2.5 % has a standard error of 0.4 % here.
    assert above <= 0.033
    assert 0.003 <= below <= 0.033
    assert above + below >= 0.015, "as wide as it must be, and not much wider"


def test_pairs_without_momentum_are_an_upper_bound_alone():
    def with_lower_end(batches: list[np.ndarray]) -> Diversity:
        found = in_pairs(batches)
        assert found.spread is not None
        return replace(found, spread=replace(found.spread, bounds_below=True))

    settings = {"draws": 200, "batch_size": 8, "steps": 40, "lr": 0.1, "start": 2.0}
    assert drawn(with_lower_end, **settings)[0] > 0.1, "a lower end would be wrong"
    above, below = drawn(in_pairs, **settings)
    assert above == 0
    assert below <= 0.05


def of_moments(*, momentum: float) -> Diversity:
    model, delivered = nn.Linear(DIMENSION, 1, bias=False).double(), [0]
    optimizer, estimator = SGD(model.parameters(), 0.0, momentum=momentum), Moments()
    attach(estimator, TrainingContext(model, Delivered(lambda: delivered[0]), optimizer))
    estimator.start()
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        delivered[0] += 64
        optimizer.zero_grad()
        model(torch.randn(64, DIMENSION, dtype=torch.float64, generator=generator) + 0.3).mean().backward()
        optimizer.step()
    return estimator.finish()


def test_no_policy_grows_a_batch_on_an_upper_bound_and_the_reason_says_what_to_use():
    found = of_moments(momentum=0.0)
    low, high = found.noise_scale_interval()
    assert (low, high < math.inf) == (0.0, True)
    seen = Measurement(epoch=1, batch_size=8, dataset_size=6400, diversity=found, lr=0.1, loss=0.001)
    grown = NoiseScale(4096).next(seen)
    assert grown.batch_size == 8
    assert "only estimator='split' or 'per-sample' can tell here" in grown.reason
    assert CABS(4096, min_batch_size=1).next(seen).batch_size == 8
    # That less is wanted is known.
    large = replace(seen, batch_size=4096)
    assert NoiseScale(4096, monotone=False).next(large).batch_size < 100
