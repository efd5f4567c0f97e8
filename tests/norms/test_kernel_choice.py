"""When the GPU kernels are asked, and when they must not be; without running any of them."""

import pytest
import torch
from torch import Tensor, nn

from divebatch.errors import CoverageError
from divebatch.norms import NormMeter, triton
from divebatch.norms.compiled import CompiledEngine
from divebatch.norms.forms import Outer, RowSums, joined, measured
from divebatch.norms.rules.conv import Patches
from divebatch.norms.sketch import Estimate, seed_signs
from reference.per_sample import mlp


@pytest.fixture
def willing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that would take anything."""
    for name in ("applies", "applies_exactly", "may_apply"):
        monkeypatch.setattr(triton, name, lambda *_: True)


def weight_and_bias(rows: int) -> list[RowSums | Outer]:
    left = torch.randn(2, 5, rows)
    return [RowSums(left), Outer(left, torch.randn(2, 5, 3))]


@pytest.mark.usefixtures("willing")
@pytest.mark.parametrize(
    ("rows", "mode", "num_forms"), [(4, "exact", 1), (4, "sketch", 1), (1, "exact", 1), (1, "sketch", 2)]
)
def test_a_bias_is_joined_to_its_weight_where_a_kernel_counts_both(rows: int, mode: str, num_forms: int):
    forms = joined(weight_and_bias(rows), mode)
    assert len(forms) == num_forms
    assert forms[-1].with_bias == (num_forms == 1)


def test_without_kernels_a_bias_stays_by_itself():
    assert len(joined(weight_and_bias(4), "exact")) == 2


def patches(kernel: int, *, groups: int = 1) -> Patches:
    layer = nn.Conv2d(2 * groups, 4 * groups, kernel, groups=groups)
    x = torch.randn(2, 2 * groups, 18, 18)
    sizes = (layer.kernel_size, layer.stride, layer.dilation, groups)
    return Patches(torch.randn_like(layer(x)), x, [0, 0, 0, 0], *sizes, layer.weight.shape)


@pytest.mark.parametrize(("kernel", "groups", "suits"), [(3, 1, True), (8, 1, True), (9, 1, False), (3, 2, False)])
def test_only_plain_convolutions_with_small_kernels_suit(kernel: int, groups: int, suits: bool):
    assert patches(kernel, groups=groups)._suits_triton() is suits


def test_a_kernel_is_used_where_it_may_round(monkeypatch: pytest.MonkeyPatch):
    form = patches(5)
    expected = form.explicit(slice(None)).flatten(1).square().sum(1)
    with monkeypatch.context() as patched:
        patched.setattr(triton, "may_apply", lambda *_: True)
        patched.setattr(triton, "conv2d_sq_norms", lambda *_: expected)  # at no cost
        assert form.sq_norms() is expected
    torch.testing.assert_close(form.sq_norms(), expected)


class Asked:
    """A form that only notes the seed it was given."""

    num_samples = 1

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def sketch(self, *, seed: Tensor) -> Estimate:
        self.seen.append(int(seed))
        return Estimate(torch.zeros(1), None)


def test_each_parameter_of_a_layer_has_signs_of_its_own():
    seen: list[int] = []
    measured([Asked(seen) for _ in range(3)], "sketch", seed=torch.tensor([7]))
    assert seen == [7, 8, 9]


def test_torchs_newer_switch_for_float32_does_not_stop_a_pass():
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert triton._may_round()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("tensor", "within_reach"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3, dtype=torch.float64), False),
        (torch.zeros(0, 3), False),
        (torch.zeros(1).expand(65_536, 3), False),
        (torch.zeros(8, 2, 3).transpose(0, 1), True),
        (torch.empty(2, 3, 2**30, device="meta"), False),
    ],
)  # fmt: skip
def test_what_a_kernel_may_read(tensor: Tensor, within_reach: bool):
    assert triton._is_within_reach(tensor) is within_reach


def test_tensors_of_a_transform_are_out_of_reach():
    seen = []
    torch.func.grad(lambda x: (seen.append(triton._is_within_reach(x)), x.sum())[1])(torch.ones(3))
    assert seen == [False]


@pytest.mark.parametrize("looks_first", [True, False])
@pytest.mark.parametrize("layer", [nn.LayerNorm(3), nn.BatchNorm1d(3)])
def test_second_derivatives_through_tapped_layers_are_refused(
    layer: nn.Module, looks_first: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(CompiledEngine, "looks_first", looks_first)
    x, error = torch.randn(4, 3, requires_grad=True), CoverageError if looks_first else RuntimeError
    with NormMeter(layer, compiled=True):
        (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(error, match="do not add up|not called" if looks_first else "once_differentiable"):
            dx.square().sum().backward()


def test_seeds_are_drawn_anew_from_the_signs_own_state():
    meter, drawn = NormMeter(mlp(), compiled=True, mode="sketch"), []
    for seed in (1, 2, 1):
        seed_signs(torch.device("cpu"), seed)
        meter.reset()
        drawn.append(meter._engine.seeds.clone())
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
