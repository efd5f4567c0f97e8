"""The hand-written kernels against the weight gradient itself; without a GPU by Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
pytest.importorskip("triton", reason="needs triton")

from divebatch.norms import fused, triton_kernels
from divebatch.norms.conv import Patches

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Triton's interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "3x3": (2, 4, 3, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    "many channels": (2, 70, 130, (5, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
    "stride, dilation, uneven": (2, 5, 17, (7, 8), (3, 2), (2, 1), (1, 0), (1, 2)),
    "1x1, stride 2": (1, 70, 20, (9, 9), (1, 1), (2, 2), (0, 0), (1, 1)),
    "7x7, stride 2": (2, 3, 3, (11, 11), (7, 7), (2, 2), (3, 3), (1, 1)),
    "padding wider than the kernel": (2, 3, 2, (4, 4), (2, 2), (1, 1), (3, 2), (1, 1)),
    "several tiles of positions": (1, 300, 40, (12, 12), (3, 3), (1, 1), (1, 1), (1, 1)),
    "one row of positions": (3, 6, 4, (1, 20), (1, 1), (1, 1), (0, 0), (1, 1)),
}


def signs(num_samples: int, num_rows: int, seed: torch.Tensor) -> torch.Tensor:
    """(B, 2, P): those the kernel draws, seen through a projection of unit vectors."""
    units = torch.eye(num_rows, device=DEVICE).expand(num_samples, num_rows, num_rows).contiguous()
    return triton_kernels.projected(units, seed)


def form_of(case: str, memory_format: torch.memory_format) -> Patches:
    num_samples, rows, channels, size, kernel, stride, padding, dilation = CASES[case]
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(channels, rows, kernel, stride, padding, dilation, bias=False, device=DEVICE)
    x = torch.randn(num_samples, channels, *size, device=DEVICE).contiguous(memory_format=memory_format)
    dy = torch.randn_like(layer(x)).contiguous(memory_format=memory_format)
    ends = [amount for amount in reversed(padding) for _ in range(2)]
    return Patches(dy, x, ends, kernel, stride, dilation, 1, layer.weight.shape)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_exact_norms_are_those_of_the_weight_gradient(case, memory_format, with_bias):
    form = form_of(case, memory_format)
    geometry = [list(part) for part in form._geometry]
    sq_norms = triton_kernels.sq_norms(form.left, form.unpadded, *geometry, with_bias)
    expected = form.explicit(slice(None)).flatten(1).square().sum(1)
    expected += form.left.flatten(2).sum(2).square().sum(1) * with_bias
    torch.testing.assert_close(sq_norms, expected, rtol=1e-5 if DEVICE == "cpu" else 1e-2, atol=1e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_sums_are_those_of_the_projected_weight_gradient(case, memory_format, with_bias):
    form, seed = form_of(case, memory_format), torch.tensor([7], device=DEVICE)
    geometry = [list(part) for part in form._geometry]
    sums = triton_kernels.sketch(form.left, form.unpadded, seed, *geometry, with_bias)
    drawn = signs(*form.left.shape[:2], seed)
    gradients = torch.cat([form.explicit(slice(None)).flatten(2), form.left.flatten(2).sum(2, True) * with_bias], 2)
    u = torch.einsum("bhp,bpd->bhd", drawn, gradients)
    expected = torch.stack([u.square().sum((1, 2)), (u[:, 0] * u[:, 1]).sum(1)], 1)
    error = (sums - expected).abs() / expected[:, :1]  # products of both halves cancel: their size is the norms'
    assert error.max() < (1e-4 if DEVICE == "cpu" else 1e-2)


OUTERS = {
    "gram": (2, 5, 40, 50),
    "several tiles": (2, 140, 150, 141),
    "gradient": (3, 200, 20, 17),
    "one": (1, 2, 3, 2),
}


def outer_of(case: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both factors, and the gradients they stand for."""
    num_samples, positions, rows, columns = OUTERS[case]
    torch.manual_seed(0)
    left, right = (torch.randn(num_samples, positions, size, device=DEVICE) for size in (rows, columns))
    return left, right, left.double().mT @ right.double()


@pytest.mark.parametrize("case", OUTERS)
def test_exact_norms_of_outer_products(case):
    left, right, gradients = outer_of(case)
    expected = gradients.flatten(1).square().sum(1).float()
    torch.testing.assert_close(
        fused.outer_sq_norms(left, right), expected, rtol=1e-5 if DEVICE == "cpu" else 1e-2, atol=1e-5
    )


@pytest.mark.parametrize("case", OUTERS)
def test_sketched_norms_of_outer_products(case):
    left, right, gradients = outer_of(case)
    seed = torch.tensor([7], device=DEVICE)
    u = torch.einsum("bhp,bpc->bhc", signs(left.shape[0], left.shape[2], seed).double(), gradients)
    expected = torch.stack([u.square().sum((1, 2)), (u[:, 0] * u[:, 1]).sum(1)], 1)
    found = fused.outer_sketch(left, right, seed=seed)
    tolerance = (1e-4 if DEVICE == "cpu" else 1e-2) * expected[:, 0]
    assert ((found.sq_norms - expected[:, 0]).abs() < tolerance).all()
    assert ((found.variances.sqrt() / 2 - expected[:, 1].abs()).abs() < tolerance).all()


def test_each_row_has_one_sign_in_one_half_and_both_occur():
    drawn = signs(40, 50, torch.tensor([3], device=DEVICE))
    assert ((drawn != 0).sum(1) == 1).all()
    assert drawn.abs().max() == 1
    assert abs(drawn.sum().item()) < 4 * 2000**0.5
    assert abs((drawn[:, 0] != 0).sum().item() - 1000) < 4 * 500**0.5
    assert not torch.equal(drawn, signs(40, 50, torch.tensor([4], device=DEVICE)))
    assert not torch.equal(drawn[0], drawn[1])


def test_the_operators_give_what_the_form_asks_for():
    form = form_of("stride, dilation, uneven", torch.channels_last)
    expected = form.explicit(slice(None)).flatten(1).square().sum(1)
    sq_norms = fused.conv2d_sq_norms(form.left, form.unpadded, *form._geometry)
    torch.testing.assert_close(sq_norms, expected, rtol=1e-5 if DEVICE == "cpu" else 1e-2, atol=1e-5)
    draws = [fused.conv2d_sketch(form.left, form.unpadded, *form._geometry) for _ in range(60)]
    sketches = torch.stack([draw.sq_norms for draw in draws])
    errors = torch.stack([draw.variances for draw in draws]).mean(0).sqrt() / 60**0.5
    assert ((sketches.mean(0) - expected).abs() < 5 * errors).all()
    assert sketches.std(0).min() > 0


def test_the_switch_is_put_back_and_stays_off_without_triton(monkeypatch):
    monkeypatch.setattr(fused, "ENABLED", False)
    with fused.switched(True):
        assert fused.ENABLED
        with fused.switched(False):
            assert not fused.ENABLED
        assert fused.ENABLED
    assert not fused.ENABLED
    monkeypatch.setattr(fused, "AVAILABLE", False)
    with fused.switched(True):
        assert not fused.ENABLED
