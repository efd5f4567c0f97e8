"""A NoiseMeter in a loop on several ranks, DDP or FSDP2, reads what it would read in one process."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW

from distributed.rank_pool import RankPool
from divebatch import NoiseMeter
from divebatch.noise_meter import NoiseScale
from divebatch.ranks import Ranks
from reference.known_noise import draws, half_squares, linear

BATCH = 60


def read_on_ranks(ranks: Ranks, wrap: str, **settings: Any) -> list[NoiseScale]:
    """Two readings; each rank takes its part of each batch."""
    model: Any = linear()
    if not ranks.is_alone and wrap == "fsdp":
        assert ranks._group is not None
        fully_shard(model, mesh=DeviceMesh.from_group(ranks._group, "cpu"))
    adam = settings.get("preconditioned")
    optimizer: Any = AdamW(model.parameters(), 0.01) if adam else SGD(model.parameters(), 0.01, momentum=0.9)
    meter, readings = NoiseMeter(optimizer, **settings), []
    if not ranks.is_alone and wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model, process_group=ranks._group)
    for number, (x, y) in enumerate(draws(torch.Generator().manual_seed(1), 12, BATCH), 1):
        mine = slice(ranks.rank * BATCH // ranks.size, (ranks.rank + 1) * BATCH // ranks.size)
        optimizer.zero_grad()
        half_squares(model(x[mine]), y[mine]).backward()
        optimizer.step()
        if number % 6 == 0:
            readings.append(meter.read(BATCH))
    return readings


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ddp": (4, "ddp", {}),
    "fsdp": (3, "fsdp", {}),
    "fsdp, sketched": (2, "fsdp", {"sketch": True}),
    "fsdp, preconditioned": (2, "fsdp", {"preconditioned": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_read_what_one_process_does(pool: RankPool, case: str) -> None:
    size, wrap, settings = CASES[case]
    expected = [(r.value, r.low, r.high) for r in read_on_ranks(Ranks.alone(), wrap, **settings)]
    for readings in pool.run(size, read_on_ranks, wrap, **settings):
        for reading, numbers in zip(readings, expected, strict=True):
            assert (reading.value, reading.low, reading.high) == pytest.approx(numbers, rel=1e-6)
