"""The order of an epoch, and how it is cut into batches and into each rank's shard of them."""

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, SubsetRandomSampler, TensorDataset

from divebatch import AdaptiveLoader
from divebatch.data.order import (
    FromSampler,
    InParts,
    Order,
    Sequential,
    Shuffled,
    index_dtype,
    mixed_seed,
    num_batches,
)
from divebatch.data.source import rank_shard_of, shard_places, size_without_stand_ins
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.ranks import Ranks, RankShard
from divebatch.research import StratifiedBatches
from reference.feeding import flat, numbers

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
@given(seed=st.integers(0, 2**31), high=st.integers(1, 100))
def test_a_seed_of_more_than_32_bits_is_not_a_later_epoch_of_a_small_one(seed, high):
    assert mixed_seed(seed + high * 2**32, 0) != mixed_seed(seed, high)


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


# Epochs that are parts of another order


class Drawn(Order):
    """Permutations of a generator of its own: no epoch can be drawn twice."""

    is_reproducible = False

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, epoch: int) -> torch.Tensor:
        return torch.randperm(self.size, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def in_epochs_of_15() -> AdaptiveLoader:
    return AdaptiveLoader(TensorDataset(torch.arange(40)), 4, seed=1, order=Drawn(40), epoch_samples=15)


def test_epochs_of_an_order_that_cannot_be_repeated_visit_every_sample_once():
    loader = in_epochs_of_15()
    for _ in range(2):
        assert sorted(number for _ in range(3) for number in flat(loader)) == list(range(40))


@pytest.mark.parametrize("batches", [0, 2, 3])
def test_such_an_epoch_resumes_with_the_very_next_sample(batches: int):
    loader, resumed = in_epochs_of_15(), in_epochs_of_15()
    list(loader)
    passing = iter(loader)
    for _ in range(batches):
        next(passing)
    resumed.load_state_dict(loader.state_dict())
    rest = flat(passing)
    assert [flat(resumed) for _ in range(4)] == [rest, *(flat(loader) for _ in range(3))]


@pytest.mark.parametrize("epoch_samples", [None, 20])
def test_other_labels_are_refused_in_parts_too(epoch_samples: int | None):
    by_halves, in_turn = ([index // 20 for index in range(40)], [index % 2 for index in range(40)])
    one, other = (
        AdaptiveLoader(range(40), 4, order=StratifiedBatches(labels), epoch_samples=epoch_samples)
        for labels in (by_halves, in_turn)
    )
    with pytest.raises(CheckpointError, match="labels"):
        other.load_state_dict(one.state_dict())


# Cutting


@quickly
@given(size=st.integers(0, 50), batch_size=st.integers(1, 60), drop_last=st.booleans(), start=st.integers(0, 10))
def test_cutting_agrees_with_torch(size, batch_size, drop_last, start):
    by_torch = list(BatchSampler(range(start, start + size), batch_size, drop_last))
    places = shard_places(start + size, batch_size, Ranks.alone(), drop_last=drop_last, start=start)
    assert [list(range(start + size)[place]) for place in places] == by_torch
    assert num_batches(size, batch_size, drop_last=drop_last) == len(by_torch)


# Each rank's shard; the ranks are made up, so that no process is needed


class Rank(Ranks):
    """One of several that never talk."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size

    def from_first(self, value: Any) -> Any:
        return value


def ranks_of(size: int) -> list[Rank]:
    return [Rank(rank, size) for rank in range(size)]


sizes = st.tuples(st.integers(1, 9), st.integers(0, 40), st.integers(0, 90), st.booleans())


@given(sizes)
def test_shards_are_those_of_tensor_split(drawn: tuple[int, int, int, bool]):
    ranks, more, rest, _ = drawn
    num_samples = ranks + more + rest
    parts = torch.arange(num_samples).tensor_split(ranks)
    assert [rank_shard_of(num_samples, rank).mine for rank in ranks_of(ranks)] == [len(part) for part in parts]
    assert sum(rank_shard_of(num_samples, rank).loss_weight for rank in ranks_of(ranks)) == pytest.approx(ranks)


@given(sizes)
def test_the_ranks_parts_of_each_batch_make_up_the_batch(drawn: tuple[int, int, int, bool]):
    ranks, more, rest, drop_last = drawn
    batch_size = ranks + more
    order = torch.randperm(batch_size + rest)
    batches = [batch for batch in order.split(batch_size) if len(batch) == batch_size or not drop_last]
    places = [shard_places(len(order), batch_size, rank, drop_last=drop_last) for rank in ranks_of(ranks)]
    shared = [[order[place] for place in mine] for mine in places]
    assert {len(parts) for parts in shared} == {len(batches)}
    for number, batch in enumerate(batches):
        mine = [rank_shard_of(len(batch), rank).mine for rank in ranks_of(ranks)]
        counted = [parts[number][:count] for parts, count in zip(shared, mine, strict=True)]
        assert torch.equal(torch.cat(counted), batch)
        stand_ins = [parts[number] for parts, part in zip(shared, counted, strict=True) if not len(part)]
        assert all(torch.equal(stand_in, batch[:1]) for stand_in in stand_ins)


@given(sizes)
def test_a_full_pass_leaves_no_rank_without_a_sample(drawn: tuple[int, int, int, bool]):
    ranks, more, rest, _ = drawn
    size = size_without_stand_ins(ranks + more + rest, ranks + more, Rank(0, ranks))
    last = (ranks + more + rest) % size
    assert size >= ranks + more
    assert last == 0 or last >= ranks


def test_a_stand_in_weighs_nothing_and_a_lone_process_everything():
    assert RankShard(3, 0, 4).is_stand_in
    assert RankShard(3, 0, 4).loss_weight == 0.0
    assert [RankShard(3, 0, 4).weight_for("sum"), RankShard(3, 1, 4).weight_for("sum")] == [0.0, 1.0]
    assert not RankShard(0, 0).is_stand_in  # before the first batch
    assert RankShard(0, 0).loss_weight == RankShard(5, 5).loss_weight == 1.0


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


def shared(loader: AdaptiveLoader, rank: Rank | None) -> AdaptiveLoader:
    if rank is not None:
        loader._join(rank)
    return loader


def wrapped(rank: Rank | None) -> AdaptiveLoader:
    sampler = SubsetRandomSampler(range(1, 22), generator=torch.Generator().manual_seed(3))
    dataloader = DataLoader(Numbers(), 6, sampler=sampler)
    return shared(AdaptiveLoader.wrap(dataloader, seed=0), rank)


def listed(batch: Any) -> list[int]:
    return numbers([batch])[0]


LOADERS = {
    "tensors": lambda rank: shared(AdaptiveLoader(TensorDataset(torch.arange(23)), 6, seed=0), rank),
    "numbers": lambda rank: shared(AdaptiveLoader(Numbers(), 6, seed=0), rank),
    "workers": lambda rank: shared(AdaptiveLoader(Numbers(), 6, num_workers=1, seed=0), rank),
    "in order": lambda rank: shared(AdaptiveLoader(Numbers(), 6, shuffle=False, drop_last=True, seed=0), rank),
    "an own sampler": wrapped,
}


@pytest.mark.parametrize("kind", LOADERS)
def test_every_kind_of_loader_deals_out_what_one_process_gets(kind: str):
    single = LOADERS[kind](None)
    loaders = [LOADERS[kind](rank) for rank in ranks_of(4)]
    for size in (6, 9):
        for loader in (single, *loaders):
            loader.batch_size = size
        for whole, *parts in zip(single, *loaders, strict=True):
            mine = [listed(part)[: loader.rank_shard.mine] for part, loader in zip(parts, loaders, strict=True)]
            assert list(chain(*mine)) == listed(whole)
    for loader in loaders:
        assert loader.state_dict() == single.state_dict()
        assert len(loader) == len(single)
    assert sum(loader.local_samples_delivered for loader in loaders) == single.samples_delivered


@pytest.mark.parametrize("kind", LOADERS)
def test_a_full_pass_is_shared_too(kind: str):
    shared = [[listed(batch) for batch in LOADERS[kind](rank).full_pass()] for rank in ranks_of(4)]
    assert len({len(batches) for batches in shared}) == 1
    seen = [number for batches in shared for batch in batches for number in batch]
    assert sorted(seen) == sorted(number for batch in LOADERS[kind](None).full_pass() for number in listed(batch))


class Random(Numbers):
    def __getitem__(self, index: int) -> int:
        return int(torch.randint(2**40, ()))


def test_workers_of_different_ranks_draw_different_random_numbers():
    first, second = (
        [listed(batch) for batch in shared(AdaptiveLoader(Random(), 23, num_workers=1, seed=0), rank)]
        for rank in ranks_of(2)
    )
    assert not {*first[0]} & {*second[0]}


def test_a_resume_with_other_ranks_goes_on_at_the_same_sample():
    single = list(AdaptiveLoader(TensorDataset(torch.arange(23)), 6, seed=0))
    before = shared(AdaptiveLoader(TensorDataset(torch.arange(23)), 6, seed=0), Rank(1, 3))
    passing = iter(before)
    next(passing), next(passing)
    for size in (1, 2, 5):
        loaders = [shared(AdaptiveLoader(TensorDataset(torch.arange(23)), 8, seed=0), rank) for rank in ranks_of(size)]
        for loader in loaders:
            loader.load_state_dict(before.state_dict())
        rest = [[n for batch in loader for n in listed(batch)[: loader.rank_shard.mine]] for loader in loaders]
        assert sorted(chain(*rest)) == sorted(n for batch in single[2:] for n in listed(batch))


def test_more_ranks_than_samples_of_a_saved_batch_cut_the_rest_so_that_each_has_one():
    before = AdaptiveLoader(TensorDataset(torch.arange(23)), 2, seed=0)
    passing = iter(before)
    delivered = listed(next(passing))
    loaders = [shared(AdaptiveLoader(TensorDataset(torch.arange(23)), 8, seed=0), rank) for rank in ranks_of(3)]
    rest = []
    for loader in loaders:
        with pytest.warns(UserWarning, match="below the 3 ranks"):
            loader.load_state_dict(before.state_dict())
        rest.append([listed(batch) for batch in loader])
    assert all([len(batch) for batch in batches] == [1] * 7 for batches in rest)
    assert sorted([*delivered, *(number for batches in rest for batch in batches for number in batch)]) == list(
        range(23)
    )
