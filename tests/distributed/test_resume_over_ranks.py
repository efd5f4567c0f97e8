"""A run that stops within an epoch and goes on with another number of ranks ends as one that never stopped."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.loops import Problem, Restless, Run
from distributed.rank_pool import RankPool
from divebatch import DiveBatch, Fixed
from divebatch.errors import UsageError
from divebatch.ranks import Ranks

PROBLEM = Problem(num_samples=213, batch_size=30, epochs=3, policy=DiveBatch(1.0, 80))
CUT = 2
"""Batches of the second epoch that are seen before the stop."""


def whole(state: Any) -> Any:
    """With full tensors in the place of shards: what a checkpoint brings back to another number of ranks."""
    if isinstance(state, Tensor):
        return state.full_tensor().clone() if hasattr(state, "full_tensor") else state
    if isinstance(state, list):
        return [whole(value) for value in state]
    return {key: whole(value) for key, value in state.items()} if isinstance(state, dict) else state


def told(run: Run, record: dict[str, Any]) -> dict[str, Any]:
    """With the sums themselves: an unbiased estimate may have no diversity to show."""
    return {**record, "sums": run.sums[-1]}


def run_before_the_stop(ranks: Ranks, problem: Problem) -> tuple[Any, list[Any], list[int]]:
    run = Run(ranks, problem)
    records = [told(run, run.epoch())]
    run.seen.clear()
    return state_after(run, CUT), records, run.seen


def state_after(run: Run, batches: int) -> Any:
    """Taken in the loop's body, as a checkpoint is."""
    for number, batch in enumerate(run.loader, start=1):
        run.step(batch)
        if number == batches:
            return run.state()
    raise AssertionError("the epoch was too short")


def run_after_the_stop(ranks: Ranks, problem: Problem, state: Any) -> tuple[Any, list[Any], list[int]]:
    run = Run(ranks, problem)
    run.load(state)
    for batch in run.loader:
        run.step(batch)
    seen = list(run.seen)
    run.scheduler.step()
    records = [told(run, asdict(run.control.step()))]
    records += [told(run, run.epoch()) for _ in range(problem.epochs - 2)]
    return run.weights(), records, seen


def run_without_a_stop(ranks: Ranks, problem: Problem) -> tuple[Any, list[Any]]:
    run = Run(ranks, problem)
    records = [told(run, run.epoch()) for _ in range(problem.epochs)]
    return run.weights(), records


def assert_same(ours: Any, theirs: Any) -> None:
    weights, records = ours
    assert weights == pytest.approx(theirs[0], rel=1e-9, abs=1e-9)
    for mine, other in zip(records, theirs[1], strict=True):
        for name in ("epoch", "batch_size", "lr", "steps", "samples", "next_batch_size"):
            assert mine[name] == pytest.approx(other[name], rel=1e-9), name
        changes = zip(mine["changes"] or [], other["changes"] or [], strict=True)
        assert all(one == pytest.approx(two, rel=1e-9) for one, two in changes)
        assert mine["sums"] == pytest.approx(other["sums"], rel=1e-9, nan_ok=True)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (1, 4), (4, 1)])
def test_another_number_of_ranks_goes_on_at_the_same_sample(pool: RankPool, before: int, after: int) -> None:
    first = pool.run(before, run_before_the_stop, PROBLEM)
    states = [state for state, _, _ in first]
    assert all(_equal(state, states[0]) for state in states)
    second = pool.run(after, run_after_the_stop, PROBLEM, states[0])
    seen = [number for *_, numbers in (*first, *second) for number in numbers]
    assert sorted(seen) == list(range(PROBLEM.num_samples))
    expected = run_without_a_stop(Ranks.alone(), PROBLEM)
    for (_, records, _), (weights, later, _) in zip(first[:1] * after, second, strict=True):
        assert_same((weights, records + later), expected)


