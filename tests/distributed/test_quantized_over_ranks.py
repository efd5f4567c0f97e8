"""Quantized gradients under DDP: each rank rounds what it sends, all have the same weights, and a resume is exact."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from distributed.rank_pool import RankPool
from divebatch import AdaptiveLoader, Controller, Fixed
from divebatch.errors import ArgumentError
from divebatch.estimators import Moments
from divebatch.ranks import Ranks
from divebatch.research import LangevinNoise, QuantizedGradients

N, BATCH, LEVELS = 96, 12, 4


class Run:
    """DDP with quantized gradients, noise on the weights, and `moments`."""

    def __init__(self, ranks: Ranks, *, levels: int | None = LEVELS, lr: float = 0.1) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.net = DistributedDataParallel(net, process_group=ranks._group)
        data = torch.randn(N, 5, dtype=torch.float64), torch.randn(N, 3, dtype=torch.float64)
        self.loader = AdaptiveLoader(TensorDataset(*data), BATCH, seed=1, process_group=ranks._group)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)
        self.noise = LangevinNoise(self.optimizer, temperature=1e-3, seed=4)
        self.quantize = QuantizedGradients(levels or 1, seed=2)
        if levels:
            self.quantize.attach(self.net)
        self.control = Controller(
            self.net, self.optimizer, self.loader, Fixed(), estimator=Moments(), measure_always=True
        )

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        (self.net(batch[0]) - batch[1]).square().mean().backward()
        self.optimizer.step()

    def epoch(self) -> Any:
        for batch in self.loader:
            self.step(batch)
        return self.control.step()

    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()]).tolist()

    def parts(self) -> tuple[Any, ...]:
        return self.net, self.optimizer, self.noise, self.quantize, self.control

    def state(self) -> list[Any]:
        return [part.state_dict() for part in self.parts()]

    def load(self, states: list[Any]) -> None:
        for part, state in zip(self.parts(), states, strict=True):
            part.load_state_dict(state)


def trained(ranks: Ranks, **settings: Any) -> tuple[list[float], list[Any], float]:
    run = Run(ranks, **settings)
    records = [run.epoch() for _ in range(2)]
    return run.weights(), [r.noise_scale for r in records], run.quantize.bits_sent


def test_both_ranks_end_with_the_same_weights(pool: RankPool) -> None:
    (first, records, bits), (second, others, _) = pool.run(2, trained)
    assert first == second
    assert records == others
    assert bits > 0
    plain = pool.run(2, trained, levels=None)[0]
    assert plain[0] != first


def resumed(ranks: Ranks, stop: int) -> tuple[list[float], list[Any], float]:
    run = Run(ranks)
    records = [run.epoch()]
    for number, batch in enumerate(run.loader, 1):
        run.step(batch)
        if number == stop:
            break
    states = run.state()
    fresh = Run(ranks)
    fresh.load(states)
    records.append(fresh.epoch())
    return fresh.weights(), [r.noise_scale for r in records], fresh.quantize.bits_sent


@pytest.mark.parametrize("stop", [1, 5])
def test_a_resume_within_an_epoch_is_exact(pool: RankPool, stop: int) -> None:
    """Also where DDP has rearranged its buckets, which it does after its first pass, and so once more."""
    for (weights, records, bits), (ours, of_ours, own_bits) in zip(
        pool.run(2, trained), pool.run(2, resumed, stop), strict=True
    ):
        assert ours == weights
        assert own_bits == bits
        for one, other in zip(of_ours, records, strict=True):
            assert one == pytest.approx(other, rel=1e-9)


def on_the_inner_model(ranks: Ranks) -> None:
    QuantizedGradients(1).attach(nn.Linear(2, 2))


def test_ranks_must_attach_it_to_the_model_that_averages(pool: RankPool) -> None:
    assert all(isinstance(answer, ArgumentError) for answer in pool.answers(2, on_the_inner_model))
