"""AdaptiveLoader over an IterableDataset: its own order, batched by the size in force."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from divebatch import AdaptiveLoader
from divebatch.errors import ArgumentError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

WORKERS = {
    "none": {},
    "two": {"num_workers": 2},
    "two persistent": {"num_workers": 2, "persistent_workers": True},
}
with_workers = pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS)


class Stream(IterableDataset):
    """The numbers below `size`; each worker takes its share."""

    def __init__(self, size=23):
        self.size = size

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(first, self.size, step))


class SizedStream(Stream):
    def __len__(self):
        return self.size


any_stream = pytest.mark.parametrize("stream", [Stream, SizedStream])


def numbers(batches):
    return [batch.tolist() for batch in batches]


def flat(batches):
    return list(chain(*numbers(batches)))


def counted(loader):
    return [batch for _, batch in zip(range(len(loader)), loader, strict=False)]


@any_stream
@with_workers
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_come_as_from_a_torch_loader_of_each_size(stream, workers, drop_last):
    loader = AdaptiveLoader(stream(), 1, drop_last=drop_last, **workers)
    for batch_size in (4, 9, 2):
        loader.batch_size = batch_size
        by_torch = DataLoader(stream(), batch_size=batch_size, drop_last=drop_last, num_workers=2 if workers else 0)
        assert numbers(loader) == numbers(by_torch)


@any_stream
@with_workers
def test_every_sample_comes_once_an_epoch(stream, workers):
    loader = AdaptiveLoader(stream(), 1, **workers)
    for batch_size in (5, 40, 3):
        loader.batch_size = batch_size
        assert sorted(flat(loader)) == list(range(23))
    assert (loader.epoch, loader.samples_delivered, loader.dataset_size) == (3, 69, 23)


@with_workers
def test_a_size_set_during_an_epoch_waits_for_the_next(workers):
    loader = AdaptiveLoader(Stream(24), 4, **workers)
    for batch in loader:
        loader.batch_size = 6
        assert (loader.batch_size, len(batch)) == (6, 4)
    assert [len(batch) for batch in loader] == [6, 6, 6, 6]


def test_a_stream_of_unknown_length_has_one_after_its_first_epoch():
    loader = AdaptiveLoader(Stream(), 4, seed=0)
    assert loader.dataset_size is None
    with pytest.raises(TypeError, match="length"):
        len(loader)
    assert len(list(loader)) == 6
    assert (loader.dataset_size, len(loader)) == (23, 6)


def test_a_sized_stream_has_a_length_at_once():
    loader = AdaptiveLoader(SizedStream(), 4, seed=0)
    assert (loader.dataset_size, len(loader), len(list(loader))) == (23, 6, 6)


def test_a_loop_that_counts_the_batches_of_a_sized_stream_finishes_the_epoch():
    loader = AdaptiveLoader(SizedStream(), 5, seed=0)
    assert flat(counted(loader)) == list(range(23))
    assert loader.finished_pass(since=0).samples == 23
    assert flat(counted(loader)) == list(range(23))
    assert loader.finished_pass(since=1).epoch == 1


@with_workers
def test_an_epoch_left_early_starts_again_and_does_not_count(workers):
    loader = AdaptiveLoader(Stream(), 4, **workers)
    for _ in loader:
        break
    next(iter(loader))
    with pytest.raises(UsageError, match="1 of"):
        loader.finished_pass(since=0)
    assert sorted(flat(loader)) == list(range(23))
    assert (loader.finished_pass(since=0).samples, loader.samples_delivered) == (23, 23)


@with_workers
def test_a_full_pass_moves_neither_position_nor_random_state(workers):
    loader = AdaptiveLoader(Stream(), 4, drop_last=True, **workers)
    batches = iter(loader)
    delivered = numbers([next(batches)])
    state, random_state = loader.state_dict(), torch.get_rng_state()
    assert sorted(flat(loader.full_pass())) == list(range(23))
    assert loader.state_dict() == state
    assert delivered + numbers(batches) == numbers(loader)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_an_own_collate_is_used_and_its_samples_counted():
    loader = AdaptiveLoader(Stream(), 10, collate_fn=lambda samples: {"sum": sum(samples)}, seed=0)
    assert list(loader) == [{"sum": 45}, {"sum": 145}, {"sum": 63}]
    assert loader.samples_delivered == 23


@any_stream
@with_workers
def test_an_empty_stream_is_an_error_not_an_empty_epoch(stream, workers):
    with pytest.raises(ArgumentError, match="empty"):
        list(AdaptiveLoader(stream(0), 4, **workers))


@any_stream
def test_a_stream_shorter_than_a_batch_is_an_error_only_when_it_would_be_dropped(stream):
    assert numbers(AdaptiveLoader(stream(3), 4, seed=0)) == [[0, 1, 2]]
    with pytest.raises(ArgumentError, match="drop_last=True"):
        list(AdaptiveLoader(stream(3), 4, drop_last=True, seed=0))
