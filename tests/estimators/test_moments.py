"""Moments: against gradients kept by hand, against the truth, and where a batch has no step."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer

from divebatch import Diversity
from divebatch.estimators import Estimator, Moments
from divebatch.estimators.average import PairAverage
from divebatch.estimators.moments import SuccessiveGradients, extrapolation
from divebatch.estimators.second_moment import StepGradients
from divebatch.norms.accumulators import trainable
from reference.delivery import Loop, cut
from reference.known_noise import SQ_NORM, TRACE, draws, half_squares, linear
from reference.per_sample import mean_loss, mlp, samples

OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], float]] = {
    "momentum": (lambda p, lr: SGD(p, lr, momentum=0.9), 1 / 0.9),
    "Nesterov": (lambda p, lr: SGD(p, lr, momentum=0.9, nesterov=True), 1.9 / 0.81),
    "half of it": (lambda p, lr: SGD(p, lr, momentum=0.5), 2.0),
    "Adam": (lambda p, lr: Adam(p, lr, betas=(0.8, 0.99)), 1.25),
    "as little as will do": (lambda p, lr: SGD(p, lr, momentum=0.4), 2.5),
    "NAdam": (lambda p, lr: torch.optim.NAdam(p, lr), 0.0),
    "little": (lambda p, lr: SGD(p, lr, momentum=0.3), 0.0),
    "half of Nesterov's": (lambda p, lr: SGD(p, lr, momentum=0.5, nesterov=True), 0.0),
    "none": (lambda p, lr: SGD(p, lr), 0.0),
    "no such thing": (lambda p, lr: torch.optim.Adagrad(p, lr), 0.0),
}
any_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def looped(kind: str, lr: float = 0.01, estimator: Estimator | None = None, **settings: Any) -> Loop:
    """A loop measured by moments."""
    return Loop(estimator or Moments(), lambda p: OPTIMIZERS[kind][0](p, lr), **settings)


def by_hand(loop: Loop, factor: float) -> tuple[float, float]:
    """Means over steps, weighted by their samples; without a factor those of pairs."""
    rows = []
    for newest in range(2 if factor else 1, len(loop.gradients)):
        before, last, own = (loop.gradients[newest - lag] for lag in (2, 1, 0))
        sq_norm = (1 + factor) * float(own @ last) - factor * float(own @ before)
        rows.append((loop.sizes[newest], loop.sizes[newest] * (float(own @ own) - sq_norm), sq_norm))
    total = sum(row[0] for row in rows)
    return sum(row[0] * row[1] for row in rows) / total, sum(row[0] * row[2] for row in rows) / total


@any_optimizer
def test_how_far_to_extrapolate_follows_from_the_momentum(kind: str):
    make, factor = OPTIMIZERS[kind]
    assert extrapolation(make(mlp().parameters(), 0.1)) == pytest.approx(factor)


def test_the_largest_parameter_group_counts():
    few, many = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(9))
    groups = [{"params": [few], "momentum": 0.0}, {"params": [many], "momentum": 0.8}]
    assert extrapolation(SGD(groups, 0.1)) == extrapolation(SGD(groups[::-1], 0.1)) == pytest.approx(1.25)


@any_optimizer
@pytest.mark.parametrize("lr", [0.0, 0.01])
@pytest.mark.parametrize("count", [12, 40, 43])  # three steps; ten; and a last batch of three samples
def test_it_equals_the_products_of_gradients_that_were_kept(kind: str, lr: float, count: int):
    loop = looped(kind, lr)
    for batch in cut(count, 4):
        loop.step(batch)
    measured = loop.estimator.finish()
    assert (measured.trace, measured.sq_norm) == pytest.approx(by_hand(loop, OPTIMIZERS[kind][1]), rel=1e-9)
    assert measured.num_samples == count


@pytest.mark.parametrize(
    ("settings", "kind", "stops"),
    [
        ({"every_steps": 5}, "momentum", (3, 8, 13)),
        ({"every_steps": 2}, "momentum", (3, 6, 9, 12, 15)),  # as few as it takes
        ({"every_steps": 5}, "none", (2, 7, 12)),
        ({"every_steps": 2}, "none", (2, 4, 6, 8, 10, 12, 14)),
    ],
)
@pytest.mark.parametrize("interrupted", [False, True])
def test_one_estimate_in_so_many_steps(settings: dict[str, Any], kind: str, stops: tuple[int, ...], interrupted: bool):
    """Each is that of an epoch of the steps it takes; whatever the moment at which the state is saved and loaded."""
    loop, alone, pairs = (
        looped(kind, 0.01, Moments(**settings)),
        looped(kind, 0.01, Moments(**settings)),
        [],
    )
    for number, batch in enumerate(cut(60, 4), start=1):
        loop.step(batch)
        if interrupted:
            loop.resume(Moments(**settings))
        if number - 1 in {stop - stops[0] for stop in stops}:
            alone.estimator.close()
            alone.estimator.start()
        alone.step(batch)
        if number in stops:
            found = alone.estimator.finish()
            pairs.append((found.trace, found.sq_norm))
            alone.estimator.start()
    measured = loop.estimator.finish()
    means = [sum(each) / len(stops) for each in zip(*pairs, strict=True)]
    assert (measured.trace, measured.sq_norm) == (pytest.approx(means[0], rel=1e-9), pytest.approx(means[1], rel=1e-9))
    assert measured.num_samples == 60


def test_an_epoch_begins_with_a_look_and_steps_without_samples_are_none_of_it():
    """However the last epoch ended, and also where an optimizer steps twice on one batch."""
    loop, found = looped("momentum", 0.0, Moments(every_steps=6)), []
    for count, twice in ((28, False), (20, False), (28, True)):  # the second ends within the pause
        for batch in cut(count, 4):
            loop.step(batch)
            if twice:
                loop.optimizer.step()
        found.append(loop.estimator.finish())
        loop.estimator.start()
    assert found[0] == found[2]
    assert math.isfinite(found[0].trace)


def test_strides_and_types_of_parameters_are_kept_apart():
    """A network in channels_last with a half-precision head, and a parameter that gets no gradient in some steps."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=torch.channels_last)
    model.register_parameter("rare", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    torch.manual_seed(0)
    optimizer, kept = SGD(model.parameters(), 0.1, momentum=0.9), []
    history = SuccessiveGradients(trainable(model), optimizer, PairAverage())
    for step in range(5):
        there = {name: p for name, p in model.named_parameters() if step % 2 or name != "rare"}
        gradients = {name: torch.randn_like(p).detach() for name, p in there.items()}
        history.add_gradients(StepGradients(gradients, scale=0.5), 4)
        whole = [0.5 * gradients.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()]
        kept.append(torch.cat([each.double().flatten() for each in whole]))
    row = history.products(1.0)
    expected = [kept[3] @ kept[3], kept[4] @ kept[4], kept[4] @ kept[3], kept[4] @ kept[2]]
    assert [float(part) for part in row.parts] == pytest.approx([float(each) for each in expected], rel=1e-5)
    # Else a GPU would copy them one by one.
    weight, view = model[0].weight, history.views[0]["0.weight"]
    assert view.stride() == weight.stride() != weight.contiguous().stride()


def test_the_noise_along_the_gradient_is_that_of_a_step_and_the_one_before():
    loop = looped("momentum", 0.01)
    for batch in cut(11, 4):  # 4, 4 and 3 samples: one estimate
        loop.step(batch)
    _, first, second = loop.gradients
    along = float((first - second) @ (4 * first + 3 * second)) / 7
    assert loop.estimator.finish().inner_variance == pytest.approx(along**2 * 12 / 7, rel=1e-9)


def test_complex_gradients_have_real_products():
    model = nn.ParameterDict({"real": nn.Parameter(torch.ones(3).double()), "other": nn.Parameter(torch.ones(2) * 1j)})
    history = SuccessiveGradients(trainable(model), SGD(model.parameters(), 0.1, momentum=0.9), PairAverage())
    for _ in range(3):
        history.add_gradients(StepGradients({name: p.detach() for name, p in model.named_parameters()}), 4)
    row = history.products(1.0)
    assert [float(part) for part in row.parts] == [5.0] * 4


def test_a_long_vector_is_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("divebatch.estimators.moments.LONGEST_DOT", 7)
    loop = looped("momentum", 0.01)
    for batch in cut(20, 4):
        loop.step(batch)
    measured = loop.estimator.finish()
    assert (measured.trace, measured.sq_norm) == pytest.approx(by_hand(loop, 1 / 0.9), rel=1e-9)


# Against the truth

DRAWS = 200


@pytest.fixture(scope="module")
def repeated() -> list[Diversity]:
    """The same epoch of 16 batches of 64 at weights that stand still, drawn anew again and again."""
    loop, generator, found = looped("momentum", 0.0, model=linear(), loss_fn=half_squares), torch.Generator(), []
    for _ in range(DRAWS):
        for batch in draws(generator.manual_seed(len(found)), 16, 64):
            loop.step(batch)
        found.append(loop.estimator.finish())
        loop.estimator.start()
    return found


@pytest.mark.parametrize(("name", "truth"), [("trace", TRACE), ("sq_norm", SQ_NORM)])
def test_at_fixed_weights_the_mean_of_many_estimates_is_the_truth(repeated: list[Diversity], name: str, truth: float):
    values = torch.tensor([getattr(diversity, name) for diversity in repeated])
    error = float(values.std() / math.sqrt(DRAWS))
    assert abs(float(values.mean()) - truth) < 3.5 * error
    assert error < 0.05 * truth


def test_the_interval_holds_the_truth_in_90_to_99_of_100_draws(repeated: list[Diversity]):
    """Estimates of neighbouring steps share gradients, which the spread has to know of."""
    intervals = [diversity.noise_scale_interval() for diversity in repeated]
    assert 0.90 <= sum(low <= TRACE / SQ_NORM <= high for low, high in intervals) / DRAWS <= 0.99
    observed = torch.tensor([diversity.sq_norm for diversity in repeated]).var()
    stated = sum(diversity.spread.sq_norm_variance for diversity in repeated) / DRAWS
    assert 0.8 < stated / float(observed) < 1.4


@pytest.mark.parametrize(("kind", "lr"), [("momentum", 0.2), ("Nesterov", 0.1), ("half of it", 0.2)])
def test_where_weights_move_it_is_nearer_to_the_truth_than_pairs(kind: str, lr: float, monkeypatch: pytest.MonkeyPatch):
    found = {}
    for factor in (None, 0.0):
        loop, signal = looped(kind, lr, model=linear(), loss_fn=half_squares), []
        if factor is not None:
            monkeypatch.setattr("divebatch.estimators.moments._factor", lambda _: 0.0)
        for number, batch in enumerate(draws(torch.Generator().manual_seed(3), 2100, 16)):
            if number == 100:  # at rest around the minimum by then
                loop.estimator.close()
                loop.estimator.start()
            signal.append(float(loop.model.weight.detach().square().sum()))
            loop.step(batch)
        found[factor] = loop.estimator.finish().sq_norm / (sum(signal[100:]) / len(signal[100:]))
    assert found[None] == pytest.approx(1.0, abs=0.2)
    assert found[0.0] < 0.8


# In use


@pytest.mark.parametrize("kind", ["momentum", "none"])
def test_a_state_is_gone_on_with_before_the_optimizers_own_is_loaded(kind: str):
    """A momentum that changes in training is another one in a new optimizer."""
    found = []
    for interrupted in (False, True):
        loop = looped(kind, 0.01)
        group = loop.optimizer.param_groups[0]
        momentum = group["momentum"]
        for number, batch in enumerate(cut(40, 4)):
            loop.step(batch)
            if interrupted and number == 4:
                state, loop.estimator = loop.estimator.state_dict(), Moments()
                group["momentum"] = 0.9 - momentum
                loop.estimator.bind(loop.context)
                loop.estimator.start()
                loop.estimator.load_state_dict(state)
                group["momentum"] = momentum
        found.append(loop.estimator.finish())
    assert found[0] == found[1]


# Batches without a step: a GradScaler met an overflow, or the loop dropped the gradient

SIZE = 4
BAD = (0, 3, 4, 7)
"""Of eight batches: the first, as with a scale that starts too high, two in a row, and the last."""
any_clearing = pytest.mark.parametrize("set_to_none", [True, False])


def skipping(optimizer: type[Optimizer] = SGD, *, accumulate: int = 1, delivered: int = 0, **settings: Any) -> Loop:
    """Weights that stand still, so that a skipped batch must be as if it had never been there."""
    return Loop(Moments(), lambda p: optimizer(p, lr=0.0, **settings), accumulate=accumulate, delivered=delivered)


def loss_of(loop: Loop, index: int) -> Tensor:
    loop.deliver(SIZE)
    x, y = samples(64)
    part = slice(SIZE * index, SIZE * (index + 1))
    return mean_loss(loop.model(x[part]), y[part])


def kept(indices, **settings) -> Diversity:
    loop = skipping(**settings)
    for index in indices:
        loop.optimizer.zero_grad()
        loss_of(loop, index).backward()
        loop.optimizer.step()
    return loop.estimator.finish()


def assert_same(measured: Diversity, expected: Diversity) -> None:
    assert measured.num_samples == expected.num_samples
    assert (measured.trace, measured.sq_norm) == pytest.approx((expected.trace, expected.sq_norm), rel=1e-9)


def scaled(loop: Loop, *, before: bool, set_to_none: bool) -> Diversity:
    scaler = GradScaler("cpu", init_scale=1024.0)
    for index in range(8):
        loss = loss_of(loop, index) * (math.inf if index in BAD else 1.0)
        if before:
            loop.optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(loss).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        if not before:
            loop.optimizer.zero_grad(set_to_none=set_to_none)
    return loop.estimator.finish()


@any_clearing
@pytest.mark.parametrize("before", [True, False])
def test_a_batch_whose_step_a_scaler_skipped_is_in_no_estimate(before: bool, set_to_none: bool):
    for settings in ({}, {"momentum": 0.9}):
        expected = kept([1, 2, 5, 6], **settings)
        assert_same(scaled(skipping(**settings), before=before, set_to_none=set_to_none), expected)


@any_clearing
def test_a_batch_that_the_loop_dropped_is_in_no_estimate(set_to_none: bool):
    loop = skipping()
    for index in range(4):
        loss_of(loop, index).backward()
        if index in (1, 2):
            loop.optimizer.zero_grad(set_to_none=set_to_none)
            continue
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=set_to_none)
    assert_same(loop.estimator.finish(), kept([0, 3]))


