"""Loops that add up the gradients of several batches: what each step really held, counted by the loop itself."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch.optim import SGD

from divebatch import AdaptiveLoader, Controller, Decision, DiveBatch, EpochRecord, Fixed, Measurement
from divebatch.errors import ArgumentError, UsageError
from divebatch.policies import NoiseScale, Policy
from reference.per_sample import dataset, mean_loss, mlp
from saved import through_a_file

pytestmark = pytest.mark.filterwarnings("ignore:.* cannot grow the batch")  # plain SGD has no momentum

DATA = dataset(48)


@dataclass(frozen=True)
class Sizes(Policy):
    """Chooses one size after the other, and keeps what it saw."""

    needs: ClassVar[frozenset[str]] = frozenset()
    decides_within_epochs: ClassVar[bool] = True
    sizes: tuple[int, ...]
    seen: list[Measurement] = field(default_factory=list, compare=False)

    def next(self, seen: Measurement) -> Decision:
        self.seen.append(seen)
        return Decision(batch_size=self.sizes[min(len(self.seen), len(self.sizes)) - 1])


@dataclass(frozen=True)
class ByStep(Policy):
    """The size that its table has for the step."""

    needs: ClassVar[frozenset[str]] = frozenset()
    decides_within_epochs: ClassVar[bool] = True
    sizes: tuple[tuple[int, int], ...]

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=dict(self.sizes).get(seen.step, seen.batch_size))


class Loop:
    """Steps once in `k` batches. `ending` says what becomes of an epoch's last batches where they are fewer."""

    def __init__(
        self,
        policy: Policy,
        k: int = 4,
        *,
        ending: str = "step",
        batch_size: int = 3,
        data: Any = DATA,
        **settings: Any,
    ):
        self.k, self.ending = k, ending
        self.model = mlp()
        self.optimizer = SGD(self.model.parameters(), 0.01)
        self.loader = AdaptiveLoader(data, batch_size, seed=0, **settings.pop("loader", {}))
        if self.loader.delivery_size is None:
            settings = {"accumulate": k} | settings
        self.control = Controller(self.model, self.optimizer, self.loader, policy, **settings)
        self.optimizer.register_step_pre_hook(lambda o, *_: self.rates.append(o.param_groups[0]["lr"]))
        self.held: list[int] = []
        """Samples of each step, all epochs."""
        self.rates: list[float] = []
        self._since, self._batches = 0, 0

    def train(self) -> Iterator[int]:
        if self.ending != "carry":
            self._since, self._batches = 0, 0
            self.optimizer.zero_grad()
        for x, y in self.loader:
            (mean_loss(self.model(x), y) / self.k).backward()
            self._since, self._batches = self._since + len(x), self._batches + 1
            if self._batches % self.k == 0:
                self.step()
            yield self._batches
        if self.ending == "step" and self._since:
            self.step()

    def step(self) -> None:
        self.held.append(self._since)
        self._since = 0
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self) -> EpochRecord:
        for _ in self.train():
            pass
        return self.control.step()


@pytest.mark.parametrize("ending", ["step", "drop", "carry"])
@pytest.mark.parametrize("num_samples", [48, 47])
def test_sizes_rates_and_records_are_those_of_what_a_step_holds(ending: str, num_samples: int):
    loop = Loop(Sizes((24, 8, 10, 48)), ending=ending, data=dataset(num_samples), lr_coupling="linear")
    records = [loop.epoch() for _ in range(4)]
    most = 48 if num_samples == 48 else 44  # a multiple of 4 within the data
    assert [record.batch_size for record in records] == [12, 24, 8, 8]
    assert [record.next_batch_size for record in records] == [24, 8, 8, most]
    assert [record.micro_batch_size for record in records] == [3, 6, 2, 2]
    assert [m.batch_size for m in loop.control.policy.seen] == [12, 24, 8, 8]
    assert {m.first_batch_size for m in loop.control.policy.seen} == {12}
    steps = 0
    for record in records:
        mine = range(steps, record.steps)
        full = [loop.held[step] for step in mine if loop.held[step] % record.batch_size == 0]
        assert set(full) == {record.batch_size}  # most steps hold what the record says, the rest a part
        assert all(loop.held[step] <= record.batch_size or ending == "carry" for step in mine)
        assert [loop.rates[step] for step in mine] == pytest.approx([0.01 * record.batch_size / 12] * len(mine))
        steps = record.steps
    assert steps == len(loop.held)


