"""Gradients that no rule sees are an error in the first measured pass; what looks alike and is right counts."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from divebatch import NormMeter
from divebatch.errors import CoverageError
from divebatch.norms import DiversityMeter
from reference.per_sample import Calls, gradients, mean_loss, mlp, num_hooks, samples, sq_norms

INPUTS, TARGETS = samples(6)
TOKENS = torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(0))

Step = Callable[[nn.Module], Tensor]


class TiedByFunction(nn.Module):
    """The usual language model's head: the embedding's weight again."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.share = nn.Embedding(11, 8), nn.Linear(8, 8), share

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.embedding(tokens)).tanh()
        weight = self.embedding.weight
        return linear(hidden, self.share * weight + (1 - self.share) * weight.detach()).mean(1)


def tied_loss(model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    return mean_loss(model(TOKENS), torch.ones(6, 11, dtype=dtype))


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden) + linear(hidden, self.last.weight.square())


class ByForward(Beside):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first.forward(x))


def plain_loss(model: nn.Module) -> Tensor:
    return mean_loss(model(INPUTS), TARGETS)


def with_l2(model: nn.Module) -> Tensor:
    return plain_loss(model) + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())


def with_gradient_penalty(model: nn.Module) -> Tensor:
    x = INPUTS.clone().requires_grad_()
    loss = mean_loss(model(x).tanh(), TARGETS)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def hooked() -> nn.Module:
    model = mlp()
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return model


MISSED: dict[str, tuple[Callable[[], nn.Module], Step, str]] = {
    "a head tied by a function": (lambda: TiedByFunction().double(), tied_loss, r"'embedding\.weight' received"),
    "a weight used beside its layer": (Beside, plain_loss, r"'last\.weight' received: they differ by 0\.\d+ of"),
    "a direct call of forward": (ByForward, plain_loss, r"\['first\.bias', 'first\.weight'\] .* not called"),
    "a penalty on weights": (mlp, with_l2, "penalty on weights"),
    "a penalty on gradients": (lambda: nn.Sequential(mlp(), nn.Tanh()), with_gradient_penalty, "or on gradients"),
    "a hook that changes gradients": (hooked, plain_loss, r"'2\.weight' received"),
}


@pytest.mark.parametrize("settings", [{}, {"mode": "sketch"}, {"fallback": "vmap"}], ids=str)
@pytest.mark.parametrize("meter", [NormMeter, DiversityMeter])
@pytest.mark.parametrize("case", MISSED)
def test_gradients_that_no_rule_sees_are_an_error(case: str, meter: type, settings: dict):
    make, loss_of, told = MISSED[case]
    model = make()
    with meter(model, **settings), pytest.raises(CoverageError, match=told) as error:
        loss_of(model).backward()
    assert "pass estimator='moments' or 'split'" in str(error.value)
    assert num_hooks(model) == num_hooks(make())


def test_every_epoch_looks_again():
    model = mlp()
    meter = NormMeter(model)
    with meter:
        plain_loss(model).backward()
    with meter, pytest.raises(CoverageError, match="do not add up"):
        with_l2(model).backward()


def test_gradients_of_gradients_are_noticed_in_any_pass():
    model = nn.Sequential(mlp(), nn.Tanh())
    with NormMeter(model):
        plain_loss(model).backward()
        with pytest.raises(CoverageError, match="do not add up"):
            with_gradient_penalty(model).backward()


def test_a_pass_that_is_not_finite_says_nothing_and_the_next_one_does():
    model = mlp()
    with NormMeter(model):
        (plain_loss(model) * math.inf).backward()
        with pytest.raises(CoverageError, match="do not add up"):
            with_l2(model).backward()


@pytest.mark.parametrize(("dtype", "found", "overlooked"), [(torch.float32, 0.02, 1e-5), (torch.bfloat16, 0.5, 5e-3)])
def test_the_tolerance_goes_by_the_type(dtype: torch.dtype, found: float, overlooked: float):
    """A small share of the head's gradient is taken for rounding."""
    model = TiedByFunction(found).to(dtype)
    with NormMeter(model), pytest.raises(CoverageError, match="do not add up"):
        tied_loss(model).backward()
    model = TiedByFunction(overlooked).to(dtype)
    with NormMeter(model):
        tied_loss(model).backward()


def test_layers_that_run_in_16_bits_inside_are_given_room():
    """Under autocast a recurrent layer may take and give float32."""
    torch.manual_seed(25)
    layer, x = nn.LSTM(6, 8, num_layers=2, batch_first=True), torch.randn(8, 20, 6)
    with NormMeter(layer) as meter:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = layer(x)[0]
        outputs.float().square().mean().backward()
    assert meter.num_samples == 8


# What is right


def assert_counted(meter: NormMeter, expected: Tensor, rel: float = 1e-10) -> None:
    assert meter.sum_of_sq_norms() == pytest.approx(float(expected.sum()), rel=rel)
    assert meter.num_samples == len(expected)


