"""AdaptiveLoader over map-style data: coverage, size changes, order, counting, and what it refuses."""

import sys
import weakref
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from divebatch import AdaptiveLoader
from divebatch.data.order import Shuffled
from divebatch.data.source import Numbers
from divebatch.errors import ArgumentError, UsageError
from divebatch.ranks import Ranks
from reference.feeding import counted, flat, numbers, with_workers

TENSORS = {
    "one": (torch.arange(23),),
    "two": (torch.randn(23, 4), torch.arange(23)),
    "images and half precision": (torch.randn(23, 3, 5, 5), torch.randn(23).half(), torch.arange(23) % 2 == 0),
    "not contiguous": (torch.randn(4, 23).T,),
}

quickly = settings(max_examples=50, deadline=None)
any_data = pytest.mark.parametrize("data", [range(23), TensorDataset(torch.arange(23))], ids=["map", "tensors"])


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


class WorkerSeeds(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.initial_seed()


class Marked(Dataset):
    """Shows the mark that a worker's start-up function has set in the worker's own copy."""

    mark = 0

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return self.mark


def mark_worker(worker_id):
    get_worker_info().dataset.mark = 7


# Coverage


@any_data
@quickly
@given(seed=st.integers(0, 9), batch_sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_every_sample_comes_once_an_epoch_at_any_sizes(data, seed, batch_sizes):
    loader = AdaptiveLoader(data, batch_sizes[0], seed=seed)
    for batch_size in batch_sizes:
        loader.batch_size = batch_size
        batches = numbers(loader)
        assert sorted(chain(*batches)) == list(range(23))
        assert {len(batch) for batch in batches[:-1]} <= {batch_size}
        assert 1 <= len(batches[-1]) <= batch_size


@any_data
@quickly
@given(batch_sizes=st.lists(st.integers(1, 23), min_size=1, max_size=5))
def test_dropping_the_rest_leaves_whole_batches_of_distinct_samples(data, batch_sizes):
    loader = AdaptiveLoader(data, 1, drop_last=True, seed=0)
    for batch_size in batch_sizes:
        loader.batch_size = batch_size
        batches = numbers(loader)
        assert [len(batch) for batch in batches] == [batch_size] * (23 // batch_size)
        assert len(set(chain(*batches))) == len(batches) * batch_size


@with_workers
def test_workers_deliver_every_sample_once_while_the_size_changes(workers):
    loader = AdaptiveLoader(range(23), 1, seed=5, **workers)
    for epoch, batch_size in enumerate((7, 50, 3)):
        loader.batch_size = batch_size
        batches = numbers(loader)
        assert list(chain(*batches)) == Shuffled(23, 5).draw(epoch).tolist()
        assert len(batches) == -(-23 // batch_size)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
def test_tensors_in_memory_come_as_from_a_torch_loader(tensors, shuffle, drop_last):
    data = TensorDataset(*tensors)
    order = Shuffled(23, 1).draw(0).tolist() if shuffle else range(23)
    by_torch = list(DataLoader(data, batch_size=5, sampler=order, drop_last=drop_last))
    ours = list(AdaptiveLoader(data, 5, shuffle=shuffle, seed=1, drop_last=drop_last))
    assert [type(batch) for batch in ours] == [type(batch) for batch in by_torch]
    torch.testing.assert_close(ours, by_torch, rtol=0, atol=0)


def test_sparse_tensors_in_memory_are_cut_too():
    rows = torch.eye(7, 3)
    batches = list(AdaptiveLoader(TensorDataset(rows.to_sparse()), 3, seed=1))
    assert torch.equal(torch.cat([x.to_dense() for (x,) in batches]), rows[Shuffled(7, 1).draw(0)])


@pytest.mark.parametrize("drop_last", [False, True])
def test_numbers_come_as_from_a_tensor_of_them(drop_last):
    looked_up, themselves = TensorDataset(torch.arange(23)), Numbers(23, torch.device("cpu"))
    expected, ours = (AdaptiveLoader(data, 5, seed=1, drop_last=drop_last) for data in (looked_up, themselves))
    for _ in range(2):
        torch.testing.assert_close(list(ours), list(expected), rtol=0, atol=0)
    torch.testing.assert_close(list(ours.full_pass()), list(expected.full_pass()), rtol=0, atol=0)
    by_torch = list(DataLoader(themselves, batch_size=5))
    torch.testing.assert_close(list(AdaptiveLoader(themselves, 5, shuffle=False)), by_torch, rtol=0, atol=0)


# The size


@with_workers
def test_a_size_set_during_an_epoch_reads_back_at_once_and_waits_for_the_next(workers):
    loader = AdaptiveLoader(range(23), 4, seed=0, **workers)
    sizes = []
    for batch in loader:
        loader.batch_size = 9
        assert (loader.batch_size, len(loader)) == (9, 6)
        sizes.append(len(batch))
    assert sizes == [4, 4, 4, 4, 4, 3]
    assert len(loader) == 3
    assert [len(batch) for batch in loader] == [9, 9, 5]


@quickly
@given(size=st.integers(1, 40), batch_size=st.integers(1, 50), drop_last=st.booleans())
def test_len_is_the_number_of_batches(size, batch_size, drop_last):
    loader = AdaptiveLoader(
        range(size), min(batch_size, size) if drop_last else batch_size, drop_last=drop_last, seed=0
    )
    assert len(loader) == len(list(loader)) >= 1


@pytest.mark.parametrize("batch_size", [0, -1, True, 2.5, None])
def test_a_wrong_batch_size_is_refused_and_the_old_one_kept(batch_size):
    with pytest.raises(ValueError, match=f"batch_size={batch_size!r}"):
        AdaptiveLoader(range(10), batch_size, seed=0)
    loader = AdaptiveLoader(range(10), 4, seed=0)
    with pytest.raises(ValueError, match=f"batch_size={batch_size!r}"):
        loader.batch_size = batch_size
    assert loader.batch_size == 4


def test_a_batch_larger_than_the_data_is_refused_only_when_it_would_be_dropped():
    assert [len(batch) for batch in AdaptiveLoader(range(10), 11, seed=0)] == [10]
    with pytest.raises(ArgumentError, match="batch_size=11 is larger than the 10 samples"):
        AdaptiveLoader(range(10), 11, drop_last=True, seed=0)
    loader = AdaptiveLoader(range(10), 10, drop_last=True, seed=0)
    with pytest.raises(ArgumentError, match="drop_last=False"):
        loader.batch_size = 11


# The order


@with_workers
def test_set_epoch_jumps_to_the_order_of_that_epoch(workers):
    loader = AdaptiveLoader(range(23), 4, seed=4, **workers)
    next(iter(loader))
    loader.set_epoch(7)
    assert flat(loader) == Shuffled(23, 4).draw(7).tolist()
    assert loader.epoch == 8


@any_data
@with_workers
def test_the_global_random_state_neither_matters_nor_moves(data, workers):
    loader = AdaptiveLoader(data, 4, seed=0, **workers)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert flat(loader) == Shuffled(23, 0).draw(0).tolist()
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_get_seeds_that_depend_on_seed_and_epoch_alone():
    def seeds(seed, epoch):
        loader = AdaptiveLoader(WorkerSeeds(), 1, seed=seed, num_workers=2)
        loader.set_epoch(epoch)
        return tuple(flat(loader))

    drawn = {pair: seeds(*pair) for pair in [(0, 0), (0, 1), (1, 0)]}
    torch.manual_seed(9)
    assert seeds(0, 1) == drawn[0, 1]
    assert len({seed for pair in drawn.values() for seed in pair}) == 6


# Leaving early and counting


@with_workers
def test_an_epoch_left_early_starts_again_and_does_not_count(workers):
    loader = AdaptiveLoader(range(23), 4, seed=0, **workers)
    for left_after in (1, 3):
        for number, _ in enumerate(loader, 1):
            if number == left_after:
                break
    next(iter(loader))
    assert loader.epoch == 0
    assert flat(loader) == Shuffled(23, 0).draw(0).tolist()
    assert (loader.epoch, loader.batches_delivered, loader.samples_delivered) == (1, 6, 23)


@any_data
def test_counts_grow_with_each_delivered_batch(data):
    loader = AdaptiveLoader(data, 10, seed=0)
    seen = [(loader.epoch, loader.batches_delivered, loader.samples_delivered) for _ in range(2) for _ in loader]
    assert seen == [(0, 1, 10), (0, 2, 20), (0, 3, 23), (1, 4, 33), (1, 5, 43), (1, 6, 46)]


@with_workers
def test_a_loop_that_counts_the_batches_finishes_the_epoch(workers):
    loader = AdaptiveLoader(range(23), 5, seed=0, **workers)
    for epoch in range(3):
        batches = counted(loader)
        assert flat(batches) == Shuffled(23, 0).draw(epoch).tolist()
    assert loader.finished_epoch(since=2).epoch == 2
    assert (loader.epoch, loader.samples_delivered) == (3, 69)


def test_an_epoch_left_early_names_both_ways_out():
    loader = AdaptiveLoader(range(40), 1, seed=0)
    next(iter(loader))
    with pytest.raises(UsageError, match=r"1 of 40 batches.*epoch_samples=.*skip step\(\)") as error:
        loader.finished_epoch(since=0)
    assert "epoch 1 has not ended" in str(error.value)
    short = AdaptiveLoader(range(40), 1, seed=0, epoch_samples=2)
    assert len(list(short)) == 2
    assert short.finished_epoch(since=0).samples == 2


def test_a_second_pass_before_the_step_is_named():
    loader = AdaptiveLoader(range(6), 2, seed=0)
    list(loader), list(loader)
    with pytest.raises(UsageError, match=r"2 epochs have ended.*full_pass\(\)"):
        loader.finished_epoch(since=0)


def test_a_look_after_the_end_of_an_epoch_counts_nothing():
    loader = AdaptiveLoader(range(6), 2, seed=0)
    list(loader)
    state = loader.state_dict()
    next(iter(loader))
    assert loader.finished_epoch(since=0).samples == 6
    assert (loader.epoch, loader.batches_delivered, loader.samples_delivered) == (1, 3, 6)
    assert loader.state_dict() == state


def test_what_came_since_the_last_step_is_counted_anew_with_each_epoch_and_resume():
    loader, resumed = (AdaptiveLoader(range(7), 2, seed=0) for _ in "ab")
    batches = iter(loader)
    next(batches), next(batches)
    assert loader.since_last_step() == (2, 4, 4)
    assert loader.since_last_step() == (0, 0, 0)
    next(batches)
    resumed.load_state_dict(loader.state_dict())
    assert list(map(len, resumed)) == [1]
    assert resumed.since_last_step() == (1, 1, 1)
    next(iter(loader))  # which leaves the epoch
    assert loader.since_last_step() == (1, 2, 2)


# What a program reads of a DataLoader


SETTINGS = {
    "none": {},
    "workers": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3, "timeout": 60.0},
    "functions": {"num_workers": 1, "worker_init_fn": print, "collate_fn": list, "generator": torch.Generator()},
}


@pytest.mark.parametrize("settings_of_loader", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("how", ["made", "wrapped"])
def test_settings_read_as_those_of_a_torch_loader(settings_of_loader, how):
    by_torch = DataLoader(range(23), 4, drop_last=True, **settings_of_loader)
    ours = AdaptiveLoader(range(23), 4, drop_last=True, **settings_of_loader)
    if how == "wrapped":
        ours = AdaptiveLoader.wrap(by_torch)
    names = [name for name in vars(by_torch) if not name.startswith("_") and "sampler" not in name]
    assert len(names) >= 13
    for name in [*names, "multiprocessing_context"]:
        assert getattr(ours, name) == getattr(by_torch, name), name


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_a_sampler_is_not_there_and_the_error_says_which_line_to_drop(name):
    loader = AdaptiveLoader(range(23), 4, seed=0)
    assert not hasattr(loader, name)  # a program that asks first goes on
    with pytest.raises(AttributeError, match=rf"drop the line.*{name}\.set_epoch\(epoch\).*skip_first_batches"):
        getattr(loader, name).set_epoch(1)


def test_a_worker_init_function_may_be_set_later():
    loader = AdaptiveLoader(Marked(), 4, seed=0, num_workers=2)
    loader.worker_init_fn = mark_worker
    assert set(flat(loader)) == set(flat(loader.full_pass())) == {7}
    in_memory = AdaptiveLoader(TensorDataset(torch.arange(3)), 4, seed=0)
    in_memory.worker_init_fn = mark_worker
    assert in_memory.worker_init_fn is mark_worker


def test_a_batch_takes_few_calls_of_our_own():
    batches, calls = iter(AdaptiveLoader(TensorDataset(torch.arange(23)), 4, seed=0)), []
    next(batches)

    def count(frame, event, _):
        if event == "call" and "divebatch" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        next(batches)
    finally:
        sys.setprofile(None)
    assert 1 <= len(calls) <= 4, calls


# A pass for measuring


@any_data
@with_workers
def test_a_full_pass_shows_every_sample_and_moves_nothing(data, workers):
    loader = AdaptiveLoader(data, 5, drop_last=True, seed=0, **workers)
    batches = iter(loader)
    delivered = numbers([next(batches)])
    state, random_state = loader.state_dict(), torch.get_rng_state()
    assert flat(loader.full_pass()) == list(range(23))
    assert loader.state_dict() == state
    assert torch.equal(torch.get_rng_state(), random_state)
    assert list(chain(*delivered, *numbers(batches))) == Shuffled(23, 0).draw(0).tolist()[:20]
    assert loader.epoch == 1


# What is refused


@pytest.mark.parametrize("data", [[], TensorDataset(torch.zeros(0, 3))], ids=["list", "tensors"])
def test_an_empty_dataset_is_refused(data):
    with pytest.raises(ArgumentError, match="empty"):
        AdaptiveLoader(data, 4, seed=0)


def test_a_dataset_without_length_is_refused():
    with pytest.raises(ArgumentError, match="Unsized has no length"):
        AdaptiveLoader(Unsized(), 4, seed=0)


@pytest.mark.parametrize("seed", [-1, True, 0.5, "0"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_wrong_seed_is_refused(seed, shuffle):
    with pytest.raises(ArgumentError, match=f"seed={seed!r}"):
        AdaptiveLoader(range(10), 4, shuffle=shuffle, seed=seed)


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_settings_that_wrap_takes_care_of_are_refused(name):
    with pytest.raises(ArgumentError, match=rf"{name} cannot be passed on; use AdaptiveLoader.wrap"):
        AdaptiveLoader(range(10), 4, **{name: range(10)})


def test_workers_must_keep_the_order():
    with pytest.raises(ArgumentError, match="in_order=False"):
        AdaptiveLoader(range(10), 4, num_workers=2, in_order=False, seed=0)


# The seed that is drawn


def test_without_a_seed_torch_decides_as_it_does_elsewhere():
    torch.manual_seed(7)
    first, second = AdaptiveLoader(range(23), 4), AdaptiveLoader(range(23), 4)
    torch.manual_seed(7)
    again = AdaptiveLoader(range(23), 4)
    assert first.seed == again.seed != second.seed
    assert flat(first) == flat(again) == Shuffled(23, first.seed).draw(0).tolist() != flat(second)


def test_ranks_take_the_seed_that_rank_0_has_drawn():
    class Second(Ranks):
        def from_first(self, _: object) -> int:
            return 5

    loader = AdaptiveLoader(range(23), 4)
    loader._join(Second(None))
    assert loader.seed == 5
    assert flat(loader) == Shuffled(23, 5).draw(0).tolist()


def test_wrapping_draws_the_seed_from_the_loaders_own_generator():
    own = torch.Generator().manual_seed(3)
    before = torch.get_rng_state()
    loaders = [AdaptiveLoader.wrap(DataLoader(range(23), 4, shuffle=True, generator=own.manual_seed(3))) for _ in "ab"]
    assert loaders[0].seed == loaders[1].seed
    assert torch.equal(torch.get_rng_state(), before)


# What is done to a batch, and how much of one comes at a time


@with_workers
def test_a_transform_makes_what_is_delivered(workers):
    loader = AdaptiveLoader(range(23), 4, shuffle=False, seed=0, transform=lambda batch: batch * 2, **workers)
    assert flat(loader) == flat(loader.full_pass()) == list(range(0, 46, 2))
    loader.transform = None
    assert flat(loader) == list(range(23))


@any_data
def test_batches_may_be_delivered_in_smaller_ones(data):
    loader = AdaptiveLoader(data, 12, shuffle=False, seed=0, delivery_size=5)
    for batch_size in (12, 20):
        loader.batch_size = batch_size
        assert len(loader) == 5
        assert [len(batch) for batch in numbers(loader)] == [5, 5, 5, 5, 3]
        assert loader.finished_epoch(since=loader.epoch - 1).batch_size == batch_size
    assert flat(loader.full_pass()) == list(range(23))


def test_a_wrong_delivery_size_is_refused():
    with pytest.raises(ArgumentError, match="delivery_size=0"):
        AdaptiveLoader(range(23), 4, delivery_size=0)


def test_no_batch_is_held_beside_the_loops_own_and_the_next(monkeypatch):
    alive: list[weakref.ref[Any]] = []
    select, most = torch.Tensor.index_select, 0

    def noted(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal most
        batch = select(tensor, *args)
        alive.append(weakref.ref(batch))
        most = max(most, sum(each() is not None for each in alive))
        return batch

    monkeypatch.setattr(torch.Tensor, "index_select", noted)
    for (_x,) in AdaptiveLoader(TensorDataset(torch.randn(64, 4)), 8, seed=0):
        pass
    assert most == 2
