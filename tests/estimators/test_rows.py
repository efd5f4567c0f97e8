"""Norms that are read late, against the same norms at once."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, micro_batches
from divebatch.estimators import Moments, Oracle, Split, average
from divebatch.estimators.average import PairAverage, norms_of, numbers_of, read
from divebatch.estimators.split import ChunkNorms
from divebatch.policies import NoiseScale
from reference import per_sample
from reference.per_sample import dataset, mean_loss, mlp

pytestmark = pytest.mark.filterwarnings("ignore:.* the noise scale, and .moments.")  # plain SGD has no momentum

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
    before_last = norms_of([torch.stack(sums[:-1]).sum(0)]) if len(sizes) > 2 else None
    norms = [norms_of([2 * part.mean(0)]) for part in parts]
    row = ChunkNorms(sizes, [0.25] * len(sizes), norms, norms_of([samples.sum(0)]), before_last)
    (found,) = numbers_of([row])
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
            step(model, optimizer, batch, 8 // parts)
    return seen.count


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], size: int) -> None:
    optimizer.zero_grad()
    for (x, y), share in micro_batches(batch, size):
        (mean_loss(model(x), y) * share).backward()
    optimizer.step()


def launches_of_two_steps(estimator: Callable[[], object], parts: int) -> int:
    return launches(estimator(), parts, 4) - launches(estimator(), parts, 2)


@pytest.mark.parametrize(("kind", "parts", "count"), [(Moments, 1, 2 * 3), (Split, 2, 2 * (2 * 3 + 3))])
def test_a_step_costs_few_launches(kind, parts: int, count: int):
    """Three for each step of moments: a copy, a norm, a product. Of split, three a chunk and three an estimate."""
    plain = launches_of_two_steps(lambda: Oracle(mean_loss), parts)
    assert launches_of_two_steps(kind, parts) - plain == count


@pytest.mark.parametrize("kind", [Moments, Split])
def test_it_does_not_matter_when_they_are_read(kind, monkeypatch: pytest.MonkeyPatch):
    found = []
    for most in (average.MOST_WAITING, 1, 3):
        monkeypatch.setattr(average, "MOST_WAITING", most)
        model = mlp()
        loader, optimizer = AdaptiveLoader(DATA, 4, seed=0), torch.optim.SGD(model.parameters(), 0.01)
        with Controller(model, optimizer, loader, NoiseScale(64), estimator=kind(decay=0.9)) as control:
            for batch in loader:
                step(model, optimizer, batch, 2)
            found.append(control.step())
    assert found[0] == found[1] == found[2]


def test_squares_beyond_all_numbers_are_infinite_and_no_error():
    huge = norms_of([torch.full((2,), 1e155, dtype=torch.float64)])
    (found,) = numbers_of([ChunkNorms((2, 2), (1.0, 1.0), (huge, 0.0), huge, None)])
    assert not any(map(math.isfinite, found[1:]))


def test_numbers_on_the_host_are_averaged_as_tensors_are():
    generator = torch.Generator().manual_seed(0)
    pairs, weights = torch.randn(5, 3, generator=generator, dtype=torch.float64), [4.0, 1.0, 0.0, 2.0, 3.0]
    pairs[2] = torch.nan  # has no weight
    by_one, at_once = PairAverage(decay=0.9), PairAverage(decay=0.9)
    for pair, weight in zip(pairs, weights, strict=True):
        by_one.add(pair, weight)
    at_once.extend(pairs[:2].tolist(), weights[:2])
    at_once.extend(pairs[2:].tolist(), weights[2:])
    at_once.extend([], [])
    assert at_once.state_dict() == by_one.state_dict()


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
            for batch in loader:
                step(model, optimizer, batch, 4)
            found.append(control.step().diversity)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
