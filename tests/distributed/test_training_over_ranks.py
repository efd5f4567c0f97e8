"""The same training on 1, 2 and 4 ranks, to rounding."""

from dataclasses import replace
from typing import Any

import pytest

from distributed.loops import Problem, Restless, trained
from distributed.rank_pool import RankPool
from divebatch import DiveBatch
from divebatch.ranks import Ranks

RESNET = Problem(model="resnet", num_samples=61, batch_size=10, policy=replace(Problem().policy, delta=0.3))
SHORT = Problem(num_samples=213, batch_size=30, epochs=2, policy=DiveBatch(1.0, 60))
CASES = {
    "ddp": Problem(),
    "fsdp": Problem(wrap="fsdp"),
    "resnet ddp": RESNET,
    "resnet fsdp": replace(RESNET, wrap="fsdp"),
    "the inner model": replace(SHORT, give_inner=True),
    "wrapped late": replace(SHORT, wrap_late=True, give_inner=True),
    "static graph": replace(SHORT, ddp={"static_graph": True}),
    "no_sync": replace(SHORT, micro=3, sync_each=False),
    "micro-batches": replace(SHORT, micro=5),
    "fsdp micro-batches": replace(SHORT, wrap="fsdp", micro=5),
    "fsdp without sync": replace(SHORT, wrap="fsdp", micro=5, sync_each=False),
    "bucket views": replace(SHORT, ddp={"gradient_as_bucket_view": True, "find_unused_parameters": True}),
    "clipping": replace(SHORT, clip=0.05),
    "a layer called twice": replace(SHORT, model="shared"),
    "fsdp, a layer called twice": replace(SHORT, model="shared", wrap="fsdp"),
    "within epochs": Problem(num_samples=1009, policy=Restless(), estimator="moments", coupling="sqrt", every_steps=4),
    "fsdp within epochs": Problem(
        num_samples=1009, policy=Restless(), estimator="moments", coupling="sqrt", every_steps=4, wrap="root"
    ),
    "SyncBatchNorm": replace(SHORT, model="batch norm", num_samples=217),
}
ALONE: dict[tuple[str, int, float | None], dict[str, Any]] = {}


def alone(problem: Problem) -> dict[str, Any]:
    """The training of one process in a plain loop, trained once for all cases."""
    key = (problem.model, problem.num_samples, problem.clip)
    if key not in ALONE:
        ALONE[key] = trained(Ranks.alone(), replace(problem, wrap="none", ddp={}, micro=None))
    return ALONE[key]


def assert_same_training(ours: dict[str, Any], single: dict[str, Any], *, rel: float = 1e-9) -> None:
    assert len({record["batch_size"] for record in single["records"]}) > 1, "sizes that do not move show nothing"
    for mine, theirs in zip(ours["records"], single["records"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            expected = pytest.approx(value, rel=rel) if isinstance(value, float) else value
            assert mine[name] == expected or name == "reason", name
    for mine, theirs in zip(ours["sums"], single["sums"], strict=True):
        assert mine == pytest.approx(theirs, rel=rel)
    assert ours["weights"] == pytest.approx(single["weights"], rel=rel, abs=1e-9)


BOTH = ["ddp", "fsdp", "resnet ddp", "resnet fsdp"]
"""Cases that two ranks run too."""


@pytest.mark.parametrize(("case", "size"), [*((case, 2) for case in BOTH), *((case, 4) for case in CASES)])
def test_training_is_that_of_one_process(pool: RankPool, case: str, size: int) -> None:
    for answer in pool.run(size, trained, CASES[case]):
        assert_same_training(answer, alone(CASES[case]))


def test_shards_with_copies_count_once(pool: RankPool) -> None:
    """Two pairs of ranks: each piece of a parameter is on one rank of each pair."""
    for answer in pool.run(4, trained, replace(SHORT, wrap="hsdp")):
        assert_same_training(answer, alone(SHORT))
