"""Ranks that are warmed together train as if they had not been."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from distributed.rank_pool import RankPool
from divebatch import AdaptiveLoader, Auto, Controller, DiveBatch, Policy, warm_shapes
from divebatch.policies import Doublings
from divebatch.ranks import Ranks

POLICIES: dict[str, Policy] = {"moments": Auto(28), "norms": Doublings(DiveBatch(0.1, 28))}


def wrapped(model: nn.Module, wrap: str, ranks: Ranks) -> Any:
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return fully_shard(model, mesh=init_device_mesh("cpu", (ranks.size,)))


def trained(ranks: Ranks, policy: Policy, wrap: str, *, is_warmed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(101, 6), torch.randint(0, 3, (101,)))
    model: Any = wrapped(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)), wrap, ranks)
    optimizer = AdamW(model.parameters(), lr=0.01)
    loader = AdaptiveLoader(data, 7, seed=0)
    control = Controller(model, optimizer, loader, policy)
    if wrap == "ddp":  # it orders its buckets anew after its first backward pass, and sums are rounded otherwise then
        model(data.tensors[0]).sum().backward()
    torch.manual_seed(ranks.rank)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    if is_warmed:
        warm_shapes(step, control)
    with control:
        for _ in range(3):
            for batch in loader:
                step(batch)
            control.step()
    return [getattr(each, "to_local", lambda each=each: each)().detach() for each in model.parameters()]


@pytest.mark.parametrize(("policy", "wrap"), [("moments", "ddp"), ("norms", "ddp"), ("norms", "fsdp")])
def test_ranks_train_the_same_weights_warmed_or_not(pool: RankPool, policy: str, wrap: str) -> None:
    cold = pool.run(4, trained, POLICIES[policy], wrap, is_warmed=False)
    warm = pool.run(4, trained, POLICIES[policy], wrap, is_warmed=True)
    for mine, theirs in zip(cold, warm, strict=True):
        assert all(map(torch.equal, mine, theirs))
