"""Streams: their own order in batches of the current size, endless ones, and sizes that change within one."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from divebatch import AdaptiveLoader
from divebatch.data.order import Shuffled
from divebatch.errors import ArgumentError, CheckpointError, UsageError
from reference.feeding import WORKERS, SizedStream, Stream, flat, numbers, with_workers

with_one_worker_too = pytest.mark.parametrize("workers", [*WORKERS, pytest.param({"num_workers": 1}, id="one")])
any_stream = pytest.mark.parametrize("stream", [Stream, SizedStream])


@any_stream
@with_workers
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_come_as_from_a_torch_loader_of_each_size(stream, workers, drop_last):
    loader = AdaptiveLoader(stream(), 1, drop_last=drop_last, **workers)
    for batch_size in (4, 9, 2):
        loader.batch_size = batch_size
        by_torch = DataLoader(stream(), batch_size=batch_size, drop_last=drop_last, num_workers=2 if workers else 0)
        assert numbers(loader) == numbers(by_torch)


def test_a_stream_of_unknown_length_has_one_after_its_first_epoch():
    loader = AdaptiveLoader(Stream(), 4, seed=0)
    assert loader.dataset_size is None
    with pytest.raises(TypeError, match="length"):
        len(loader)
    assert len(list(loader)) == 6
    assert (loader.dataset_size, len(loader)) == (23, 6)


@with_workers
def test_an_epoch_left_early_starts_again_and_does_not_count(workers):
    loader = AdaptiveLoader(Stream(), 4, **workers)
    for _ in loader:
        break
    next(iter(loader))
    with pytest.raises(UsageError, match="1 of"):
        loader.finished_epoch(since=0)
    assert sorted(flat(loader)) == list(range(23))
    assert (loader.finished_epoch(since=0).samples, loader.samples_delivered) == (23, 23)


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


# Epochs of N samples


def same_share_each(numbers, workers):
    """Whether each worker's numbers come in order, none left out."""
    num_workers = max(1, workers.get("num_workers", 0))
    shares = [[n for n in numbers if n % num_workers == share] for share in range(num_workers)]
    return all(share == list(range(i, i + num_workers * len(share), num_workers)) for i, share in enumerate(shares))


@with_one_worker_too
def test_each_epoch_goes_on_where_the_last_one_ended(workers):
    loader = AdaptiveLoader(Stream(None), 4, epoch_samples=10, seed=0, **workers)
    assert (len(loader), loader.dataset_size) == (3, 10)
    epochs = [numbers(loader) for _ in range(3)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[4, 4, 2]] * 3
    assert same_share_each([n for epoch in epochs for batch in epoch for n in batch], workers)
    assert (loader.epoch, loader.samples_delivered, loader.batches_delivered) == (3, 30, 9)


@with_one_worker_too
def test_with_drop_last_batches_are_whole_and_nothing_is_dropped(workers):
    loader = AdaptiveLoader(Stream(None), 4, epoch_samples=10, drop_last=True, seed=0, **workers)
    epochs = [numbers(loader) for _ in range(2)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[4, 4, 4]] * 2
    assert len(loader) == 3
    assert same_share_each([n for epoch in epochs for batch in epoch for n in batch], workers)


@with_one_worker_too
@pytest.mark.parametrize(("epochs", "batches"), [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0)])
def test_a_resume_goes_on_with_the_next_sample(workers, epochs, batches):
    def make():
        return AdaptiveLoader(Stream(None), 4, epoch_samples=10, seed=0, **workers)

    whole, begun, resumed = make(), make(), make()
    expected = [flat(whole) for _ in range(4)]
    for _ in range(epochs):
        list(begun)
    under_way = iter(begun)
    for _ in range(batches):
        next(under_way)
    resumed.load_state_dict(begun.state_dict())
    rest = [flat(resumed) for _ in range(4 - epochs)]
    assert rest == [expected[epochs][4 * batches :], *expected[epochs + 1 :]]
    assert resumed.samples_delivered == 40


@with_one_worker_too
def test_an_epoch_left_early_is_not_counted_and_the_stream_goes_on(workers):
    loader = AdaptiveLoader(Stream(None), 4, epoch_samples=10, seed=0, **workers)
    first = next(iter(loader)).tolist()
    epochs = [numbers(loader) for _ in range(2)]
    assert loader.samples_delivered == sum(len(batch) for epoch in epochs for batch in epoch)
    assert all(10 <= sum(map(len, epoch)) < 14 for epoch in epochs)
    assert same_share_each([*first, *(n for epoch in epochs for batch in epoch for n in batch)], workers)


def test_a_stream_that_ends_begins_anew_with_the_next_epoch():
    loader = AdaptiveLoader(Stream(25), 4, epoch_samples=10, seed=0)
    epochs = [flat(loader) for _ in range(5)]
    assert epochs == [list(range(10)), list(range(10, 20)), list(range(20, 25)), *epochs[:2]]
    fits = AdaptiveLoader(Stream(20), 4, epoch_samples=10, seed=0)
    assert [flat(fits) for _ in range(4)] == [list(range(10)), list(range(10, 20))] * 2