def test_decisions_within_epochs_go_on_too(pool: RankPool) -> None:
    """The state is taken right before a decision, on four ranks, which two make."""
    settings = {"policy": Restless(), "estimator": "moments", "coupling": "sqrt", "every_steps": CUT}
    problem = replace(PROBLEM, num_samples=3 * PROBLEM.num_samples, **settings)
    state, records, _ = pool.run(4, run_before_the_stop, problem)[0]
    expected = run_without_a_stop(Ranks.alone(), problem)
    assert len(expected[1][1]["changes"]) > 1
    for weights, later, _ in pool.run(2, run_after_the_stop, problem, state):
        assert_same((weights, records + later), expected)


@pytest.mark.parametrize("estimator", ["per-sample", "split", "moments", "ranks"])
def test_every_estimator_goes_on_with_the_sums_of_all_ranks(pool: RankPool, estimator: str) -> None:
    problem = replace(PROBLEM, estimator=estimator, micro=4, sync_each=False)
    first = pool.run(4, run_before_the_stop, problem)
    second = pool.run(4, run_after_the_stop, problem, first[0][0])
    expected = pool.run(4, run_without_a_stop, problem)
    for (_, records, _), (weights, later, _), other in zip(first, second, expected, strict=True):
        assert_same((weights, records + later), other)


def rest_of_epoch(ranks: Ranks, problem: Problem, state: Any) -> tuple[list[int], Any, list[int]]:
    run = Run(ranks, problem)
    run.load(state)
    local = []
    for batch in run.loader:
        run.step(batch)
        local.append(run.loader.rank_shard.mine)
    return run.seen, run.control.step(loss=1.0 + ranks.rank), local


@pytest.mark.filterwarnings("ignore:batch_size=2 is below")
def test_a_batch_below_the_ranks_is_raised_within_an_epoch_too(pool: RankPool) -> None:
    problem = Problem(num_samples=23, batch_size=2, policy=Fixed())
    state, before = within_an_epoch(Ranks.alone(), problem, 3)
    answers = pool.run(4, rest_of_epoch, problem, state)
    assert sorted([*before, *(number for seen, *_ in answers for number in seen)]) == list(range(23))
    assert [local for *_, local in answers] == [[1, 1, 1, 1, 1], *[[1, 1, 1, 1, 0]] * 3]
    assert {record.batch_size for _, record, _ in answers} == {4}


def within_an_epoch(ranks: Ranks, problem: Problem, batches: int) -> tuple[Any, list[int]]:
    run = Run(ranks, problem)
    return state_after(run, batches), run.seen


def sums_of_shards(ranks: Ranks, problem: Problem) -> tuple[Any, Any, Any]:
    """The sums in the middle of an epoch; the same loaded into a new meter from shards, and from whole tensors."""
    run = Run(ranks, problem)
    for _, batch in zip(range(CUT), run.loader, strict=False):
        run.step(batch)
    state = run.control._estimator.state_dict()
    taken = []
    for again in (state, whole(state)):
        run.control._estimator.close()
        run.control._estimator.start()
        run.control._estimator.load_state_dict(again)
        taken.append(whole(run.control._estimator.state_dict()))
    return whole(state), *taken


def test_sharded_sums_are_saved_in_shards_and_come_back(pool: RankPool) -> None:
    for size in (2, 4):
        for saved, from_shards, from_whole in pool.run(size, sums_of_shards, replace(PROBLEM, wrap="fsdp")):
            assert float(saved["gradient_sums"]["0.weight"].abs().sum()) > 0
            assert _equal(saved, from_shards)
            assert _equal(saved, from_whole)


def state_within_a_step(ranks: Ranks) -> None:
    run = Run(ranks, replace(PROBLEM, estimator="split"))
    x, y = next(iter(run.loader))
    run.loss(run.model(x), y).backward()
    run.control.state_dict()


def test_a_state_within_a_step_is_refused(pool: RankPool) -> None:
    for answer in pool.answers(4, state_within_a_step):
        assert isinstance(answer, UsageError)
        assert "save their state after an optimizer step" in str(answer)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    return bool(one == other)
