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
