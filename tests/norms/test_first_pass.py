"""A compiled meter's first pass runs uncompiled and refuses what an eager meter refuses."""

import gc
import math
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from divebatch import NormMeter
from divebatch.errors import DivebatchError
from divebatch.norms import DiversityMeter
from reference.per_sample import assert_same_sums, diversity_of, gradients, mean_loss, mlp, samples, sq_norms

# What the compiler itself warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")

INPUTS, TARGETS = samples(6)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counting:
    """A compiler that says how often it was asked."""

    def __init__(self) -> None:
        self.graphs, self.calls = 0, 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        self.graphs += 1

        def run(*args: Tensor) -> object:
            self.calls += 1
            return graph(*args)

        return run


def backward(model: Callable[[Tensor], Tensor], x: Tensor = INPUTS, y: Tensor = TARGETS) -> None:
    mean_loss(model(x), y).backward()


@pytest.mark.parametrize("mode", ["exact", "sketch"])
def test_nothing_is_compiled_for_it_and_all_passes_count(mode: str):
    model, backend = mlp(), Counting()
    run, meter = torch.compile(model, backend=backend, dynamic=False), DiversityMeter(model, compiled=True, mode=mode)
    rows = gradients(model, mean_loss, INPUTS, TARGETS)
    for epoch in range(3):
        with meter:
            for _ in range(3):
                backward(run)
            assert_same_sums(meter.diversity(), diversity_of(torch.cat([rows] * 3)))
        assert backend.graphs == 1
        assert backend.calls == 2 + 3 * epoch


def test_a_pass_may_be_recorded_once_the_first_is_over():
    model = mlp()
    with DiversityMeter(model, compiled=True) as meter:
        assert meter.token is None
        backward(model)
        token = meter.token
        assert token is not None
        backward(model)
        assert meter.token is token


def test_forward_passes_that_wait_together_all_count():
    model = mlp()
    with DiversityMeter(model, compiled=True) as meter:
        losses = [mean_loss(model(INPUTS[part]), TARGETS[part]) for part in (slice(0, 2), slice(2, 6))]
        for loss in losses:
            loss.backward()
        backward(model)
        rows = gradients(model, mean_loss, INPUTS, TARGETS)
        assert_same_sums(meter.diversity(), diversity_of(torch.cat([rows] * 2)))


def test_a_first_pass_that_is_not_finite_is_followed_by_another():
    model = mlp()
    with NormMeter(model, compiled=True) as meter:
        (mean_loss(model(INPUTS), TARGETS) * math.inf).backward()
        assert not meter._engine.is_checked
        backward(model)
        assert meter._engine.is_checked


@pytest.mark.parametrize("end", ["detached", "dropped"])
def test_compiled_code_runs_again_when_the_meter_goes(end: str):
    model, backend = mlp(), Counting()
    run, meter = torch.compile(model, backend=backend), NormMeter(model, compiled=True)
    meter.attach()
    run(INPUTS)
    assert backend.calls == 0
    if end == "detached":
        meter.detach()
    else:
        gone = weakref.ref(meter)
        del meter, model, run
        gc.collect()
        assert gone() is None
        torch.compiler.reset()
        run = torch.compile(mlp(), backend=backend)
    run(INPUTS)
    assert backend.calls == 1


# What eager meters refuse


class TwiceAndNever(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.unused = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x)))


class NormByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x) + self.norm.weight.square())


REFUSED = {
    "called twice while another is unused": (TwiceAndNever, "layer 'layer' was called several times"),
    "the weight of a normalisation used by a function": (NormByFunction, "'norm.weight' received"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_eager_meter_refuses_is_refused(case: str):
    make, told = REFUSED[case]
    model = make().double()
    run = torch.compile(model, backend="eager")
    with NormMeter(model, compiled=True), pytest.raises(DivebatchError, match=told):
        backward(run)


def test_a_pass_with_everything_frozen_does_not_count():
    model = mlp()
    run = torch.compile(model, backend="aot_eager")
    with NormMeter(model, compiled=True) as meter:
        for _ in range(2):
            backward(run)
            model.requires_grad_(False)
            backward(run, INPUTS.clone().requires_grad_())
            model.requires_grad_(True)
    assert meter.num_samples == 12
    assert meter.sum_of_sq_norms() == pytest.approx(2 * float(sq_norms(model, mean_loss, INPUTS, TARGETS).sum()))


def test_inputs_alone_asked_for_do_not_count():
    model = mlp()
    run = torch.compile(model, backend="aot_eager")
    with NormMeter(model, compiled=True) as meter:
        for _ in range(2):
            backward(run)
            x = INPUTS.clone().requires_grad_()
            torch.autograd.grad(mean_loss(run(x), TARGETS), x)
    assert meter.num_samples == 12
