"""The hand-written kernels against the weight gradient itself; without a GPU by Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from divebatch.norms import NormMeter, triton
from divebatch.norms.rules import normalization
from divebatch.norms.rules.conv import Patches
from divebatch.norms.triton import kernels

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
    return kernels.projected(units, seed)


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
    geometry = [number for part in form._geometry for number in part]
    sq_norms = kernels.sq_norms(form.left, form.unpadded, geometry, with_bias)
    expected = form.explicit(slice(None)).flatten(1).square().sum(1)
    expected += form.left.flatten(2).sum(2).square().sum(1) * with_bias
    torch.testing.assert_close(sq_norms, expected, rtol=1e-5 if DEVICE == "cpu" else 1e-2, atol=1e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_sums_are_those_of_the_projected_weight_gradient(case, memory_format, with_bias):
    form, seed = form_of(case, memory_format), torch.tensor([7], device=DEVICE)
    geometry = [number for part in form._geometry for number in part]
    sums = kernels.sketch(form.left, form.unpadded, seed, geometry, with_bias)
    drawn = signs(*form.left.shape[:2], seed)
    gradients = torch.cat([form.explicit(slice(None)).flatten(2), form.left.flatten(2).sum(2, True) * with_bias], 2)
    u = torch.einsum("bhp,bpd->bhd", drawn, gradients)
    expected = torch.stack([u.square().sum((1, 2)), (u[:, 0] * u[:, 1]).sum(1)], 1)
    error = (sums - expected).abs() / expected[:, :1]  # products of both halves cancel: their size is the norms'
    assert error.max() < (1e-4 if DEVICE == "cpu" else 1e-2)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(3, 5, 4, 6), (2, 130, 17, 9), (1, 3, 1, 1)])
def test_sums_of_a_normalisation_layer(shape, memory_format, per_sample):
    torch.manual_seed(0)
    x, dy = (torch.randn(shape, device=DEVICE).contiguous(memory_format=memory_format) for _ in range(2))
    mean, inverse_std = (torch.rand(shape[:2] if per_sample else shape[1:2], device=DEVICE) for _ in range(2))
    normal = (x - mean[..., None, None]) * inverse_std[..., None, None]
    weight, bias = triton.channel_sums(x, dy, mean, inverse_std)
    torch.testing.assert_close(weight, (normal * dy).sum((2, 3)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias, dy.sum((2, 3)), rtol=1e-4, atol=1e-4)


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
        triton.outer_sq_norms(left, right), expected, rtol=1e-5 if DEVICE == "cpu" else 1e-2, atol=1e-5
    )


@pytest.mark.parametrize("case", OUTERS)
def test_sketched_norms_of_outer_products(case):
    left, right, gradients = outer_of(case)
    seed = torch.tensor([7], device=DEVICE)
    u = torch.einsum("bhp,bpc->bhc", signs(left.shape[0], left.shape[2], seed).double(), gradients)
    expected = torch.stack([u.square().sum((1, 2)), (u[:, 0] * u[:, 1]).sum(1)], 1)
    found = triton.outer_sketch(left, right, seed=seed)
    tolerance = (1e-4 if DEVICE == "cpu" else 1e-2) * expected[:, 0]
    assert ((found.sq_norms - expected[:, 0]).abs() < tolerance).all()
    assert ((found.variances.sqrt() / 2 - expected[:, 1].abs()).abs() < tolerance).all()


@pytest.mark.slow
def test_each_row_has_one_sign_in_one_half_and_both_occur():
    drawn = signs(40, 50, torch.tensor([3], device=DEVICE))
    assert ((drawn != 0).sum(1) == 1).all()
    assert drawn.abs().max() == 1
    assert abs(drawn.sum().item()) < 4 * 2000**0.5
    assert abs((drawn[:, 0] != 0).sum().item() - 1000) < 4 * 500**0.5
    assert not torch.equal(drawn, signs(40, 50, torch.tensor([4], device=DEVICE)))
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.slow
def test_the_operators_give_what_the_form_asks_for():
    form = form_of("stride, dilation, uneven", torch.channels_last)
    expected = form.explicit(slice(None)).flatten(1).square().sum(1)
    sq_norms = triton.conv2d_sq_norms(form.left, form.unpadded, *form._geometry)
    torch.testing.assert_close(sq_norms, expected, rtol=1e-5 if DEVICE == "cpu" else 1e-2, atol=1e-5)
    draws = [triton.conv2d_sketch(form.left, form.unpadded, *form._geometry) for _ in range(60)]
    sketches = torch.stack([draw.sq_norms for draw in draws])
    errors = torch.stack([draw.variances for draw in draws]).mean(0).sqrt() / 60**0.5
    assert ((sketches.mean(0) - expected).abs() < 5 * errors).all()
    assert sketches.std(0).min() > 0


def test_the_switch_is_put_back_and_stays_off_without_triton(monkeypatch):
    monkeypatch.setattr(triton, "ENABLED", False)
    with triton.switched(True):
        assert triton.ENABLED
        with triton.switched(False):
            assert not triton.ENABLED
        assert triton.ENABLED
    assert not triton.ENABLED
    monkeypatch.setattr(triton, "AVAILABLE", False)
    with triton.switched(True):
        assert not triton.ENABLED


class Everything(torch.nn.Module):
    """Layers of each kind that a kernel may take: with and without bias, few and many positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.batch_norm = torch.nn.Conv2d(3, 6, 3, padding=1, bias=False), torch.nn.BatchNorm2d(6)
        self.second, self.group_norm = torch.nn.Conv2d(6, 40, 3, stride=2), torch.nn.GroupNorm(4, 40)
        self.linear, self.last = torch.nn.Linear(40, 5), torch.nn.Linear(5, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.group_norm(self.second(self.batch_norm(self.first(x)).relu()))
        return self.last(self.linear(x.flatten(2).mT).tanh()).mean(1)


def counted(model: torch.nn.Module, mode: str, passes: int) -> NormMeter:
    x, y = torch.randn(5, 3, 9, 9, device=DEVICE), torch.randint(4, (5,), device=DEVICE)
    with NormMeter(model, mode=mode) as meter:
        for _ in range(passes):
            torch.nn.functional.cross_entropy(model(x), y).backward()
    return meter


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "passes"), [("exact", 1), ("sketch", 25)])
def test_a_network_measured_by_kernels_is_the_network_measured_without(mode, passes, monkeypatch):
    model = Everything().to(DEVICE)
    with triton.switched(False):
        torch.manual_seed(1)
        expected = counted(model, "exact", passes)
    used = []
    for name in ("conv2d_sq_norms", "conv2d_sketch", "channel_sums"):
        plain = getattr(triton, name)
        monkeypatch.setattr(
            triton, name, lambda *a, plain=plain, name=name, **k: (used.append(name), plain(*a, **k))[1]
        )
    for name in ("applies", "applies_exactly"):
        monkeypatch.setattr(triton, name, lambda left, right: left.dtype == right.dtype)
    monkeypatch.setattr(normalization, "_layer_kernel_applies", lambda *_: False)  # it is a CPU's
    torch.manual_seed(1)
    found = counted(model, mode, passes)
    kernel = "conv2d_sq_norms" if mode == "exact" else "conv2d_sketch"
    assert (used.count(kernel), used.count("channel_sums")) == (4 * passes, 2 * passes)
    assert found.num_samples == expected.num_samples == 5 * passes
    tolerance = 5 * found.standard_error() if mode == "sketch" else 1e-2 * expected.sum_of_sq_norms()
    assert abs(found.sum_of_sq_norms() - expected.sum_of_sq_norms()) < tolerance
    if mode == "sketch":
        assert 0 < found.standard_error() < 0.2 * expected.sum_of_sq_norms()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: Triton's interpreter does not run inside the compiler")
@pytest.mark.parametrize("in_bfloat16", [False, True])
@pytest.mark.parametrize("mode", ["exact", "sketch"])
def test_a_compiled_network_measured_by_kernels_is_the_network_measured_without_either(mode, in_bfloat16):
    model, passes = Everything().to(DEVICE), 20
    x, y = torch.randn(64, 3, 9, 9, device=DEVICE), torch.randint(4, (64,), device=DEVICE)
    torch.compiler.reset()
    found = {}
    for both, run in ((False, model), (True, torch.compile(model))):
        with triton.switched(both), NormMeter(model, mode=mode if both else "exact", compiled=both) as meter:
            for _ in range(passes):
                with torch.autocast(DEVICE, torch.bfloat16, enabled=in_bfloat16):
                    loss = torch.nn.functional.cross_entropy(run(x), y)
                loss.backward()
        found[both] = meter
    assert found[True].num_samples == found[False].num_samples == 64 * passes
    expected = found[False].sum_of_sq_norms()
    tolerance = 5 * found[True].standard_error() if mode == "sketch" else 0
    assert abs(found[True].sum_of_sq_norms() - expected) < tolerance + 1e-2 * expected