@pytest.mark.parametrize("touch", [False, True])
def test_batches_that_are_accumulated_count_all(touch: bool):
    loop = skipping(accumulate=2)
    for index in range(4):
        (loss_of(loop, index) / 2).backward()
        if touch:
            nn.utils.clip_grad_norm_(loop.model.parameters(), 1e9)
        if index % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad(set_to_none=False)
    measured = loop.estimator.finish()
    assert measured.num_samples == 4 * SIZE
    first, second = (gradient_of(range(start, start + 2)) for start in (0, 2))
    assert measured.trace == pytest.approx(float((second - first) @ second) * 2 * SIZE, rel=1e-9)


def gradient_of(indices) -> Tensor:
    loop = skipping()
    gradients = [torch.autograd.grad(loss_of(loop, index), list(loop.model.parameters())) for index in indices]
    return torch.stack([torch.cat([part.flatten() for part in each]) for each in gradients]).mean(0)


def test_a_state_after_a_skipped_step_goes_on_without_its_batch():
    loop = skipping()
    for index in range(3):
        loop.optimizer.zero_grad()
        loss_of(loop, index).backward()
        if index < 2:
            loop.optimizer.step()
    state, resumed = loop.estimator.state_dict(), skipping(delivered=loop.delivered)
    resumed.estimator.load_state_dict(state)
    for index in (3, 4):
        resumed.optimizer.zero_grad()
        loss_of(resumed, index).backward()
        resumed.optimizer.step()
    assert_same(resumed.estimator.finish(), kept([0, 1, 3, 4]))
