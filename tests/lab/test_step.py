"""One step: what it computes, what it does where memory runs out, and whose time is counted."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from divebatch.data.micro_batches import BatchPlan
from divebatch.errors import BatchTooLargeError
from divebatch.lab import Clock, DeviceOptions, Run, Tally, TrainStep, execute, train_epoch
from divebatch.lab import clock as clock_module
from divebatch.lab import step as module
from divebatch.lab.models import MODELS, ModelSettings
from divebatch.lab.ranks import Parallel
from divebatch.lab.schema import Method, Part
from divebatch.records import read_run
from lab.helpers import assert_same_end, kill_after, small

CPU = torch.device("cpu")


def make_step(model: nn.Module, **options: Any) -> TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return TrainStep(Parallel.alone(model), mse_loss, optimizer, DeviceOptions(**options), Clock(CPU))


def twins() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 1), nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    return model, twin


@pytest.mark.parametrize("micro_batch_size", [None, 1, 2, 3, 100])
def test_an_epoch_is_plain_sgd_and_its_loss_the_mean_over_samples(micro_batch_size):
    model, twin = twins()
    batches = [(torch.randn(n, 3), torch.randn(n, 1)) for n in (5, 2)]
    heard = []
    loss = train_epoch(make_step(model, micro_batch_size=micro_batch_size), batches, Tally(), lambda: heard.append(1))
    total = 0.0
    for x, y in batches:
        mean = (twin(x) - y).square().mean()
        total += mean.item() * len(y)
        gradients = torch.autograd.grad(mean, list(twin.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    assert loss == pytest.approx(total / 7)
    torch.testing.assert_close(model.weight, twin.weight)
    assert len(heard) == 2


def test_a_gradient_over_the_limit_is_scaled_down_for_the_step_and_estimators_see_it_whole():
    model, twin = twins()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(Parallel.alone(model), mse_loss, optimizer, DeviceOptions(), Clock(CPU), clip_norm=1.0)
    seen = []

    def norm() -> float:
        return float(torch.stack([each.grad.square().sum() for each in model.parameters()]).sum().sqrt())

    optimizer.register_step_pre_hook(lambda *_: seen.append(norm()))
    for size in (10.0, 0.01):
        x, y = size * torch.randn(4, 3), size * torch.randn(4, 1)
        step((x, y))
        mean = (twin(x) - y).square().mean()
        gradients = torch.autograd.grad(mean, list(twin.parameters()))
        whole = torch.cat([each.flatten() for each in gradients]).norm().item()
        assert seen[-1] == pytest.approx(whole)
        assert norm() == pytest.approx(min(whole, 1.0), rel=1e-4)
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient * min(1.0, 1.0 / whole)
        torch.testing.assert_close(model.weight, twin.weight)
    assert seen[0] > 1.0 > seen[1]


class SmallMemory(nn.Module):
    """Takes at most `fits` samples at once."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        self.fits, self.layer = fits, nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.layer(x)


@pytest.mark.parametrize(
    ("fits", "micro_batch_size", "message"),
    [
        (20, None, "batch of 64 samples in micro-batches of 64. Try micro_batch_size=32"),
        (5, 16, "batch of 64 samples in micro-batches of 16. Try micro_batch_size=8"),
        (0, 1, "batch of 64 samples in micro-batches of 1. Not even one sample fits"),
    ],
)
def test_out_of_memory_names_the_sizes_and_what_to_try(fits, micro_batch_size, message):
    step = make_step(SmallMemory(fits), micro_batch_size=micro_batch_size)
    with pytest.raises(BatchTooLargeError) as caught:
        step((torch.randn(64, 3), torch.randn(64, 1)))
    assert message in str(caught.value)


@pytest.mark.parametrize("compiles", [True, False])
def test_the_first_pass_of_each_size_is_compiling_where_it_is_compiled(compiles, monkeypatch):
    monkeypatch.setattr(module, "compiled", lambda function, **_: function)
    step = make_step(nn.Linear(3, 1), compile=compiles).under(lambda: BatchPlan(batch_size=4))
    laps = []
    monkeypatch.setattr(step.clock, "lap", lambda name: laps.append(name) or nullcontext())
    for size in (4, 4, 3, 4, 3, 2):
        step((torch.ones(size, 3), torch.ones(size, 1)))
    assert laps == ["compile" if compiles else "train"] * 3
    assert step.num_compiled == (1 if compiles else 0)  # a short batch is not


@pytest.mark.parametrize(("micro_batch_size", "cuts", "sizes"), [(None, 1, [7]), (None, 2, [4, 3]), (3, 2, [3, 3, 1])])
def test_a_batch_is_cut_as_the_options_and_the_plan_want_it(micro_batch_size, cuts, sizes, monkeypatch):
    step = make_step(nn.Linear(3, 1), micro_batch_size=micro_batch_size)
    step.plan = lambda: BatchPlan(min_micro_batches=cuts)
    ran = []
    monkeypatch.setattr(step.graphs, "run", lambda part, plan: ran.append(part) or step._run(part, plan))
    step((torch.ones(7, 3), torch.ones(7, 1)))
    assert [len(part.targets) for part in ran] == sizes
    assert [part.is_last for part in ran] == [False] * (len(sizes) - 1) + [True]
    assert [part.is_full for part in ran] == [size == sizes[0] for size in sizes]


