"""Weights on what enters a model backwards."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from divebatch.errors import UsageError
from divebatch.norms import NormMeter, gradient_diversity
from divebatch.norms.rank_weighting import weigh_gradients
from divebatch.ranks import RankShard
from reference.per_sample import mean_loss, mlp, samples

WEIGHT = 0.75
SHARD = RankShard(num_samples=8, mine=3, num_ranks=2)


def gradient(model: nn.Module, *, times: int = 1) -> Tensor:
    x, y = samples(5)
    model.zero_grad()
    for _ in range(times):
        mean_loss(model(x), y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_gradients_are_multiplied_until_it_is_undone():
    model, plain = mlp(), gradient(mlp())
    undo = weigh_gradients(model, lambda: WEIGHT)
    torch.testing.assert_close(gradient(model), WEIGHT * plain)
    undo()
    assert torch.equal(gradient(model), plain)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_weight_of_one_leaves_the_output_alone():
    model, (x, _) = mlp(), samples(5)
    weigh_gradients(model, lambda: 1.0)
    assert model(x).grad_fn.name() == mlp()(x).grad_fn.name()


class Outputs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = mlp(), kind

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        return {"tuple": (y, None), "dict": {"a": [y], "b": 3}}[self.kind]


@pytest.mark.parametrize(("kind", "get"), [("tuple", lambda out: out[0]), ("dict", lambda out: out["a"][0])])
def test_tensors_are_found_in_nested_outputs(kind: str, get: Any):
    model, (x, y) = Outputs(kind), samples(5)
    weigh_gradients(model, lambda: WEIGHT)
    mean_loss(get(model(x)), y).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found, WEIGHT * gradient(mlp()))


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return type("Result", (), {"loss": x})()


def test_an_output_that_shows_no_tensor_is_an_error_with_the_way_out():
    model = Opaque()
    weigh_gradients(model, lambda: WEIGHT)
    with pytest.raises(UsageError, match=r"a Result, shows no tensor.*loss_reduction='weighted'"):
        model(torch.ones(2))
    with torch.no_grad():
        model(torch.ones(2))


class CallsItself(nn.Module):
    """As a LightningModule does, whose training step is its outer forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.inner(x) if y is None else mean_loss(self(x), y)


def test_only_the_outermost_of_nested_calls_counts():
    model, (x, y) = CallsItself(), samples(5)
    weigh_gradients(model, lambda: WEIGHT)
    for _ in range(2):
        model.zero_grad()
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 99).double(), y)  # a failed pass must not be taken for one under way
        model(x, y).backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(found, WEIGHT * gradient(mlp()))


def test_outputs_may_be_changed_in_place():
    model, (x, y) = mlp(), samples(5)
    weigh_gradients(model, lambda: WEIGHT)
    mean_loss(model(x).mul_(2.0), y).backward()


def test_a_meter_that_knows_the_weight_counts_as_without():
    model, (x, y) = mlp(), samples(5)
    with NormMeter(mlp_plain := mlp()) as plain:
        mean_loss(mlp_plain(x), y).backward()
    weigh_gradients(model, lambda: WEIGHT)
    with NormMeter(model, rank_shard=lambda: SHARD) as meter:
        mean_loss(model(x), y).backward()
    assert meter.sum_of_sq_norms() == pytest.approx(plain.sum_of_sq_norms(), rel=1e-12)
    assert meter.num_samples == 5


def test_a_measurement_at_fixed_weights_is_no_training():
    model, data = mlp(), samples(5)
    weigh_gradients(model, lambda: WEIGHT)
    assert gradient_diversity(model, mean_loss, [data]) == gradient_diversity(mlp(), mean_loss, [data])


# Gradients with respect to inputs


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return outputs.sum() + slope.square().sum()


def test_gradients_of_inputs_are_not_weighed():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.ones(4, 2, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    weights = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    undo = weigh_gradients(model, lambda: 3.0)
    assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], plain)
    model(x).sum().backward()
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(parameter.grad, 3 * weight)
    undo()


def test_a_loss_on_gradients_of_inputs_is_an_error_where_ranks_weigh_unequally():
    model = nn.Linear(2, 1)
    undo = weigh_gradients(model, lambda: 3.0)
    with pytest.raises(UsageError, match=r"must count 3-fold") as error:
        penalised(model, torch.ones(4, 2, requires_grad=True))
    assert "loss_reduction='weighted'" in str(error.value)
    undo()


def test_a_loss_on_gradients_of_inputs_is_a_warning_before():
    model = nn.Linear(2, 1)
    undo = weigh_gradients(model, lambda: 1.0)
    with pytest.warns(UserWarning, match="The first such batch will be an error") as told:
        penalised(model, torch.ones(4, 2, requires_grad=True)).backward()
    assert told[0].filename == __file__
    penalised(model, torch.ones(4, 2, requires_grad=True)).backward()  # once
    undo()


def test_inputs_that_another_model_made_are_weighed():
    encoder, model = nn.Linear(2, 2), nn.Linear(2, 1)
    undo = weigh_gradients(model, lambda: 3.0)
    model.requires_grad_(False)
    model(encoder(torch.ones(4, 2))).sum().backward()
    weighed = encoder.weight.grad.clone()
    undo()
    encoder.weight.grad = None
    model(encoder(torch.ones(4, 2))).sum().backward()
    torch.testing.assert_close(weighed, 3 * encoder.weight.grad)
