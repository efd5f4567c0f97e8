"""QSGD: what it does to a vector, exactly; and that it does so to each backward pass's gradient, and resumes."""

from collections import defaultdict
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, Fixed, micro_batches
from divebatch.errors import ArgumentError, CheckpointError, UsageError
from divebatch.research import QuantizedGradients
from divebatch.research.quantized import bits_to_send, rounded

quickly = settings(max_examples=50, deadline=None)
entries = st.floats(-10, 10, allow_subnormal=False).map(lambda x: 0.0 if abs(x) < 1e-6 else x)
vectors = st.lists(entries, min_size=1, max_size=6).filter(any).map(lambda v: torch.tensor(v, dtype=torch.float64))


def outcomes(vector, levels):
    """Every outcome of rounding `vector`, with its probability: each entry goes down or up by itself."""
    place = levels * vector.abs() / vector.norm()
    chances = (place - place.floor()).tolist()
    for ups in product((0, 1), repeat=len(vector)):
        probability = 1.0
        for up, chance in zip(ups, chances, strict=True):
            probability *= chance if up else 1 - chance
        if probability > 0:
            draws = torch.tensor([0.0 if up else 1.0 for up in ups], dtype=torch.float64)
            yield probability, rounded(vector, levels, draws)


# One vector


@quickly
@given(vector=vectors, levels=st.integers(1, 8))
def test_rounding_is_unbiased_and_has_exactly_the_variance_it_tells(vector, levels):
    every = list(outcomes(vector, levels))
    mean = sum(chance * each.value for chance, each in every)
    variance = sum(chance * (each.value - vector).square().sum() for chance, each in every)
    size, square = len(vector), vector.square().sum().item()
    assert mean.tolist() == pytest.approx(vector.tolist(), abs=1e-9)
    assert all(each.variance.item() == pytest.approx(variance.item(), abs=1e-9) for _, each in every)
    assert variance.item() <= min(size / levels**2, size**0.5 / levels) * square + 1e-9


def test_many_draws_scatter_as_told():
    quantize, vector = QuantizedGradients(2, seed=3), torch.randn(50, generator=torch.Generator().manual_seed(0))
    drawn = torch.stack([quantize(vector) for _ in range(3000)]).double()
    variance = quantize.variance_added / 3000
    assert (drawn - vector).square().sum(1).mean().item() == pytest.approx(variance, rel=0.02)
    assert (drawn.mean(0) - vector).square().sum().item() < 2 * variance / 3000


def test_zeros_stay_and_what_is_not_finite_is_seen_by_whoever_looks():
    quantize = QuantizedGradients(4)
    assert quantize(torch.zeros(5)).tolist() == [0.0] * 5
    assert quantize(torch.tensor([1e-30, 0.0]), stream=1).norm() == pytest.approx(1e-30)
    assert quantize.variance_added == 0.0
    for bad in (torch.inf, torch.nan):
        assert not quantize(torch.tensor([1.0, bad])).isfinite().all()


def test_bits_are_those_of_the_shorter_form():
    # 100 entries and 4 levels: 4 bits for each; or a count, and 7 + 1 + 2 for each that is not zero.
    assert bits_to_send(100, torch.tensor(10), 4).item() == 32 + 1 + 32 + 10 * 10
    assert bits_to_send(100, torch.tensor(99), 4).item() == 32 + 1 + 100 * 4
    quantize = QuantizedGradients(1)
    quantize(torch.zeros(1000))
    assert (quantize.bits_sent, quantize.bits_unrounded) == (65, 32_000)


@pytest.mark.parametrize("levels", [0, -1, 2.5, True, None])
def test_levels_below_one_are_refused(levels):
    with pytest.raises(ArgumentError, match="levels"):
        QuantizedGradients(levels)


