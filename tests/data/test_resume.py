"""A loader that is saved and loaded delivers exactly what was still to come."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from divebatch import AdaptiveLoader
from divebatch.data.order import Shuffled
from divebatch.errors import CheckpointError
from reference.feeding import SizedStream, Stream, flat, numbers

PREFETCHING = {"num_workers": 2, "prefetch_factor": 4}


class Rotated:
    """A sampler whose order is a function of the epoch it is told."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(i + self.epoch) % 23 for i in range(23)])

    def __len__(self):
        return 23


LOADERS = {
    "tensors": lambda **kw: AdaptiveLoader(TensorDataset(torch.arange(23)), 4, **{"seed": 0, **kw}),
    "map": lambda **kw: AdaptiveLoader(range(23), 4, **{"seed": 0, **kw}),
    "in sequence": lambda **kw: AdaptiveLoader(range(23), 4, shuffle=False, **{"seed": 0, **kw}),
    "dropping the rest": lambda **kw: AdaptiveLoader(range(23), 4, drop_last=True, **{"seed": 0, **kw}),
    "workers": lambda **kw: AdaptiveLoader(range(23), 4, **PREFETCHING, **{"seed": 0, **kw}),
    "persistent workers": lambda **kw: AdaptiveLoader(
        range(23), 4, persistent_workers=True, **PREFETCHING, **{"seed": 0, **kw}
    ),
    "own sampler": lambda **kw: AdaptiveLoader.wrap(DataLoader(range(23), 4, sampler=Rotated()), **{"seed": 0, **kw}),
    "stream": lambda **kw: AdaptiveLoader(Stream(), 4, **{"seed": 0, **kw}),
    "stream dropping the rest": lambda **kw: AdaptiveLoader(Stream(), 4, drop_last=True, **{"seed": 0, **kw}),
    "stream with workers": lambda **kw: AdaptiveLoader(Stream(), 4, **PREFETCHING, **{"seed": 0, **kw}),
    "stream with persistent workers": lambda **kw: AdaptiveLoader(
        Stream(), 4, persistent_workers=True, **PREFETCHING, **kw
    ),
}
any_loader = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.slow] if "persistent" in name else [])
        for name, make in LOADERS.items()
    ],
)


def resumed(make, state, **settings):
    loader = make(**settings)
    loader.load_state_dict(state)
    return loader


def after(loader, num_batches):
    """The loader's iterator once `num_batches` have been delivered."""
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    return batches


# What comes after a resume


@any_loader
@pytest.mark.parametrize("epochs_before", [0, 1])
@pytest.mark.parametrize("delivered", [1, 3])
def test_the_remaining_samples_come_in_the_same_order(make, epochs_before, delivered):
    loader = make()
    for _ in range(epochs_before):
        list(loader)
    batches = after(loader, delivered)
    copy = resumed(make, loader.state_dict())
    assert numbers(copy) == numbers(batches) != []
    assert numbers(copy) == numbers(loader)
    assert copy.state_dict() == loader.state_dict()


@any_loader
def test_a_state_counts_what_was_delivered_not_what_was_prefetched(make):
    loader = make()
    batches = after(loader, 2)
    state = loader.state_dict()
    assert (state["pass"]["batches"], state["pass"]["samples"]) == (2, 8)
    copy = resumed(make, state)
    assert (copy.batches_delivered, copy.samples_delivered) == (2, 8)
    list(copy), list(batches)
    assert (copy.batches_delivered, copy.samples_delivered) == (loader.batches_delivered, loader.samples_delivered)


@any_loader
def test_a_state_saved_in_the_body_of_the_last_batch_leaves_nothing_of_that_epoch(make):
    loader = make()
    for _ in loader:
        state = loader.state_dict()
    copy = resumed(make, state)
    assert numbers(copy) == []
    assert copy.finished_epoch(since=0).batches == loader.finished_epoch(since=0).batches
    assert copy.epoch == loader.epoch == 1
    assert numbers(copy) == numbers(loader)


@any_loader
def test_a_state_saved_between_epochs_continues_with_the_next(make):
    loader = make()
    list(loader)
    copy = resumed(make, loader.state_dict())
    assert (copy.epoch, copy.samples_delivered) == (1, loader.samples_delivered)
    assert numbers(copy) == numbers(loader)


@pytest.mark.parametrize(
    "make", [LOADERS["tensors"], LOADERS["map"], LOADERS["stream"]], ids=["tensors", "map", "stream"]
)
def test_a_loader_already_in_use_can_be_set_back(make):
    loader = make()
    batches = after(loader, 2)
    state = loader.state_dict()
    rest = numbers(batches)
    after(loader, 1)
    loader.load_state_dict(state)
    assert numbers(loader) == rest


def test_a_resumed_epoch_left_early_starts_again_from_its_beginning():
    loader = AdaptiveLoader(range(23), 4, seed=0)
    batches = after(loader, 2)
    copy = resumed(LOADERS["map"], loader.state_dict())
    next(iter(copy))
    assert flat(copy) == Shuffled(23, 0).draw(0).tolist()
    assert copy.samples_delivered == 23
    del batches


