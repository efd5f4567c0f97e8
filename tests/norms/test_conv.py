"""The rules for convolutions and transposed convolutions against a loop over samples."""

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from divebatch import NormMeter
from divebatch.norms import forms
from divebatch.norms.rules import conv
from reference.per_sample import Calls, mean_loss, sq_norms, twice
from reference.rules import TOLERANCE, assert_matches_loop, metered, weighted

KERNELS = ("_by_positions", "_by_patches", "_by_grouped_convolution")
NUM_SAMPLES = 4
EVEN_SAME = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


@dataclass
class Case:
    kind: type[nn.Module]
    size: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    channels: tuple[int, int] = (4, 6)


def of(kind: type[nn.Module], *size: int, channels: tuple[int, int] = (4, 6), **settings: Any) -> Case:
    return Case(kind, size, {"kernel_size": 3, **settings}, channels)


PLAIN = {
    "1d": of(nn.Conv1d, 9),
    "1d, stride that leaves a rest": of(nn.Conv1d, 10, stride=3),
    "1d, dilation": of(nn.Conv1d, 11, dilation=3),
    "1d, stride and dilation and padding": of(nn.Conv1d, 12, stride=2, dilation=2, padding=3),
    "1d, a kernel as long as the input": of(nn.Conv1d, 9, kernel_size=9),
    "1d, pointwise": of(nn.Conv1d, 7, kernel_size=1),
    "1d, one channel each": of(nn.Conv1d, 7, channels=(1, 1)),
    "1d, many channels and few positions": of(nn.Conv1d, 4, channels=(24, 24)),
    "2d": of(nn.Conv2d, 7, 6),
    "2d, no bias": of(nn.Conv2d, 7, 6, bias=False),
    "2d, pointwise with stride": of(nn.Conv2d, 7, 6, kernel_size=1, stride=2),
    "2d, uneven everything": of(nn.Conv2d, 11, 9, kernel_size=(2, 3), stride=(3, 1), dilation=(2, 3), padding=(1, 2)),
    "2d, groups": of(nn.Conv2d, 6, 5, groups=2, padding=1),
    "2d, groups with stride and dilation": of(nn.Conv2d, 9, 9, groups=2, stride=2, dilation=2, padding=2),
    "2d, depthwise": of(nn.Conv2d, 6, 5, channels=(4, 4), groups=4),
    "2d, depthwise with multiplier": of(nn.Conv2d, 6, 5, channels=(4, 8), groups=4, stride=2),
    "2d, stride beyond the kernel": of(nn.Conv2d, 9, 8, kernel_size=2, stride=4),
    "2d, padding beyond the kernel": of(nn.Conv2d, 2, 3, padding=4),
    "3d": of(nn.Conv3d, 4, 5, 4),
    "3d, uneven everything": of(nn.Conv3d, 5, 4, 6, kernel_size=(1, 2, 3), stride=(2, 1, 3), dilation=(1, 3, 1)),
    "3d, groups and padding": of(nn.Conv3d, 4, 3, 4, groups=2, padding=(1, 0, 2)),
    "3d, depthwise": of(nn.Conv3d, 4, 3, 4, channels=(2, 2), groups=2),
    "1d, valid": of(nn.Conv1d, 9, padding="valid"),
    "1d, same": of(nn.Conv1d, 9, padding="same"),
    "1d, same, even kernel": of(nn.Conv1d, 9, kernel_size=4, padding="same"),
    "2d, valid": of(nn.Conv2d, 7, 6, padding="valid", stride=2),
    "2d, same, dilation": of(nn.Conv2d, 7, 6, padding="same", dilation=2),
    "2d, same, even kernel": of(nn.Conv2d, 7, 6, kernel_size=(2, 4), padding="same", dilation=(3, 1)),
    "2d, same, one side even": of(nn.Conv2d, 7, 6, kernel_size=(2, 3), padding="same", groups=2),
    "3d, same, even kernel": of(nn.Conv3d, 4, 3, 4, kernel_size=2, padding="same"),
}
PADDED = {
    f"{dims}d, {mode}, {name}": of(kind, *size, padding_mode=mode, **settings)
    for dims, kind, size in ((1, nn.Conv1d, (8,)), (2, nn.Conv2d, (6, 5)), (3, nn.Conv3d, (4, 4, 5)))
    for mode in ("reflect", "replicate", "circular")
    for name, settings in (
        ("padding 2, stride 2", {"padding": 2, "stride": 2}),
        ("same, even kernel", {"padding": "same", "kernel_size": 2}),
    )
}
TRANSPOSED = {
    "transposed 1d": of(nn.ConvTranspose1d, 6),
    "transposed 1d, stride and padding": of(nn.ConvTranspose1d, 6, stride=2, padding=2),
    "transposed 1d, output padding": of(nn.ConvTranspose1d, 6, stride=3, output_padding=2),
    "transposed 1d, output padding by dilation": of(nn.ConvTranspose1d, 6, dilation=3, output_padding=2, padding=1),
    "transposed 2d": of(nn.ConvTranspose2d, 4, 5),
    "transposed 2d, no bias": of(nn.ConvTranspose2d, 4, 5, bias=False),
    "transposed 2d, stride beyond the kernel": of(nn.ConvTranspose2d, 3, 4, kernel_size=2, stride=3),
    "transposed 2d, uneven everything": of(
        nn.ConvTranspose2d, 4, 3,
        kernel_size=(2, 3), stride=(3, 2), dilation=(2, 1), padding=(1, 2), output_padding=(2, 1),
    ),
    "transposed 2d, groups": of(nn.ConvTranspose2d, 4, 4, groups=2, stride=2, padding=1, output_padding=1),
    "transposed 2d, depthwise": of(nn.ConvTranspose2d, 4, 4, channels=(4, 4), groups=4, dilation=2),
    "transposed 3d": of(nn.ConvTranspose3d, 3, 2, 3),
    "transposed 3d, uneven everything": of(
        nn.ConvTranspose3d, 3, 2, 3,
        kernel_size=(1, 2, 3), stride=(1, 2, 2), padding=(0, 1, 1), output_padding=(0, 1, 0),
    ),
    "transposed 3d, groups": of(nn.ConvTranspose3d, 3, 3, 2, groups=2, stride=2, output_padding=1),
}  # fmt: skip
CASES = PLAIN | PADDED | TRANSPOSED
EVERY_CASE = [pytest.param(name, marks=EVEN_SAME if "even" in name else ()) for name in CASES]
FEW_CASES = ["1d", "2d, groups with stride and dilation", "3d, uneven everything", "transposed 2d, groups"]
FROZEN = ("weight", "bias")