@pytest.mark.parametrize("estimator", ["split", "moments", "per-sample", "ranks", "trajectory"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_every_estimator_says_the_same_of_a_divided_and_an_undivided_loss(estimator: str, scale: float):
    def noise(factor: float) -> float:
        loop = Loop(NoiseScale(48) if estimator != "trajectory" else DiveBatch(1e-9, 48), estimator=estimator)
        loop.optimizer.param_groups[0]["lr"] = 0.0
        for number, (x, y) in enumerate(loop.loader, 1):
            (mean_loss(loop.model(x), y) * factor).backward()
            if number % 4 == 0:
                loop.step()
        record = loop.control.step()
        assert record.batch_size == 12
        return record.diversity_low if record.diversity is None else record.diversity

    assert noise(scale) == pytest.approx(noise(2.0), rel=1e-6)


def test_decisions_within_an_epoch_fall_between_steps_and_count_them():
    policy = Sizes((8, 8, 16))
    loop = Loop(policy, every_steps=2, lr_coupling="linear")
    for batches in loop.train():
        if batches % 4:
            before = loop.loader.batch_size
        else:
            assert loop.loader.batch_size == before  # decided when the loop comes for the next batch, a step's first
    record = loop.control.step()
    assert loop.held == [12, 12, 8, 8, 8]
    assert [(m.step, m.samples, m.batch_size) for m in policy.seen] == [(2, 24, 12), (4, 40, 8), (5, 48, 8)]
    assert [tuple(change)[:2] for change in record.changes] == [(2, 8)]
    assert loop.rates == pytest.approx([0.01 * held / 12 for held in loop.held])


class Skips:
    """A GradScaler's way: some steps are left out, their gradients dropped."""

    def __init__(self, *skipped: int) -> None:
        self.skipped, self.calls = skipped, 0

    def step(self, optimizer: SGD) -> bool:
        self.calls += 1
        if self.calls in self.skipped:
            return False
        optimizer.step()
        return True


@pytest.mark.parametrize("skipped", [(1, 2), (3,), (8, 16), (16,)])
def test_a_step_that_is_skipped_is_no_accumulation(skipped: tuple[int, ...]):
    policy, made, scaler = Sizes((3,)), 0, Skips(*skipped)
    loop = Loop(policy, 1)
    for x, y in loop.loader:
        loop.optimizer.zero_grad()
        mean_loss(loop.model(x), y).backward()
        made += scaler.step(loop.optimizer)
    record = loop.control.step()
    assert (record.batch_size, record.steps, policy.seen[0].first_batch_size) == (3, made, 3)
    assert record.micro_batch_size is None


def prefetched(loader: Any, ahead: int) -> Iterator[Any]:
    """A loop's own prefetching: so many batches are taken before the first is used."""
    waiting: list[Any] = []
    for batch in loader:
        waiting.append(batch)
        if len(waiting) > ahead:
            yield waiting.pop(0)
    yield from waiting


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("k", [1, 4])
def test_prefetching_is_no_accumulation(ahead: int, k: int):
    loop = Loop(Sizes((6 * k, 6 * k)), k)
    records = []
    for _ in range(2):
        for number, (x, y) in enumerate(prefetched(loop.loader, ahead), 1):
            (mean_loss(loop.model(x), y) / k).backward()
            loop._since += len(x)
            if number % k == 0:
                loop.step()
        records.append(loop.control.step())
    assert [record.batch_size for record in records] == [3 * k, 6 * k]
    assert set(loop.held[: records[0].steps]) == {3 * k}
    assert records[0].steps == 16 // k


def test_a_loop_may_step_several_times_on_the_same_batch():
    loop = Loop(Fixed(), 1, batch_size=8)
    for x, y in loop.loader:
        for _ in range(2):
            loop.optimizer.zero_grad()
            mean_loss(loop.model(x), y).backward()
            loop.optimizer.step()
    record = loop.control.step()
    assert (record.batch_size, record.steps) == (8, 12)


@pytest.mark.parametrize(("told", "k"), [(1, 4), (2, 4), (4, 2), (1, 3)])
def test_a_wrong_number_is_an_error_at_the_third_step(told: int, k: int):
    loop = Loop(Fixed(), k, batch_size=1, accumulate=told)
    with pytest.raises(UsageError, match=rf"once in {k} .*accumulate={told}: pass accumulate={k}"):
        loop.epoch()
    assert len(loop.held) == 3


def test_a_wrong_number_in_short_epochs_is_an_error_once_three_steps_agree():
    loop = Loop(Fixed(), 4, batch_size=4, accumulate=1)  # 3 steps an epoch, the last at its end
    loop.epoch()
    with pytest.raises(UsageError, match="pass accumulate=4"):
        loop.epoch()


def test_several_steps_between_batches_are_an_error_where_steps_add_up():
    loop = Loop(Fixed(), 4, batch_size=1)
    for number, (x, y) in enumerate(loop.loader):
        mean_loss(loop.model(x), y).backward()
        if number == 4:
            loop.optimizer.step(), loop.optimizer.step(), loop.optimizer.step()
            with pytest.raises(UsageError, match="several times before the 4 batches"):
                loop.optimizer.step()
            break


def test_a_loader_that_delivers_parts_of_a_step_is_not_counted_twice():
    policy = Sizes((24, 24))
    loop = Loop(policy, batch_size=12, loader={"delivery_size": 3}, lr_coupling="linear")
    first = loop.epoch()
    loop.k = 8
    second = loop.epoch()
    assert [m.batch_size for m in policy.seen] == [12, 24]
    assert [(r.batch_size, r.next_batch_size, r.steps) for r in (first, second)] == [(12, 24, 4), (24, 24, 6)]
    assert loop.held == [12] * 4 + [24] * 2
    assert loop.rates == pytest.approx([0.01] * 4 + [0.02] * 2)


def test_a_loop_that_does_not_add_up_what_the_loader_delivers_in_parts_is_told():
    loop = Loop(Fixed(), 1, batch_size=12, loader={"delivery_size": 3})
    with pytest.raises(UsageError, match=r"4 of the loader's batches .* delivery_size"):
        loop.epoch()


def test_two_ways_to_say_it_are_one_too_many():
    with pytest.raises(ArgumentError, match="delivery_size=3"):
        Loop(Fixed(), batch_size=12, loader={"delivery_size": 3}, accumulate=4)
    with pytest.raises(ArgumentError, match="accumulate"):
        Loop(Fixed(), accumulate=0)


def test_an_epoch_whose_steps_were_all_skipped_has_as_many_as_its_batches():
    loop = Loop(Fixed(), 1)
    list(loop.loader)
    with pytest.warns(UserWarning, match=r"epoch 1 has ended, no step of SGD.*GradScaler has skipped every step"):
        assert loop.control.step().steps == 16


def test_weights_that_are_nan_and_skipped_steps_are_not_another_optimizers():
    loop = Loop(Fixed(), 1)
    torch.nn.init.constant_(loop.control._weight, torch.nan)
    list(loop.loader)
    with pytest.warns(UserWarning, match="GradScaler has skipped every step"):
        loop.control.step()


def test_an_optimizer_that_was_replaced_is_an_error_at_the_epochs_end():
    loop = Loop(DiveBatch(1.0, 40), 1, estimator="moments")
    loop.epoch()
    loop.optimizer = torch.optim.Adam(loop.model.parameters(), 0.01)
    with pytest.raises(UsageError, match=r"weights have changed, but no step of SGD was seen.*make a new Controller"):
        loop.epoch()


def test_every_steps_without_a_step_is_an_error():
    loop = Loop(Sizes((3,)), 1, every_steps=2)
    list(loop.loader)
    with pytest.raises(UsageError, match="every_steps=2 counts steps of the optimizer"):
        loop.control.step()


def test_steps_outside_an_epoch_do_not_count():
    loop = Loop(Fixed(), 1)
    loop.optimizer.step()  # as some do, before a scheduler's first
    assert loop.epoch().steps == 16
    loop.optimizer.step()
    assert loop.epoch().steps == 32


@pytest.mark.parametrize("stop", range(1, 16))
@pytest.mark.parametrize("every_steps", [None, 2])
def test_a_state_taken_after_any_batch_goes_on(stop: int, every_steps: int | None):
    def make() -> Loop:
        return Loop(ByStep(((2, 8), (4, 8), (5, 16))), ending="drop", every_steps=every_steps, lr_coupling="linear")

    whole, begun, resumed = make(), make(), make()
    expected = [whole.epoch(), whole.epoch()]
    for batches in begun.train():
        if batches == stop:
            break
    resumed.control.load_state_dict(through_a_file(begun.control.state_dict()))
    resumed._batches = stop % 4  # this loop's own count, which it keeps in its checkpoint
    resumed.ending = "carry"
    records = [resumed.epoch()]
    resumed.ending = "drop"
    records.append(resumed.epoch())
    for mine, theirs in zip(records, expected, strict=True):
        assert (mine.batch_size, mine.next_batch_size) == (theirs.batch_size, theirs.next_batch_size)
        assert (mine.steps, mine.lr) == (theirs.steps, pytest.approx(theirs.lr))
