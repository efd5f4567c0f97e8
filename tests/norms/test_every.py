"""One backward pass in q is measured; the rest is extrapolated, with a standard error."""

import math

import pytest
import torch
from torch import Tensor, nn

from divebatch import NormMeter
from divebatch.errors import ArgumentError
from divebatch.norms import DiversityMeter
from reference.per_sample import mean_loss, mlp, samples, sq_norms

Batch = tuple[Tensor, Tensor]


def batches(count: int, *, seed: int = 1, size: int = 4) -> list[Batch]:
    inputs, targets = samples(count * size, seed=seed)
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def norms_of(model: nn.Module, data: list[Batch]) -> list[float]:
    """The sum of squared norms of each batch."""
    return [float(sq_norms(model, mean_loss, x, y).sum()) for x, y in data]


def run(model: nn.Module, data: list[Batch]) -> None:
    for x, y in data:
        model.zero_grad()
        mean_loss(model(x), y).backward()


def num_forward_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


# What is measured


@pytest.mark.parametrize(("every", "steps"), [(2, 1), (2, 6), (2, 7), (3, 7), (3, 9), (5, 4), (10, 21)])
def test_one_in_q_is_measured_and_stands_for_the_rest(every: int, steps: int):
    model, data = mlp(), batches(steps)
    with NormMeter(model, every=every) as meter:
        run(model, data)
    measured = norms_of(model, data)[::every]
    assert meter.sum_of_sq_norms() == pytest.approx(sum(measured) * steps / len(measured), rel=1e-10)
    assert meter.num_samples == 4 * len(measured)


def test_passes_that_are_not_measured_run_without_hooks():
    model, data = mlp(), batches(7)
    counts = []
    with NormMeter(model, every=3) as meter:
        for x, y in data:
            counts.append(num_forward_hooks(model))
            mean_loss(model(x), y).backward()
            assert meter.num_samples == 4 * math.ceil(len(counts) / 3)
    assert counts == [2, 0, 0, 2, 0, 0, 2]
    assert num_forward_hooks(model) == 0


def test_per_sample_is_of_the_last_measured_pass():
    model, data = mlp(), batches(6)
    with NormMeter(model, every=4) as meter:
        run(model, data)
    torch.testing.assert_close(meter.per_sample(), sq_norms(model, mean_loss, *data[4]), rtol=1e-10, atol=0)


def test_every_one_measures_all_passes():
    model, data = mlp(), batches(5)
    with NormMeter(model, every=1) as meter:
        run(model, data)
        assert num_forward_hooks(model) == 2
    assert meter.sum_of_sq_norms() == pytest.approx(sum(norms_of(model, data)), rel=1e-10)
    assert meter.num_samples == 20


def test_forward_passes_without_backward_do_not_use_up_a_turn():
    model, data = mlp(), batches(4)
    with NormMeter(model, every=2) as meter:
        for x, y in data:
            model(x)
            with torch.no_grad():
                model(x)
            mean_loss(model(x), y).backward()
    assert meter.num_samples == 8
    measured = norms_of(model, data)[::2]
    assert meter.sum_of_sq_norms() == pytest.approx(2 * sum(measured), rel=1e-10)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_when_forwards_wait_together_the_next_one_with_hooks_is_measured(order: tuple[int, int]):
    model, data = mlp(), batches(6)
    with NormMeter(model, every=3) as meter:
        for pair in (data[:2], data[2:4], data[4:]):
            losses = [mean_loss(model(x), y) for x, y in pair]
            for which in order:
                losses[which].backward()
    norms = norms_of(model, data)
    assert meter.num_samples == 8
    assert meter.sum_of_sq_norms() == pytest.approx(6 / 2 * (norms[order[0]] + norms[4 + order[0]]), rel=1e-10)


def test_gradient_accumulation_does_not_matter():
    model, data = mlp(), batches(7)
    with NormMeter(model, every=3) as meter:
        for x, y in data:
            mean_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    measured = norms_of(model, data)[::3]
    assert meter.sum_of_sq_norms() == pytest.approx(sum(measured) * 7 / 3, rel=1e-10)


def test_the_users_gradients_are_those_of_a_run_without_meter():
    model, plain, data = mlp(), mlp(), batches(5)
    with NormMeter(model, every=2):
        for x, y in data:
            mean_loss(model(x), y).backward()
    for x, y in data:
        mean_loss(plain(x), y).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_first_parameter_without_gradient_does_not_stop_the_count():
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spare, self.used = nn.Linear(4, 4).double(), mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model, data = Spare(), batches(6)
    with NormMeter(model, every=2) as meter:
        run(model, data)
    assert meter.sum_of_sq_norms() == pytest.approx(2 * sum(norms_of(model, data)[::2]), rel=1e-10)


# Beginning again