def test_a_full_pass_shows_an_epochs_samples_and_moves_nothing():
    loader = AdaptiveLoader(Stream(None), 4, epoch_samples=10, seed=0)
    list(loader)
    assert flat(loader.full_pass()) == list(range(10))
    assert flat(loader) == list(range(10, 20))


@pytest.mark.parametrize("kind", ["tensors", "map", "workers"])
def test_a_pass_over_a_map_style_dataset_falls_into_equal_epochs(kind):
    data = TensorDataset(torch.arange(23)) if kind == "tensors" else list(range(23))
    loader = AdaptiveLoader(data, 3, epoch_samples=10, seed=0, **({"num_workers": 2} if kind == "workers" else {}))
    epochs = [list(chain(*((b[0] if kind == "tensors" else b).tolist() for b in loader))) for _ in range(6)]
    assert [len(epoch) for epoch in epochs] == [7, 8, 8] * 2
    assert list(chain(*epochs[:3])) == Shuffled(23, 0).draw(0).tolist()
    assert list(chain(*epochs[3:])) == Shuffled(23, 0).draw(1).tolist()
    assert (loader.dataset_size, loader.epoch) == (7, 6)


def test_a_part_of_a_map_style_pass_resumes():
    loader, resumed = (AdaptiveLoader(range(23), 3, epoch_samples=10, seed=0) for _ in "ab")
    list(loader)
    batches = iter(loader)
    next(batches)
    resumed.load_state_dict(loader.state_dict())
    assert [flat(resumed), flat(resumed)] == [flat(batches), flat(loader)]


@pytest.mark.parametrize("wrong", [0, -3, 2.5, True])
def test_a_number_of_samples_that_cannot_be_is_refused(wrong):
    with pytest.raises(ArgumentError, match="epoch_samples must be an integer of at least 1"):
        AdaptiveLoader(Stream(None), 4, epoch_samples=wrong)


def test_an_epoch_larger_than_the_data_is_refused():
    with pytest.raises(ArgumentError, match="epoch_samples=24 is more than the 23 samples"):
        AdaptiveLoader(range(23), 4, epoch_samples=24)


def test_a_sampler_of_ones_own_has_its_own_length():
    sampler = WeightedRandomSampler(torch.ones(23), 23)
    with pytest.raises(ArgumentError, match="epoch_samples=10 cannot be used with a sampler of your own"):
        AdaptiveLoader.wrap(DataLoader(range(23), 4, sampler=sampler), epoch_samples=10)


def test_a_state_of_other_epochs_is_refused():
    loader = AdaptiveLoader(Stream(None), 4, epoch_samples=10, seed=0)
    for other, message in ((12, "dataset_size is 12 in"), (None, "epoch_samples is None in")):
        with pytest.raises(CheckpointError, match=message):
            loader.load_state_dict(AdaptiveLoader(Stream(None), 4, epoch_samples=other, seed=0).state_dict())


def test_an_endless_stream_that_is_left_says_what_to_pass():
    loader = AdaptiveLoader(Stream(None), 4, seed=0)
    for _ in loader:
        if loader.batches_delivered == 5:
            break
    with pytest.raises(UsageError, match=r"5 of \? batches were delivered.*epoch_samples=N"):
        loader.finished_epoch(since=0)


# Sizes that change within a stream


@with_one_worker_too
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_change_is_in_force_soon_and_no_sample_is_lost(workers, drop_last):
    loader = AdaptiveLoader(Stream(None), 4, seed=0, drop_last=drop_last, **workers)
    taken = []
    for batch in loader:
        taken.append(batch.tolist())
        if len(taken) == 2:
            loader.resize_now(7)
        if len(taken) == 12:
            break
    under_way = 2 * workers.get("num_workers", 0)
    sizes = [len(batch) for batch in taken]
    assert sizes[: 2 + under_way] == [4] * (2 + under_way)
    assert set(sizes[2 + under_way : -1]) <= {7}
    assert loader.batch_size == 7
    assert same_share_each([n for batch in taken for n in batch], workers)


@with_one_worker_too
def test_a_state_after_changes_goes_on_with_the_very_next_sample(workers):
    loader, resumed = (AdaptiveLoader(Stream(None), 4, epoch_samples=60, seed=0, **workers) for _ in "ab")
    batches, before = iter(loader), []
    for number in range(9):
        before.append(next(batches).tolist())
        if number in (1, 4):
            loader.resize_now(number + 2)
    resumed.load_state_dict(loader.state_dict())
    after = numbers(resumed)
    assert {len(batch) for batch in after[:-1]} == {6}
    assert same_share_each([n for batch in [*before, *after] for n in batch], workers)
    assert sum(map(len, [*before, *after])) == 60


def test_the_length_of_a_sized_stream_is_not_trusted_after_a_change():
    loader = AdaptiveLoader(SizedStream(50), 4, seed=0)
    taken = []
    for batch in loader:
        taken.append(len(batch))
        if len(taken) == 2:
            loader.resize_now(6)
    assert taken == [4, 4, *[6] * 7]
    assert loader.finished_epoch(since=0).samples == 50
