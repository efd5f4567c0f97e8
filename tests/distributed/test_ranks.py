"""What ranks say to each other."""

import threading
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from distributed.loops import MODELS, Problem, Run
from distributed.rank_pool import RankPool
from divebatch import ranks as module
from divebatch.errors import ArgumentError, CoverageError
from divebatch.norms import DiversityMeter
from divebatch.ranks import Ranks


def vectors(rank: int) -> list[Tensor]:
    """Types, layouts and sizes of all sorts."""
    double = (rank + 1) * torch.ones(3, 4, dtype=torch.float64)
    return [torch.arange(70.0) + rank, double.t(), torch.tensor(2.0 * rank), torch.zeros(0), torch.arange(25.0)[::2]]


def talk(ranks: Ranks) -> dict[str, Any]:
    summed = vectors(ranks.rank)
    with patch.object(module, "BUCKET_BYTES", 40):  # ten numbers at a time
        squared = ranks.sq_norm_of_sum(vectors(ranks.rank))
        ranks.sum_(summed)
    return {
        "summed": summed,
        "squared": squared,
        "numbers": ranks.sum_numbers([ranks.rank, 0.1]),
        "first": ranks.from_first({"rank": ranks.rank}),
        "gathered": ranks.gather(ranks.rank * "long"),
        "who": (ranks.rank, ranks.size, ranks.is_first, ranks.is_alone),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_over_ranks_whatever_is_summed(pool: RankPool, size: int) -> None:
    expected = [torch.stack(each).sum(0) for each in zip(*map(vectors, range(size)), strict=True)]
    for rank, answer in enumerate(pool.run(size, talk)):
        for mine, theirs in zip(answer["summed"], expected, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        assert answer["squared"] == pytest.approx(sum(float(each.double().square().sum()) for each in expected))
        assert answer["numbers"] == pytest.approx([sum(range(size)), 0.1 * size], rel=1e-15)
        assert answer["first"] == {"rank": 0}
        assert answer["gathered"] == ["long" * each for each in range(size)]
        assert answer["who"] == (rank, size, rank == 0, False)


def test_a_process_alone_talks_to_itself() -> None:
    ranks = Ranks.here()
    tensors = vectors(1)
    ranks.sum_(tensors)
    assert all(map(torch.equal, tensors, vectors(1)))
    assert ranks.sq_norm_of_sum([torch.tensor([3.0, 4.0])]) == 25.0
    assert (ranks.sum_numbers([0.1]), ranks.from_first(3), ranks.gather(3)) == ([0.1], 3, [3])
    assert (ranks.rank, ranks.size, ranks.is_first, ranks.is_alone) == (0, 1, True, True)
    ranks.require_same({"anything": object()})


def held_for_a_while(tensor: Tensor, seconds: float) -> threading.Thread:
    """What gloo's worker does: a reference dropped after the answer has been given, in a thread of its own."""
    views = [tensor.view(-1)]

    def drop() -> None:
        time.sleep(seconds)
        views.clear()

    thread = threading.Thread(target=drop)
    thread.start()
    return thread


def test_a_sum_is_there_only_when_no_worker_holds_it_any_more() -> None:
    """A worker that drops a tensor while the interpreter leaves aborts the process."""
    workers: list[threading.Thread] = []
    group = SimpleNamespace(_device_types=[torch.device("cpu")])
    with (
        patch.object(module.dist, "get_rank", return_value=0),
        patch.object(module.dist, "get_world_size", return_value=2),
        patch.object(module.dist, "all_reduce", lambda it, group: workers.append(held_for_a_while(it, 0.05))),
    ):
        ranks = Ranks(cast("Any", group))
        assert ranks._summed([torch.ones(3)])._use_count() == 1  # type: ignore[attr-defined]
    workers[0].join()


def differ(ranks: Ranks) -> None:
    ranks.require_same({"the same": 1, "the rank": ranks.rank // 3})


def test_what_differs_is_named_on_every_rank(pool: RankPool) -> None:
    for error in pool.answers(4, differ):
        assert isinstance(error, ArgumentError)
        assert "disagree on the rank: rank 0 has 0, rank 1 has 0, rank 2 has 0, rank 3 has 1." in str(error)


def refused(ranks: Ranks) -> list[str]:
    """Ways to measure that shards do not allow."""
    net = Run(ranks, Problem(wrap="fsdp", num_samples=20, batch_size=10)).net
    told = []
    for settings in ({}, {"compiled": True}, {"grad_scaler": object()}):
        try:
            DiversityMeter(net, **settings)
        except CoverageError as error:
            told.append(str(error))
    return told


def test_shards_are_measured_in_a_controllers_eager_loop_only(pool: RankPool) -> None:
    for loose, compiled, scaled in pool.run(2, refused):
        assert "sharded by FSDP2 cannot be measured with: a meter without a loader" in loose
        assert "a compiled meter cannot measure parameters sharded by FSDP2" in compiled
        assert "with: grad_scaler" in scaled


def traffic(ranks: Ranks, wrap: str) -> dict[str, Any]:
    """Numbers that the library sends, within an epoch's steps and after them, and those it keeps meanwhile."""
    run = Run(ranks, Problem(wrap=wrap, num_samples=103, batch_size=20))
    sent: list[int] = []
    summed = Ranks._summed

    def counted(self: Ranks, bucket: list[Tensor]) -> Tensor:
        sent.append(sum(len(part) for part in bucket if part.is_floating_point()))  # without messages, which are bytes
        return summed(self, bucket)

    with patch.object(Ranks, "_summed", counted):
        for batch in run.loader:
            run.step(batch)
        within, meter = sum(sent), run.estimator._meter
        shards = meter._shards._sums.values() if meter._shards is not None else []
        kept = sum(total.numel() for total in [*meter._sums.values(), *shards])
        run.control.step()
    return {"within": within, "after": sum(sent), "kept": kept, "size": sum(p.numel() for p in run.net.parameters())}


def test_steps_send_nothing_and_an_epoch_one_gradient(pool: RankPool) -> None:
    for told in pool.run(4, traffic, "ddp"):
        assert told["within"] == 0
        assert 0 <= told["after"] - told["size"] <= 16
        assert told["kept"] == told["size"]


def test_sharded_sums_are_nowhere_whole(pool: RankPool) -> None:
    answers = pool.run(4, traffic, "fsdp")
    assert sum(told["kept"] for told in answers) == answers[0]["size"]
    assert all(told["within"] == 0 and told["after"] <= 16 for told in answers)
    assert all(told["kept"] < told["size"] / 2 for told in answers)


class Bypass(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.first(x).tanh(), self.second.weight)


def bypassed(ranks: Ranks) -> None:
    with patch.dict(MODELS, {"mlp": (Bypass, (7,))}):
        run = Run(ranks, Problem(wrap="root", num_samples=20, batch_size=10))
        run.epoch()


def test_a_sharded_weight_that_is_used_past_its_layer_is_an_error(pool: RankPool) -> None:
    for error in pool.answers(2, bypassed):
        assert isinstance(error, CoverageError)
        assert "['second.weight'] received gradients although their layer was not called" in str(error)
