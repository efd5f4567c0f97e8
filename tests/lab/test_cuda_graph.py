"""Replayed passes against the same passes run one kernel at a time. Needs a GPU."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from divebatch import Diversity
from divebatch.data.micro_batches import BatchPlan
from divebatch.estimators import Split, TrainingContext
from divebatch.lab import Clock, DeviceOptions, TrainStep
from divebatch.lab.ranks import Parallel
from divebatch.norms import DiversityMeter
from reference.delivery import Delivered, attach

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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


@pytest.mark.parametrize("micro_batch_size", [None, 16])
@pytest.mark.parametrize(("mode", "tolerance"), [("exact", 2e-3), ("sketch", 0.2)])
def test_replayed_passes_measure_what_plain_ones_do(mode, tolerance, micro_batch_size):
    settings = {"mode": mode, "micro_batch_size": micro_batch_size}
    plain, replayed = measured(cuda_graphs=False, compile=False, **settings), measured(cuda_graphs=True, **settings)
    for expected, found in zip(plain, replayed, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=tolerance)
        assert found[1] == pytest.approx(expected[1], rel=2e-3)
        assert found[2] == expected[2] == sum(SIZES)


def test_sums_that_begin_anew_are_recorded_anew_and_no_token_means_no_recording():
    step = make_step(cuda_graphs=True)
    with DiversityMeter(step.parallel.model, compiled=True) as meter:
        run_steps(step, [32, 32, 32], watched_by(meter))
        (first,) = step.graphs._recorded.values()
        meter.reset()
        run_steps(step, [32, 32, 32], watched_by(meter))
        assert first not in step.graphs._recorded.values()
        assert meter.diversity().num_samples == 96
        step.graphs._keep(lambda *_: False)
        run_steps(step, [32, 32, 32], lambda size: BatchPlan(batch_size=size, measuring=True, replay_token=None))
        assert not step.graphs._recorded
        assert meter.diversity().num_samples == 192


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


def watched_in_parts(*, cuda_graphs: bool, every: int) -> tuple[dict[str, torch.Tensor], list[float], Diversity]:
    """In halves, for `split`, or one batch in so many."""
    step = make_step(cuda_graphs=cuda_graphs, compile=cuda_graphs)
    model = step.parallel.model
    estimator, delivered = Split(every_steps=every), itertools.accumulate(SIZES)
    now = [0]
    attach(estimator, TrainingContext(model, Delivered(lambda: now[0]), step.optimizer))
    estimator.start()

    def plan(batch_size: int) -> BatchPlan:
        return BatchPlan(
            batch_size=batch_size,
            measuring=True,
            min_micro_batches=estimator.min_micro_batches,
            see_replay=estimator.see_replay,
        )

    losses, full_size = [], SIZES[0]
    for size in SIZES:
        now[0] = next(delivered)
        full_size = size if size in (32, 64) else full_size
        losses += run_steps(step, [size], lambda _, full_size=full_size: plan(full_size))
    assert bool(step.graphs._recorded) == cuda_graphs
    return model.state_dict(), losses, estimator.finish()


@pytest.mark.parametrize("every", [1, 2])
def test_replayed_parts_train_and_are_seen_as_plain_ones(every):
    plain, plain_losses, expected = watched_in_parts(cuda_graphs=False, every=every)
    replayed, losses, found = watched_in_parts(cuda_graphs=True, every=every)
    assert losses == pytest.approx(plain_losses, rel=1e-3)
    assert (found.trace, found.num_samples) == (pytest.approx(expected.trace, rel=1e-2), sum(SIZES))
    for name, value in plain.items():
        torch.testing.assert_close(replayed[name], value, rtol=5e-3, atol=1e-4)


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
