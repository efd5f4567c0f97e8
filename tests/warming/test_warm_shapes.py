"""Code for every batch size before training, and a training that does not notice."""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from divebatch import AdaBatch, AdaptiveLoader, Auto, Controller, DiveBatch, Fixed, Trajectory, warm_shapes
from divebatch.errors import ArgumentError, UsageError
from divebatch.norms.sketch import seed_signs
from divebatch.policies import Doublings, Policy, SampleSchedule
from divebatch.warming.snapshot import kept

# The compiler makes one when it traces a custom function, as those of compiled meters are.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

N, FIRST, EPOCHS = 128, 4, 5
DOUBLING = AdaBatch(64, every_epochs=1)  # 4, 8, 16, 32, 64: the sizes double four times


class CountingBackend:
    """Runs graphs as they are and counts how many it was asked to compile."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1
        return graph.forward


class Net(nn.Module):
    """Weights, running statistics and random numbers: all that a step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@dataclass
class Loop:
    """A plain training loop around a compiled model."""

    policy: Policy = DOUBLING
    dynamic: bool | None = False
    estimator: Any = None
    compiled: bool = True
    norms: bool = True
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    loader_settings: dict[str, Any] = field(default_factory=dict)
    data: Any = None
    by_steps: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        seed_signs(torch.device("cpu"), 0)
        random.seed(0)
        numpy.random.seed(0)
        torch._dynamo.reset()
        self.backend = CountingBackend()
        self.plain = Net() if self.norms else nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.model: Any = (
            torch.compile(self.plain, backend=self.backend, dynamic=self.dynamic) if self.compiled else self.plain
        )
        self.optimizer = self.make_optimizer(self.plain.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        data = TensorDataset(torch.randn(N, 6), torch.randint(0, 3, (N,))) if self.data is None else self.data
        self.loader = AdaptiveLoader(data, FIRST, seed=0, **self.loader_settings)
        estimator = self.estimator() if callable(self.estimator) else self.estimator
        self.control = Controller(
            self.model, self.optimizer, self.loader, self.policy, estimator=estimator, scheduler=schedule
        )
        self.schedule, self.seen = schedule, []

    def step(self, batch: Any) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        if self.by_steps:
            self.schedule.step()

    def train(self, epochs: int = EPOCHS) -> "Loop":
        for _ in range(epochs):
            for batch in self.loader:
                self.seen.append(batch[0])
                self.step(batch)
            if not self.by_steps:
                self.schedule.step()
            self.control.step()
        return self

    def state(self) -> dict[str, Any]:
        return {
            "model": self.plain.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "control": self.control.state_dict(),
            "seen": self.seen,
            "random": [torch.get_rng_state(), random.getstate(), list(numpy.random.get_state())],
            "gradients": [each.grad for each in self.plain.parameters()],
        }


def flat(value: Any) -> Iterator[Any]:
    """Every leaf of nested containers."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from (key, *flat(entry))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from flat(entry)
    else:
        yield value


def assert_equal_bits(one: Any, other: Any) -> None:
    mine, theirs = list(flat(one)), list(flat(other))
    assert len(mine) == len(theirs)
    for left, right in zip(mine, theirs, strict=True):
        assert type(left) is type(right)
        assert (
            torch.equal(left, right)
            if isinstance(left, Tensor)
            else numpy.array_equal(left, right)
            if isinstance(left, numpy.ndarray)
            else left == right
        ), (left, right)


class RandomCrops(Dataset):
    """Draws from Python's and numpy's generators for each sample."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((6,), index / N) + random.random() + float(numpy.random.rand()), index % 3


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        generator = torch.Generator().manual_seed(1)
        return ((torch.randn(6, generator=generator), index % 3) for index in range(N))


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def rate_in_a_tensor(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(lr), foreach=False)


PLAIN = {"compiled": False}  # what is put back is the same, and compiling takes time
LOOPS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "compiled for dynamic shapes": {"dynamic": None},
    "compiled and measured by sketches": {
        "policy": Doublings(DiveBatch(0.1, 16)),
        "estimator": partial(Trajectory, mode="sketch", compiled=True),
        "norms": False,
    },
    "momentum": {"make_optimizer": momentum, **PLAIN},
    "a rate in a tensor": {"make_optimizer": rate_in_a_tensor, **PLAIN},
    "a schedule by steps": {"by_steps": True, **PLAIN},
    "random numbers in the data": {"data": RandomCrops(), **PLAIN},
    "a stream": {"data": Stream(), **PLAIN},
    "parts of a stream": {"data": Stream(), "loader_settings": {"epoch_samples": 64}, **PLAIN},
    "a sampler of the user's": {"data": "sampler", **PLAIN},
    "measured by moments": {"policy": Auto(64), **PLAIN},
    "measured by norms": {"policy": Doublings(DiveBatch(0.1, 64)), "norms": False, **PLAIN},
}