def test_sparse_and_complex_gradients_are_refused():
    for gradient in (torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(ArgumentError, match="dense real"):
            QuantizedGradients(1)(gradient)


# A model


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def passes(net, number):
    """Backward passes of micro-batches, into the same gradients."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        net(torch.randn(3, 4, generator=generator)).square().mean().backward()


def gradients(net):
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("watched_first", [True, False])
def test_each_backward_pass_is_rounded_by_itself_and_then_added(watched_first):
    net, plain, seen = model(), model(), defaultdict(list)
    quantize, by_hand = QuantizedGradients(2, seed=7), QuantizedGradients(2, seed=7)
    if not watched_first:
        quantize.attach(net)
    hooks = [p.register_hook(seen[name].append) for name, p in net.named_parameters()]
    if watched_first:
        quantize.attach(net)
    passes(net, 3), passes(plain, 3)
    for hook in hooks:
        hook.remove()
    for place, (name, parameter) in enumerate(net.named_parameters()):
        torch.testing.assert_close(parameter.grad, sum(by_hand(own, stream=place) for own in seen[name]))
        # Hooks on parameters, which estimators use, see what the data says.
        unrounded = plain.get_parameter(name).grad
        torch.testing.assert_close(unrounded, sum(seen[name]))
        assert not torch.equal(parameter.grad, unrounded)
    assert quantize.variance_added == pytest.approx(by_hand.variance_added)


def test_looking_at_gradients_is_no_training_and_after_close_nothing_is_rounded():
    net, plain = model(), model()
    quantize = QuantizedGradients(1).attach(net)
    x = torch.ones(2, 4)
    ours, theirs = (torch.autograd.grad(m(x).sum(), list(m.parameters())) for m in (net, plain))
    assert all(map(torch.equal, ours, theirs))
    assert quantize.bits_sent == 0
    quantize.close()
    passes(net, 1), passes(plain, 1)
    assert all(map(torch.equal, gradients(net), gradients(plain)))


def test_one_model_at_a_time_and_one_that_can_be_trained():
    quantize = QuantizedGradients(1).attach(model())
    with pytest.raises(UsageError, match="attached to a model already"):
        quantize.attach(model())
    with pytest.raises(ArgumentError, match="no trainable parameter"):
        QuantizedGradients(1).attach(model().requires_grad_(False))


def train(net, steps, first=0):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def test_a_resume_is_exact():
    net, whole = model(), model()
    quantize = QuantizedGradients(2, seed=1).attach(whole)
    expected = train(whole, 6)
    with QuantizedGradients(2, seed=1).attach(net) as first:
        train(net, 3)
    second = QuantizedGradients(2, seed=99).attach(net)
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, train(net, 3, first=3), expected))
    assert second.bits_sent == quantize.bits_sent
    assert second.variance_added == pytest.approx(quantize.variance_added)
    with pytest.raises(CheckpointError, match="levels is 2 in the checkpoint, and 3 in"):
        QuantizedGradients(3).load_state_dict(first.state_dict())


# What is measured beside it

N, FEATURES, BATCH = 1000, 20, 20


def samples() -> torch.Tensor:
    """Each is its own gradient at any weights: the mean of a linear model's outputs is trained."""
    return torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(0)) + 0.5


def measured(estimator, levels) -> tuple[float, float]:
    """The mean noise scale of some epochs at weights that hardly move, and tr(Sigma) with what was added."""
    torch.manual_seed(0)
    net = nn.Linear(FEATURES, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9, momentum=0.9)
    loader = AdaptiveLoader(TensorDataset(samples()), BATCH, seed=0)
    control = Controller(net, optimizer, loader, Fixed(), estimator=estimator, measure_always=True)
    quantize = QuantizedGradients(levels, seed=3).attach(net) if levels else None
    scales = []
    for _ in range(10):
        for batch in loader:
            optimizer.zero_grad()
            for (x,), weight in micro_batches(batch, BATCH // control.plan().min_micro_batches):
                (net(x).mean() * weight).backward()
            optimizer.step()
        scales.append(control.step().noise_scale)
    trace = (samples() - samples().mean(0)).square().sum(1).mean().item()
    # Each of 500 steps on 20 samples got noise of this variance, as if each sample had 20 times as much.
    return sum(scales) / 10, trace + (quantize.variance_added / 500 * BATCH if quantize else 0.0)


@pytest.mark.parametrize(("estimator", "levels", "has_noise"), [("moments", 4, True), ("split", 4, False)])
def test_added_noise_is_part_of_what_steps_show_and_not_of_what_backward_passes_show(estimator, levels, has_noise):
    found, with_noise = measured(estimator, levels)
    plain, trace = measured(estimator, None)
    expected = plain * with_noise / trace if has_noise else plain
    assert with_noise > 1.5 * trace
    assert found == pytest.approx(expected, rel=0.1 if has_noise else 1e-4)
