"""Compiled passes after the first: the taps, normalisation layers that count by themselves, seeds."""

import copy
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from divebatch import NormMeter, gradient_diversity
from divebatch.errors import CoverageError, UsageError
from divebatch.norms import DiversityMeter, triton
from divebatch.norms.compiled import CompiledEngine
from divebatch.norms.rules.conv import Patches
from reference import per_sample
from reference.per_sample import assert_same_sums, mean_loss, mlp, samples, sum_loss

pytestmark = [  # what the compiler itself warns of
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
]

BACKEND = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"
"""The default one needs a C++ compiler; the other takes the same graphs and is quicker to build."""


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.norm(self.first(x)).relu()).relu().mean((2, 3)))


class Transformer(nn.Module):
    """One block of one head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norms = nn.Embedding(11, 8), nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(x + self.down(self.up(self.norms[1](x)).tanh()))


def by_running_statistics() -> ConvNet:
    model = ConvNet()
    model.norm.eval()
    return model


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 3, 6, 6, generator=generator), torch.randn(count, 3, generator=generator)


def sentences(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(11, (count, 5), generator=generator), torch.randn(count, 5, 11, generator=generator)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "conv net": (ConvNet, images),
    "transformer": (Transformer, sentences),
}


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled code is kept by the class's forward, which tests share. What is tested here are compiled passes."""
    monkeypatch.setattr(CompiledEngine, "looks_first", False)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: nn.Module, backend: "str | Callable[..., object]" = "aot_eager") -> Callable[[Tensor], Tensor]:
    """A graph break would be an error."""
    return torch.compile(model, fullgraph=True, backend=backend)


def backward(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> None:
    inputs, targets = batch
    mean_loss(model(inputs), targets).backward()


def by_hooks(model: nn.Module, *batches: tuple[Tensor, Tensor], **settings: object) -> NormMeter:
    """An eager meter after the same passes."""
    with NormMeter(model, **settings) as meter:
        for batch in batches:
            backward(model, batch)
    return meter


def assert_same(meter: NormMeter, expected: NormMeter, rel: float = 1e-4) -> None:
    assert meter.sum_of_sq_norms() == pytest.approx(expected.sum_of_sq_norms(), rel=rel)
    assert meter.num_samples == expected.num_samples
    assert expected.num_samples > 0


# Compiled


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_model_counts_like_an_eager_one(case: str):
    make, batch = CASES[case]
    model, plain = make(), make()
    meter = NormMeter(model, compiled=True)
    run = compiled(model, BACKEND)
    with meter:
        backward(run, batch(6))
        backward(run, batch(6))
    assert_same(meter, by_hooks(plain, batch(6), batch(6)))
    assert meter.per_sample() is None
    assert meter.standard_error() == 0
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_compiled_convolution_of_few_positions_takes_their_products(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 24, 3, stride=1, padding=(1, 0)), nn.Flatten(), nn.Linear(24 * 4 * 2, 3))
    batch = torch.randn(6, 16, 4, 4), torch.randn(6, 3)
    expected = by_hooks(copy.deepcopy(model), batch)
    monkeypatch.setattr(Patches, "_by_patches", None)
    with NormMeter(model, compiled=True) as meter:
        backward(compiled(model), batch)
    assert_same(meter, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "sketch"])