ROOM = 20
"""Samples that fit."""


class Small(nn.Module):
    """Runs out of memory above a number of samples, in the middle of a pass."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(num_features, 3), nn.Linear(3, 1)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        middle = self.first(x)
        if self.training and len(x) > ROOM:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.seen.append(len(x))
        return self.second(middle)


@dataclass(frozen=True)
class SmallModel(ModelSettings):
    def build(self, num_features: int, num_classes: int) -> nn.Module:
        return Small(num_features)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    """80 samples in batches of 8, 16, 32, which does not fit."""
    monkeypatch.setitem(MODELS, "small", SmallModel)
    policy = Part(kind="adabatch", settings={"max_batch_size": 64, "every_epochs": 1})
    method = Method(label="it", batch_size=8, lr=0.1, lr_coupling="linear", policy=policy, measure_always=True)
    experiment = replace(small(), model=Part(kind="small"), methods={"it": method}, schedule=Part(kind="constant"))
    return Run(experiment, "it", 0, tmp_path / "run")


def test_a_run_that_outgrows_the_memory_goes_back_says_so_and_stays_there(run, caplog):
    execute(run)
    records = read_run(run.records_path)[1]
    assert [record.batch_size for record in records] == [8, 16, 16, 16]
    assert [record.samples for record in records] == [80, 160, 240, 320]
    assert records[2].changes is not None
    assert (records[2].changes[0].batch_size, records[2].changes[0].lr) == (16, pytest.approx(0.2))
    assert [record.next_lr for record in records] == pytest.approx([0.2, 0.4, 0.2, 0.2])
    assert "at most 16: larger batches did not fit into memory" in records[2].reason
    assert "at most 16" in records[3].reason
    assert caplog.text.count("out of memory: a batch of 32 samples does not fit, 16 did") == 1
    # One step of 32 in two passes, then three of 16: 80 samples.
    assert records[2].steps - records[1].steps == 4
    assert records[2].diversity is None
    assert records[3].diversity is not None


def test_the_limit_survives_a_resume(run, tmp_path):
    whole = replace(run, folder=tmp_path / "whole")
    execute(whole)
    kill_after(run, 3)
    execute(run, resume=True)
    assert_same_end(run, whole)


def test_a_first_batch_that_does_not_fit_is_an_error_with_advice(run):
    method = replace(run.experiment.methods["it"], batch_size=32)
    broken = replace(run, experiment=replace(run.experiment, methods={"it": method}))
    with pytest.raises(BatchTooLargeError, match=r"in micro-batches of 32\. Try micro_batch_size=16"):
        execute(broken)


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch) -> Time:
    made_up = Time()
    monkeypatch.setattr(clock_module, "time", made_up)
    return made_up


def new_clock() -> Clock:
    return Clock(torch.device("cpu"))


def laps(clock: Clock) -> tuple[float, float, float, float]:
    return tuple(clock.seconds(name) for name in ("train", "measure", "evaluate", "compile"))  # type: ignore[return-value]


def test_a_lap_within_a_lap_pauses_the_outer_one(time):
    clock = new_clock()
    with clock.lap("train"):
        time.passes(1)
        with clock.lap("compile"):
            time.passes(10)
            with clock.lap("measure"):
                time.passes(100)
            time.passes(20)
        time.passes(2)
    time.passes(1000)
    with clock.lap("evaluate"):
        time.passes(5)
    assert laps(clock) == (3, 100, 5, 30)
    assert clock.train_seconds == 103
    assert clock.total_seconds == 1138


def test_a_lap_under_way_counts_already(time):
    clock = new_clock()
    with clock.lap("train"):
        time.passes(1)
        assert clock.seconds("train") == 1
        with clock.lap("measure"):
            time.passes(3)
            assert laps(clock) == (1, 3, 0, 0)
            assert clock.train_seconds == 4


def test_a_state_taken_within_a_lap_goes_on_within_a_lap(time):
    """As a checkpoint in the middle of an epoch does; the time between the two lives counts nowhere."""
    first = new_clock()
    time.passes(50)
    with first.lap("train"):
        time.passes(1)
        with first.lap("compile"):
            time.passes(10)
        time.passes(2)
        saved = first.state_dict()
        time.passes(4)
    assert first.seconds("train") == 7  # saving changes nothing
    time.passes(10_000)
    second = new_clock()
    time.passes(500)
    second.load_state_dict(saved)
    time.passes(20)
    with second.lap("train"):
        time.passes(4)
    assert laps(second) == (7, 0, 0, 10)
    assert second.total_seconds == 63 + 24
