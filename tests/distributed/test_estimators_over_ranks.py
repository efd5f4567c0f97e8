"""What each estimator says of all ranks together: the same as one process, or as its slow twin."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from distributed.loops import Problem, dataset, made, trained
from distributed.rank_pool import RankPool
from divebatch import DiveBatch
from divebatch.data.order import Shuffled
from divebatch.ranks import Ranks
from reference import per_sample
from reference.per_sample import pair_of

GROWING = Problem(num_samples=203, batch_size=20, policy=DiveBatch(0.2, 100))
STILL = replace(GROWING, num_samples=192, batch_size=21, lr=0.0, epochs=1)
"""Nine batches that four ranks cannot share evenly, and one of three samples."""


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("estimator", ["trajectory", "oracle", "moments"])
def test_four_ranks_measure_what_one_process_does(pool: RankPool, estimator: str, reduction: str) -> None:
    # A sum over W ranks reaches the optimizer divided by W.
    lr = {"mean": 0.1, "sum": 0.004}[reduction]
    problem = replace(GROWING, estimator=estimator, reduction=reduction, lr=lr)
    single = trained(Ranks.alone(), problem)
    shared = pool.run(4, trained, replace(problem, lr=lr * (4 if reduction == "sum" else 1)))
    for answer in shared:
        assert [r["batch_size"] for r in answer["records"]] == [r["batch_size"] for r in single["records"]]
        for mine, theirs in zip(answer["sums"], single["sums"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)


def test_ranks_sketch_with_the_same_signs(pool: RankPool) -> None:
    problem = replace(GROWING, estimator="moments", settings={"sketch_size": 50})
    single, exact = (trained(Ranks.alone(), each)["sums"] for each in (problem, replace(problem, settings={})))
    assert single != exact
    for answer in pool.run(2, trained, problem):
        for mine, theirs in zip(answer["sums"], single, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)


def shares(problem: Problem, size: int) -> list[list[Tensor]]:
    """Per-sample gradients: of each batch, of each rank that has samples of it."""
    x, targets = dataset(problem).tensors
    order = Shuffled(problem.num_samples, 5).draw(0)
    rows = per_sample.gradients(made(problem), cross_entropy, x[order], targets[order, 0])
    parts = [batch.tensor_split(size) for batch in rows.split(problem.batch_size)]
    return [[part for part in batch if len(part)] for batch in parts]


def windows(estimator: str, problem: Problem, size: int) -> list[list[Tensor]]:
    """Chunks that are compared with each other."""
    batches, micro = shares(problem, size), problem.micro or problem.num_samples
    if estimator == "ranks":
        return [[chunk for part in batch for chunk in part.split(micro)] for batch in batches]
    cut = 1 if estimator == "per-sample" else micro
    return [list(part.split(cut)) for batch in batches for part in batch]


CHUNKED: dict[str, dict[str, Any]] = {
    "ranks": {"estimator": "ranks"},
    "ranks, micro-batches": {"estimator": "ranks", "micro": 2},
    "split": {"estimator": "split", "micro": 2},
    "per-sample": {"estimator": "per-sample"},
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CHUNKED)
def test_estimates_from_chunks_are_their_twins(pool: RankPool, case: str, size: int) -> None:
    problem = replace(STILL, sync_each=False, **CHUNKED[case])
    estimator = problem.estimator
    kept = [window for window in windows(estimator, problem, size) if len(window) > 1]
    weights = [sum(map(len, window)) for window in kept]
    pairs = [pair_of(window) for window in kept]
    trace, sq_norm = (sum(w * p[i] for w, p in zip(weights, pairs, strict=True)) / sum(weights) for i in (0, 1))
    count = problem.num_samples
    expected = (count * (trace + sq_norm), count**2 * sq_norm, count)
    for answer in pool.run(size, trained, problem):
        assert answer["sums"] == [pytest.approx(expected, rel=1e-9)]


BAD = 100
"""A sample of NaN gradients."""


def bad_place(problem: Problem) -> tuple[int, int]:
    """Number of the bad sample's batch, and its place in that."""
    place = int((Shuffled(problem.num_samples, 5).draw(0) == BAD).nonzero())
    return divmod(place, problem.batch_size)


@pytest.mark.parametrize("estimator", ["trajectory", "per-sample", "ranks", "moments"])
def test_ranks_leave_the_same_samples_out(pool: RankPool, estimator: str) -> None:
    problem = replace(STILL, estimator=estimator, micro=None)
    number, place = bad_place(problem)
    batches = shares(problem, 2)
    first, second = batches[number]
    lost = [first] if place < len(first) else [second]
    if estimator == "ranks":  # without a step between them, the next batch's chunks go with the bad one's
        lost = [first, second, *batches[number + 1]]
    elif estimator == "moments":
        lost = [first, second]
    answers = pool.run(2, trained, replace(problem, bad_sample=BAD))
    kept = [[part for part in batch if not any(part is each for each in lost)] for batch in batches]
    for answer in answers:
        assert answer["records"][0]["skipped_samples"] == sum(map(len, lost))
        assert answer["sums"] == answers[0]["sums"]
        if estimator == "trajectory":
            expected = per_sample.diversity_of(torch.cat([part for batch in kept for part in batch]))
            found = (expected.sum_of_sq_norms, expected.sq_norm_of_sum, expected.num_samples)
            assert answer["sums"] == [pytest.approx(found, rel=1e-9)]
        assert all(map(math.isfinite, answer["sums"][0]))
