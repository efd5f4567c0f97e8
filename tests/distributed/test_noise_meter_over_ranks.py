"""A NoiseMeter in a DDP loop reads what it would read in one process."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from distributed.rank_pool import RankPool
from divebatch import NoiseMeter
from divebatch.errors import ArgumentError
from divebatch.noise_meter import NoiseScale
from divebatch.ranks import Ranks
from reference.known_noise import draws, half_squares, linear

BATCH = 64


def read_on_ranks(ranks: Ranks) -> NoiseScale:
    """Each rank takes its part of each batch."""
    model: Any = linear()
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9)
    meter = NoiseMeter(optimizer)
    if not ranks.is_alone:
        model = nn.parallel.DistributedDataParallel(model)
    for x, y in draws(torch.Generator().manual_seed(1), 10, BATCH):
        mine = slice(ranks.rank * BATCH // ranks.size, (ranks.rank + 1) * BATCH // ranks.size)
        optimizer.zero_grad()
        half_squares(model(x[mine]), y[mine]).backward()
        optimizer.step()
    return meter.read(BATCH)


def test_ranks_of_ddp_read_what_one_process_does(pool: RankPool) -> None:
    expected = read_on_ranks(Ranks.alone())
    for reading in pool.run(4, read_on_ranks):
        assert (reading.value, reading.low, reading.high) == pytest.approx(
            (expected.value, expected.low, expected.high), rel=1e-9
        )


def made_for_shards(_: Ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,)))
    NoiseMeter(SGD(model.parameters(), 0.01, momentum=0.9))


def test_shards_are_refused(pool: RankPool) -> None:
    for answer in pool.answers(4, made_for_shards):
        assert isinstance(answer, ArgumentError)
        assert "NoiseMeter needs whole gradients, and FSDP2 has sharded" in str(answer)
