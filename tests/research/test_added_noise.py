"""Controllers beside quantized gradients: policies see the data's part, the record has both, a resume is exact."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, DiveBatch, Diversity, Fixed, micro_batches
from divebatch.errors import ArgumentError, CheckpointError, UsageError
from divebatch.estimators import AcrossRanks, Moments, Split
from divebatch.research import QuantizedGradients

N, FEATURES, BATCH = 1000, 20, 20


def samples() -> torch.Tensor:
    """Each is its own gradient at any weights: the mean of a linear model's outputs is trained."""
    return torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(0)) + 0.5


class Run:
    """A linear model whose gradients do not depend on its weights."""

    def __init__(self, estimator, *, levels=None, policy=None, micro=BATCH, reduction="mean", lr=1e-9, **more):
        torch.manual_seed(0)
        self.net = nn.Linear(FEATURES, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)
        self.loader = AdaptiveLoader(TensorDataset(samples()), BATCH, seed=0)
        self.quantize = QuantizedGradients(levels, seed=3).attach(self.net) if levels else None
        policy = policy or Fixed()
        self.control = Controller(
            self.net,
            self.optimizer,
            self.loader,
            policy,
            estimator=estimator,
            measure_always=True,
            loss_reduction=reduction,
            **more,
        )
        self.micro, self.reduction = micro, reduction

    def step(self, batch):
        self.optimizer.zero_grad()
        for (x,), weight in micro_batches(batch, self.micro):
            (self.net(x).mean() * weight if self.reduction == "mean" else self.net(x).sum()).backward()
        self.optimizer.step()

    def epoch(self):
        for batch in self.loader:
            self.step(batch)
        return self.control.step()


def true_trace() -> float:
    data = samples()
    return (data - data.mean(0)).square().sum(1).mean().item()


# What policies see


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("window", [None, 2])
def test_moments_sees_the_datas_part(window, reduction):
    run, found, policys = Run(Moments(window=window), levels=4, reduction=reduction), [], []
    measuring = run.control._measuring
    finish, of_data = measuring.estimator.finish, measuring._of_data
    measuring.estimator.finish = lambda: found.append(finish()) or found[-1]
    measuring._of_data = lambda seen: policys.append(of_data(seen)) or policys[-1]
    records = [run.epoch() for _ in range(10)]
    seen, corrected = (sum(each.trace for each in many) / 10 for many in (found, policys))
    assert seen > 1.9 * true_trace()  # what would be taken for the data's
    assert corrected == pytest.approx(true_trace(), rel=0.2)
    assert all(record.noisy_diversity > 1.5 * record.diversity for record in records)


@pytest.mark.parametrize("estimator", ["split", "per-sample", "trajectory"])
def test_estimators_that_look_at_backward_passes_see_nothing_of_it(estimator):
    plain, quantized = (Run(estimator, levels=levels, micro=10).epoch() for levels in (None, 1))
    assert quantized.diversity == pytest.approx(plain.diversity, rel=1e-5)
    if plain.noise_scale is not None:
        assert quantized.noise_scale == pytest.approx(plain.noise_scale, rel=1e-4)
        assert quantized.noise_scale_low == pytest.approx(plain.noise_scale_low, rel=1e-4)
    assert plain.noisy_diversity is None
    assert quantized.noisy_diversity > quantized.diversity


def test_what_was_added_is_counted_for_each_sample_by_the_definition():
    run, total = Run("split", levels=2, micro=10), 0.0
    for batch in run.loader:
        before = run.quantize.variance_added
        run.step(batch)
        total += len(batch[0]) ** 2 * (run.quantize.variance_added - before)
    run.control.step()
    assert run.control._measuring.added_noise == pytest.approx(total / N, rel=1e-5)


def test_the_record_has_the_diversity_with_the_noise_by_the_formula():
    run = Run("trajectory", levels=2)
    record = run.epoch()
    added = N * run.control._measuring.added_noise
    norms, of_sum = samples().square().sum().item(), samples().sum(0).square().sum().item()
    assert record.diversity == pytest.approx(norms / of_sum, rel=1e-4)
    assert record.noisy_diversity == pytest.approx((norms + added) / (of_sum + added), rel=1e-4)