def make(settings: dict[str, Any]) -> Loop:
    if settings.get("data") != "sampler":
        return Loop(**settings)
    loop = Loop(**{**settings, "data": None})
    loop.control.close()
    sampler = torch.utils.data.RandomSampler(loop.loader.dataset, generator=torch.Generator().manual_seed(3))
    loop.loader = AdaptiveLoader.wrap(DataLoader(loop.loader.dataset, batch_size=FIRST, sampler=sampler))
    loop.control = Controller(loop.model, loop.optimizer, loop.loader, loop.policy, scheduler=loop.schedule)
    return loop


@pytest.mark.parametrize("name", LOOPS)
def test_a_training_does_not_notice_that_it_was_warmed(name: str) -> None:
    plain = make(LOOPS[name]).train()
    warmed = make(LOOPS[name])
    before = warmed.state()
    copied = [each.clone() if isinstance(each, Tensor) else each for each in flat(before)]
    warm_shapes(warmed.step, warmed.control)
    assert_equal_bits(warmed.state(), copied)
    assert_equal_bits(warmed.train().state(), plain.state())


def test_no_size_is_compiled_after_the_start() -> None:
    warmed = Loop()
    report = warm_shapes(warmed.step, warmed.control)
    assert [shape.batch_size for shape in report.shapes] == [4, 8, 16, 32, 64]
    assert [shape.graphs for shape in report.shapes] == [1] * 5
    assert warmed.backend.compiled == 5 == report.graphs
    warmed.train()
    assert warmed.backend.compiled == 5
    assert report.seconds == sum(shape.seconds for shape in report.shapes) > 0
    assert str(report).splitlines()[0].startswith("5 batch sizes warmed in ")
    assert str(report).splitlines()[1].startswith("batch 4: ")


def test_epochs_with_and_without_measuring_have_code_of_their_own() -> None:
    estimator = partial(Trajectory, mode="sketch", compiled=True)
    policy = Doublings(DiveBatch(0.1, 16, every_epochs=2))
    loop = Loop(policy=policy, estimator=estimator, norms=False)
    report = warm_shapes(loop.step, loop.control)
    assert [(shape.batch_size, shape.graphs) for shape in report.shapes] == [(4, 2), (8, 2), (16, 1)]
    before = loop.backend.compiled
    loop.train()
    assert loop.backend.compiled == before


@pytest.mark.parametrize(("dynamic", "graphs"), [(None, [1, 1, 0, 0, 0]), (True, [1, 0, 0, 0, 0])])
def test_dynamic_code_is_compiled_once_or_twice(dynamic: bool | None, graphs: list[int]) -> None:
    loop = Loop(dynamic=dynamic)
    report = warm_shapes(loop.step, loop.control)
    assert [shape.graphs for shape in report.shapes] == graphs
    loop.train()
    assert loop.backend.compiled == sum(graphs)


def test_the_last_batch_of_an_epoch_is_a_size_too() -> None:
    data = TensorDataset(torch.randn(100, 6), torch.randint(0, 3, (100,)))
    loop = Loop(policy=AdaBatch(32, every_epochs=1), data=data)
    report = warm_shapes(loop.step, loop.control)
    assert [shape.batch_size for shape in report.shapes] == [4, 8, 16, 32]  # 100 = 12 * 8 + 4 = 6 * 16 + 4 = 3 * 32 + 4
    data = TensorDataset(torch.randn(101, 6), torch.randint(0, 3, (101,)))
    sizes = {}
    for drop_last in (False, True):
        loop = Loop(policy=AdaBatch(32, every_epochs=1), data=data, loader_settings={"drop_last": drop_last})
        loop.plain.layers[1] = nn.Identity()  # no statistics of the single sample that is left
        report = warm_shapes(loop.step, loop.control)
        sizes[drop_last] = [shape.batch_size for shape in report.shapes]
        compiled = loop.backend.compiled
        loop.train()
        assert loop.backend.compiled == compiled
    assert sizes == {False: [1, 4, 5, 8, 16, 32], True: [4, 8, 16, 32]}


def test_parts_of_a_batch_have_one_shape_whatever_the_batch() -> None:
    loop = Loop(policy=DiveBatch(0.1, 64), estimator="moments", compiled=False, loader_settings={"delivery_size": 4})
    assert [shape.batch_size for shape in warm_shapes(loop.step, loop.control).shapes] == [4]
    assert loop.loader.delivery_size == 4


def test_where_a_step_takes_several_batches_those_are_what_is_compiled() -> None:
    loop = Loop(compiled=False)
    loop.control.close()
    control = Controller(
        loop.model, loop.optimizer, loop.loader, AdaBatch(64), batches_per_step=4, scheduler=loop.schedule
    )
    assert [shape.batch_size for shape in warm_shapes(loop.step, control).shapes] == [4, 8, 16]


