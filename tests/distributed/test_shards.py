"""What a rank holds of a sharded model, and the layouts that cannot be measured."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.optim import SGD

from distributed.rank_pool import RankPool
from divebatch import NoiseMeter
from divebatch.errors import ArgumentError
from divebatch.norms.sharded import first_row
from divebatch.ranks import Ranks


@given(rows=st.integers(0, 40), size=st.integers(1, 9))
def test_rows_begin_where_torch_cuts(rows: int, size: int) -> None:
    lengths = [len(part) for part in torch.arange(rows).chunk(size)] if rows else []
    starts = [sum(lengths[:rank]) for rank in range(size)]
    assert [first_row(rows, rank, size) for rank in range(size)] == starts


def by_columns(_: nn.Parameter) -> Shard:
    return Shard(1)


def meter_of(ranks: Ranks, ignores: bool, **settings: Any) -> None:
    model = nn.Linear(4, 4, bias=ignores)
    assert ranks._group is not None
    mesh = DeviceMesh.from_group(ranks._group, "cpu")
    if ignores:
        fully_shard(model, mesh=mesh, ignored_params={model.bias})
    else:
        fully_shard(model, mesh=mesh, shard_placement_fn=by_columns)
    NoiseMeter(SGD(model.parameters(), 0.1, momentum=0.9), **settings)


def test_layouts_that_cannot_be_measured_are_errors(pool: RankPool) -> None:
    for answer in pool.answers(2, meter_of, ignores=True):
        assert isinstance(answer, ArgumentError)
        assert "'0' over the ranks [0, 1] and '1' not at all" in str(answer)
    for answer in pool.answers(2, meter_of, ignores=False, sketch=True):
        assert isinstance(answer, ArgumentError)
        assert "sharded by rows, and '0' is by dimension 1" in str(answer)
    assert pool.run(2, meter_of, ignores=False) == [None, None]