def by_loop(layer: nn.Module, x: Tensor, dy: Tensor) -> Tensor:
    return sq_norms(copy.deepcopy(layer).double(), weighted, x.double(), dy.double())


def layer_and_call(case: Case, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = case.kind(*case.channels, **case.settings, dtype=dtype)
    x = torch.randn(NUM_SAMPLES, case.channels[0], *case.size, dtype=dtype)
    return layer, x, torch.randn_like(layer(x))


def patches_of(layer: nn.Module, x: Tensor, dy: Tensor) -> conv.Patches:
    """The weight's gradients, as the layer's rule states them."""
    rule = conv.transposed_conv if getattr(layer, "transposed", False) else conv.conv
    return rule(layer, x, dy)["weight"]


def weight_only(layer: nn.Module) -> nn.Module:
    if layer.bias is not None:
        layer.bias.requires_grad_(False)
    return layer


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, slice]]:
    """The name of the chosen kernel and the samples of each of its calls."""
    calls = []

    def recorded(name: str) -> Any:
        kernel = getattr(conv.Patches, name)
        return lambda form, samples: (calls.append((name, samples)), kernel(form, samples))[1]

    for name in KERNELS:
        monkeypatch.setattr(conv.Patches, name, recorded(name))
    return calls


# One call


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", EVERY_CASE)
def test_sq_norms_match_a_loop_over_samples(case: str, dtype: torch.dtype):
    assert_matches_loop(*layer_and_call(CASES[case], dtype))


@pytest.mark.parametrize("case", EVERY_CASE)
def test_every_kernel_is_right_on_every_case(case: str):
    for dtype, tolerance in TOLERANCE.items():
        layer, x, dy = layer_and_call(CASES[case], dtype)
        patches, expected = patches_of(layer, x, dy), by_loop(weight_only(layer), x, dy)
        for kernel in KERNELS:
            fast = getattr(patches, kernel)(slice(0, NUM_SAMPLES))
            torch.testing.assert_close(fast.double(), expected, rtol=tolerance, atol=0, msg=lambda m, k=kernel: k + m)


