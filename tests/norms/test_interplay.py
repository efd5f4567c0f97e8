"""Measuring beside other features of torch, and what is left of it in memory."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from divebatch import NormMeter
from divebatch.norms import DiversityMeter, sketch
from reference.per_sample import Calls, assert_same_sums, diversity_of, gradients, mean_loss, mlp, samples, sq_norms

pytestmark = [  # what the compiler itself warns of
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
]


Problem = tuple[nn.Module, Tensor, Tensor]


def on_matrices() -> Problem:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(6, 16), torch.randn(6, 8)


def on_sequences() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 8))
    return model, torch.randn(6, 5, 16), torch.randn(6, 5, 8)


def on_images(inplace: bool = True) -> Problem:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.ReLU(inplace)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 16), nn.ReLU(inplace), nn.Linear(16, 4))
    return model, torch.randn(6, 3, 8, 8), torch.randn(6, 4)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "matrices": on_matrices,
    "sequences": on_sequences,
    "images": on_images,
}


def in_double(problem: Problem) -> Problem:
    model, inputs, targets = problem
    return model.double(), inputs.double(), targets.double()


def assert_counted(meter: NormMeter, expected: Tensor, rtol: float = 1e-10) -> None:
    measured = meter.per_sample()
    assert measured is not None
    torch.testing.assert_close(measured.double(), expected.double(), rtol=rtol, atol=0)
    assert meter.sum_of_sq_norms() == pytest.approx(float(expected.sum()), rel=rtol)
    assert meter.num_samples == len(expected)


def assert_diversity(meter: DiversityMeter, rows: Tensor, rel: float = 1e-10) -> None:
    assert_same_sums(meter.diversity(), diversity_of(rows), rel)


# Precision


@pytest.mark.parametrize("case", PROBLEMS)
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_is_close_to_single_precision(case: str, backward_inside: bool):
    model, inputs, targets = PROBLEMS[case]()
    expected = sq_norms(model, mean_loss, inputs, targets)
    with NormMeter(model) as meter:
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_loss(model(inputs), targets)
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
    assert_counted(meter, expected, rtol=3e-2)


@pytest.mark.parametrize("backward_inside", [False, True])
def test_a_sketch_under_autocast_stays_near(backward_inside: bool):
    model, inputs, targets = on_sequences()
    expected = float(sq_norms(model, mean_loss, inputs, targets).sum())
    with NormMeter(model, mode="sketch") as meter:
        for _ in range(50):
            with torch.autocast("cpu", torch.bfloat16):
                loss = mean_loss(model(inputs), targets)
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
    assert meter.sum_of_sq_norms() / 50 == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_model_in_bfloat16_is_close_to_single_precision(case: str):
    model, inputs, targets = PROBLEMS[case]()
    model.bfloat16().float()
    inputs, targets = inputs.bfloat16(), targets.bfloat16()
    expected = sq_norms(model, mean_loss, inputs.float(), targets.float())
    model.bfloat16()
    with NormMeter(model) as meter:
        mean_loss(model(inputs), targets).backward()
    assert meter.sum_of_sq_norms() == pytest.approx(float(expected.sum()), rel=5e-2)


# Loss scaling


class ByMethod:
    """All that a foreign scaler is asked for."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


class ByTensor:
    """Like torch's: reading the tensor needs no synchronisation, the method would."""

    def __init__(self, scale: float) -> None:
        self._scale = torch.tensor(scale)

    def get_scale(self) -> float:
        raise AssertionError("not needed")


@pytest.mark.parametrize("kind", [ByMethod, ByTensor])
@pytest.mark.parametrize("scale", [65536.0, 0.125, 1000.0])
def test_a_scaled_loss_gives_the_unscaled_numbers(kind: type, scale: float):
    model, (inputs, targets) = mlp(), samples(6)
    rows = gradients(model, mean_loss, inputs, targets)
    with DiversityMeter(model, grad_scaler=kind(scale)) as meter:
        (mean_loss(model(inputs), targets) * scale).backward()
        assert_counted(meter.norms, rows.square().sum(1), rtol=1e-6)
        assert_diversity(meter, rows, rel=1e-6)


