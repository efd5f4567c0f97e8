"""AdaptiveLoader.wrap: an existing DataLoader goes on as it was, with a batch size that may change."""

from collections import namedtuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from divebatch import AdaptiveLoader
from divebatch.data.order import Shuffled
from divebatch.errors import ArgumentError
from reference.feeding import Stream, flat

Sample = namedtuple("Sample", ["x", "y"])


class Pairs(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.full((3,), float(index)), index


class Positions:
    """A sampler that yields what it was given."""

    def __init__(self, positions):
        self.positions = positions

    def __iter__(self):
        return iter(self.positions)

    def __len__(self):
        return len(self.positions)


class Buckets(BatchSampler):
    """A batch sampler with ideas of its own."""


def as_dict(samples):
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.tensor([y for _, y in samples])}


def as_named_tuple(samples):
    return Sample(**as_dict(samples))


def as_nested(samples):
    return {"inputs": [as_dict(samples), (torch.tensor(len(samples)),)]}


def assert_same(ours, theirs):
    ours, theirs = list(ours), list(theirs)
    assert [type(batch) for batch in ours] == [type(batch) for batch in theirs]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# Order


def test_plain_shuffling_becomes_a_function_of_seed_and_epoch():
    loader = AdaptiveLoader.wrap(DataLoader(range(11), batch_size=3, shuffle=True), seed=4)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert [flat(loader), flat(loader)] == [Shuffled(11, 4).draw(epoch).tolist() for epoch in range(2)]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_sequential_loader_gives_the_batches_it_gave(workers):
    theirs = DataLoader(Pairs(), batch_size=4, **workers)
    loader = AdaptiveLoader.wrap(theirs, seed=0)
    assert loader.batch_size == 4
    assert_same(loader, theirs)
    loader.batch_size = 6
    assert_same(loader, DataLoader(Pairs(), batch_size=6))


def test_dropping_the_rest_is_taken_over():
    loader = AdaptiveLoader.wrap(DataLoader(range(11), batch_size=4, drop_last=True), seed=0)
    assert [len(batch) for batch in loader] == [4, 4]
    with pytest.raises(ArgumentError, match="larger than the 11 samples"):
        loader.batch_size = 12


SAMPLERS = {
    "subset": lambda: SubsetRandomSampler(range(2, 9)),
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, 12.0), 20),
    "with replacement": lambda: RandomSampler(range(11), replacement=True),
    "a few": lambda: RandomSampler(range(11), num_samples=5),
    "many times": lambda: RandomSampler(range(11), num_samples=25),
    "list": lambda: [10, 3, 3, 5],
    "tensors": lambda: Positions(torch.tensor([10, 3, 3, 5])),
    "from the end": lambda: Positions([-1, 0, -2, 5]),
}


@pytest.mark.parametrize("data", [range(11), TensorDataset(torch.arange(11))], ids=["map", "tensors"])
@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_an_own_sampler_keeps_drawing_the_order(data, make):
    theirs = DataLoader(data, batch_size=3, sampler=make(), generator=torch.Generator())
    torch.manual_seed(0)
    expected = [list(theirs), list(theirs)]
    loader = AdaptiveLoader.wrap(theirs, seed=0)
    torch.manual_seed(0)
    assert loader.dataset_size == len(theirs.sampler)
    for batches in expected:
        assert len(loader) == len(batches)
        assert_same(loader, batches)


def test_a_full_pass_shows_what_a_random_sampler_drew_without_drawing_again():
    loader = AdaptiveLoader.wrap(DataLoader(range(11), 3, sampler=WeightedRandomSampler(torch.ones(11), 11)), seed=0)
    drawn = flat(loader)
    before = torch.get_rng_state()
    assert flat(loader.full_pass()) == drawn
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sampler_is_told_the_epoch():
    ours, theirs = (DistributedSampler(range(11), num_replicas=2, rank=0, seed=3) for _ in range(2))
    loader = AdaptiveLoader.wrap(DataLoader(range(11), batch_size=3, sampler=ours), seed=0)
    for epoch in range(3):
        theirs.set_epoch(epoch)
        assert flat(loader) == list(theirs)


# Batches


@pytest.mark.parametrize("collate", [None, as_dict, as_named_tuple, as_nested])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_any_structure_pass_through_and_are_counted(collate, workers):
    theirs = DataLoader(Pairs(), batch_size=4, collate_fn=collate, num_workers=workers)
    loader = AdaptiveLoader.wrap(theirs, seed=0)
    assert_same(loader, theirs)
    assert loader.samples_delivered == 11
    assert_same(loader.full_pass(), theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_can_be_wrapped(workers):
    theirs = DataLoader(Stream(11), batch_size=4, drop_last=True, num_workers=workers)
    assert_same(AdaptiveLoader.wrap(theirs, seed=0), theirs)


# Settings


def test_pinned_memory_is_taken_over():
    loader = AdaptiveLoader.wrap(DataLoader(TensorDataset(torch.arange(11)), batch_size=4, pin_memory=True), seed=0)
    if torch.accelerator.is_available():
        assert all(batch.is_pinned() for (batch,) in loader)
    else:
        with pytest.warns(UserWarning, match="pin_memory"):
            list(loader)


def test_a_generator_of_its_own_seeds_the_workers():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    list(AdaptiveLoader.wrap(DataLoader(range(11), batch_size=4, generator=generator), seed=0))
    assert not torch.equal(generator.get_state(), before)


# What is refused


def test_a_batch_sampler_with_ideas_of_its_own_is_refused():
    with pytest.raises(ArgumentError, match=r"batch sampler is: Buckets.*NoiseMeter"):
        AdaptiveLoader.wrap(
            DataLoader(range(11), batch_sampler=Buckets(SequentialSampler(range(11)), 3, False)), seed=0
        )


def test_a_loader_without_batches_is_refused():
    with pytest.raises(ArgumentError, match=r"batch_size=None"):
        AdaptiveLoader.wrap(DataLoader(range(11), batch_size=None), seed=0)


def test_an_empty_loader_is_refused():
    with pytest.raises(ArgumentError, match="empty"):
        AdaptiveLoader.wrap(DataLoader([]), seed=0)
    with pytest.raises(ArgumentError, match="empty"):
        AdaptiveLoader.wrap(DataLoader(range(11), sampler=[]), seed=0)


@pytest.mark.parametrize("num_samples", [10**10, 10**8 + 1])
def test_a_sampler_of_more_samples_than_memory_holds_is_refused_at_once(num_samples):
    sampler = RandomSampler(range(11), replacement=True, num_samples=num_samples)
    with pytest.raises(ArgumentError, match=rf"RandomSampler draws {num_samples} samples.*epoch_samples=N"):
        AdaptiveLoader.wrap(DataLoader(range(11), batch_size=4, sampler=sampler))


def test_what_is_no_loader_is_refused_by_its_name():
    with pytest.raises(ArgumentError, match="Pairs"):
        AdaptiveLoader.wrap(Pairs(), seed=0)