def attack(model: nn.Module) -> Tensor:
    """One step against the loss, without any gradient of a parameter."""
    x = INPUTS.clone().requires_grad_()
    (slope,) = torch.autograd.grad(mean_loss(model(x), TARGETS), x)
    return INPUTS + 0.1 * slope.sign()


def attack_while_frozen(model: nn.Module) -> Tensor:
    x = INPUTS.clone().requires_grad_()
    model.requires_grad_(False)
    mean_loss(model(x), TARGETS).backward()
    model.requires_grad_(True)
    return INPUTS + 0.1 * x.grad.sign()


@pytest.mark.parametrize("meter", [NormMeter, DiversityMeter])
@pytest.mark.parametrize("make", [attack, attack_while_frozen])
@pytest.mark.parametrize("passes_before", [0, 1])
def test_a_pass_that_brings_no_parameter_a_gradient_does_not_count(meter: type, make, passes_before: int):
    model = mlp()
    with meter(model) as counting:
        for _ in range(passes_before):
            plain_loss(model).backward()
        mean_loss(model(make(model)), TARGETS).backward()
        norms = counting if meter is NormMeter else counting.norms
        expected = sq_norms(mlp(), mean_loss, attack(mlp()), TARGETS)
        if passes_before:
            expected = torch.cat([expected, sq_norms(mlp(), mean_loss, INPUTS, TARGETS)])
        assert_counted(norms, expected)


def test_an_attack_on_the_graph_that_is_differentiated_afterwards():
    model, x = mlp(), INPUTS.clone().requires_grad_()
    with NormMeter(model) as meter:
        loss = mean_loss(model(x), TARGETS)
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
    assert_counted(meter, sq_norms(model, mean_loss, INPUTS, TARGETS))


def test_gradients_asked_of_some_layers_count_for_those():
    model = mlp()
    with NormMeter(model) as meter:
        plain_loss(model).backward(inputs=list(model[0].parameters()))
    rows = gradients(model, mean_loss, INPUTS, TARGETS)
    assert_counted(meter, rows[:, : 4 * 5 + 5].square().sum(1))


def test_parameters_set_free_after_the_forward_pass_do_not_count():
    model = mlp()
    with NormMeter(model) as meter:
        model[0].weight.requires_grad_(False)
        loss = plain_loss(model)
        model[0].weight.requires_grad_(True)
        loss.backward()
    model[0].weight.requires_grad_(False)
    assert_counted(meter, sq_norms(model, mean_loss, INPUTS, TARGETS))


# In-place operations on an output that is a view


class InPlaceOnViews(nn.Module):
    """Linear with a bias on sequences, InstanceNorm and attention all return views."""

    def __init__(self, *, add: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.attention = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.last, self.add = nn.InstanceNorm1d(5, affine=True), nn.Linear(8, 3), add

    def forward(self, x: Tensor) -> Tensor:
        h = self.changed(self.first(x), 0.5)
        h = self.changed(self.attention(h, h, h)[0], h)
        h = self.changed(self.norm(h), h)
        return self.changed(self.last(h), 1.0)

    def changed(self, h: Tensor, by: Tensor | float) -> Tensor:
        if self.add:
            h += by
            return h
        return h.relu_()


@pytest.mark.parametrize("mode", ["exact", "sketch"])
@pytest.mark.parametrize("add", [False, True])
def test_outputs_that_are_views_may_be_changed_in_place(add: bool, mode: str):
    model, x = (
        InPlaceOnViews(add=add).double(),
        torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1)).double(),
    )
    expected = sq_norms(model, mean_loss, x, torch.zeros(6, 5, 3).double())
    with DiversityMeter(model, mode=mode) as meter:
        mean_loss(model(x), torch.zeros(6, 5, 3).double()).backward()
        assert_counted(meter.norms, expected, rel=1e-10 if mode == "exact" else 1.0)


# Checkpoints


def shared_by_checkpoints(use_reentrant: bool) -> nn.Module:
    torch.manual_seed(0)
    run = partial(checkpoint, use_reentrant=use_reentrant)
    shared = Calls(nn.Linear(4, 4), lambda layer, x: run(layer, run(layer, x).tanh())[:, :3])
    return nn.Sequential(nn.Linear(4, 4), shared).double()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_shared_by_checkpoints_is_exact_or_refused(use_reentrant: bool):
    model = shared_by_checkpoints(use_reentrant)
    expected = sq_norms(shared_by_checkpoints(False), mean_loss, INPUTS, TARGETS)
    with NormMeter(model) as meter:
        if use_reentrant:
            with pytest.raises(CoverageError, match=r"layer '1.layer' is used .* use_reentrant=False"):
                plain_loss(model).backward()
        else:
            plain_loss(model).backward()
            assert_counted(meter, expected)
