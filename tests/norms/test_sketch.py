"""Squared norms from random signs: right on average, honest about their noise, exact where that costs nothing."""

import pytest
import torch
from torch import Tensor, nn

from divebatch import NormMeter
from divebatch.norms import forms, sketch
from divebatch.norms.rules import conv
from reference.per_sample import Calls, mean_loss, sq_norms, sum_loss, twice

NUM_DRAWS = 4000

NOISY = {
    "linear on sequences": (lambda: nn.Linear(5, 4), (6, 5)),
    "linear on images": (lambda: nn.Linear(5, 4, bias=False), (2, 3, 5)),
    "conv": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 6, 5)),
    "conv with stride and groups": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), (4, 7, 6)),
    "conv with uneven strides and dilations": (lambda: nn.Conv2d(2, 3, (3, 2), (2, 3), 1, (1, 2)), (2, 8, 9)),
    "conv with circular padding": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 4, 5)),
    "conv of one dimension": (lambda: nn.Conv1d(2, 5, 3, stride=3, padding="valid"), (2, 11)),
    "conv of three dimensions": (lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), (2, 3, 4, 3)),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 4, 3), (3, 4, 5)),
    "transposed conv with stride, groups and output padding": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (4, 3, 4),
    ),
}

EXACT = {
    "linear at a single position": (lambda: nn.Linear(4, 5), (4,)),
    "linear with one row": (lambda: nn.Linear(4, 1), (6, 4)),
    "conv with one channel": (lambda: nn.Conv2d(3, 1, 3), (3, 5, 5)),
    "depthwise conv": (lambda: nn.Conv2d(4, 4, 3, stride=2, groups=4), (4, 7, 7)),
    "depthwise transposed conv": (lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, groups=4), (4, 3, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(4), (3, 4)),
}


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, stride=2, groups=2)]
    return nn.Sequential(*layers, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(72, 5)).double()


def random_target(model: nn.Module, inputs: Tensor) -> Tensor:
    """Far away, so that the gradients of all outputs are large."""
    return 2 * torch.randn(model(inputs[:1]).shape, dtype=inputs.dtype).expand(
        len(inputs), *model(inputs[:1]).shape[1:]
    )


def draws(model: nn.Module, sample: Tensor, count: int = NUM_DRAWS) -> tuple[Tensor, float, float]:
    """Estimates of one sample's squared norm, the squared norm itself, and the meter's standard error of their sum."""
    inputs = sample.expand(count, *sample.shape[1:])
    targets = random_target(model, inputs)
    with NormMeter(model, mode="sketch", loss_reduction="sum") as meter:
        sum_loss(model(inputs), targets).backward()
    estimates = meter.per_sample()
    assert estimates is not None
    return estimates, float(sq_norms(model, sum_loss, inputs[:1], targets[:1])), meter.standard_error()


# On average


@pytest.mark.parametrize("case", NOISY)
def test_the_mean_over_many_draws_is_the_squared_norm(case: str):
    make, shape = NOISY[case]
    torch.manual_seed(1)
    layer = make().double()
    estimates, exact, _ = draws(layer, torch.randn(1, *shape, dtype=torch.float64))
    standard_error = float(estimates.std()) / NUM_DRAWS**0.5
    assert standard_error > 0
    assert abs(float(estimates.mean()) - exact) < 4 * standard_error


@pytest.mark.parametrize("case", NOISY)
def test_the_standard_error_is_the_spread_of_the_draws(case: str):
    make, shape = NOISY[case]
    torch.manual_seed(2)
    layer = make().double()
    estimates, _, standard_error = draws(layer, torch.randn(1, *shape, dtype=torch.float64))
    assert standard_error == pytest.approx(float(estimates.std()) * NUM_DRAWS**0.5, rel=0.2)