@pytest.mark.parametrize(("make", "batch"), [*CASES.values(), (by_running_statistics, images)])
def test_no_gradient_is_copied_to_learn_its_strides(make, batch, mode: str, monkeypatch: pytest.MonkeyPatch):
    """The compiler does that to all that go into a backward function which asks for one's."""
    monkeypatch.setattr(
        triton, "applies", lambda *both: not all(map(triton._is_within_reach, both))
    )  # asked as on a GPU
    functions: list[str] = []

    def seen(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        functions.extend(part.code for part in graph.modules() if isinstance(part, torch.fx.GraphModule))
        return graph

    model = make()
    with NormMeter(model, mode=mode, compiled=True) as meter, torch.autocast("cpu", torch.bfloat16):
        backward(compiled(model, seen), batch(6))
    assert meter.num_samples == 6
    assert len(functions) > 1
    assert not [code for code in functions if "contiguous" in code]


@pytest.mark.slow
def test_attaching_and_detaching_switches_the_count_on_and_off():
    model, data = ConvNet(), images(6)
    meter = NormMeter(model, compiled=True)
    run = compiled(model)
    backward(run, data)
    assert (meter.sum_of_sq_norms(), meter.num_samples, meter.per_sample()) == (0.0, 0, None)
    for times in (1, 2):
        with meter:
            backward(run, data)
        assert meter.num_samples == 6 * times
        backward(run, data)
        assert meter.num_samples == 6 * times
    assert_same(meter, by_hooks(ConvNet(), data, data))
    assert type(model.first) is nn.Conv2d
    meter.reset()
    assert (meter.sum_of_sq_norms(), meter.num_samples) == (0.0, 0)


@pytest.mark.slow
def test_another_instance_that_was_compiled_before_does_not_hide_the_taps():
    other, model, data = ConvNet(), ConvNet(), images(6)
    run_other, run = compiled(other), compiled(model)
    backward(run_other, data)
    backward(run, data)
    meter, model_now = NormMeter(model, compiled=True), copy.deepcopy(model)
    with meter:
        backward(run_other, data)
        assert meter.num_samples == 0
        backward(run, data)
    assert_same(meter, by_hooks(model_now, data))


@pytest.mark.slow
def test_a_sketch_inside_the_graph_is_right_and_draws_new_signs():
    model, data = ConvNet(), images(6)
    meter = NormMeter(model, compiled=True, mode="sketch")
    run, seen = compiled(model, BACKEND), set()
    with meter:
        for _ in range(20):
            before = meter.sum_of_sq_norms()
            backward(run, data)
            seen.add(meter.sum_of_sq_norms() - before)
    exact = by_hooks(ConvNet(), *[data] * 20).sum_of_sq_norms()
    assert len(seen) == 20
    assert max(seen) > 1.001 * min(seen)
    assert 0 < meter.standard_error() < 0.2 * exact
    assert abs(meter.sum_of_sq_norms() - exact) < 5 * meter.standard_error()
    assert meter.per_sample() is None


@pytest.mark.slow
def test_a_compiled_diversity_is_the_eager_one():
    """With batches of several sizes, read on the way and gone on with from a state."""
    model, plain = ConvNet(), ConvNet()
    meter = DiversityMeter(model, compiled=True)
    run = compiled(model)
    with meter, DiversityMeter(plain) as expected:
        for sizes in ((6, 4, 4), (3, 6)):
            for size in sizes:
                backward(run, images(size))
                backward(plain, images(size))
            assert_same_sums(meter.diversity(), expected.diversity(), rel=1e-4)
            meter.load_state_dict(meter.state_dict())


@pytest.mark.slow
def test_autocast_inside_the_graph():
    model, (inputs, targets) = Transformer(), sentences(6)
    meter = NormMeter(model, compiled=True)
    run = compiled(model)
    with meter:
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_loss(run(inputs), targets)
        loss.backward()
    assert_same(meter, by_hooks(Transformer(), (inputs, targets)), rel=3e-2)


# What the taps themselves must do; they are the same without a compiler


@pytest.mark.parametrize(("loss_reduction", "loss_fn"), [("mean", mean_loss), ("sum", sum_loss)])
def test_taps_know_the_losss_reduction_and_scale(loss_reduction: str, loss_fn):
    model, (inputs, targets) = ConvNet(), images(6)

    class Scaler:
        def get_scale(self) -> float:
            return 256.0

    meter = DiversityMeter(model, compiled=True, loss_reduction=loss_reduction, grad_scaler=Scaler())
    with meter:
        (loss_fn(model(inputs), targets) * 256.0).backward()
        measured = meter.diversity()
    expected = by_hooks(ConvNet(), (inputs, targets))
    assert measured.sum_of_sq_norms == pytest.approx(expected.sum_of_sq_norms(), rel=1e-4)
    assert measured.num_samples == 6


def test_forward_passes_alone_do_not_count():
    model = ConvNet().eval()
    with NormMeter(model, compiled=True) as meter:
        model(images(6)[0])
        with torch.no_grad():
            model(images(6)[0])
        backward(model, images(4))
    assert_same(meter, by_hooks(ConvNet().eval(), images(4)))


def test_tied_weights_are_refused():
    model = Transformer()
    model.head.weight = model.tokens.weight
    with pytest.raises(CoverageError, match="layers tokens, head share parameters"):
        NormMeter(model, compiled=True)


def test_a_model_with_taps_can_be_measured_by_others():
    model, data = mlp()[0], samples(6)  # a single layer
    targets = torch.zeros(6, 5, dtype=torch.float64)
    expected = per_sample.diversity(model, mean_loss, [(data[0], targets)])
    with NormMeter(model, compiled=True) as meter:
        measured = gradient_diversity(model, mean_loss, [(data[0], targets)])
        assert meter.num_samples == 0
    assert_same_sums(measured, expected)


def test_a_second_compiled_meter_at_the_same_time_is_refused():
    model, data = ConvNet(), images(6)
    first, second = (NormMeter(model, compiled=True) for _ in range(2))
    with first:
        with pytest.raises(UsageError, match="another compiled meter is attached"):
            second.attach()
        backward(model, data)
    with second:
        backward(model, data)
    assert first.num_samples == second.num_samples == 6
    assert type(model.first) is nn.Conv2d


@pytest.mark.slow
@torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True)
def test_switching_is_noticed_where_guards_look_at_attributes_only():
    # torch up to 2.12 does so by default, and then a class that changes goes unnoticed.
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 3))
    inputs, targets = images(6)
    meter = NormMeter(model, compiled=True)
    run = torch.compile(lambda model, x: model(x), backend="aot_eager", dynamic=False)
    for count in (0, 6, 12):
        assert meter.num_samples == count
        for _ in range(4):
            mean_loss(run(model, inputs), targets).backward()
        with meter:
            mean_loss(run(model, inputs), targets).backward()


