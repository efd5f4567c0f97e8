"""Normalisation layers that count by themselves, against the layers and rules they stand in for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from divebatch import NormMeter
from divebatch.errors import CoverageError
from divebatch.norms.compiled import CompiledEngine

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (6, 3)),
    "BatchNorm1d, positions": (lambda: nn.BatchNorm1d(3), (6, 3, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (6, 3, 3, 5)),
    "BatchNorm2d, average of all": (lambda: nn.BatchNorm2d(3, momentum=None), (6, 3, 3, 5)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), (6, 3, 3, 2, 2)),
    "LayerNorm": (lambda: nn.LayerNorm(3), (6, 3)),
    "LayerNorm, positions": (lambda: nn.LayerNorm(3, eps=0.1), (6, 5, 3)),
    "LayerNorm, two dimensions": (lambda: nn.LayerNorm((2, 3)), (6, 5, 4, 2, 3)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(3, bias=False), (6, 5, 3)),
}


@pytest.fixture(autouse=True)
def compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here are compiled passes."""
    monkeypatch.setattr(CompiledEngine, "looks_first", False)


def layers_of(case: str, frozen: str | None) -> tuple[nn.Module, nn.Module]:
    """The same layer twice."""
    pair = (CASES[case][0]().double(), CASES[case][0]().double())
    for layer in pair:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-2, 1, layer.weight.numel()).view_as(layer.weight))
        if frozen:
            getattr(layer, frozen).requires_grad_(False)
    return pair


def pass_through(layer: nn.Module, x: Tensor, **settings: bool) -> tuple[Tensor, NormMeter]:
    """The input's gradient, and what was counted."""
    x = x.clone().requires_grad_()
    with NormMeter(layer, loss_reduction="sum", **settings) as meter:
        layer(x).sin().sum().backward()
    return x.grad, meter


@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
@pytest.mark.parametrize("case", CASES)
def test_a_tapped_layer_is_the_layer_itself(case: str, frozen: str | None):
    if frozen and "without" in case:
        pytest.skip("has but one parameter")
    torch.manual_seed(0)
    plain, tapped = layers_of(case, frozen)
    x = torch.randn(CASES[case][1], dtype=torch.float64)
    (dx, counted), (expected_dx, expected) = pass_through(tapped, x, compiled=True), pass_through(plain, x)
    assert counted.sum_of_sq_norms() == pytest.approx(expected.sum_of_sq_norms(), rel=1e-10)
    assert counted.num_samples == 6
    torch.testing.assert_close(dx, expected_dx, rtol=1e-10, atol=1e-12)
    for one, other in zip(plain.parameters(), tapped.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-12)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(tapped.get_buffer(name), buffer)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tapped_layer_norm_gives_the_type_that_the_layer_gives(dtype: torch.dtype, autocast: bool):
    layer, x = nn.LayerNorm(3).to(dtype), torch.randn(4, 2, 3).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = layer(x)
        with NormMeter(layer, compiled=True):
            found = layer(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_a_layer_norm_without_a_batch_is_refused():
    layer = nn.LayerNorm(3)
    with NormMeter(layer, compiled=True), pytest.raises(CoverageError, match="LayerNorm"):
        layer(torch.randn(3))


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("case", ["BatchNorm2d", "LayerNorm, positions"])
def test_what_a_compiler_sees_holds_no_tensor_under_two_names(case: str):
    """torch 2.11 makes each name an output of its own, and the gradient of the layer's output went to the wrong one."""
    build, shape = CASES[case]
    layer, conversions = build(), []

    def watch(module, _):
        graphs = [part.graph for name, part in module.named_modules() if "fwd_body" in name]
        nodes = [node for graph in graphs for node in graph.nodes if node.target == "to"]
        conversions.extend((node.args[0].meta["example_value"].dtype, node.args[1]) for node in nodes)
        assert graphs
        return module

    compiled = torch.compile(lambda x: layer(x).sum(), backend=watch, fullgraph=True)
    with NormMeter(layer, compiled=True):
        compiled(torch.randn(shape))
        with torch.autocast("cpu", torch.bfloat16):
            compiled(torch.randn(shape).bfloat16())
    assert all(old != new for old, new in conversions)
    assert conversions  # of bfloat16


def test_how_many_layers_were_reached_is_kept_where_recorded_passes_find_it():
    layer = nn.BatchNorm1d(3)
    with NormMeter(layer, compiled=True) as meter:
        layer(torch.randn(4, 3)).sum().backward()
        kept = meter._engine._most_calls
        layer(torch.randn(4, 3)).sum().backward()
        assert meter._engine._most_calls is kept
