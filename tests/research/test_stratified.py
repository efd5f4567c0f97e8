"""Orders that spread classes evenly: every sample once, classes in proportion anywhere, and less variance."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from divebatch import AdaptiveLoader, Controller, Fixed, micro_batches
from divebatch.data.source import shard_places
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.ranks import Ranks
from divebatch.research import StratifiedBatches

quickly = settings(max_examples=40, deadline=None)
labels = st.lists(st.integers(0, 4), min_size=1, max_size=60)


@quickly
@given(labels=labels, seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_an_epoch_has_every_sample_once_and_depends_on_seed_and_epoch(labels, seed, epoch):
    order = StratifiedBatches(labels, seed=seed)
    drawn = order.draw(epoch).tolist()
    assert sorted(drawn) == list(range(len(labels)))
    order.draw(epoch + 1)
    assert order.draw(epoch).tolist() == StratifiedBatches(labels).seeded(seed).draw(epoch).tolist() == drawn


@quickly
@given(labels=labels, seed=st.integers(0, 2**40))
def test_any_samples_in_a_row_hold_each_class_in_proportion(labels, seed):
    drawn = np.array(labels)[StratifiedBatches(labels, seed=seed).draw(0).numpy()]
    classes, counts = np.unique(labels, return_counts=True)
    for name, count in zip(classes, counts, strict=True):
        share = count / len(labels)
        so_far = np.concatenate([[0.0], np.cumsum(drawn == name) - share * np.arange(1, len(labels) + 1)])
        most = 1 + share * max(0, len(classes) - 2)
        assert so_far.max() - so_far.min() < most + 1e-9


def test_labels_may_be_a_tensor_names_or_numbers_and_other_labels_make_another_order():
    names = ["cat", "dog", "cat", "cow"]
    numbers = torch.tensor([3, 4, 3, 9])
    assert StratifiedBatches(names).draw(0).tolist() != []
    assert StratifiedBatches([0, 2, 0, 1]).draw(3).tolist() == StratifiedBatches(names).draw(3).tolist()
    assert StratifiedBatches(numbers).draw(3).tolist() == StratifiedBatches([0, 1, 0, 2]).draw(3).tolist()


# In a loader

N = 50
LABELS = [0] * 25 + [1] * 15 + [2] * 10


def loader_of(size=10, **more):
    return AdaptiveLoader(TensorDataset(torch.arange(N)), size, order=StratifiedBatches(LABELS), seed=5, **more)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(N))


def numbers(batches):
    return [x.tolist() for (x,) in batches]


def test_sizes_change_within_an_epoch_and_a_resume_goes_on():
    whole, cut = loader_of(), loader_of()
    expected, seen = [], []
    for index, (x,) in enumerate(whole):
        expected.append(x.tolist())
        whole.resize_now([7, 20, 3][index % 3])
    batches = iter(cut)
    for index in range(3):
        seen.append(next(batches)[0].tolist())
        cut.resize_now([7, 20, 3][index % 3])
    resumed = loader_of()
    resumed.load_state_dict(cut.state_dict())
    for index, (x,) in enumerate(resumed, 3):
        seen.append(x.tolist())
        resumed.resize_now([7, 20, 3][index % 3])
    assert seen == expected
    assert sorted(chain(*seen)) == list(range(N))
    assert list(chain(*numbers(loader_of()))) == StratifiedBatches(LABELS, seed=5).draw(0).tolist() == [*chain(*seen)]


def test_ranks_and_parts_of_an_epoch_are_stratified_too():
    order = torch.tensor(LABELS)[StratifiedBatches(LABELS, seed=1).draw(0).long()]
    rank = Ranks.alone()
    rank.rank, rank.size = 1, 2
    for place in shard_places(N, 20, rank, drop_last=True):
        assert order[place].bincount(minlength=3).tolist() == pytest.approx([5, 3, 2], abs=1.5)
    parts = loader_of(epoch_samples=25)
    assert sorted(chain(*numbers(parts), *numbers(parts))) == list(range(N))


def test_a_dataloader_may_bring_it_as_its_sampler():
    data = TensorDataset(torch.arange(N))
    wrapped = AdaptiveLoader.wrap(DataLoader(data, 10, sampler=StratifiedBatches(LABELS)), seed=5)
    assert numbers(wrapped) == numbers(loader_of())
    with pytest.raises(ArgumentError, match="order of 49 samples"):
        AdaptiveLoader.wrap(DataLoader(data, 10, sampler=StratifiedBatches(LABELS[1:])))


def test_labels_that_do_not_cover_the_data_are_refused():
    data = TensorDataset(torch.arange(N))
    with pytest.raises(ArgumentError, match="order of 49 samples, and the dataset has 50"):
        AdaptiveLoader(data, 10, order=StratifiedBatches(LABELS[1:]))
    with pytest.raises(ArgumentError, match="shuffle=False"):
        AdaptiveLoader(data, 10, order=StratifiedBatches(LABELS), shuffle=False)
    with pytest.raises(ArgumentError, match="must be an Order"):
        AdaptiveLoader(data, 10, order=LABELS)
    for wrong in ([], torch.zeros(N, 2)):
        with pytest.raises(ArgumentError, match="one class for each sample"):
            StratifiedBatches(wrong)
    with pytest.raises(ArgumentError, match="IterableDataset"):
        AdaptiveLoader(Stream(), 10, order=StratifiedBatches(LABELS))


def test_a_state_of_other_labels_or_another_order_is_refused():
    state = loader_of().state_dict()
    other = AdaptiveLoader(TensorDataset(torch.arange(N)), 10, order=StratifiedBatches(LABELS[::-1]), seed=5)
    with pytest.raises(CheckpointError, match="labels"):
        other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="order"):
        AdaptiveLoader(TensorDataset(torch.arange(N)), 10, seed=5).load_state_dict(state)


# The variance

CLASSES, EACH, FEATURES = 4, 250, 30
SHARES = torch.arange(CLASSES).repeat_interleave(EACH)


def classed_data():
    """Samples that are their own gradients: classes differ far more than the samples of one."""
    generator = torch.Generator().manual_seed(0)
    means = 2 * torch.randn(CLASSES, FEATURES, generator=generator)
    return means[SHARES] + torch.randn(len(SHARES), FEATURES, generator=generator) + 1.0


def scatter(samples):
    return (samples - samples.mean(0)).square().sum(1).mean().item()


@pytest.mark.parametrize(("estimator", "sees_all"), [("split", False), ("moments", False), ("per-sample", True)])
def test_which_part_estimators_see(estimator, sees_all):
    data = classed_data()
    net = nn.Linear(FEATURES, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9, momentum=0.9)
    loader = AdaptiveLoader(TensorDataset(data), 40, order=StratifiedBatches(SHARES), seed=0)
    control = Controller(net, optimizer, loader, Fixed(), estimator=estimator, measure_always=True)
    scales = []
    for _ in range(8):
        for batch in loader:
            optimizer.zero_grad()
            for (x,), weight in micro_batches(batch, 20):
                (net(x).mean() * weight).backward()
            optimizer.step()
        scales.append(control.step().noise_scale)
    within = sum(scatter(data[label == SHARES]) for label in range(CLASSES)) / CLASSES
    expected = (scatter(data) if sees_all else within) / data.mean(0).square().sum().item()
    assert sum(scales) / len(scales) == pytest.approx(expected, rel=0.1)
