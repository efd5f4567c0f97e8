"""The order of an epoch, how it is cut into batches, and the batch sampler made of both."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from divebatch import AdaptiveBatchSampler
from divebatch.data.order import FromSampler, InParts, Sequential, Shuffled, index_dtype, mixed_seed
from divebatch.data.sampler import checked_batch_size, cut, num_batches
from divebatch.errors import ArgumentError

NOT_A_BATCH_SIZE = [0, -1, True, 2.5, 2.0, "2", None]
NOT_A_SEED = [-1, True, 0.5, "0", None]
quickly = settings(max_examples=50, deadline=None)
FORKING = "ignore:This process .* is multi-threaded:DeprecationWarning"


class EpochListener:
    """A sampler whose order is the epoch it was told, over and over."""

    def __init__(self, size):
        self.size, self.epoch, self.drawings = size, None, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.drawings += 1
        return iter([self.epoch] * self.size)

    def __len__(self):
        return self.size


# Orders


@quickly
@given(size=st.integers(1, 200), seed=st.integers(0, 2**63), epoch=st.integers(0, 10_000))
def test_a_shuffled_order_has_every_index_once(size, seed, epoch):
    order = Shuffled(size, seed)
    assert len(order) == size
    assert sorted(order.draw(epoch).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [1, 30, 70_000])
def test_an_order_is_torchs_permutation_in_half_the_bytes(size):
    by_torch = torch.randperm(size, generator=torch.Generator().manual_seed(mixed_seed(3, 4)))
    drawn = Shuffled(size, 3).draw(4)
    assert drawn.tolist() == by_torch.tolist()
    assert drawn.nbytes == Sequential(size).draw(4).nbytes == 4 * size
    assert index_dtype(2**31) == torch.int64


def test_a_part_of_a_pass_does_not_keep_the_pass():
    part = InParts(Shuffled(30, 0), 7).draw(1)
    assert part.tolist() == Shuffled(30, 0).draw(0).tolist()[6:12]
    assert part.untyped_storage().nbytes() == part.nbytes


@quickly
@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 10_000))
def test_an_order_depends_on_seed_and_epoch_alone(seed, epoch):
    order = Shuffled(30, seed)
    first = order.draw(epoch)
    torch.manual_seed(epoch)
    order.draw(epoch + 1)
    assert torch.equal(order.draw(epoch), first)
    assert torch.equal(Shuffled(30, seed).draw(epoch), first)


def test_every_seed_and_epoch_has_its_own_order():
    orders = {tuple(Shuffled(30, seed).draw(epoch).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_the_next_epoch_is_not_the_next_seed():
    assert not torch.equal(Shuffled(30, 0).draw(1), Shuffled(30, 1).draw(0))


@quickly
@given(seed=st.integers(0, 2**31), high=st.integers(1, 100))
def test_a_seed_of_more_than_32_bits_is_not_a_later_epoch_of_a_small_one(seed, high):
    assert mixed_seed(seed + high * 2**32, 0) != mixed_seed(seed, high)


def test_a_sequential_order_is_the_same_every_epoch():
    assert Sequential(4).draw(0).tolist() == Sequential(4).draw(7).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", NOT_A_SEED)
def test_a_wrong_seed_is_named(seed):
    with pytest.raises(ArgumentError, match="seed=" + repr(seed)):
        Shuffled(10, seed)


def test_a_sampler_is_told_the_epoch_and_asked_once():
    sampler = EpochListener(3)
    order = FromSampler(sampler)
    assert (len(order), order.draw(5), order.fixed()) == (3, [5, 5, 5], [5, 5, 5])
    assert sampler.drawings == 1


def test_a_sampler_needs_a_length_and_a_sample():
    with pytest.raises(ArgumentError, match="generator has no length"):
        FromSampler(i for i in range(3))
    with pytest.raises(ArgumentError, match="empty"):
        FromSampler([])


# Cutting


@quickly
@given(size=st.integers(0, 50), batch_size=st.integers(1, 60), drop_last=st.booleans(), start=st.integers(0, 10))
def test_cutting_agrees_with_torch(size, batch_size, drop_last, start):
    by_torch = list(BatchSampler(range(start, start + size), batch_size, drop_last))
    places = cut(start + size, batch_size, drop_last=drop_last, start=start)
    assert [list(range(start + size)[place]) for place in places] == by_torch
    assert num_batches(size, batch_size, drop_last=drop_last) == len(by_torch)


@pytest.mark.parametrize("batch_size", NOT_A_BATCH_SIZE)
def test_a_wrong_batch_size_is_named(batch_size):
    with pytest.raises(ArgumentError, match=f"batch_size={batch_size!r}"):
        checked_batch_size(batch_size, dataset_size=10, drop_last=False)


def test_only_dropping_the_rest_limits_the_batch_to_the_data():
    assert checked_batch_size(11, dataset_size=10, drop_last=False) == 11
    assert checked_batch_size(10, dataset_size=10, drop_last=True) == 10
    assert checked_batch_size(11, dataset_size=None, drop_last=True) == 11
    with pytest.raises(ArgumentError, match="batch_size=11 is larger than the 10 samples"):
        checked_batch_size(11, dataset_size=10, drop_last=True)


# The batch sampler


@quickly
@given(
    size=st.integers(1, 60), seed=st.integers(0, 9), batch_sizes=st.lists(st.integers(1, 70), min_size=1, max_size=5)
)
def test_the_sampler_yields_every_index_once_an_epoch_at_any_sizes(size, seed, batch_sizes):
    sampler = AdaptiveBatchSampler(size, 1, seed=seed)
    for epoch, batch_size in enumerate(batch_sizes):
        sampler.batch_size = batch_size
        by_torch = list(BatchSampler(Shuffled(size, seed).draw(epoch).tolist(), batch_size, drop_last=False))
        assert len(sampler) == len(by_torch)
        assert list(sampler) == by_torch
        assert sorted(itertools.chain(*by_torch)) == list(range(size))


def test_the_sampler_drops_an_incomplete_last_batch_where_asked():
    sampler = AdaptiveBatchSampler(7, 3, shuffle=False, drop_last=True)
    assert (len(sampler), list(sampler)) == (2, [[0, 1, 2], [3, 4, 5]])


def test_a_size_set_during_an_epoch_reads_back_at_once_and_waits_for_the_next():
    sampler = AdaptiveBatchSampler(6, 2, shuffle=False)
    batches = iter(sampler)
    sampler.batch_size = 3
    assert sampler.batch_size == 3
    assert list(batches) == [[0, 1], [2, 3], [4, 5]]
    assert list(sampler) == [[0, 1, 2], [3, 4, 5]]


def test_only_a_complete_pass_moves_the_sampler_on():
    sampler = AdaptiveBatchSampler(20, 4, seed=0)
    first = next(iter(sampler))
    assert sampler.epoch == 0
    epoch_0, epoch_1 = list(sampler), list(sampler)
    assert sampler.epoch == 2
    assert epoch_0[0] == first != epoch_1[0]


def test_a_loop_that_counts_the_batches_moves_the_sampler_on():
    sampler = AdaptiveBatchSampler(20, 4, seed=0)
    first, second = ([batch for _, batch in zip(range(len(sampler)), sampler, strict=False)] for _ in range(2))
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(20))
    assert first != second


def test_set_epoch_jumps():
    by_passing, by_jumping = AdaptiveBatchSampler(20, 4, seed=3), AdaptiveBatchSampler(20, 4, seed=3)
    list(by_passing), list(by_passing)
    by_jumping.set_epoch(2)
    assert list(by_jumping) == list(by_passing)


@pytest.mark.filterwarnings(FORKING)
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_the_sampler_serves_a_torch_loader(workers):
    sampler = AdaptiveBatchSampler(23, 1, seed=0)
    loader = DataLoader(range(23), batch_sampler=sampler, **workers)
    for epoch, batch_size in enumerate((4, 30, 3)):
        sampler.batch_size = batch_size
        batches = [batch.tolist() for batch in loader]
        assert list(itertools.chain(*batches)) == Shuffled(23, 0).draw(epoch).tolist()
        assert {len(batch) for batch in batches[:-1]} <= {batch_size}


@pytest.mark.parametrize("size", [0, -1, True, 2.5])
def test_the_sampler_refuses_a_wrong_dataset_size(size):
    with pytest.raises(ArgumentError, match=f"dataset_size={size!r}"):
        AdaptiveBatchSampler(size, 1, seed=0)


@pytest.mark.parametrize("batch_size", NOT_A_BATCH_SIZE)
def test_the_sampler_refuses_a_wrong_batch_size_and_keeps_the_old_one(batch_size):
    with pytest.raises(ArgumentError, match="batch_size="):
        AdaptiveBatchSampler(10, batch_size, seed=0)
    sampler = AdaptiveBatchSampler(10, 4, seed=0)
    with pytest.raises(ArgumentError, match="batch_size="):
        sampler.batch_size = batch_size
    assert sampler.batch_size == 4


def test_the_sampler_refuses_an_epoch_without_a_batch():
    with pytest.raises(ArgumentError, match="would leave no batch at all"):
        AdaptiveBatchSampler(10, 11, drop_last=True, seed=0)


def test_a_sampler_goes_on_from_the_epoch_of_a_state():
    sampler, other = AdaptiveBatchSampler(20, 4), AdaptiveBatchSampler(20, 7)
    list(sampler)
    sampler.batch_size = 6
    state = sampler.state_dict()
    next(iter(sampler))  # an epoch that was left is not over
    assert sampler.state_dict() == state
    other.load_state_dict(state)
    assert (other.batch_size, list(other)) == (6, list(sampler))


def test_without_a_seed_torch_decides_over_the_sampler():
    torch.manual_seed(3)
    first, second = AdaptiveBatchSampler(20, 4), AdaptiveBatchSampler(20, 4)
    torch.manual_seed(3)
    assert first.seed == AdaptiveBatchSampler(20, 4).seed != second.seed