def test_torchs_own_scaler_as_it_grows():
    model, (inputs, targets) = mlp(dtype=torch.float32), samples(6, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    expected = []
    with NormMeter(model, grad_scaler=scaler) as meter:
        for _ in range(3):
            expected.append(sum_without(meter, model, inputs, targets))
            optimizer.zero_grad()
            scaler.scale(mean_loss(model(inputs), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2048.0
    assert meter.sum_of_sq_norms() == pytest.approx(sum(expected), rel=1e-5)


def sum_without(meter: NormMeter, model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """The loop's passes are not the meter's."""
    meter._engine.paused = True
    total = float(sq_norms(model, mean_loss, inputs, targets).sum())
    meter._engine.paused = False
    return total


def test_a_disabled_scaler_changes_nothing():
    model, (inputs, targets) = mlp(), samples(6)
    with NormMeter(model, grad_scaler=torch.amp.GradScaler("cpu", enabled=False)) as meter:
        mean_loss(model(inputs), targets).backward()
    assert_counted(meter, sq_norms(model, mean_loss, inputs, targets))


@pytest.mark.parametrize("scale", [1.0, 4096.0])
def test_the_standard_error_is_unscaled(scale: float):
    model, inputs, targets = in_double(on_sequences())
    sketch._generators.clear()
    with NormMeter(model, mode="sketch", grad_scaler=ByTensor(scale)) as meter:
        (mean_loss(model(inputs), targets) * scale).backward()
    sketch._generators.clear()
    with NormMeter(model, mode="sketch") as plain:
        mean_loss(model(inputs), targets).backward()
    assert meter.standard_error() == pytest.approx(plain.standard_error(), rel=1e-6)


def test_passes_that_overflow_under_a_scaler_are_in_no_sum():
    model, inputs, targets = in_double(on_sequences())
    rows = gradients(model, mean_loss, inputs, targets)
    with DiversityMeter(model, grad_scaler=ByTensor(8.0)) as meter:
        for factor in (1.0, float("inf"), 1.0):
            (mean_loss(model(inputs), targets) * 8.0 * factor).backward()
        assert_diversity(meter, torch.cat([rows] * 2))


# Layouts and in-place layers


@pytest.mark.parametrize("mode", ["exact", "sketch"])
@pytest.mark.parametrize("model_too", [False, True])
def test_channels_last(mode: str, model_too: bool):
    model, inputs, targets = in_double(on_images())
    expected = sq_norms(model, mean_loss, inputs, targets)
    model = model.to(memory_format=torch.channels_last) if model_too else model
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    with NormMeter(model, mode=mode) as meter:
        for _ in range(1 if mode == "exact" else 200):
            mean_loss(model(inputs), targets).backward()
    if mode == "exact":
        assert_counted(meter, expected)
    else:
        assert abs(meter.sum_of_sq_norms() - 200 * float(expected.sum())) < 4 * meter.standard_error()


# Checkpointing


class Blocks(nn.Module):
    """Convolutional blocks, each under a checkpoint, between layers that are not; or blocks alone."""

    def __init__(self, use_reentrant: bool | None, *, ends: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant, self.ends = use_reentrant, ends
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
        blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(True)) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks).double()
        for end in (self.first, self.last):
            end.double().requires_grad_(ends)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if self.ends else x
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x) if self.ends else x


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("batches", [1, 2])
def test_checkpointed_blocks_count_like_plain_ones(use_reentrant: bool | None, ends: bool, batches: int):
    model, plain = Blocks(use_reentrant, ends=ends), Blocks(None, ends=ends)
    inputs = torch.randn(5 * batches, 3 if ends else 4, 4, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randn_like(plain(inputs))
    rows = gradients(plain, mean_loss, inputs, targets)
    with DiversityMeter(model) as meter:
        for x, y in zip(inputs.split(5), targets.split(5), strict=True):
            mean_loss(model(x), y).backward()
        torch.testing.assert_close(meter.norms.per_sample(), rows[-5:].square().sum(1), rtol=1e-10, atol=0)
        assert_diversity(meter, rows)


# Losses over tokens


@pytest.mark.parametrize("ignore", [False, True])
def test_a_mean_over_tokens_gives_each_sequence_the_weight_it_has(ignore: bool):
    torch.manual_seed(0)
    num_samples, length, vocabulary = 6, 5, 9
    layers = [nn.Embedding(vocabulary, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, vocabulary)]
    model = nn.Sequential(*layers).double()
    tokens = torch.randint(vocabulary, (num_samples, length))
    targets = torch.randint(vocabulary, (num_samples, length))
    if ignore:
        targets[0, 2:], targets[3, 1:], targets[5] = -100, -100, -100
    num_counted = int((targets != -100).sum())

    def own_loss(outputs: Tensor, target: Tensor) -> Tensor:
        total = cross_entropy(outputs.flatten(0, 1), target.flatten(), reduction="sum")
        return total * num_samples / num_counted

    rows = gradients(model, own_loss, tokens, targets)
    with DiversityMeter(model) as meter:
        cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        measured = meter.norms.per_sample()
        assert_diversity(meter, rows)
    torch.testing.assert_close(measured, rows.square().sum(1), rtol=1e-10, atol=1e-14)
    if ignore:
        assert measured[5] == 0


# What a meter leaves behind: nothing that keeps a model alive, and code that the next model can use


MEASURES: dict[str, Callable[[nn.Module], NormMeter | DiversityMeter]] = {
    "by hooks": lambda model: DiversityMeter(model),
    "compiled": lambda model: DiversityMeter(model, compiled=True),
    "compiled sketch": lambda model: DiversityMeter(model, compiled=True, mode="sketch"),
    "norms alone": lambda model: NormMeter(model),
}


@torch.compile(backend="aot_eager")
def compiled_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mean_loss(model(x), y)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def measured_model(case: str, *, attached_still: bool) -> "weakref.ref[nn.Module]":
    model = mlp()
    meter = MEASURES[case](model)
    loss = compiled_loss if case.startswith("compiled") else lambda model, x, y: mean_loss(model(x), y)
    meter.attach()
    for _ in range(3):
        loss(model, *samples(4)).backward()
    if not attached_still:
        meter.detach()
    return weakref.ref(model)


def of_images(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), layer, nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def of_sentences(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 3))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "GroupNorm": (lambda: of_images(nn.GroupNorm(2, 4)), (4, 2, 4, 4)),
    "BatchNorm": (lambda: of_images(nn.BatchNorm2d(4)), (4, 2, 4, 4)),
    "InstanceNorm": (lambda: of_images(nn.InstanceNorm2d(4, affine=True)), (4, 2, 4, 4)),
    "LayerNorm": (lambda: of_sentences(nn.LayerNorm(8)), (4, 5, 8)),
    "RMSNorm": (lambda: of_sentences(nn.RMSNorm(8)), (4, 5, 8)),
    "transformer layer": (
        lambda: of_sentences(nn.TransformerEncoderLayer(8, 2, 8, dropout=0, batch_first=True)),
        (4, 5, 8),
    ),
    "LSTM": (lambda: of_sentences(Calls(nn.LSTM(8, 8, batch_first=True), lambda layer, x: layer(x)[0])), (4, 5, 8)),
}


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("mode", ["exact", "sketch"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_measured_pass_leaves_nothing_of_itself(layer: str, mode: str):
    """A hook that holds a tensor which knows its node is a cycle that nobody breaks: each pass would stay for good."""
    make, shape = LAYERS[layer]
    model, counts = make(), []
    with NormMeter(model, mode=mode):
        for _ in range(4):
            model(torch.randn(shape)).square().mean().backward()
            model.zero_grad()
            counts.append(num_tensors())
    assert counts[-1] == counts[-2] == counts[-3]


@pytest.mark.parametrize("attached_still", [False, True])
@pytest.mark.parametrize("case", MEASURES)
def test_a_measured_model_is_freed_with_its_meter(case: str, attached_still: bool):
    model = measured_model(case, attached_still=attached_still)
    gc.collect()
    assert model() is None


def test_a_second_model_takes_the_code_that_was_compiled_for_the_first():
    made = []
    for _ in range(2):
        measured_model("compiled", attached_still=False)
        made.append(counters["stats"]["unique_graphs"])
    assert made == [1, 1]