def test_the_first_pass_after_a_reset_is_measured():
    model, data = mlp(), batches(3)
    with NormMeter(model, every=10) as meter:
        run(model, data)
        meter.reset()
        run(model, data)
    assert meter.sum_of_sq_norms() == pytest.approx(3 * norms_of(model, data)[0], rel=1e-10)


def test_the_first_pass_after_attaching_again_is_measured():
    model, data = mlp(), batches(3)
    meter = NormMeter(model, every=10)
    for _ in range(2):
        meter.reset()
        with meter:
            run(model, data)
        assert meter.sum_of_sq_norms() == pytest.approx(3 * norms_of(model, data)[0], rel=1e-10)


def test_passes_after_detaching_do_not_count():
    model, data = mlp(), batches(4)
    with NormMeter(model, every=2) as meter:
        run(model, data[:2])
    before = meter.sum_of_sq_norms()
    run(model, data[2:])
    assert meter.sum_of_sq_norms() == before


def test_sums_that_were_loaded_are_not_extrapolated_again():
    model, data = mlp(), batches(8)
    with NormMeter(model, every=2) as through:
        run(model, data[:4])
        saved, num_samples = through.sum_of_sq_norms(), through.num_samples
        run(model, data[4:])
    with NormMeter(model, every=2) as resumed:
        resumed.load_sums(saved, num_samples)
        assert resumed.sum_of_sq_norms() == pytest.approx(saved, rel=1e-10)
        run(model, data[4:])
    assert resumed.sum_of_sq_norms() == pytest.approx(through.sum_of_sq_norms(), rel=1e-10)


# The standard error


def test_measuring_everything_leaves_no_standard_error():
    model = mlp()
    with NormMeter(model, every=1) as meter:
        run(model, batches(5))
    assert meter.standard_error() == 0


@pytest.mark.parametrize("steps", [2, 3])
def test_a_single_measured_pass_does_not_tell_the_error(steps: int):
    model = mlp()
    with NormMeter(model, every=3) as meter:
        run(model, batches(steps))
    assert meter.standard_error() == math.inf


def test_the_standard_error_is_that_of_a_sample_without_replacement():
    model, data = mlp(), batches(12)
    with NormMeter(model, every=4) as meter:
        run(model, data)
    measured = torch.tensor(norms_of(model, data)[::4], dtype=torch.float64)
    variance = 12**2 * (1 - 3 / 12) * float(measured.var()) / 3
    assert meter.standard_error() == pytest.approx(variance**0.5, rel=1e-9)


def test_equal_passes_leave_no_standard_error():
    model, (batch,) = mlp(), batches(1)
    with NormMeter(model, every=3) as meter:
        run(model, [batch] * 9)
    assert meter.standard_error() == pytest.approx(0, abs=1e-6 * meter.sum_of_sq_norms())
    assert meter.sum_of_sq_norms() == pytest.approx(9 * norms_of(model, [batch])[0], rel=1e-10)


@pytest.mark.parametrize("mode", ["exact", "sketch"])
def test_the_truth_lies_within_the_interval_most_of_the_time(mode: str):
    num_problems, covered = 60, 0
    torch.manual_seed(0)
    for _ in range(num_problems):
        model = nn.Linear(4, 3).double()
        data = [(torch.randn(3, 2, 4).double(), torch.randn(3, 2, 3).double()) for _ in range(48)]
        with NormMeter(model) as truth, NormMeter(model, mode=mode, every=4) as meter:
            run(model, data)
        covered += abs(meter.sum_of_sq_norms() - truth.sum_of_sq_norms()) <= 1.96 * meter.standard_error()
    assert 0.8 * num_problems <= covered <= num_problems


def test_the_noise_of_a_sketch_is_part_of_it():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    batch = torch.randn(4, 5, 4).double(), torch.randn(4, 5, 3).double()
    with NormMeter(model, mode="sketch", every=2) as meter:
        run(model, [batch] * 40)
    exact = 40 * norms_of(model, [batch])[0]
    assert 0 < meter.standard_error() < 0.5 * exact
    assert abs(meter.sum_of_sq_norms() - exact) < 5 * meter.standard_error()
    assert meter.num_samples == 80


# Diversity


def test_a_diversity_of_one_pass_in_q_is_refused():
    with pytest.raises(ArgumentError, match=r"every must be 1 here, got every=2: .*mode='sketch'"):
        DiversityMeter(mlp(), every=2)


# Wrong values


@pytest.mark.parametrize("every", [0, -1, 1.0, 2.5, "2", None, True, False, math.nan])
def test_a_wrong_every_gets_an_error_that_shows_it(every: object):
    with pytest.raises(ArgumentError, match=f"every must be an integer of at least 1, got every={every!r}"):
        NormMeter(mlp(), every=every)
