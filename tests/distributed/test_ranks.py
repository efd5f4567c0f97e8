"""What ranks say to each other."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from distributed.loops import Problem, Run
from distributed.team import Team
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
        "gathered": ranks.gather(ranks.rank),
        "who": (ranks.rank, ranks.size, ranks.is_first, ranks.is_alone),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_over_ranks_whatever_is_summed(team: Team, size: int) -> None:
    expected = [torch.stack(each).sum(0) for each in zip(*map(vectors, range(size)), strict=True)]
    for rank, answer in enumerate(team.run(size, talk)):
        for mine, theirs in zip(answer["summed"], expected, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        assert answer["squared"] == pytest.approx(sum(float(each.double().square().sum()) for each in expected))
        assert answer["numbers"] == pytest.approx([sum(range(size)), 0.1 * size], rel=1e-15)
        assert answer["first"] == {"rank": 0}
        assert answer["gathered"] == list(range(size))
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


def differ(ranks: Ranks) -> None:
    ranks.require_same({"the same": 1, "the rank": ranks.rank // 3})


def test_what_differs_is_named_on_every_rank(team: Team) -> None:
    for error in team.answers(4, differ):
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


def test_shards_are_measured_in_a_controllers_eager_loop_only(team: Team) -> None:
    for loose, compiled, scaled in team.run(2, refused):
        assert "sharded by FSDP2 cannot be measured with: a meter without a loader" in loose
        assert "with: compiled" in compiled
        assert "with: grad_scaler" in scaled