@pytest.mark.parametrize("case", EVERY_CASE)
def test_explicit_gradients_are_those_of_each_sample(case: str):
    layer, x, dy = layer_and_call(CASES[case], torch.float64)
    explicit = patches_of(layer, x, dy).explicit(slice(1, 3))
    for i, gradient in zip((1, 2), explicit, strict=True):
        (expected,) = torch.autograd.grad(weighted(layer(x[i : i + 1]), dy[i : i + 1]), [layer.weight])
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("case", FEW_CASES)
def test_frozen_parameters_do_not_count(case: str, frozen: str):
    layer, x, dy = layer_and_call(CASES[case], torch.float64)
    getattr(layer, frozen).requires_grad_(False)
    assert_matches_loop(layer, x, dy)


@pytest.mark.parametrize("case", ["2d", "2d, uneven everything", "2d, depthwise", "3d", "transposed 2d, groups"])
def test_channels_last(case: str):
    layer, x, dy = layer_and_call(CASES[case], torch.float64)
    memory_format = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    layer, x, dy = (each.to(memory_format=memory_format) for each in (layer, x, dy))
    assert_matches_loop(layer, x, dy)
    patches, expected = patches_of(layer, x, dy), by_loop(weight_only(layer), x, dy)
    for kernel in KERNELS:
        torch.testing.assert_close(getattr(patches, kernel)(slice(0, NUM_SAMPLES)), expected, rtol=1e-10, atol=0)


def test_an_output_size_chosen_in_the_call():
    class Sized(nn.ConvTranspose2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, output_size=[11, 13])

    layer, sized = nn.ConvTranspose2d(3, 2, 3, stride=3).double(), Sized(3, 2, 3, stride=3).double()
    x, dy = torch.randn(4, 3, 3, 4).double(), torch.randn(4, 2, 11, 13).double()
    fast = metered(layer, x, dy, output_size=[11, 13])
    torch.testing.assert_close(fast, sq_norms(sized, weighted, x, dy), rtol=1e-10, atol=0)


# Any shape


