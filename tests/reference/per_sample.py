"""Slow obvious twins: one sample at a time, every gradient kept. And the small problem they are compared on."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from divebatch import Diversity, micro_batches
from divebatch.norms.sharded import is_sharded

LossFn = Callable[[Any, Any], Tensor]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradients(model: nn.Module, loss_fn: LossFn, inputs: Tensor, targets: Tensor) -> Tensor:
    """(B, P) in float64: row i is the gradient of sample i's own loss over all trainable parameters."""
    rows = []
    for i in range(len(inputs)):
        loss = loss_fn(model(inputs[i : i + 1]), targets[i : i + 1])
        parts = torch.autograd.grad(loss, trainable(model), allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([part.flatten().double() for part in parts]))
    return torch.stack(rows)


def sq_norms(model: nn.Module, loss_fn: LossFn, inputs: Tensor, targets: Tensor) -> Tensor:
    return gradients(model, loss_fn, inputs, targets).square().sum(1)


def diversity_of(rows: Tensor) -> Diversity:
    return Diversity(float(rows.square().sum()), float(rows.sum(0).square().sum()), len(rows))


def pair_of(chunks: list[Tensor]) -> tuple[float, float]:
    """(tr(Sigma), ||G||^2) by the analysis of variance between chunks, each a matrix of per-sample gradients."""
    means, sizes = torch.stack([chunk.mean(0) for chunk in chunks]), torch.tensor([len(chunk) for chunk in chunks])
    mean = torch.cat(chunks).mean(0)
    between = (sizes * (means - mean).square().sum(1)).sum() / (len(chunks) - 1)
    return float(between), float(mean.square().sum() - between / sizes.sum())


def diversity(model: nn.Module, loss_fn: LossFn, batches: Iterable[Any]) -> Diversity:
    """At fixed weights."""
    return diversity_of(torch.cat([gradients(model, loss_fn, x, y) for x, y in batches]))


def trajectory(model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, batches: Iterable[Any]) -> Diversity:
    """The paper's Definition 2: train for one epoch and keep each sample's gradient at the weights it met."""
    kept = []
    for inputs, targets in batches:
        kept.append(gradients(model, loss_fn, inputs, targets))
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
    return diversity_of(torch.cat(kept))


def assert_same_sums(measured: Diversity, expected: Diversity, rel: float = 1e-10) -> None:
    assert measured.sum_of_sq_norms == pytest.approx(expected.sum_of_sq_norms, rel=rel)
    assert measured.sq_norm_of_sum == pytest.approx(expected.sq_norm_of_sum, rel=rel)
    assert measured.num_samples == expected.num_samples


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    *,
    parts_of: int = 1000,
    loss_fn: LossFn | None = None,
) -> None:
    """Make a step on each batch, cut into parts of so many samples."""
    for batch in batches:
        optimizer.zero_grad()
        for (x, y), weight in micro_batches(batch, parts_of):
            ((loss_fn or mean_loss)(model(x), y) * weight).backward()
        optimizer.step()


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).sum(1).mean()


def sum_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


def mlp(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).to(dtype)


class Calls(nn.Module):
    """A layer in a call of the test's own: `call(layer, x)`."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Any) -> Any:
        return self.call(self.layer, x)


def twice(layer: Any, x: Tensor) -> Tensor:
    """Call a layer two times, for `Calls`."""
    return layer(layer(x).tanh())


def samples(count: int, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and targets that fit `mlp`."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=dtype)
    return inputs, torch.randn(count, 3, generator=generator, dtype=dtype)


def dataset(count: int, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> TensorDataset:
    return TensorDataset(*samples(count, seed=seed, dtype=dtype))


def whole(tensor: Any) -> Tensor:
    """Return a tensor with all its shards: a collective if it has any."""
    return (tensor.full_tensor() if is_sharded(tensor) else tensor).detach()


def num_hooks(model: nn.Module) -> int:
    """Hooks on the model's modules and parameters."""
    modules = [m._forward_hooks | m._forward_pre_hooks | m._backward_hooks for m in model.modules()]
    parameters = [parameter._backward_hooks or {} for parameter in model.parameters()]
    return sum(map(len, modules)) + sum(map(len, parameters))
