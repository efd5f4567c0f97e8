"""Ranks cannot part: they agree at the start, take the same decisions, and say together what is wrong."""

import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from distributed.loops import Problem, Run, trained
from distributed.rank_pool import RankPool
from divebatch import AdaptiveLoader, Controller, Decision, DiveBatch, Fixed, Measurement, Policy
from divebatch.errors import ArgumentError, DivebatchError, UsageError
from divebatch.ranks import Ranks

SMALL = Problem(num_samples=103, batch_size=20, policy=DiveBatch(0.2, 60))


@dataclass(frozen=True)
class Touchy(Policy):
    """Wants another size for every other measurement."""

    needs: ClassVar[frozenset[str]] = frozenset({"diversity", "loss", "throughputs"})

    def next(self, seen: Measurement) -> Decision:
        assert seen.diversity is not None
        assert seen.loss is not None
        told = (seen.diversity.sum_of_sq_norms, seen.loss, *seen.history.throughputs)
        return Decision(batch_size=10 + hash(told) % 80, reason=repr(told))


def noisy_training(ranks: Ranks) -> Any:
    """Every rank measures something else."""
    run = Run(ranks, replace(SMALL, policy=Touchy()))
    finish = run.estimator.finish
    run.estimator.finish = lambda: replace(finish(), sum_of_sq_norms=1.0 + ranks.rank)
    records = []
    for _ in range(4):
        for batch in run.loader:
            run.step(batch)
        run.scheduler.step()
        records.append(asdict(run.control.step(loss=1.0 + ranks.rank)))
    return records


def test_noise_that_differs_between_ranks_does_not_part_them(pool: RankPool) -> None:
    first, *others = pool.run(4, noisy_training)
    assert len({record["batch_size"] for record in first}) > 1
    assert all(other == first for other in others)
    assert "1.0, 2.4" in first[0]["reason"]  # rank 0's sum; the mean loss: ranks saw 26, 26, 26 and 25 samples


@dataclass(frozen=True)
class Dice(Policy):
    """Against the contract: what it says depends on more than what it is shown."""

    needs: ClassVar[frozenset[str]] = frozenset()
    decides_within_epochs: ClassVar[bool] = True

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=int(torch.randint(5, 40, ())))


def random_training(ranks: Ranks) -> Any:
    run = Run(ranks, replace(SMALL, policy=Dice(), every_steps=3, estimator="moments"))
    torch.manual_seed(ranks.rank)
    return [run.epoch() for _ in range(2)]


def test_policies_that_differ_between_ranks_do_not_part_them(pool: RankPool) -> None:
    first, *others = pool.run(4, random_training)
    assert len(first[0]["changes"]) > 1
    assert all(other == first for other in others)


def loss_told_by(ranks: Ranks, losses: list[float | None]) -> str:
    run = Run(ranks, replace(SMALL, policy=Touchy()))
    for batch in run.loader:
        run.step(batch)
    return run.control.step(loss=losses[ranks.rank]).reason


def test_the_loss_is_the_mean_over_samples_of_the_ranks_that_tell_it(pool: RankPool) -> None:
    told = pool.run(4, loss_told_by, [1.0, 2.0, 3.0, 8.0])
    # 103 samples in batches of 20, the last of 3: 26, 26, 26 and 25
    assert {float(reason.split(", ")[1]) for reason in told} == {(26 * 6.0 + 25 * 8.0) / 103}
    assert all("needs the epoch's mean training loss" in str(e) for e in pool.answers(4, loss_told_by, [None] * 4))


# At the start


def parted(ranks: Ranks, what: str) -> None:
    odd = ranks.rank == 2
    settings = {
        "the number of samples": {"num_samples": 102 if odd else 103},
        "batch_size": {"batch_size": 21 if odd else 20},
        "policy": {"policy": DiveBatch(0.3 if odd else 0.2, 60)},
        "estimator": {"estimator": "moments" if odd else "trajectory"},
        "lr_coupling": {"coupling": "sqrt" if odd else "linear"},
        "every_steps": {"every_steps": 2 if odd else 3, "policy": Dice(), "estimator": "moments"},
        "the learning rate": {"lr": 0.2 if odd else 0.1},
    }
    trained(ranks, replace(SMALL, **settings[what]))


