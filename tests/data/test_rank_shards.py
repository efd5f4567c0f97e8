"""How batches are cut over ranks; the ranks are made up, so that no process is needed."""

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

from divebatch import AdaptiveLoader
from divebatch.data.source import rank_shard_of, shard_places, size_without_stand_ins
from divebatch.ranks import Ranks, RankShard


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


LOADERS = {
    "tensors": lambda rank: shared(AdaptiveLoader(TensorDataset(torch.arange(23)), 6, seed=0), rank),
    "numbers": lambda rank: shared(AdaptiveLoader(Numbers(), 6, seed=0), rank),
    "workers": lambda rank: shared(AdaptiveLoader(Numbers(), 6, num_workers=1, seed=0), rank),
    "in order": lambda rank: shared(AdaptiveLoader(Numbers(), 6, shuffle=False, drop_last=True, seed=0), rank),
    "an own sampler": wrapped,
}


def numbers(batch: Any) -> list[int]:
    return (batch[0] if isinstance(batch, list) else batch).tolist()


@pytest.mark.parametrize("kind", LOADERS)
def test_every_kind_of_loader_deals_out_what_one_process_gets(kind: str):
    single = LOADERS[kind](None)
    loaders = [LOADERS[kind](rank) for rank in ranks_of(4)]
    for size in (6, 9):
        for loader in (single, *loaders):
            loader.batch_size = size
        for whole, *parts in zip(single, *loaders, strict=True):
            mine = [numbers(part)[: loader.rank_shard.mine] for part, loader in zip(parts, loaders, strict=True)]
            assert list(chain(*mine)) == numbers(whole)
    for loader in loaders:
        assert loader.state_dict() == single.state_dict()
        assert len(loader) == len(single)
    assert sum(loader.local_samples_delivered for loader in loaders) == single.samples_delivered


@pytest.mark.parametrize("kind", LOADERS)
def test_a_full_pass_is_shared_too(kind: str):
    shared = [[numbers(batch) for batch in LOADERS[kind](rank).full_pass()] for rank in ranks_of(4)]
    assert len({len(batches) for batches in shared}) == 1
    seen = [number for batches in shared for batch in batches for number in batch]
    assert sorted(seen) == sorted(number for batch in LOADERS[kind](None).full_pass() for number in numbers(batch))


class Random(Numbers):
    def __getitem__(self, index: int) -> int:
        return int(torch.randint(2**40, ()))


def test_workers_of_different_ranks_draw_different_random_numbers():
    first, second = (
        [numbers(batch) for batch in shared(AdaptiveLoader(Random(), 23, num_workers=1, seed=0), rank)]
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
        rest = [[n for batch in loader for n in numbers(batch)[: loader.rank_shard.mine]] for loader in loaders]
        assert sorted(chain(*rest)) == sorted(n for batch in single[2:] for n in numbers(batch))
