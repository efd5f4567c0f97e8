"""The rule for Linear layers against a loop over samples."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from divebatch.norms import forms
from reference.per_sample import sq_norms
from reference.rules import TOLERANCE, assert_matches_loop, metered, weighted

SHAPES = {
    "matrix": ((7, 4), 3),
    "one sample": ((1, 4), 3),
    "one input, one output": ((7, 1), 1),
    "one position": ((7, 1, 4), 3),
    "few positions of a wide layer": ((5, 2, 16), 12),
    "many positions of a narrow layer": ((5, 30, 3), 2),
    "as many positions as both forms cost the same": ((5, 2, 4), 4),
    "image": ((3, 5, 6, 4), 3),
    "rank five": ((2, 2, 3, 2, 9), 8),
}
FROZEN = {"nothing": (), "weight": ("weight",), "bias": ("bias",)}


def layer_of(num_inputs: int, num_outputs: int, *, bias: bool, frozen: tuple[str, ...], dtype: torch.dtype):
    layer = nn.Linear(num_inputs, num_outputs, bias=bias, dtype=dtype)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    return layer


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(kernel, samples) of every kernel call."""
    calls = []
    for name in ("_by_gram", "_by_gradient"):
        kernel = getattr(forms, name)

        def recording(x: Tensor, dy: Tensor, *, name: str = name, kernel=kernel) -> Tensor:
            calls.append((name, len(x)))
            return kernel(x, dy)

        monkeypatch.setattr(forms, name, recording)
    return calls


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("case", SHAPES)
def test_sq_norms_match_a_loop_over_samples(case: str, frozen: str, dtype: torch.dtype):
    torch.manual_seed(0)
    shape, num_outputs = SHAPES[case]
    layer = layer_of(shape[-1], num_outputs, bias=True, frozen=FROZEN[frozen], dtype=dtype)
    x, dy = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], num_outputs, dtype=dtype)
    assert_matches_loop(layer, x, dy)


@st.composite
def layers_with_calls(draw: st.DrawFn) -> tuple[nn.Linear, Tensor, Tensor]:
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    num_inputs, num_outputs = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    bias = draw(st.booleans())
    frozen = FROZEN[draw(st.sampled_from(list(FROZEN)))] if bias else ()
    before = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    # Whole numbers are exact in both precisions, so that no cancellation can hide behind the tolerance.
    x, dy = (torch.randint(-3, 4, (*before, size), generator=generator) for size in (num_inputs, num_outputs))
    return layer_of(num_inputs, num_outputs, bias=bias, frozen=frozen, dtype=dtype), x.to(dtype), dy.to(dtype)


@given(layers_with_calls(), st.sampled_from([1, 500, 64 * 2**20]))
def test_sq_norms_match_for_any_shape_and_chunk(layer_and_call: tuple[nn.Linear, Tensor, Tensor], chunk_bytes: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "CHUNK_BYTES", chunk_bytes)
        assert_matches_loop(*layer_and_call)


@pytest.mark.parametrize("kernel", [forms._by_gram, forms._by_gradient])
@pytest.mark.parametrize("case", ["few positions of a wide layer", "many positions of a narrow layer"])
def test_both_kernels_are_right_for_every_shape(kernel, case: str):
    torch.manual_seed(0)
    shape, num_outputs = SHAPES[case]
    layer = layer_of(shape[-1], num_outputs, bias=False, frozen=(), dtype=torch.float64)
    x, dy = torch.randn(shape).double(), torch.randn(*shape[:-1], num_outputs).double()
    torch.testing.assert_close(kernel(x, dy), sq_norms(layer, weighted, x, dy), rtol=1e-10, atol=0)


def test_squares_of_half_precision_do_not_overflow():
    torch.manual_seed(0)
    x, dy = torch.randn(5, 3, 64).half(), (1000 * torch.randn(5, 3, 64)).half()
    expected = (dy.double().mT @ x.double()).square().sum((1, 2))
    torch.testing.assert_close(forms._by_gram(dy, x).double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("num_positions", "kernel"), [(3, "_by_gram"), (4, "_by_gradient"), (9, "_by_gradient")])
def test_the_cheaper_kernel_is_taken(num_positions: int, kernel: str, kernel_calls: list[tuple[str, int]]):
    metered(nn.Linear(8, 8), torch.randn(5, num_positions, 8), torch.randn(5, num_positions, 8))
    assert kernel_calls == [(kernel, 5)]


@pytest.mark.parametrize(("num_positions", "entries"), [(3, 2 * 3 * 3), (9, 8 * 8)])
@pytest.mark.parametrize("fitting", [1, 2, 5])
def test_chunks_stay_below_the_cap(num_positions, entries, fitting, kernel_calls, monkeypatch):
    monkeypatch.setattr(forms, "CHUNK_BYTES", fitting * entries * 4 + 3)
    layer, x, dy = nn.Linear(8, 8), torch.randn(5, num_positions, 8), torch.randn(5, num_positions, 8)
    assert_matches_loop(layer, x, dy)
    assert kernel_calls[0][1] == fitting
    assert len(kernel_calls) == math.ceil(5 / fitting)
