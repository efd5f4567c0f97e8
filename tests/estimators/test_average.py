"""Means of many small estimates, and their spread."""

import math
from itertools import permutations, product

import pytest
import torch

from divebatch import Diversity
from divebatch.errors import ArgumentError
from divebatch.estimators import Moments, PerSample, Split
from divebatch.estimators.average import PairAverage, unbiased
from divebatch.measurement import Spread


def average_of(num_samples: int, *, decay: float = 1.0) -> PairAverage:
    average = PairAverage(decay=decay)
    average.num_samples = num_samples
    return average


def test_an_exponential_mean_is_not_pulled_to_zero_and_forgets():
    steady, changed = average_of(10, decay=0.5), average_of(10, decay=0.5)
    for step in range(20):
        steady.add(torch.tensor([3.0, 2.0], dtype=torch.float64), 1)
        changed.add(torch.tensor([3.0, 2.0] if step < 10 else [5.0, 1.0], dtype=torch.float64), 1)
    assert (steady.diversity().trace, steady.diversity().sq_norm) == pytest.approx((3.0, 2.0))
    assert (changed.diversity().trace, changed.diversity().sq_norm) == pytest.approx((5.0, 1.0), rel=2e-3)


def test_the_first_of_an_exponential_mean_counts_whole():
    average = average_of(7, decay=0.99)
    average.add(torch.tensor([3.0, 2.0], dtype=torch.float64), 7)
    assert average.diversity().trace == pytest.approx(3.0)
    assert average.diversity().noise_scale_interval() == (0.0, math.inf)  # one estimate tells nothing of its spread


def test_an_exponential_mean_by_hand():
    values, decay, average = [4.0, 1.0, 7.0], 0.8, average_of(3, decay=0.8)
    for value in values:
        average.add(torch.tensor([value, 1.0], dtype=torch.float64), 1)
    weights = [decay**2, decay, 1.0]
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    measured = average.diversity()
    assert measured.trace == pytest.approx(mean)
    assert measured.spread is not None
    assert measured.spread.degrees == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) - 1)


def test_the_spread_of_equal_weights_is_the_textbooks():
    pairs, average = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), average_of(7)
    for pair in pairs:
        average.add(pair, 5)
    spread, covariance = average.diversity().spread, (torch.cov(pairs.T) / 7).tolist()
    assert spread is not None
    assert (spread.trace_variance, spread.covariance) == pytest.approx((covariance[0][0], covariance[0][1]))
    assert (spread.sq_norm_variance, spread.degrees) == pytest.approx((covariance[1][1], 6))


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("overlap", [0, 2, 3])
def test_estimates_that_share_gradients_are_counted_with_their_neighbours(overlap: int, decay: float):
    """Against the sum over all pairs of estimates; half-way the state is saved and loaded."""
    generator = torch.Generator().manual_seed(2)
    pairs = torch.randn(9, 2, dtype=torch.float64, generator=generator)
    sizes = [4.0, 2.0, 3.0, 4.0, 4.0, 0.0, 1.0, 4.0, 4.0]  # a weight of zero counts for nothing
    average, other = (PairAverage(decay=decay, overlap=overlap) for _ in range(2))
    average.extend(pairs[:5].tolist(), sizes[:5])
    other.load_state_dict(average.state_dict())
    other.extend(pairs[5:].tolist(), sizes[5:])
    other.num_samples = 9
    weights = torch.tensor([size * decay ** (8 - step) for step, size in enumerate(sizes)], dtype=torch.float64)
    away = pairs - (weights @ pairs) / weights.sum()
    scatter, together = torch.zeros(2, 2, dtype=torch.float64), 0.0
    for one, two in product(range(9), range(9)):
        near = max(0.0, 1 - abs(one - two) / (overlap + 1)) * weights[one] * weights[two]
        scatter += near * torch.outer(away[one], away[two])
        together += float(near)
    share = float(weights.square().sum() / weights.sum() ** 2)
    expected = scatter / (weights.sum() ** 2 - together)
    spread = other.diversity().spread
    assert spread is not None
    assert (spread.trace_variance, spread.covariance) == pytest.approx((float(expected[0, 0]), float(expected[0, 1])))
    assert (spread.sq_norm_variance, spread.degrees) == pytest.approx((float(expected[1, 1]), 1 / share - 1))


def test_a_covariance_moves_the_interval_of_the_ratio():
    """What varies together cancels in a ratio."""

    def width(covariance: float) -> float:
        spread = Spread(trace_variance=1.0, sq_norm_variance=0.01, covariance=covariance, degrees=50)
        low, high = Diversity.from_noise(10.0, 1.0, 100, spread=spread).noise_scale_interval()
        return high - low

    assert width(0.1) < 1e-6 < width(0.05) < width(0.0) < width(-0.05)


def test_an_interval_survives_every_number():
    numbers = [0.0, 5e-324, 1e-200, 1e-30, 1.0, 1e30, 1e99, 1e200, 1e308, math.inf, math.nan]
    for trace, sq_norm, first, second in product(numbers, [-1.0, *numbers], numbers, numbers):
        spread = Spread(trace_variance=first, sq_norm_variance=second, covariance=1.0, degrees=1.0)
        low, high = Diversity(trace, sq_norm, 10, spread).noise_scale_interval()
        assert 0 <= low <= high


@pytest.mark.parametrize("value", [0, -0.5, 1.5, math.nan, True, "0.9"])
def test_a_wrong_decay_is_named(value: object):
    for make in (PairAverage, PerSample, Split, Moments):
        with pytest.raises(ArgumentError, match=f"decay={value!r}"):
            make(decay=value)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2), (1, 3), (4, 2)])
def test_batches_without_replacement_tell_of_what_the_samples_were_drawn_from(sizes: tuple[int, ...]):
    """Over all draws from six samples: ||G||^2 is theirs less tr(Sigma) / 6, so the oracle's B is B / (1 + B / 6)."""
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    draws = torch.stack([rows[list(order)] for order in permutations(range(6), sum(sizes))])
    means = torch.stack([chunk.mean(1) for chunk in draws.split(sizes, dim=1)])
    weighted = (torch.tensor(sizes)[:, None] * means.square().sum(2)).sum(0)
    means_of_all = draws.mean(1).square().sum(1)
    trace, sq_norm = (float(each.mean()) for each in unbiased(weighted, means_of_all, len(sizes), sum(sizes)))
    assert trace == pytest.approx(float(rows.var(0).sum()))
    assert sq_norm == pytest.approx(float(rows.mean(0).square().sum()) - trace / 6)
    exact = Diversity(float(rows.square().sum()), float(rows.sum(0).square().sum()), 6).noise_scale
    assert exact == pytest.approx(trace / (sq_norm + trace / 6) * 5 / 6)
