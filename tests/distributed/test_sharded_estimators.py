"""Estimators on models that FSDP2 has sharded say what they say of the same training in one process."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from distributed.loops import Problem, Run, dataset, made, trained, wrapped
from distributed.rank_pool import RankPool
from distributed.test_resume_over_ranks import state_after, whole
from divebatch import AdaptiveLoader, Controller, DiveBatch
from divebatch.errors import ArgumentError
from divebatch.policies import NoiseDoubling
from divebatch.ranks import Ranks

MOMENTS = Problem(num_samples=103, batch_size=14, epochs=1, policy=DiveBatch(0.2, 100), estimator="moments")
ADAM = replace(MOMENTS, optimizer=AdamW, lr=0.01)
SKETCH = {"sketch_size": 50}
CASES = {
    "moments": MOMENTS,
    "moments, sketched": replace(MOMENTS, settings=SKETCH),
    "three steps in four": replace(MOMENTS, settings={"every_steps": 4}),
    "as Adam sees it": replace(ADAM, settings={"preconditioned": True}),
    "as Adam sees it, sketched": replace(ADAM, settings={"preconditioned": True, **SKETCH}),
    "a sum": replace(MOMENTS, reduction="sum", lr=0.004),
    "clipping": replace(MOMENTS, clip=0.05),
    "frozen": replace(MOMENTS, frozen=("0.weight", "3.weight")),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a rank without rows": ("moments", {"wrap": "fsdp"}),
    "sketches of no rows": ("moments, sketched", {"wrap": "fsdp"}),
    "copies of shards": ("moments", {"wrap": "hsdp"}),
    "sketches of copies": ("moments, sketched", {"wrap": "hsdp"}),
    "parameters stay whole": ("moments, sketched", {"fsdp": {"reshard_after_forward": False}}),
    "micro-batches": ("moments", {"micro": 2}),
    "micro-batches without sync": ("moments", {"micro": 2, "sync_each": False}),
    "gradients in float32": ("moments", {"fsdp": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}}),
}
BAD = 50
"""A sample of NaN gradients."""


def all_trained(ranks: Ranks, problems: list[Problem]) -> list[Any]:
    """One call of the ranks for many runs."""
    return [trained(ranks, problem)["sums"] for problem in problems]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Of each case, what one process measures."""
    return dict(zip(CASES, all_trained(Ranks.alone(), list(CASES.values())), strict=True))


def on_shards(case: str, size: int, **changes: Any) -> Problem:
    problem = CASES[case]
    # A sum over W ranks reaches the optimizer divided by W.
    lr = problem.lr * (size if problem.reduction == "sum" else 1)
    return replace(problem, lr=lr, **{"wrap": "root", **changes})


def assert_alike(found: list[Any], expected: list[Any], *, rel: float = 1e-9) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=rel)


@pytest.mark.parametrize("size", [2, 3])
def test_shards_show_what_whole_gradients_do(pool: RankPool, expected: dict[str, Any], size: int) -> None:
    """A model in one group, and the first two cases layer by layer."""
    layers = [on_shards(case, size, wrap="fsdp") for case in [*CASES][:2]]
    for answer in pool.run(size, all_trained, [*layers, *(on_shards(case, size) for case in [*CASES][2:])]):
        for case, found in zip(CASES, answer, strict=True):
            assert_alike(found, expected[case])


def test_all_ways_to_shard_show_the_same(pool: RankPool, expected: dict[str, Any]) -> None:
    """On four ranks, of which one holds nothing of the last layer's three rows."""
    problems = [on_shards(case, 4, **changes) for case, changes in LAYOUTS.values()]
    for answer in pool.run(4, all_trained, problems):
        for (layout, (case, _)), found in zip(LAYOUTS.items(), answer, strict=True):
            assert_alike(found, expected[case], rel=1e-5 if "float32" in layout else 1e-9)


def by_columns(parameter: nn.Parameter) -> Shard | None:
    """Where torch can: two ranks must get equally many."""
    return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % 2 == 0 else None


def test_columns_show_the_same(pool: RankPool) -> None:
    problem = replace(MOMENTS, model="resnet", num_samples=50, batch_size=9)
    expected = trained(Ranks.alone(), problem)["sums"]
    for answer in pool.run(2, trained, replace(problem, wrap="root", fsdp={"shard_placement_fn": by_columns})):
        assert_alike(answer["sums"], expected)


