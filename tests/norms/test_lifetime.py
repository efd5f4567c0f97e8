"""What a meter leaves behind: nothing that keeps a model alive, and code that the next model can use."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from divebatch.norms import DiversityMeter, NormMeter
from reference.per_sample import mean_loss, mlp, samples

pytestmark = [  # what the compiler itself warns of
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
]

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


class First(nn.Module):
    """What a layer gives first, where it gives more than that."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


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
    "LSTM": (lambda: of_sentences(First(nn.LSTM(8, 8, batch_first=True))), (4, 5, 8)),
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