@st.composite
def layers_with_calls(draw: st.DrawFn) -> tuple[nn.Module, Tensor, Tensor]:
    dtype, dims = draw(st.sampled_from(list(TOLERANCE))), draw(st.integers(1, 3))
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    is_transposed = draw(st.booleans())

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups = draw(st.integers(1, 3))
    channels = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    geometry = {"kernel_size": each(1, 3), "stride": each(1, 3), "dilation": each(1, 2), "padding": each(0, 2)}
    size = each(1, 6 if dims < 3 else 4)
    per_dim = zip(size, *geometry.values(), strict=True)
    if is_transposed:
        lengths = [(n - 1) * stride - 2 * pad + dilation * (k - 1) + 1 for n, k, stride, dilation, pad in per_dim]
        steps = zip(geometry["stride"], geometry["dilation"], strict=True)
        geometry["output_padding"] = tuple(draw(st.integers(0, max(pair) - 1)) for pair in steps)
    else:
        lengths = [n + 2 * pad - dilation * (k - 1) for n, k, _, dilation, pad in per_dim]
    assume(min(lengths) >= 1)
    layer = kinds[is_transposed][dims - 1](*channels, groups=groups, bias=draw(st.booleans()), **geometry, dtype=dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    # Whole numbers are exact in both precisions, so that no cancellation can hide behind the tolerance.
    x = torch.randint(-3, 4, (draw(st.integers(1, 4)), channels[0], *size), generator=generator).to(dtype)
    return layer, x, torch.randint(-3, 4, layer(x).shape, generator=generator).to(dtype)


@settings(max_examples=150)
@given(layers_with_calls(), st.sampled_from(KERNELS))
def test_every_kernel_matches_for_any_geometry(layer_and_call: tuple[nn.Module, Tensor, Tensor], kernel: str):
    layer, x, dy = layer_and_call
    fast = getattr(patches_of(layer, x, dy), kernel)(slice(0, len(x)))
    torch.testing.assert_close(fast.double(), by_loop(weight_only(layer), x, dy), rtol=TOLERANCE[x.dtype], atol=0)


# Chunks


@pytest.mark.parametrize("fitting", [1, 3, 4])
@pytest.mark.parametrize("case", ["1d", "2d, groups", "transposed 1d"])
def test_chunks_stay_below_the_cap(case: str, fitting: int, kernel_calls: list[tuple[str, slice]], monkeypatch):
    layer, x, dy = layer_and_call(CASES[case], torch.float32)
    left, right = (x, dy) if layer.transposed else (dy, x)
    entries = left[0, 0].numel() * right.shape[1] * layer.weight[0, 0].numel()
    monkeypatch.setattr(forms, "CHUNK_BYTES", fitting * entries * 4 + 3)
    assert_matches_loop(layer, x, dy)
    assert kernel_calls[0] == ("_by_grouped_convolution", slice(0, fitting))
    assert len(kernel_calls) == math.ceil(NUM_SAMPLES / fitting)


def test_chunks_count_the_products_of_positions(kernel_calls: list[tuple[str, slice]], monkeypatch: pytest.MonkeyPatch):
    layer = nn.Conv1d(1, 64, 25, padding=12, bias=False)  # patches of 400 entries, but 40 positions with the zeros
    x, dy = torch.randn(NUM_SAMPLES, 1, 16), torch.randn(NUM_SAMPLES, 64, 16)
    monkeypatch.setattr(forms, "CHUNK_BYTES", 3 * 40**2 * 4 + 3)
    assert_matches_loop(layer, x, dy)
    assert kernel_calls == [("_by_positions", slice(0, 3)), ("_by_positions", slice(3, 6))]


# Products of positions


@pytest.mark.parametrize(
    ("layer", "size", "kernel"),
    [
        (nn.Conv2d(64, 64, 3, padding=1), 8, "_by_positions"),
        (nn.Conv2d(16, 16, 3, padding=1), 32, "_by_grouped_convolution"),
        (nn.Conv2d(64, 64, 3, padding=1, groups=8), 8, "_by_grouped_convolution"),
        (nn.Conv2d(64, 64, 3, stride=8), 32, "_by_grouped_convolution"),  # few positions, but of a large input
        (nn.Conv2d(16, 64, 1), 16, "_by_patches"),
    ],
)
def test_the_shape_decides_the_kernel(layer: nn.Conv2d, size: int, kernel: str, kernel_calls: list[tuple[str, slice]]):
    x = torch.randn(1, layer.in_channels, size, size)
    patches_of(layer, x, layer(x).detach()).sq_norms()
    assert kernel_calls == [(kernel, slice(0, 1))]


def test_squares_of_half_precision_do_not_overflow():
    layer, x, dy = layer_and_call(CASES["2d"], torch.float32)
    x, dy = 100 * x, 1000 * dy  # the gradients fit into float16, products of positions do not
    fast = patches_of(layer, x.half(), dy.half())._by_positions(slice(None))
    expected = by_loop(weight_only(layer), x.half().float(), dy.half().float())
    torch.testing.assert_close(fast.double(), expected, rtol=1e-4, atol=0)


# Several calls


def called_twice() -> nn.Module:
    """On images of two sizes."""
    return Calls(nn.Conv2d(3, 3, 3, stride=2, padding=1), twice)


def tied_convolutions() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Tanh(), nn.Conv2d(3, 3, 3, padding=1, dilation=2))
    model[2].weight = model[0].weight
    return model


def tied_bias_only() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Tanh(), nn.Conv2d(3, 3, 2))
    model[2].bias = model[0].bias
    return model


def tied_autoencoder() -> nn.Module:
    """The decoder is the encoder's transpose."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Tanh(), nn.ConvTranspose2d(4, 3, 3, stride=2))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("chunk_bytes", [1, 16 * 2**20])
@pytest.mark.parametrize("make", [called_twice, tied_convolutions, tied_bias_only, tied_autoencoder])
def test_gradients_of_a_shared_weight_add_up_before_they_are_squared(make, chunk_bytes: int, monkeypatch):
    monkeypatch.setattr(forms, "CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    model = make().double()
    inputs = torch.randn(4, 3, 7, 6).double()
    targets = torch.randn_like(model(inputs))
    with NormMeter(model) as meter:
        mean_loss(model(inputs), targets).backward()
    torch.testing.assert_close(meter.per_sample(), sq_norms(model, mean_loss, inputs, targets), rtol=1e-10, atol=0)