def test_a_batch_without_a_step_is_left_out(pool: RankPool) -> None:
    problem = replace(MOMENTS, bad_sample=BAD)
    skipped = trained(Ranks.alone(), problem)
    assert skipped["records"][0]["skipped_samples"] == MOMENTS.batch_size
    for sets_to_none in (True, False):
        for answer in pool.run(2, trained, replace(problem, wrap="root", sets_to_none=sets_to_none)):
            assert answer["records"][0]["skipped_samples"] == MOMENTS.batch_size
            assert_alike(answer["sums"], skipped["sums"])


def refused(ranks: Ranks, problem: Problem) -> str:
    with pytest.raises(ArgumentError) as raised:
        trained(ranks, problem)
    return str(raised.value)


@pytest.mark.parametrize("estimator", ["oracle", "per-sample", "split", "ranks"])
def test_what_needs_whole_gradients_is_refused(pool: RankPool, estimator: str) -> None:
    for answer in pool.run(2, refused, replace(MOMENTS, wrap="fsdp", estimator=estimator)):
        assert "needs whole gradients, and FSDP2 has sharded" in answer
        assert "'moments'" in answer


def sent(ranks: Ranks, problem: Problem) -> tuple[int, int]:
    """Numbers that the library sends within an epoch's steps, and after them."""
    run, counts = Run(ranks, problem), [0, 0]
    summed = Ranks._summed

    def counted(self: Ranks, bucket: list[Tensor]) -> Tensor:
        counts[-1] += sum(len(part) for part in bucket if part.is_floating_point())  # without messages
        return summed(self, bucket)

    with patch.object(Ranks, "_summed", counted):
        for batch in run.loader:
            run.step(batch)
        counts[:] = [counts[-1], 0]
        run.control.step()
    return counts[0], counts[1]


@pytest.mark.parametrize(("settings", "numbers"), [({}, 0), (SKETCH, 50)])
def test_steps_send_nothing_or_a_sketch(pool: RankPool, settings: dict[str, Any], numbers: int) -> None:
    """Eight steps; six estimates of four numbers are read at the end."""
    for within, after in pool.run(2, sent, replace(MOMENTS, wrap="root", settings=settings)):
        assert within == 8 * numbers
        assert 6 * 4 <= after <= 6 * 4 + 16


CUT = 4
"""Batches of the epoch that are seen before a state is taken."""


def cut_in_two(ranks: Ranks, problems: list[Problem], states: list[Any] | None = None) -> list[tuple[Any, Any]]:
    """For each problem the state after `CUT` batches and, from the one given or the own one, the epoch's sums."""
    return [
        state_and_sums(Run(ranks, problem), None if states is None else state)
        for problem, state in zip(problems, states or problems, strict=True)
    ]


def state_and_sums(run: Run, state: Any) -> tuple[Any, Any]:
    """At a rate of zero: there is nothing to save but the controller's state."""
    if state is None:
        state, run = state_after(run, CUT)["control"], Run(run.ranks, run.problem)
    whole_state = whole(state)
    run.control.load_state_dict(state)
    run.epoch()
    return whole_state, run.sums


def test_a_state_of_shards_fits_any_number_of_ranks(pool: RankPool) -> None:
    """Taken on three ranks; those three, two others, and one process that has whole gradients go on with it."""
    names = [name for name in CASES if name.startswith(("moments", "three"))]
    problems = [replace(on_shards(name, 1), lr=0.0) for name in names]
    unbroken = all_trained(Ranks.alone(), problems)
    first = pool.run(3, cut_in_two, problems)
    states = [state for state, _ in first[0]]
    for answer in (*first, *pool.run(2, cut_in_two, problems, states), cut_in_two(Ranks.alone(), problems, states)):
        for (_, found), sums in zip(answer, unbroken, strict=True):
            assert_alike(found, sums)


def decided_by_auto(ranks: Ranks, problem: Problem) -> tuple[str, float | None]:
    model = wrapped(made(problem), ranks, problem)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    loader = AdaptiveLoader(dataset(problem), problem.batch_size, seed=5, process_group=ranks._group or "alone")
    with Controller(model, optimizer, loader, NoiseDoubling(60)) as control:
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y[:, 0]).backward()
            optimizer.step()
        record = control.step()
        return type(control._estimator).__name__, record.diversity


def test_auto_measures_shards_by_default(pool: RankPool) -> None:
    problem = replace(MOMENTS, wrap="fsdp")
    name, diversity = decided_by_auto(Ranks.alone(), problem)
    assert diversity is not None
    for answer in pool.run(2, decided_by_auto, problem):
        assert answer == (name, pytest.approx(diversity, rel=1e-9))