@pytest.mark.parametrize("compiled", [torch.compile, lambda model: model.compile() or model], ids=["wrap", "in-place"])
def test_a_meter_that_is_not_made_for_a_compiled_model_warns(compiled):
    model = compiled(mlp())
    with pytest.warns(UserWarning, match=r"under torch.compile and this meter is not.*compiled=True"):
        NormMeter(model)
    NormMeter(model, compiled=True)


def test_the_exact_diversity_of_a_compiled_model_is_that_of_the_model():
    model, rows = mlp(), [samples(6)]
    compiled = torch.compile(model, backend="aot_eager")
    mean_loss(compiled(rows[0][0]), rows[0][1]).backward()  # its code is made before any hook
    assert gradient_diversity(compiled, mean_loss, rows) == gradient_diversity(model, mean_loss, rows)


# Normalisation layers that count by themselves, against the layers and rules they stand in for


NORMALIZATIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
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


def layers_of(case: str, frozen: str | None) -> tuple[nn.Module, nn.Module]:
    """The same layer twice."""
    pair = (NORMALIZATIONS[case][0]().double(), NORMALIZATIONS[case][0]().double())
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
@pytest.mark.parametrize("case", NORMALIZATIONS)
def test_a_tapped_layer_is_the_layer_itself(case: str, frozen: str | None):
    if frozen and "without" in case:
        pytest.skip("has but one parameter")
    torch.manual_seed(0)
    plain, tapped = layers_of(case, frozen)
    x = torch.randn(NORMALIZATIONS[case][1], dtype=torch.float64)
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
    build, shape = NORMALIZATIONS[case]
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


# The seeds that compiled passes hand to the GPU kernels which draw random signs


def make_meter(mode: str) -> tuple[nn.Module, NormMeter]:
    model = mlp()
    return model, NormMeter(model, compiled=True, mode=mode)


def test_each_pass_has_other_seeds_and_a_pass_that_waits_is_not_disturbed():
    model, meter = make_meter("sketch")
    x, y = samples(4)
    seeds = meter._engine.seeds
    assert len(seeds) == len(meter._layers)
    seen = [seeds.clone()]
    with meter:
        losses = [mean_loss(model(x), y) for _ in range(2)]
        for loss in losses:
            loss.backward()  # torch refuses if what it saved for this pass was changed in sight
            seen.append(seeds.clone())
    assert meter._engine.seeds is seeds  # a recorded pass reads them at this place
    assert len({tuple(each.tolist()) for each in seen}) == 3
    assert len(set(seen[0].tolist())) == len(seen[0])