def test_sizes_may_be_named() -> None:
    loop = Loop(policy=DiveBatch(0.1, 64), estimator="moments", compiled=False)
    assert [each.batch_size for each in warm_shapes(loop.step, loop.control, sizes=[32, 4, 32]).shapes] == [4, 32]
    with pytest.raises(ArgumentError, match="sizes must be an integer of at least 1, got sizes=0"):
        warm_shapes(loop.step, loop.control, sizes=[0])
    with pytest.raises(ArgumentError, match="sizes is empty"):
        warm_shapes(loop.step, loop.control, sizes=[])
    with pytest.raises(ArgumentError, match="sizes has 1000000, and an epoch has"):
        warm_shapes(loop.step, loop.control, sizes=[4, 1_000_000])
    wrong: Any = 8
    with pytest.raises(ArgumentError, match="sizes must be a list of batch sizes, got sizes=8"):
        warm_shapes(loop.step, loop.control, sizes=wrong)
    with pytest.raises(ArgumentError, match=r"warm_shapes\(step, control\)"):
        warm_shapes(loop.control, loop.step)  # type: ignore[arg-type]


def test_too_many_sizes_are_an_error_that_says_how_to_make_them_few() -> None:
    loop = Loop(policy=DiveBatch(0.1, 64), estimator="moments", compiled=False)
    with pytest.raises(ArgumentError, match=r"DiveBatch can reach 61 batch sizes.*Doublings\(DiveBatch\(\.\.\.\)\)"):
        warm_shapes(loop.step, loop.control)


def test_sizes_beyond_the_compilers_limit_are_named_with_the_line_to_change() -> None:
    loop = Loop(policy=SampleSchedule("0:4 1K:5 2K:6 3K:7 4K:8 5K:9 6K:10 7K:11 8K:12 9K:13"))
    loop.loader.drop_last = True
    line = r"at most 8 variants .* batches of 12, 13 samples .* torch\._dynamo\.config\.recompile_limit = 18"
    # Our trainer, in another test of the same process, may have raised the limit.
    with torch._dynamo.config.patch(recompile_limit=8), pytest.warns(UserWarning, match=line):
        warm_shapes(loop.step, loop.control)


def test_decisions_within_epochs_leave_rests_of_any_size() -> None:
    loop = Loop(policy=Fixed(), compiled=False)
    loop.control.close()
    control = Controller(loop.model, loop.optimizer, loop.loader, Auto(8), every_steps=4, scheduler=loop.schedule)
    with pytest.warns(UserWarning, match="every_steps=4 .* pass drop_last=True to the loader"):
        warm_shapes(loop.step, control)


def test_it_is_refused_within_a_loop_and_where_nothing_can_be_put_back() -> None:
    loop = Loop(compiled=False)
    for _ in loop.loader:
        with pytest.raises(UsageError, match="call it before the loop"):
            warm_shapes(loop.step, loop.control)
        break
    with pytest.raises(ArgumentError, match="also_restore holds a list, which has no state_dict"):
        warm_shapes(loop.step, loop.control, also_restore=[[]])
    loop.control.close()
    with pytest.raises(UsageError, match="this controller was closed"):
        warm_shapes(loop.step, loop.control)


def test_what_the_step_changes_besides_is_put_back_where_it_is_named() -> None:
    loop, scaler = Loop(compiled=False), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    average = torch.optim.swa_utils.AveragedModel(loop.plain)

    def step(batch: Any) -> None:
        loop.optimizer.zero_grad()
        scaler.scale(cross_entropy(loop.model(batch[0]), batch[1])).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        average.update_parameters(loop.plain)

    scaled, averaged = scaler.state_dict(), [each.clone() for each in average.state_dict().values()]
    warm_shapes(step, loop.control, also_restore=[scaler, average])
    assert scaler.state_dict() == scaled
    assert_equal_bits(list(average.state_dict().values()), averaged)


def test_a_step_that_fails_leaves_everything_as_it_was() -> None:
    loop = Loop(compiled=False)
    before = [each.clone() if isinstance(each, Tensor) else each for each in flat(loop.state())]

    def step(batch: Any) -> None:
        loop.step(batch)
        if len(batch[0]) == 16:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        warm_shapes(step, loop.control)
    assert_equal_bits(loop.state(), before)
    loop.train()


def test_a_training_can_be_warmed_where_it_is_resumed_within_an_epoch() -> None:
    plain = Loop(compiled=False)
    for number, batch in enumerate(plain.loader):
        plain.step(batch)
        if number == 4:
            break
    states = [plain.plain.state_dict(), plain.optimizer.state_dict(), plain.control.state_dict(), torch.get_rng_state()]
    loops = []
    for is_warmed in (False, True):
        loop, saved = Loop(compiled=False), copy.deepcopy(states)
        loop.plain.load_state_dict(saved[0])
        loop.optimizer.load_state_dict(saved[1])
        loop.control.load_state_dict(saved[2])
        torch.set_rng_state(saved[3])
        if is_warmed:
            warm_shapes(loop.step, loop.control)
        loops.append(loop.train(3).state())
    assert_equal_bits(*loops)


def test_contents_come_back_into_the_same_objects() -> None:
    tensor, inner = torch.ones(2), [1]
    table: dict[str, Any] = {"tensor": tensor, "inner": inner, "none": None}
    back = kept(table)
    tensor.mul_(3)
    inner.append(2)
    table |= {"tensor": torch.zeros(1), "more": 1}
    assert back() is table
    assert table["tensor"] is tensor
    assert tensor.tolist() == [1, 1]
    assert table["inner"] is inner
    assert inner == [1]
    assert set(table) == {"tensor", "inner", "none"}
