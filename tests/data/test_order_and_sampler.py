"""The order of an epoch, and how it is cut into batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from divebatch.data.order import FromSampler, InParts, Sequential, Shuffled, index_dtype, mixed_seed, num_batches
from divebatch.data.source import shard_places
from divebatch.errors import ArgumentError
from divebatch.ranks import Ranks

NOT_A_SEED = [-1, True, 0.5, "0", None]
quickly = settings(max_examples=50, deadline=None)


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
    places = shard_places(start + size, batch_size, Ranks.alone(), drop_last=drop_last, start=start)
    assert [list(range(start + size)[place]) for place in places] == by_torch
    assert num_batches(size, batch_size, drop_last=drop_last) == len(by_torch)