# What a state brings along


@any_loader
def test_a_size_set_during_the_saved_epoch_waits_for_the_next(make):
    loader = make()
    batches = after(loader, 2)
    loader.batch_size = 7
    copy = resumed(make, loader.state_dict())
    assert copy.batch_size == 7
    assert numbers(copy) == numbers(batches)
    next_epoch = numbers(copy)
    assert len(next_epoch[0]) == 7
    assert next_epoch == numbers(loader)


def test_a_state_overrides_batch_size_and_seed():
    loader = AdaptiveLoader(range(23), 4, seed=1)
    batches = after(loader, 2)
    copy = AdaptiveLoader(range(23), 9, seed=2)
    copy.load_state_dict(loader.state_dict())
    assert (copy.batch_size, copy.seed) == (4, 1)
    assert numbers(copy) == numbers(batches)
    assert flat(copy) == Shuffled(23, 1).draw(1).tolist()


# What does not fit

MISFITS = {
    "another dataset size": (
        LOADERS["map"],
        lambda: AdaptiveLoader(range(24), 4, seed=0),
        "dataset_size is 23 in",
    ),
    "another stream size": (
        lambda: AdaptiveLoader(SizedStream(23), 4, seed=0),
        lambda: AdaptiveLoader(SizedStream(24), 4, seed=0),
        "dataset_size is 23 in",
    ),
    "another rest": (LOADERS["map"], LOADERS["dropping the rest"], "drop_last is False in"),
    "another order": (LOADERS["map"], LOADERS["in sequence"], "shuffle|order"),
    "other shares of a stream": (LOADERS["stream with workers"], LOADERS["stream"], "workers"),
}


@pytest.mark.parametrize(("saved", "other", "message"), MISFITS.values(), ids=MISFITS)
def test_a_state_of_another_loader_is_refused_and_changes_nothing(saved, other, message):
    loader, misfit = saved(), other()
    batches = after(loader, 2)
    before = misfit.state_dict()
    with pytest.raises(CheckpointError, match=message):
        misfit.load_state_dict(loader.state_dict())
    assert misfit.state_dict() == before
    del batches


def test_a_state_of_another_version_is_refused():
    loader = AdaptiveLoader(range(23), 4, seed=0)
    with pytest.raises(CheckpointError, match=r"loader\.version is 999 in the checkpoint, and 2 in this run"):
        loader.load_state_dict({**loader.state_dict(), "version": 999})
    with pytest.raises(CheckpointError, match=r"loader\.version is None in the checkpoint"):
        loader.load_state_dict({})


# Random numbers do not repeat


class Draws(Dataset):
    """What a worker draws for each sample, as augmentation does."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.randint(2**40, ())


@pytest.mark.parametrize("own", [False, True])
def test_workers_draw_anew_after_a_change_and_after_a_resume(own):
    def make():
        settings = {"generator": torch.Generator().manual_seed(5)} if own else {}
        return AdaptiveLoader(Draws(), 2, seed=0, num_workers=2, **settings)

    loader, resumed = make(), make()
    batches = iter(loader)
    first = flat([next(batches), next(batches)])
    loader.resize_now(1)
    second = flat([next(batches), next(batches)])
    state = loader.state_dict()
    rest = flat(batches)
    resumed.load_state_dict(state)
    again = flat(resumed)
    numbers = [*first, *second, *rest, *again, *flat(resumed)]
    assert len(rest) == len(again) == 6
    assert len({*numbers}) == len(numbers)


def test_a_resume_at_the_same_place_draws_the_same():
    loader = AdaptiveLoader(Draws(), 2, seed=0, num_workers=2)
    states = [loader.state_dict() for _ in loader]
    for state in states[:3]:
        twice = []
        for _ in range(2):
            copy = AdaptiveLoader(Draws(), 2, seed=0, num_workers=2)
            copy.load_state_dict(state)
            twice.append(flat(copy))
        assert twice[0] == twice[1]


def generator():
    return torch.Generator().manual_seed(1)


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, 13.0), 12, generator=generator()),
    "with replacement": lambda: RandomSampler(range(12), replacement=True, generator=generator()),
    "of a part": lambda: SubsetRandomSampler(range(2, 12), generator=generator()),
}


def with_sampler(kind):
    return AdaptiveLoader.wrap(DataLoader(range(12), 5, sampler=SAMPLERS[kind]()), seed=0)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(("epochs", "batches"), [(1, 0), (0, 1), (2, 2), (3, 0)])
def test_a_samplers_orders_go_on_after_a_resume(kind, epochs, batches):
    loader, resumed = with_sampler(kind), with_sampler(kind)
    for _ in range(epochs):
        list(loader)
    under_way = iter(loader)
    for _ in range(batches):
        next(under_way)
    resumed.load_state_dict(loader.state_dict())
    rest = flat(under_way)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert flat(resumed) == rest
    assert [flat(resumed) for _ in range(3)] == [flat(loader) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