DIFFERENCES = ["the number of samples", "batch_size", "policy", "estimator", "lr_coupling", "every_steps"]


@pytest.mark.parametrize("what", [*DIFFERENCES, "the learning rate"])
def test_ranks_that_disagree_get_the_same_error_everywhere(pool: RankPool, what: str) -> None:
    errors = pool.answers(4, parted, what)
    assert all(isinstance(error, ArgumentError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(f"the ranks disagree on {what}")
    assert "rank 1 has" in str(errors[0])
    assert "rank 2 has" in str(errors[0])


def test_a_group_that_was_never_initialised_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = AdaptiveLoader(TensorDataset(torch.arange(8)), 2, seed=0)  # a group may still come
    with pytest.raises(UsageError, match=r"WORLD_SIZE=4 .* no process group .*init_process_group\(\) first"):
        next(iter(loader))
    assert len(list(AdaptiveLoader(TensorDataset(torch.arange(8)), 2, process_group="alone", seed=0))) == 4


def sizes_of(ranks: Ranks, batch_size: int, policy: Policy) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "epoch 1 has ended, no step")
        loader = AdaptiveLoader(
            TensorDataset(torch.arange(22.0)[:, None]), batch_size, process_group=ranks._group, seed=0
        )
        model = nn.Linear(1, 1)
        control = Controller(model, SGD(model.parameters(), 0.1), loader, policy, lr_coupling="linear")
        local = [len(x) for (x,) in loader]
        record = control.step()
    told = [str(warning.message) for warning in caught]
    return record.batch_size, record.next_batch_size, record.next_lr, record.reason, local, told


@dataclass(frozen=True)
class Shrinks(Policy):
    needs: ClassVar[frozenset[str]] = frozenset()

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=1, reason="tiny")


def test_a_batch_below_the_ranks_is_raised_to_them_and_recorded(pool: RankPool) -> None:
    for size, following, lr, reason, local, warned in pool.run(4, sizes_of, 8, Shrinks()):
        assert (size, following, reason) == (8, 4, "tiny; raised to the 4 samples that ranks and estimator need")
        assert lr == pytest.approx(0.1 * 4 / 8)
        assert local[:2] == [2, 2]
        assert not warned
    for size, following, _, _, _, warned in pool.run(4, sizes_of, 2, Fixed()):
        assert (size, following) == (4, 4)
        assert warned == ["batch_size=2 is below the 4 ranks that share a batch: raised to it"]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(20))


def refusals(ranks: Ranks) -> list[str]:
    data = TensorDataset(torch.arange(3))
    dealt = DataLoader(TensorDataset(torch.arange(20)), 5, sampler=DistributedSampler(range(20)))
    told = []
    for make in (
        lambda: AdaptiveLoader(Stream(), 5, process_group=ranks._group, seed=0),
        lambda: AdaptiveLoader(data, 3, process_group=ranks._group, seed=0),
        lambda: AdaptiveLoader.wrap(dealt, process_group=ranks._group, seed=0),
    ):
        try:
            make()
        except DivebatchError as error:
            told.append(str(error))
    return told


def test_data_that_ranks_cannot_share_is_refused(pool: RankPool) -> None:
    for stream, few, dealt in pool.run(4, refusals):
        assert "an IterableDataset has no order that 4 ranks could share" in stream
        assert few == "3 samples cannot be shared by 4 ranks"
        assert "a DistributedSampler would do it a second time" in dealt


def drawn(ranks: Ranks) -> tuple[list[list[int]], list[int]]:
    torch.manual_seed(ranks.rank)
    data = TensorDataset(torch.arange(23))
    loader = AdaptiveLoader.wrap(DataLoader(data, 6, sampler=RandomSampler(data, num_samples=19)), seed=0)
    seen = [batch.tolist()[: loader.rank_shard.mine] for (batch,) in loader]
    return seen, [number for (batch,) in loader.full_pass() for number in batch.tolist()]


def test_an_own_sampler_draws_for_all_ranks_on_the_first(pool: RankPool) -> None:
    answers = pool.run(4, drawn)
    torch.manual_seed(0)
    expected = list(RandomSampler(range(23), num_samples=19))
    batches = zip(*(seen for seen, _ in answers), strict=True)
    assert [number for parts in batches for part in parts for number in part] == expected
    assert sorted(number for _, full in answers for number in full) == sorted(expected)
