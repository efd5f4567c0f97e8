"""Recorded passes: when one is made and what it serves, by a stand-in for a GPU, and on one."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, EpochRecord
from divebatch.data.micro_batches import BatchPlan
from divebatch.estimators import Split, split
from divebatch.lab import Clock, DeviceOptions, Tally, TrainStep, cuda_graph, train_epoch
from divebatch.lab.cuda_graph import GraphedPasses, MicroBatch, Recording
from divebatch.lab.ranks import Parallel
from divebatch.norms import DiversityMeter
from divebatch.norms.loss_scale import LossWeight
from divebatch.policies import NoiseScale


class Written:
    """In place of a CUDA graph."""

    under_way = False

    def replay(self) -> None:
        """`Played` does it."""


@contextmanager
def written(_: Written) -> Iterator[None]:
    Written.under_way = True
    try:
        yield
    finally:
        Written.under_way = False


class Played(Recording):
    """Goes through the pass anew each time, seen by no hook that waits for an accumulated gradient. As a graph does, it
    writes its loss and its gradients where it wrote them before."""

    made = replayed = 0

    def __init__(self, parameters, run, inputs, targets):
        Played.made += 1
        self._run = run
        super().__init__(parameters, run, inputs, targets)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        Played.replayed += 1
        loss = self._run(inputs, targets)
        for name, new in zip(self.gradients, torch.autograd.grad(loss, list(self._parameters.values())), strict=True):
            self.gradients[name].copy_(new)
        return self._loss.copy_(loss.detach())


@pytest.fixture
def on_a_gpu(monkeypatch):
    Played.made = Played.replayed = 0
    monkeypatch.setattr(cuda_graph, "Recording", Played)
    monkeypatch.setattr(GraphedPasses, "is_enabled", property(lambda _: True, lambda _, __: None), raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Written)
    monkeypatch.setattr(torch.cuda, "graph", written)
    monkeypatch.setattr(split, "is_recorded", lambda _: Written.under_way)


def make_cpu_step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch_size: int | None = None) -> TrainStep:
    options = DeviceOptions(micro_batch_size=micro_batch_size)
    return TrainStep(Parallel.alone(model), mse_loss, optimizer, options, Clock(torch.device("cpu")))


class Passes:
    """Passes through a small model, with the size of a full one."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)
        self.graphs = make_cpu_step(self.model, torch.optim.SGD(self.model.parameters(), 0.1)).graphs
        self.expect(4)

    def expect(self, full_size: int, batch_size: int | None = None) -> None:
        self.full_size = full_size
        self.graphs.expect(full_size, batch_size or full_size)

    def add(self, size: int = 4, *, weight: float = 1.0, measuring: bool = False, token: object = True) -> bool:
        """One pass; whether it came from a recording."""
        before = Played.replayed
        part = MicroBatch(
            inputs=torch.ones(size, 3),
            targets=torch.ones(size, 1),
            weight=LossWeight(weight, size),
            is_full=size == self.full_size,
        )
        self.graphs.run(part, BatchPlan(measuring=measuring, replay_token=token))
        return Played.replayed > before

    @property
    def recorded(self) -> dict[tuple[int, bool], object]:
        return {variant: each.token for variant, each in self.graphs._recorded.items()}


@pytest.fixture
def passes(on_a_gpu):
    return Passes()


def run(passes: Passes, size: int = 4, **settings: Any) -> bool:
    passes.model.zero_grad()
    return passes.add(size, **settings)


def test_the_second_pass_is_recorded_and_a_short_one_is_not(passes):
    assert [run(passes), run(passes)] == [False, True]
    assert [run(passes, 3), run(passes)] == [False, True]
    assert Played.made == 1


def test_parts_of_all_batches_have_one_recording(passes):
    assert [run(passes, weight=weight) for weight in (0.5, 0.5, 0.25, 1.0)] == [False, True, True, True]
    assert Played.made == 1
    assert not any(run(passes, weight=0.0) for _ in range(3))  # a dummy for the sake of other ranks


