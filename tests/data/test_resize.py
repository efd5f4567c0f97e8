"""A batch size that changes within an epoch: still every sample once, and every position can be resumed."""

import tracemalloc
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from divebatch import AdaptiveLoader
from divebatch.data.order import Shuffled
from divebatch.data.source import TensorSource, make_source
from reference.feeding import numbers, with_workers

N = 23
MAKE = {
    "tensors": lambda size=4, **more: AdaptiveLoader(TensorDataset(torch.arange(N)), size, seed=5, **more),
    "map": lambda size=4, **more: AdaptiveLoader(range(N), size, seed=5, **more),
    "own sampler": lambda size=4: AdaptiveLoader.wrap(
        DataLoader(range(N), batch_size=size, sampler=SubsetRandomSampler(range(N))), seed=0
    ),
}
any_kind = pytest.mark.parametrize("kind", MAKE)


def listed(batch):
    return numbers([batch])[0]


def epoch(loader, changes: dict[int, int]) -> list[list[int]]:
    """An epoch whose size is set to `changes[i]` in the body of batch i; checks the length as it goes."""
    batches: list[list[int]] = []
    lengths = []
    for index, batch in enumerate(loader):
        batches.append(listed(batch))
        if index in changes:
            loader.resize_now(changes[index])
        lengths.append(len(loader))
    assert lengths[-1] == len(batches)
    return batches


# Coverage


@any_kind
@given(
    changes=st.dictionaries(st.integers(0, 8), st.integers(1, 30), max_size=4),
    more=st.dictionaries(st.integers(0, 8), st.integers(1, 30), max_size=2),
)
def test_every_sample_comes_once_whatever_the_changes(kind, changes, more):
    loader = MAKE[kind]()
    for asked in (changes, more):
        size = loader.batch_size
        batches = epoch(loader, asked)
        assert sorted(chain(*batches)) == list(range(N))
        for index, batch in enumerate(batches[:-1]):
            assert len(batch) == size
            size = asked.get(index, size)
        assert 1 <= len(batches[-1]) <= size


@with_workers
def test_the_order_is_the_epochs_own_and_prefetched_batches_are_cut_anew(workers):
    loader = AdaptiveLoader(range(N), 2, seed=5, **workers)
    for number in range(2):
        loader.batch_size = 2
        batches = epoch(loader, {1: 5, 2: 1, 4: 6})
        assert [len(batch) for batch in batches] == [2, 2, 5, 1, 1, 6, 6]
        assert list(chain(*batches)) == Shuffled(N, 5).draw(number).tolist()


@given(changes=st.dictionaries(st.integers(0, 8), st.integers(1, N), max_size=4))
def test_dropping_the_rest_leaves_whole_batches(changes):
    loader = MAKE["tensors"](4, drop_last=True)
    batches, size = epoch(loader, changes), 4
    for index, batch in enumerate(batches):
        assert len(batch) == size
        size = changes.get(index, size)
    assert N - sum(map(len, batches)) < size
    assert len(set(chain(*batches))) == sum(map(len, batches))
    assert loader.epoch == 1


# Observing


def test_an_observer_hears_before_each_batch_is_fetched_and_not_after_the_last():
    loader, heard = MAKE["tensors"](10), []
    forget = loader.observe(lambda current: heard.append((current.batches, current.samples)))
    for _ in loader:
        heard.append("body")  # noqa: PERF401
    assert heard == [(0, 0), "body", (1, 10), "body", (2, 20), "body"]
    forget()
    forget()
    assert len(list(loader)) == 3
    assert len(heard) == 6


def test_a_resumed_loop_first_hears_of_the_step_before():
    loader, heard = MAKE["tensors"](10), []
    batches = iter(loader)
    next(batches)
    resumed = MAKE["tensors"](10)
    resumed.observe(lambda current: heard.append(current.batches))
    resumed.load_state_dict(loader.state_dict())
    batches = iter(resumed)
    assert heard == []  # not before the loop begins: there is more to load than the loader
    next(batches)
    assert heard == [1]


# What a change costs


PLAIN = {"collate_fn": None, "generator": None, "num_workers": 0, "pin_memory": False}


class Places:
    """Where batches of two lie, and how many of them were asked for."""

    def __init__(self):
        self.asked = 0

    def __iter__(self):
        for first in range(0, 2_000, 2):
            self.asked += 1
            yield slice(first, first + 2)


@pytest.mark.parametrize("dataset", [range(2_000), TensorDataset(torch.arange(2_000))], ids=["map", "tensors"])
@pytest.mark.parametrize("kind", [torch.arange, lambda size: list(range(size))], ids=["tensor", "list"])
def test_a_source_looks_no_further_than_the_next_batch(dataset, kind):
    source, places = make_source(dataset, PLAIN), Places()
    batches = source.batches(kind(2_000), places, seed=(0, 0, 0))
    assert [listed(next(batches)) for _ in range(2)] == [[0, 1], [2, 3]]
    assert places.asked <= 4  # a DataLoader's batches are counted beside being drawn


def test_changes_of_size_make_no_copy_of_what_is_left():
    loader = AdaptiveLoader(range(200_000), 4, seed=0)
    batches = iter(loader)
    next(batches)
    tracemalloc.start()
    for size in (2, 8, 3):
        loader.resize_now(size)
        assert len(next(batches)) == size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000  # the numbers alone would take 40 bytes each


@any_kind
def test_an_order_is_given_up_with_the_end_of_its_pass(kind):
    loader = MAKE[kind]()
    for _ in loader:
        assert loader.current.order is not None
    assert loader._finished.order is None
    assert loader._finished.samples == N


@pytest.mark.parametrize("convert", [lambda order: order, lambda order: order.tolist()], ids=["tensor", "list"])
def test_an_order_goes_to_the_tensors_device_once_an_epoch(convert):
    source = TensorSource([torch.empty(N, device="meta")])
    first, second = (convert(Shuffled(N, 0).draw(epoch)) for epoch in range(2))
    assert source._on_device(first) is source._on_device(first)
    assert source._on_device(first) is not source._on_device(second)


# Resuming


@any_kind
@pytest.mark.parametrize("stop", range(6))
def test_a_state_after_changes_continues_with_the_very_next_sample(kind, stop):
    loader, changes = MAKE[kind](2), {0: 3, 2: 1, 3: 7}
    seen = []
    for index, batch in enumerate(loader):
        seen.append(listed(batch))
        if index in changes:
            loader.resize_now(changes[index])
        if index == stop:
            state = loader.state_dict()
    assert len(seen) == 6
    resumed = MAKE[kind](4)
    resumed.load_state_dict(state)
    later = {index - stop - 1: size for index, size in changes.items()}
    assert epoch_of_rest(resumed, later) == seen[stop + 1 :]
    assert (resumed.batches_delivered, resumed.samples_delivered, resumed.epoch) == (6, N, 1)


def epoch_of_rest(loader, changes):
    batches = []
    for index, batch in enumerate(loader):
        batches.append(listed(batch))
        if index in changes:
            loader.resize_now(changes[index])
    return batches
