"""A loop of your own on several ranks: DDP, or FSDP2 with --fsdp. By itself it trains in one process.

torchrun --nproc-per-node 2 examples/ddp_loop.py [--fsdp]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, DiveBatch


def main() -> None:
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1003, 20), torch.randint(3, (1003,)))
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
    train(shard(model) if "--fsdp" in sys.argv else DistributedDataParallel(model), data)
    dist.destroy_process_group()


def shard(model: nn.Sequential) -> nn.Module:
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model


def train(model: nn.Module, data: TensorDataset) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = AdaptiveLoader(data, batch_size=37, seed=0)  # of all ranks
    policy = DiveBatch(0.5, 512)
    control = Controller(model, optimizer, loader, policy, lr_coupling="linear")
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        record = control.step()  # the same on all ranks
        if dist.get_rank() == 0:
            print(record)


if __name__ == "__main__":
    main()