def test_a_recording_that_fails_leaves_the_gradients_of_earlier_parts(passes, monkeypatch):
    run(passes, weight=0.5)
    before = passes.model.weight.grad
    monkeypatch.setattr(passes.graphs, "_loss_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        passes.add(weight=0.5)
    assert passes.model.weight.grad is before


def test_sums_that_begin_anew_run_once_kernel_by_kernel_before_they_are_recorded(passes):
    first, second = object(), object()
    assert [run(passes, measuring=True, token=first) for _ in range(3)] == [False, True, True]
    assert [run(passes, measuring=True, token=second) for _ in range(3)] == [False, True, True]
    assert Played.made == 2


def test_without_a_token_nothing_is_recorded(passes):
    assert not any(run(passes, measuring=True, token=None) for _ in range(3))


def test_another_size_drops_the_recording(passes):
    assert [run(passes), run(passes)] == [False, True]
    passes.expect(5)
    assert not passes.recorded
    assert [run(passes, 5), run(passes, 5)] == [False, True]


def test_there_is_no_recording_beside_one_that_measures_or_has_another_token(passes):
    for measuring, token in ((False, 1), (True, 1), (True, 2), (False, 2)):
        assert [run(passes, measuring=measuring, token=token) for _ in range(3)] == [False, True, True]
        assert passes.recorded == {(4, measuring): token}


def run_part(passes: Passes, size: int, batch_size: int) -> bool:
    passes.expect(size, batch_size)
    return run(passes, size, weight=size / batch_size)


def test_whole_batches_and_halves_have_a_recording_each_until_the_size_changes(passes):
    assert [run_part(passes, size, 8) for size in (4, 8, 4, 8, 8, 4)] == [False, False, True, True, True, True]
    assert (Played.made, len(passes.recorded)) == (2, 2)
    assert run_part(passes, 8, 16)  # halves of larger batches: what was recorded serves on
    assert [size for size, _ in passes.recorded] == [8]
    assert Played.made == 2


INPUTS = torch.linspace(-1, 2, 183, dtype=torch.float64).view(61, 3).sin()
DATA = TensorDataset(INPUTS, 3 + INPUTS.sum(1, keepdim=True))


def trained_here(estimator: str | Split, micro_batch_size: int | None) -> tuple[list[EpochRecord], list[Tensor]]:
    """Three epochs with batches of 8, the last of them of 5."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loader, step = AdaptiveLoader(DATA, 8, seed=0), make_cpu_step(model, optimizer, micro_batch_size)
    records = []
    with Controller(model, optimizer, loader, NoiseScale(8), estimator=estimator, measure_always=True) as control:
        step.plan = control.plan
        for _ in range(3):
            records.append(control.step(loss=train_epoch(step, loader, Tally())))  # noqa: PERF401
    return records, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore:.* cannot grow the batch")  # the experiment has no momentum
@pytest.mark.parametrize("micro_batch_size", [None, 2, 3])
@pytest.mark.parametrize("kind", ["split", "moments", "split, one batch in 3"])
def test_what_is_replayed_trains_and_is_measured_as_what_is_not(kind, micro_batch_size, request):
    make = (lambda: Split(every_steps=3)) if "," in kind else lambda: kind
    expected, expected_weights = trained_here(make(), micro_batch_size)
    request.getfixturevalue("on_a_gpu")
    found, weights = trained_here(make(), micro_batch_size)
    assert Played.made == (2 if "," in kind and micro_batch_size is None else 1)
    assert Played.replayed >= 3 * 7 - 1
    for one, other in zip(found, expected, strict=True):
        assert one.measured == other.measured
        assert (one.diversity, one.diversity_low, one.train_loss) == pytest.approx(
            (other.diversity, other.diversity_low, other.train_loss), rel=1e-9
        )
    for mine, theirs in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = [32, 32, 32, 32, 7, 32, 64, 64, 64, 5]
"""A first pass, a recorded one, replays, a short last batch; then another size."""


def make_step(*, cuda_graphs: bool, **settings: Any) -> TrainStep:
    torch.manual_seed(0)
    device = torch.device("cuda")
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    model = layers.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
    options = DeviceOptions(**{"compile": True, **settings}, cuda_graphs=cuda_graphs)
    return TrainStep(Parallel.alone(model), cross_entropy, optimizer, options, Clock(device))


def run_steps(step: TrainStep, sizes: list[int], plan: Callable[[int], BatchPlan]) -> list[float]:
    """One step on a batch of each size; `plan` is asked with the size of a full batch."""
    losses, full_size = [], sizes[0]
    for size in sizes:
        full_size = size if size in (32, 64) else full_size
        under = step.under(lambda full_size=full_size: plan(full_size))
        inputs = torch.randn(size, 3, 12, 12, device="cuda").contiguous(memory_format=torch.channels_last)
        losses.append(under((inputs, torch.randint(4, (size,), device="cuda"))).item())
    return losses


def plain(batch_size: int) -> BatchPlan:
    return BatchPlan(batch_size=batch_size)


def watched_by(meter: DiversityMeter) -> Callable[[int], BatchPlan]:
    return lambda batch_size: BatchPlan(batch_size=batch_size, measuring=True, replay_token=meter.token)


def trained(*, cuda_graphs: bool) -> tuple[dict[str, torch.Tensor], list[float], TrainStep]:
    step = make_step(cuda_graphs=cuda_graphs)
    losses = run_steps(step, SIZES, plain)
    return step.parallel.model.state_dict(), losses, step


def measured(*, cuda_graphs: bool, mode: str, compile: bool = True, **settings: Any) -> list[tuple[float, float, int]]:
    """Both sums of two measured epochs, with plain steps in between."""
    step = make_step(cuda_graphs=cuda_graphs, compile=compile, **settings)
    meter, found = DiversityMeter(step.parallel.model, compiled=compile, mode=mode), []
    for _ in range(2):
        run_steps(step, SIZES, plain)
        with meter:
            run_steps(step, SIZES, watched_by(meter))
            seen = meter.diversity()
        found.append((seen.sum_of_sq_norms, seen.sq_norm_of_sum, seen.num_samples))
    assert bool(step.graphs._recorded) == cuda_graphs
    return found


@NEEDS_GPU
@pytest.mark.parametrize("micro_batch_size", [None, 16])
@pytest.mark.parametrize(("mode", "tolerance"), [("exact", 2e-3), ("sketch", 0.2)])
def test_replayed_passes_measure_what_plain_ones_do(mode, tolerance, micro_batch_size):
    settings = {"mode": mode, "micro_batch_size": micro_batch_size}
    plain, replayed = measured(cuda_graphs=False, compile=False, **settings), measured(cuda_graphs=True, **settings)
    for expected, found in zip(plain, replayed, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=tolerance)
        assert found[1] == pytest.approx(expected[1], rel=2e-3)
        assert found[2] == expected[2] == sum(SIZES)


@NEEDS_GPU
def test_replayed_passes_train_the_same_weights_statistics_and_losses():
    plain, plain_losses, _ = trained(cuda_graphs=False)
    replayed, losses, step = trained(cuda_graphs=True)
    assert step.graphs._recorded
    assert step.peak_memory_bytes > 0
    assert step.num_compiled == 2
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    assert len(set(losses)) == len(losses)
    for name, value in plain.items():
        torch.testing.assert_close(replayed[name], value, rtol=1e-3, atol=1e-5)


@NEEDS_GPU
def test_replayed_sketches_draw_other_signs_each_time():
    step = make_step(cuda_graphs=True)
    for group in step.optimizer.param_groups:
        group["lr"] = 0.0
    meter = DiversityMeter(step.parallel.model, compiled=True, mode="sketch")
    batch = torch.randn(32, 3, 12, 12, device="cuda"), torch.randint(4, (32,), device="cuda")
    with meter:
        watched = step.under(lambda: watched_by(meter)(32))
        sums = [0.0]
        for _ in range(8):
            watched(batch)
            sums.append(meter.norms.sum_of_sq_norms())
    added = {round(after - before, 9) for before, after in itertools.pairwise(sums)}
    assert step.graphs._recorded
    assert len(added) == 8
