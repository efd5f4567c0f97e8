"""What is random does not repeat: what workers draw after a change or a resume, and a sampler's orders after one."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from divebatch import AdaptiveLoader

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Draws(Dataset):
    """What a worker draws for each sample, as augmentation does."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.randint(2**40, ())


def drawn(batches):
    return [number for batch in batches for number in batch.tolist()]


@pytest.mark.parametrize("own", [False, True])
def test_workers_draw_anew_after_a_change_and_after_a_resume(own):
    def make():
        settings = {"generator": torch.Generator().manual_seed(5)} if own else {}
        return AdaptiveLoader(Draws(), 2, seed=0, num_workers=2, **settings)

    loader, resumed = make(), make()
    batches = iter(loader)
    first = drawn([next(batches), next(batches)])
    loader.resize_now(1)
    second = drawn([next(batches), next(batches)])
    state = loader.state_dict()
    rest = drawn(batches)
    resumed.load_state_dict(state)
    again = drawn(resumed)
    numbers = [*first, *second, *rest, *again, *drawn(resumed)]
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
            twice.append(drawn(copy))
        assert twice[0] == twice[1]


class Hidden:
    """A sampler whose random state nobody sees."""

    def __init__(self):
        self.rng = np.random.default_rng(1)

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(self.rng.permutation(12).tolist())


def generator():
    return torch.Generator().manual_seed(1)


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, 13.0), 12, generator=generator()),
    "with replacement": lambda: RandomSampler(range(12), replacement=True, generator=generator()),
    "of a part": lambda: SubsetRandomSampler(range(2, 12), generator=generator()),
    "hidden": Hidden,
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
    rest = drawn(under_way)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert drawn(resumed) == rest
    assert [drawn(resumed) for _ in range(3)] == [drawn(loader) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


@pytest.mark.parametrize("kind", ["weighted", "of a part"])
def test_a_loader_in_use_is_set_back_with_its_samplers_generator(kind):
    loader = with_sampler(kind)
    list(loader)
    state = loader.state_dict()
    orders = [drawn(loader) for _ in range(3)]
    loader.load_state_dict(state)
    assert [drawn(loader) for _ in range(3)] == orders


def test_a_sampler_that_has_drawn_ahead_and_cannot_go_back_is_told():
    loader = with_sampler("hidden")
    list(loader)
    state = loader.state_dict()
    list(loader)
    with pytest.warns(UserWarning, match=r"Hidden has drawn 2 orders .* only 1, .* new sampler"):
        loader.load_state_dict(state)


def test_an_own_generator_decides_over_the_seed():
    before = torch.get_rng_state()
    first, again = (AdaptiveLoader(range(23), 4, generator=generator()) for _ in "ab")
    other = AdaptiveLoader(range(23), 4, generator=torch.Generator().manual_seed(2))
    assert first.seed == again.seed != other.seed
    assert torch.equal(torch.get_rng_state(), before)
