"""Means of many small estimates, and their spread; norms that are read late, against the same norms at once."""

import math
from collections.abc import Callable
from itertools import permutations, product

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, Diversity
from divebatch.errors import ArgumentError
from divebatch.estimators import Moments, Oracle, PerSample, Split
from divebatch.estimators import average as averages
from divebatch.estimators.average import PairAverage, norms_of, read, unbiased
from divebatch.estimators.split import numbers_of_chunks
from divebatch.measurement import Spread
from divebatch.policies import NoiseScale
from reference import per_sample
from reference.per_sample import dataset, mean_loss, mlp, train


def average_of(num_samples: int, *, decay: float = 1.0) -> PairAverage:
    average = PairAverage(decay=decay)
    average.num_samples = num_samples
    return average


def test_an_exponential_mean_by_hand():
    values, decay, average = [4.0, 1.0, 7.0], 0.8, average_of(3, decay=0.8)
    for value in values:
        average.extend([[value, 1.0]], [1])
    weights = [decay**2, decay, 1.0]
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    measured = average.diversity()
    assert measured.trace == pytest.approx(mean)
    assert measured.spread is not None
    assert measured.spread.degrees == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) - 1)


def test_the_spread_of_equal_weights_is_the_textbooks():
    pairs, average = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), average_of(7)
    for pair in pairs:
        average.extend([pair.tolist()], [5])
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


# Norms that are read late

plain_sgd = pytest.mark.filterwarnings("ignore:.* cannot grow the batch")  # it has no momentum
DATA = dataset(41)


def test_norms_of_many_kinds_are_read_in_order():
    generator = torch.Generator().manual_seed(0)
    groups = [[torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator)] for _ in range(4)]
    groups[2] = [each.double() for each in groups[2]]
    expected = [float(sum(each.double().square().sum() for each in group)) for group in groups]
    many = [norms_of(groups[0]), 7.0, *map(norms_of, groups[1:]), norms_of([])]
    assert read(many) == pytest.approx([expected[0], 7.0, *expected[1:], 0.0], rel=1e-6)
    assert read([]) == []


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (3, 1, 2)])
def test_a_row_is_the_analysis_of_variance_between_its_chunks(sizes: tuple[int, ...]):
    samples = torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.3
    parts = list(samples.split(sizes))
    sums = [part.sum(0) for part in parts]
    before_last = [norms_of([torch.stack(sums[:-1]).sum(0)])] if len(sizes) > 2 else []
    norms = [norms_of([2 * part.mean(0)]) for part in parts]
    values = read([*norms, norms_of([samples.sum(0)]), *before_last])
    found = numbers_of_chunks(values, sizes=sizes, factors=[0.25] * len(sizes))
    assert found[1:3] == pytest.approx(per_sample.pair_of(parts), rel=1e-12)
    *first, last = parts
    apart = (torch.cat(first).mean(0) - last.mean(0)) @ samples.mean(0)
    assert found[3] == pytest.approx(float(apart**2) * len(last) * (1 - len(last) / sum(sizes)), rel=1e-9)


class Launches(TorchDispatchMode):
    """Operators that would be launches on a GPU, one or more each."""

    FREE = ("view", "detach", "alias", "slice", "select", "empty")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not any(name in str(func) for name in self.FREE)
        return func(*args, **(kwargs or {}))


def launches(estimator: object, parts: int, steps: int) -> int:
    model = mlp()
    loader, optimizer, seen = AdaptiveLoader(DATA, 8, seed=0), torch.optim.SGD(model.parameters(), 0.01), Launches()
    with Controller(model, optimizer, loader, NoiseScale(64), estimator=estimator), seen:
        for _, batch in zip(range(steps), loader, strict=False):
            train(model, optimizer, [batch], parts_of=8 // parts)
    return seen.count


def launches_of_two_steps(estimator: Callable[[], object], parts: int) -> int:
    return launches(estimator(), parts, 4) - launches(estimator(), parts, 2)


@plain_sgd
@pytest.mark.parametrize(("kind", "parts", "count"), [(Moments, 1, 2 * 3), (Split, 2, 2 * (2 * 3 + 3))])
def test_a_step_costs_few_launches(kind, parts: int, count: int):
    """Three for each step of moments: a copy, a norm, a product. Of split, three a chunk and three an estimate."""
    plain = launches_of_two_steps(lambda: Oracle(mean_loss), parts)
    assert launches_of_two_steps(kind, parts) - plain == count


@plain_sgd
@pytest.mark.parametrize("kind", [Moments, Split])
def test_it_does_not_matter_when_they_are_read(kind, monkeypatch: pytest.MonkeyPatch):
    found = []
    for most in (averages.MOST_WAITING, 1, 3):
        monkeypatch.setattr(averages, "MOST_WAITING", most)
        model = mlp()
        loader, optimizer = AdaptiveLoader(DATA, 4, seed=0), torch.optim.SGD(model.parameters(), 0.01)
        with Controller(model, optimizer, loader, NoiseScale(64), estimator=kind(decay=0.9)) as control:
            train(model, optimizer, loader, parts_of=2)
            found.append(control.step())
    assert found[0] == found[1] == found[2]


@plain_sgd
@pytest.mark.parametrize("kind", [Moments, Split])
def test_sparse_gradients_count_as_dense_ones(kind):
    """With tokens that repeat, of which a sparse gradient has several entries."""
    tokens, targets = torch.randint(3, (24, 4), generator=torch.Generator().manual_seed(0)), torch.ones(24, 2)
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.EmbeddingBag(3, 2, mode="sum", sparse=sparse)
        loader = AdaptiveLoader(TensorDataset(tokens, targets), 8, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with Controller(model, optimizer, loader, NoiseScale(64), estimator=kind()) as control:
            train(model, optimizer, loader, parts_of=4)
            found.append(control.step().diversity)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