def test_the_truth_lies_within_the_interval_in_about_95_of_100_draws():
    model, num_batches = conv_net(), 300
    inputs = torch.randn(16, 3, 7, 7, dtype=torch.float64)
    targets = random_target(model, inputs)
    exact = float(sq_norms(model, mean_loss, inputs, targets).sum())
    meter, covered = NormMeter(model, mode="sketch"), 0
    with meter:
        for _ in range(num_batches):
            meter.reset()
            mean_loss(model(inputs), targets).backward()
            covered += abs(meter.sum_of_sq_norms() - exact) <= 1.96 * meter.standard_error()
    assert 0.9 * num_batches <= covered <= 0.99 * num_batches


# Where it is exact


@pytest.mark.parametrize("case", EXACT)
def test_what_cannot_be_cheaper_is_exact(case: str):
    make, shape = EXACT[case]
    torch.manual_seed(4)
    layer = make().double()
    inputs = torch.randn(7, *shape, dtype=torch.float64)
    targets = torch.randn_like(layer(inputs))
    with NormMeter(layer, mode="sketch") as meter:
        mean_loss(layer(inputs), targets).backward()
    torch.testing.assert_close(meter.per_sample(), sq_norms(layer, mean_loss, inputs, targets), rtol=1e-10, atol=0)
    assert meter.standard_error() == 0


def test_a_layer_called_twice_is_right():
    torch.manual_seed(0)
    model = Calls(nn.Linear(4, 4), twice).double()
    estimates, exact, standard_error = draws(model, torch.randn(1, 3, 4, dtype=torch.float64))
    assert abs(float(estimates.mean()) - exact) <= 4 * standard_error / NUM_DRAWS + 1e-10 * exact


# In chunks


def sketched(layer: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor | None, float]:
    """Estimates and their standard error, always with the same signs."""
    sketch.seed_signs(inputs.device, 0)
    with NormMeter(layer, mode="sketch") as meter:
        mean_loss(layer(inputs), targets).backward()
    return meter.per_sample(), meter.standard_error()


@pytest.mark.parametrize("fitting", [1, 3, 7])
@pytest.mark.parametrize("case", [case for case in (*NOISY, *EXACT) if "conv" in case])
def test_chunks_stay_below_the_cap_and_do_not_change_a_sketch(case: str, fitting: int, monkeypatch):
    make, shape = (NOISY | EXACT)[case]
    torch.manual_seed(6)
    layer = make().double()
    inputs = torch.randn(7, *shape, dtype=torch.float64)
    targets, product, chunks = torch.randn_like(layer(inputs)), conv._product, []

    def observed(shifts: Tensor, right: Tensor) -> Tensor:
        chunks.append(shifts.shape)
        return product(shifts, right)

    monkeypatch.setattr(conv, "_product", observed)
    whole = sketched(layer, inputs, targets)
    (shape_of_whole,) = chunks
    monkeypatch.setattr(forms, "CACHE_BYTES", fitting * shape_of_whole[1:].numel() * inputs.element_size())
    torch.testing.assert_close(sketched(layer, inputs, targets), whole, rtol=1e-10, atol=1e-12)
    sizes = [shape[0] for shape in chunks[1:]]
    assert max(sizes) == fitting
    assert sum(sizes) == shape_of_whole[0]


# The signs


def test_every_backward_pass_draws_new_signs():
    model = conv_net()
    inputs = torch.randn(4, 3, 7, 7, dtype=torch.float64)
    targets = random_target(model, inputs)
    kept = []
    with NormMeter(model, mode="sketch") as meter:
        for _ in range(3):
            mean_loss(model(inputs), targets).backward()
            kept.append(meter.per_sample())
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (kept[first] != kept[second]).all()


def test_signs_follow_the_seed_of_the_run():
    model = conv_net()
    sample = torch.randn(1, 3, 7, 7, dtype=torch.float64)
    kept = []
    for seed in (6, 6, 7):
        torch.manual_seed(seed)
        sketch._generators.clear()
        kept.append(draws(model, sample, count=5)[0])
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])


def test_a_sketch_draws_nothing_from_the_users_random_state():
    model = conv_net()
    before = torch.get_rng_state()
    inputs = torch.zeros(2, 3, 7, 7, dtype=torch.float64)
    with NormMeter(model, mode="sketch"):
        model(inputs).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


# Around it
