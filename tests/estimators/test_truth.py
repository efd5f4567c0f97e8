"""The unbiased estimators against a slow twin, and against the truth where it is known."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from divebatch import AdaptiveLoader, Diversity, gradient_diversity
from divebatch.errors import ArgumentError, CoverageError, UsageError
from divebatch.estimators import AcrossRanks, Estimator, Moments, PerSample, Split, TrainingContext
from divebatch.norms.loss_scale import LossWeight
from reference import delivery, per_sample
from reference.delivery import cut
from reference.known_noise import DIMENSION, OFFSET, SQ_NORM, TRACE, draws, half_squares, linear
from reference.per_sample import dataset, mean_loss, mlp, pair_of, samples

CASES: dict[str, Callable[..., Estimator]] = {
    "per-sample": PerSample,
    "split": Split,
    "moments": Moments,
    "ranks": AcrossRanks,
}
any_case = pytest.mark.parametrize("case", CASES)
PART = 3


class Loop(delivery.Loop):
    """Batches in parts of three samples."""

    def __init__(self, estimator: Estimator, *args: Any, **settings: Any) -> None:
        super().__init__(estimator, *args, parts_of=PART, **settings)


# Against the twin: all gradients kept, then the textbook's variances


def twin(case: str, batches: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """The mean over steps, weighted by samples."""
    rows = [per_sample.gradients(mlp(), mean_loss, x, y) for x, y in batches]
    windows = {
        "per-sample": [list(part.split(1)) for batch in rows for part in batch.split(PART)],
        "split": [list(batch.split(PART)) for batch in rows],
        "ranks": [list(batch.split(PART)) for batch in rows],
        "moments": itertools.pairwise(rows),
        "two batches": [[first, second] for first, second in zip(rows[::2], rows[1::2], strict=False)],
    }[case]
    kept = [window for window in windows if len(window) > 1]
    weights = [len(window[1]) if case == "moments" else sum(map(len, window)) for window in kept]
    pairs = [products_of(*window) if case == "moments" else pair_of(window) for window in kept]
    mean = [sum(w * pair[i] for w, pair in zip(weights, pairs, strict=True)) / sum(weights) for i in (0, 1)]
    return mean[0], mean[1]


def products_of(last: Tensor, own: Tensor) -> tuple[float, float]:
    """Of the mean gradients of two steps: their product is signal, what the newer one has beside it is noise."""
    sq_norm = float(last.mean(0) @ own.mean(0))
    return len(own) * (float(own.mean(0).square().sum()) - sq_norm), sq_norm


@any_case
@pytest.mark.parametrize("count", [32, 33, 35])  # batches of 8: even, one sample left, a part left
def test_at_fixed_weights_every_estimate_is_its_twins(case: str, count: int):
    measured = Loop(CASES[case]()).run(cut(count, 8))
    assert (measured.trace, measured.sq_norm) == pytest.approx(twin(case, cut(count, 8)), rel=1e-9)
    assert measured.num_samples == count


@pytest.mark.parametrize("kind", [Split, AcrossRanks])
def test_loader_batches_whose_losses_were_divided_by_their_number_count_in_full(kind):
    """Lightning divides so and tells the weight; each pass is a whole batch of the loader all the same."""
    data = cut(32, 8)
    expected = Loop(kind()).run(data, parts_of=4)
    loop = Loop(kind())
    for batch in data:
        loop.optimizer.zero_grad()
        for x, y in zip(*(tensor.split(4) for tensor in batch), strict=True):
            loop.deliver(len(x))
            loss = mean_loss(loop.model(x), y) / 2
            LossWeight(0.5).mark(loss)
            loss.backward()
        loop.optimizer.step()
    found = loop.estimator.finish()
    assert (found.trace, found.sq_norm) == pytest.approx((expected.trace, expected.sq_norm), rel=1e-10)


@pytest.mark.parametrize("case", ["per-sample", "moments"])
def test_a_sum_gives_the_same_as_a_mean(case: str):
    by_sum = Loop(CASES[case](), loss_fn=per_sample.sum_loss, reduction="sum").run(cut(32, 8), parts_of=8)
    by_mean = Loop(CASES[case]()).run(cut(32, 8), parts_of=8)
    assert (by_sum.trace, by_sum.sq_norm) == pytest.approx((by_mean.trace, by_mean.sq_norm), rel=1e-9)


def test_a_compiled_per_sample_estimate_is_the_plain_one():
    """The taps of a compiled meter work without a compiler."""
    found, plain = (Loop(PerSample(compiled=compiled)).run(cut(16, 6), parts_of=6) for compiled in (True, False))
    assert (found.trace, found.sq_norm) == pytest.approx((plain.trace, plain.sq_norm), rel=1e-9)
    assert found.num_samples == plain.num_samples == 16


def test_one_batch_of_all_data_differs_from_the_exact_diversity_by_the_bias_that_is_known():
    data = samples(40)
    measured = Loop(PerSample()).run([data], parts_of=40)
    exact = gradient_diversity(mlp(), mean_loss, [data])
    assert measured.trace == pytest.approx(exact.trace * 40 / 39, rel=1e-9)
    assert measured.sq_norm == pytest.approx(exact.sq_norm - exact.trace / 39, rel=1e-9)
    assert 40 * exact.value - 1 == pytest.approx(exact.trace / exact.sq_norm, rel=1e-9)


@pytest.mark.parametrize("case", ["split", "ranks"])
def test_the_loaders_batches_are_chunks_where_they_are_accumulated(case: str):
    loop, batches = Loop(CASES[case]()), cut(30, 5)
    loop.accumulate = 2
    for first in range(0, 6, 2):
        for x, y in batches[first : first + 2]:
            loop.deliver(5)
            mean_loss(loop.model(x), y).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    measured = loop.estimator.finish()
    assert (measured.trace, measured.sq_norm) == pytest.approx(twin("two batches", batches), rel=1e-9)


@pytest.mark.parametrize("case", ["split", "moments", "ranks"])
def test_a_state_between_the_passes_of_a_step_carries_on(case: str):
    results = []
    for interrupted in (False, True):
        loop = Loop(CASES[case]())
        loop.accumulate = 2
        for index, (x, y) in enumerate(cut(40, 5)):
            loop.deliver(5)
            mean_loss(loop.model(x), y).backward()
            if index % 2:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            if interrupted and index == 4:
                loop.resume(CASES[case]())
        results.append(loop.estimator.finish())
    assert results[0] == results[1]


# Against the truth


DRAWS = 200
PARTS = {"per-sample": 64, "split": 32, "moments": 64, "ranks": 32}


@pytest.fixture(scope="module", params=CASES)
def repeated(request: pytest.FixtureRequest) -> list[Diversity]:
    """The same epoch of 16 batches of 64, drawn anew again and again."""
    loop = Loop(CASES[request.param](), model=linear(), loss_fn=half_squares)
    generator = torch.Generator().manual_seed(5)
    return [loop.run(draws(generator, 16, 64), parts_of=PARTS[request.param]) for _ in range(DRAWS)]


@pytest.mark.parametrize(("name", "truth"), [("trace", TRACE), ("sq_norm", SQ_NORM)])
def test_the_mean_of_many_estimates_is_the_truth_within_its_error(repeated: list[Diversity], name: str, truth: float):
    values = torch.tensor([getattr(diversity, name) for diversity in repeated])
    error = float(values.std() / math.sqrt(DRAWS))
    assert abs(float(values.mean()) - truth) < 3.5 * error
    assert error < 0.03 * truth


def test_the_interval_holds_the_truth_as_often_as_it_says(repeated: list[Diversity]):
    intervals = [diversity.noise_scale_interval() for diversity in repeated]
    coverage = sum(low <= TRACE / SQ_NORM <= high for low, high in intervals) / DRAWS
    assert 0.90 <= coverage <= 0.99


def test_the_stated_spread_is_the_one_between_repetitions(repeated: list[Diversity]):
    for name, variance in (("trace", "trace_variance"), ("sq_norm", "sq_norm_variance")):
        observed = torch.tensor([getattr(diversity, name) for diversity in repeated]).var()
        stated = sum(getattr(diversity.spread, variance) for diversity in repeated) / DRAWS
        # What the scatter of gradients one step apart has against itself is left out: the spread is on the safe side.
        assert 0.7 < stated / float(observed) < 1.8


def test_moments_are_biased_by_the_learning_rate_as_stated():
    """The Hessian is the identity here: ||G||^2 falls by lr * E||g||^2."""
    generator, size, lr = torch.Generator().manual_seed(1), 8, 0.2
    loop = Loop(Moments(), lambda p: SGD(p, lr), model=linear(), loss_fn=half_squares)
    values = []
    for _ in range(400):
        nn.init.constant_(loop.model.weight, OFFSET / math.sqrt(DIMENSION))
        values.append(loop.run(draws(generator, 2, size), parts_of=size).sq_norm)
    stated = -lr * (SQ_NORM + TRACE / size)
    error = float(torch.tensor(values).std()) / math.sqrt(len(values))
    assert sum(values) / len(values) - SQ_NORM == pytest.approx(stated, abs=3.5 * error)
    assert abs(stated) > 5 * error


def test_moments_say_nothing_where_successive_gradients_point_against_each_other():
    """Plain SGD at a rate at which the bias is more than the signal: no evidence that the noise is large."""
    generator = torch.Generator().manual_seed(2)
    loop = Loop(Moments(), lambda p: SGD(p, 0.9), model=linear(), loss_fn=half_squares)
    measured = loop.run(draws(generator, 200, 64), parts_of=64)
    assert measured.sq_norm < 0 < measured.trace
    assert measured.noise_scale_interval() == (0.0, math.inf)
    still = Loop(Moments(), model=linear(), loss_fn=half_squares)
    low, high = still.run(draws(generator, 200, 64), parts_of=64).noise_scale_interval()
    assert 0 == low < TRACE / SQ_NORM < high < math.inf


@pytest.mark.parametrize("mean", [-0.05, 0.05])
def test_moments_in_pairs_say_nothing_of_a_signal_near_zero(mean: float):
    found = []
    for make in (Moments, Split):
        estimator = Loop(make(), model=linear(), loss_fn=half_squares).estimator
        estimator._average.extend([(10.0, mean - 1, 0.0), (10.0, mean + 1, 0.0)] * 20, [64.0] * 40)
        estimator._average.num_samples = 64 * 40
        found.append(estimator.finish().noise_scale_interval())
    assert found[1][0] > 20
    assert found == [(0.0, math.inf), (found[1][0], math.inf)]


@pytest.mark.parametrize("num_chunks", [2, 8])
def test_chunks_tell_the_noise_along_the_gradient(num_chunks: int):
    """G' Sigma G, and the noise in g adds tr(Sigma^2) / b; Sigma from many samples."""
    size, generator = 256, torch.Generator().manual_seed(3)
    loop = Loop(Split(), model=linear(), loss_fn=half_squares)
    measured = loop.run(draws(generator, 300, size), parts_of=size // num_chunks)
    x, y = next(iter(draws(generator, 1, 40_000)))
    rows = x * (x @ loop.model.weight.T.detach() - y)
    covariance, mean = torch.cov(rows.T), loop.model.weight[0].detach()
    along = float(mean @ covariance @ mean + covariance.square().sum() / size)
    assert measured.inner_variance == pytest.approx(along, rel=0.3)
    assert measured.inner_variance < 0.25 * measured.trace * measured.sq_norm


def test_uneven_chunks_tell_it_by_definition():
    (x, y), sizes = samples(5), (3, 2)
    rows = per_sample.gradients(mlp(), mean_loss, x, y)
    first, second = rows[:3].mean(0), rows[3:].mean(0)
    expected = float((first - second) @ rows.mean(0)) ** 2 / (1 / sizes[0] + 1 / sizes[1])
    assert Loop(Split()).run([(x, y)]).inner_variance == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("cut_at", [1, 2])
def test_a_state_between_three_chunks_keeps_the_noise_along_the_gradient(cut_at: int):
    (x, y), results = samples(8), []
    for interrupted in (False, True):
        loop = Loop(Split())
        for index, (part, targets) in enumerate(zip(x.split(PART), y.split(PART), strict=True)):
            loop.deliver(len(part))
            mean_loss(loop.model(part), targets).backward()
            if interrupted and index == cut_at:
                loop.resume(Split())
        loop.optimizer.step()
        results.append(loop.estimator.finish().inner_variance)
    assert results[0] == pytest.approx(results[1], rel=1e-12)


# Wrong use, and BatchNorm


def test_uncut_batches_get_an_error_that_says_how_to_cut():
    with pytest.raises(UsageError, match=r"no batch in it went through in two or more.*divebatch\.micro_batches"):
        Loop(Split()).run(cut(32, 8), parts_of=8)


def test_batches_cut_by_hand_get_an_error_that_says_how_to_cut():
    loop, (x, y) = Loop(Split()), samples(8)
    loop.deliver(8)
    for part in (slice(0, 4), slice(4, 8)):
        (mean_loss(loop.model(x[part]), y[part]) / 2).backward()
    with pytest.raises(UsageError, match=r"held 16 samples .* delivered 8: .*divebatch\.micro_batches"):
        loop.optimizer.step()


def test_too_few_steps_for_moments_are_no_evidence():
    unknown = Loop(Moments()).run(cut(8, 8))
    assert not unknown.is_defined
    assert unknown.noise_scale_interval() == (0.0, math.inf)
    with pytest.raises(UsageError, match="no optimizer step on a batch of the loader"):
        Loop(Moments()).run([])


def test_chunks_need_a_mean_and_an_optimizer():
    for estimator in (Split(), AcrossRanks()):
        with pytest.raises(ArgumentError, match=rf"{estimator.name} needs a loss .* got loss_reduction='sum'"):
            Loop(estimator, loss_fn=per_sample.sum_loss, reduction="sum")
    for estimator in (Split(), Moments(), AcrossRanks()):
        with pytest.raises(ArgumentError, match="must know when the optimizer steps"):
            estimator.bind(TrainingContext(mlp(), AdaptiveLoader(dataset(4), 2, seed=0)))


def test_a_look_at_gradients_in_between_is_no_chunk():
    loop, (x, y) = Loop(Split()), samples(8)
    for batch in cut(16, 8):
        gradient_diversity(loop.model, mean_loss, [(x, y)])
        torch.autograd.grad(mean_loss(loop.model(x), y), list(loop.model.parameters()))
        loop.step(batch, PART)
    expected = Loop(Split()).run(cut(16, 8))
    assert loop.estimator.finish().trace == pytest.approx(expected.trace, rel=1e-12)


def test_a_pass_that_dies_half_way_is_in_no_estimate():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            raise RuntimeError("broken")

    loop, (x, y) = Loop(Split()), samples(8)
    for batch in cut(16, 8):
        hidden = Broken.apply(loop.model[1](loop.model[0](x)))
        with pytest.raises(RuntimeError, match="broken"):
            mean_loss(loop.model[2](hidden), y).backward()
        loop.step(batch, PART)
    expected = Loop(Split()).run(cut(16, 8))
    assert loop.estimator.finish().trace == pytest.approx(expected.trace, rel=1e-12)


def normalised() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def test_per_sample_refuses_batch_norm_in_training_and_takes_it_frozen():
    with pytest.raises(CoverageError, match=r"'1' \(BatchNorm1d\) is in training mode.*'split' or 'moments'"):
        Loop(PerSample(), model=normalised()).run(cut(16, 8))
    frozen = normalised()
    frozen[1].eval()
    assert Loop(PerSample(), model=frozen).run(cut(16, 8)).trace > 0


def test_split_is_right_under_batch_norm_for_chunks_as_they_are_normalised():
    """By definition: the mean over chunks of their inner products and differences, each chunk normalised by itself."""
    model, batches = normalised(), cut(32, 8)
    measured = Loop(Split(), model=normalised()).run(batches, parts_of=4)
    inner, differing, halves = 0.0, 0.0, (slice(4), slice(4, 8))
    for x, y in batches:
        parts = [torch.autograd.grad(mean_loss(model(x[h]), y[h]), list(model.parameters())) for h in halves]
        first, second = (torch.cat([gradient.flatten() for gradient in part]) for part in parts)
        inner += float(first @ second) / len(batches)
        differing += float((first - second).square().sum()) * 4 / 2 / len(batches)
    assert (measured.trace, measured.sq_norm) == pytest.approx((differing, inner), rel=1e-9)
