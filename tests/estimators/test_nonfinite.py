"""A batch whose gradients are not finite: it is in no estimate, and the record says so."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, DiveBatch, Diversity, gradient_diversity, micro_batches
from divebatch.estimators import (
    AcrossRanks,
    Estimator,
    Moments,
    Oracle,
    PerSample,
    Split,
    TrainingContext,
    Trajectory,
)
from divebatch.measurement import Measurement
from divebatch.policies import NoiseScale
from reference import per_sample
from reference.delivery import Delivered, attach
from reference.per_sample import mean_loss, mlp, samples

SIZE, COUNT, BAD = 8, 10, 3
ESTIMATORS = {
    "trajectory": Trajectory,
    "trajectory sketch": lambda: Trajectory(mode="sketch"),
    "per-sample": PerSample,
    "split": Split,
    "ranks": AcrossRanks,
    "moments": Moments,
}
any_estimator = pytest.mark.parametrize("name", ESTIMATORS)
any_value = pytest.mark.parametrize("bad", [math.nan, math.inf])


class Loop:
    """Weights that stand still, so that a batch left out must be as if it had never been there."""

    def __init__(self, estimator: Estimator, *, skips: bool, delivered: int = 0) -> None:
        self.model, self.delivered, self.skips = mlp(), delivered, skips
        self.optimizer = SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        self.estimator = estimator
        self.delivery = Delivered(lambda: self.delivered)
        attach(self.estimator, TrainingContext(self.model, self.delivery, self.optimizer))
        self.estimator.start()

    def run(self, indices, bad: dict[int, float] | None = None) -> Diversity:
        for index in indices:
            self.batch(index, (bad or {}).get(index, 1.0))
        return self.estimator.finish()

    def batch(self, index: int, factor: float) -> None:
        self.delivered += SIZE
        self.delivery.look()
        x, y = (part[SIZE * index : SIZE * (index + 1)] for part in samples(SIZE * COUNT))
        self.optimizer.zero_grad()
        for (inputs, targets), weight in micro_batches((x, y), SIZE // self.estimator.min_micro_batches):
            (mean_loss(self.model(inputs), targets) * factor * weight).backward()
        if not self.skips or all(p.grad is not None and p.grad.isfinite().all() for p in self.model.parameters()):
            before = [p.detach().clone() for p in self.model.parameters()]
            self.optimizer.step()
            with torch.no_grad():  # lr 0 times NaN is NaN
                for parameter, value in zip(self.model.parameters(), before, strict=True):
                    parameter.copy_(value)


def assert_same(measured: Diversity, expected: Diversity) -> None:
    assert (measured.trace, measured.sq_norm) == pytest.approx((expected.trace, expected.sq_norm), rel=1e-5)


@any_estimator
@any_value
def test_a_skipped_batch_is_in_no_estimate_and_is_counted(name: str, bad: float):
    torch.manual_seed(0)
    measured = Loop(ESTIMATORS[name](), skips=True).run(range(COUNT), {BAD: bad})
    others = [index for index in range(COUNT) if index != BAD]
    if name in ("split", "ranks"):  # without a step between them, the next batch's chunks go with the bad one's
        others.remove(BAD + 1)
    torch.manual_seed(0)
    if "sketch" in name:
        assert math.isfinite(measured.trace)
        assert measured.sq_norm > 0
    else:
        assert_same(measured, Loop(ESTIMATORS[name](), skips=True).run(others))
    assert measured.num_samples == SIZE * len(others)
    assert measured.skipped_samples == SIZE * (COUNT - len(others))


@any_estimator
def test_a_batch_that_the_loop_stepped_on_is_in_no_estimate_either(name: str):
    measured = Loop(ESTIMATORS[name](), skips=False).run(range(COUNT), {BAD: math.nan})
    assert measured.is_defined
    assert math.isfinite(measured.trace)
    assert measured.trace > 0
    assert 0 < measured.skipped_samples <= 3 * SIZE
    assert measured.num_samples + measured.skipped_samples == SIZE * COUNT


@any_estimator
def test_where_most_batches_are_not_finite_training_has_diverged(name: str):
    bad = dict.fromkeys(range(2, COUNT), math.nan)
    found = Loop(ESTIMATORS[name](), skips=False).run(range(COUNT), bad)
    assert found.has_diverged
    assert not found.is_defined
    assert math.isnan(found.noise_scale)
    assert "were in no step with finite gradients" in found.undefined_reason


@any_estimator
def test_what_was_left_out_is_in_the_state(name: str):
    def halves() -> Diversity:
        first = Loop(ESTIMATORS[name](), skips=True)
        for index in range(6):
            first.batch(index, math.nan if index == BAD else 1.0)
        second = Loop(ESTIMATORS[name](), skips=True, delivered=first.delivered)
        second.estimator.load_state_dict(first.estimator.state_dict())
        return second.run(range(6, COUNT))

    torch.manual_seed(0)
    whole = Loop(ESTIMATORS[name](), skips=True).run(range(COUNT), {BAD: math.nan})
    torch.manual_seed(0)
    found = halves()
    assert_same(found, whole)
    assert (found.num_samples, found.skipped_samples) == (whole.num_samples, whole.skipped_samples)


def test_a_window_begins_with_nothing_left_out():
    loop = Loop(PerSample(), skips=True)
    for index in range(4):
        loop.batch(index, math.nan if index == BAD else 1.0)
    assert loop.estimator.window().skipped_samples == SIZE
    assert loop.run(range(4, COUNT)).skipped_samples == 0


def test_the_oracle_leaves_bad_data_out_and_an_exact_diversity_does_not():
    model, (x, y) = mlp(), samples(24)
    x[10] = math.nan
    batches = list(zip(x.split(8), y.split(8), strict=True))
    oracle = Oracle(mean_loss)
    attach(oracle, TrainingContext(model, Delivered(lambda: 24, lambda: batches)))
    found = oracle.finish()
    assert_same(found, per_sample.diversity(model, mean_loss, [batches[0], batches[2]]))
    assert (found.num_samples, found.skipped_samples) == (16, 8)
    assert not gradient_diversity(model, mean_loss, batches).is_defined
    assert gradient_diversity(model, mean_loss, batches, skip_nonfinite=True).value == found.value


def test_gradients_that_overflow_where_norms_do_not_are_in_neither_sum():
    model = nn.Linear(4, 1).double()
    handle = model.weight.register_hook(lambda gradient: gradient * math.inf)
    delivered = [0]
    estimator = Trajectory()
    attach(estimator, TrainingContext(model, Delivered(lambda: delivered[0])))
    estimator.start()
    x = torch.randn(8, 4, dtype=torch.float64)
    delivered[0] = 8
    model(x).mean().backward()
    handle.remove()
    delivered[0] = 16
    model(x).mean().backward()
    found = estimator.finish()
    assert found.is_defined
    assert (found.num_samples, found.skipped_samples) == (8, 8)


# In a controller

diverges = pytest.mark.filterwarnings("ignore:.*training has probably diverged")


def controlled(estimator, policy, *, bad=(), skips: bool = True, epochs: int = 1, loss_factor: float = math.nan):
    torch.manual_seed(0)
    x = torch.randn(320, 4)
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = AdaptiveLoader(TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(320, 1)), batch_size=16, seed=0)
    control = Controller(model, optimizer, loader, policy, estimator=estimator, lr_coupling="linear")
    for _ in range(epochs):
        for index, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            factor = loss_factor if index in bad else 1.0
            for (a, b), weight in micro_batches((inputs, targets), max(1, len(inputs) // 2)):
                (nn.functional.mse_loss(model(a), b) * factor * weight).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            if norm.isfinite() or not skips:
                optimizer.step()
        record = control.step()
    return record


def test_one_skipped_batch_does_not_send_dive_batch_to_the_cap():
    policy = DiveBatch(0.01, 512)
    clean, hit = controlled("trajectory", policy), controlled("trajectory", policy, bad=(5,))
    assert clean.next_batch_size == 16, "a rule that asks for no growth"
    assert (hit.next_batch_size, hit.next_lr) == (16, pytest.approx(0.01))
    assert (clean.skipped_samples, hit.skipped_samples) == (0, 16)
    assert "16 samples left out" in str(hit)
    assert "left out" not in str(clean)


def test_a_diverged_run_still_goes_to_the_cap_by_the_papers_rule():
    with pytest.warns(UserWarning, match="304 of 320 samples .* training has probably diverged"):
        record = controlled("trajectory", DiveBatch(0.01, 256), bad=range(1, 20), skips=False)
    assert record.next_batch_size == 256
    assert "304 of 320 samples were in no step with finite gradients" in record.reason


@diverges
@pytest.mark.parametrize("estimator", ["moments", "split", "per-sample", "ranks"])
def test_a_diverged_run_changes_nothing_where_there_would_be_an_interval(estimator: str):
    record = controlled(estimator, NoiseScale(256), bad=range(1, 20), skips=False)
    assert record.next_batch_size == record.batch_size == 16
    assert "samples were in no step with finite gradients" in record.reason
    assert "no change" in record.reason
    assert record.noise_scale is record.noise_scale_high is None


def test_a_diversity_of_no_samples_has_no_numbers_and_a_reason():
    nothing = Diversity(0.0, 0.0, 0, skipped_samples=64)
    seen = Measurement(epoch=1, batch_size=16, dataset_size=64, diversity=nothing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decision = DiveBatch(0.1, 32).next(seen)
    assert decision.batch_size == 32
    assert "64 of 64 samples" in decision.reason
    assert math.isnan(nothing.trace)
    assert math.isnan(nothing.sq_norm)
    assert math.isnan(nothing.noise_scale)