@pytest.mark.parametrize("value", [0.1, 1.0, 7.0])
def test_noise_takes_a_diversity_towards_one(value):
    """(S + V) / (N + V), and the twin by drawing: noise of variance 4 on each of many gradients."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(400, 50, generator=generator, dtype=torch.float64)
    gradients -= gradients.mean(0)
    norms = gradients.square().sum().item()
    gradients += (norms / value / 400**2) ** 0.5 * torch.eye(50, dtype=torch.float64)[0]
    norms, of_sum = gradients.square().sum().item(), gradients.sum(0).square().sum().item()
    exact = Diversity(norms, of_sum, 400)
    noises = (gradients + (4 / 50) ** 0.5 * torch.randn(400, 50, generator=generator) for _ in range(400))
    sums = torch.tensor([[each.square().sum(), each.sum(0).square().sum()] for each in noises]).mean(0)
    noisy = exact.with_noise(4.0)
    assert (noisy.sum_of_sq_norms, noisy.sq_norm_of_sum) == pytest.approx(tuple(sums.tolist()), rel=0.03)
    assert abs(noisy.value - 1) < abs(exact.value - 1) or exact.value == pytest.approx(1)
    assert exact.without_noise(4.0).sq_norm_of_sum == exact.sq_norm_of_sum


def test_decisions_within_epochs_see_the_datas_part_of_their_window():
    quantized = Run("split", levels=1, micro=10, policy=DiveBatch.with_extra_samples(0.1, 100), every_steps=10)
    plain = Run("split", micro=10, policy=DiveBatch.with_extra_samples(0.1, 100), every_steps=10)
    one, other = quantized.epoch(), plain.epoch()
    assert one.changes == other.changes
    assert one.next_batch_size == other.next_batch_size


# What cannot be told apart


@pytest.mark.parametrize(
    "estimator",
    [AcrossRanks, lambda: Moments(decay=0.9), lambda: Moments(preconditioned=True)],
    ids=["ranks", "decay", "preconditioned"],
)
def test_an_estimator_that_would_misread_it_is_an_error(estimator):
    net = nn.Linear(FEATURES, 1)
    QuantizedGradients(1).attach(net)
    loader = AdaptiveLoader(TensorDataset(samples()), BATCH)
    optimizer = torch.optim.Adam(net.parameters())
    with pytest.raises(ArgumentError, match="cannot tell it from the data's"):
        Controller(net, optimizer, loader, Fixed(), estimator=estimator(), measure_always=True)


def test_it_is_an_error_later_too():
    run = Run(AcrossRanks(), micro=10)
    QuantizedGradients(1).attach(run.net)
    with pytest.raises(ArgumentError, match="cannot tell it"):
        run.epoch()
    late = Run(Moments())
    for number, batch in enumerate(late.loader):
        if number == 5:
            QuantizedGradients(1).attach(late.net)
        late.step(batch)
    with pytest.raises(UsageError, match="within an epoch"):
        late.control.step()


# Resuming


@pytest.mark.parametrize("estimator", [lambda: Moments(), lambda: Split()], ids=["moments", "split"])
@pytest.mark.parametrize("stop", [7, 23])
def test_a_resume_within_an_epoch_is_exact(estimator, stop):
    whole = Run(estimator(), levels=2, micro=10, lr=0.1)
    expected = [whole.epoch() for _ in range(2)]
    run = Run(estimator(), levels=2, micro=10, lr=0.1)
    run.epoch()
    for number, batch in enumerate(run.loader, 1):
        run.step(batch)
        if number == stop:
            state, weights, momentum = (each.state_dict() for each in (run.control, run.net, run.optimizer))
            break
    resumed = Run(estimator(), levels=2, micro=10, lr=0.1)
    resumed.net.load_state_dict(weights)
    resumed.optimizer.load_state_dict(momentum)
    resumed.control.load_state_dict(state)
    record = resumed.epoch()
    assert torch.equal(resumed.net.weight, whole.net.weight)
    assert record.noise_scale == pytest.approx(expected[1].noise_scale, rel=1e-9)
    assert record.noisy_diversity == pytest.approx(expected[1].noisy_diversity, rel=1e-9)
    assert resumed.quantize.bits_sent == whole.quantize.bits_sent


def test_a_state_with_quantized_gradients_needs_them():
    state = Run(Moments(), levels=2).control.state_dict()
    with pytest.raises(CheckpointError, match="attach the same"):
        Run(Moments()).control.load_state_dict(state)
