"""Linear layers on inputs of any rank.

Shapes: B samples, T positions of one sample (1 for a matrix input), I inputs, O outputs.
The gradient of one sample is sum_t dy_t x_t^T; its squared norm never needs the (B, O, I) tensor of all of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from divebatch.errors import CoverageError
from divebatch.norms.registry import rule_for

CHUNK_BYTES = 64 * 2**20
"""Upper bound for temporary tensors; samples are taken in chunks that stay below it."""


def join_linear_calls(calls: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Several calls of one layer are one call with more positions."""
    xs, dys = zip(*calls, strict=True)
    return torch.cat([_positions(x) for x in xs], 1), torch.cat([_positions(dy) for dy in dys], 1)


@rule_for(nn.Linear, join=join_linear_calls)
def linear_sq_norms(layer: nn.Module, x: Tensor, dy: Tensor) -> Tensor:
    """Squared norm of each sample's gradient for the trainable ones of weight and bias."""
    if x.ndim < 2:
        raise CoverageError(f"Linear was given an input of shape {tuple(x.shape)}: the batch dimension is missing")
    if x.ndim == 2:
        return _vector_sq_norms(layer, x, dy)
    x_BTI, dy_BTO = _positions(x), _positions(dy)
    parts = []
    if layer.weight.requires_grad:
        parts.append(_weight_sq_norms(x_BTI, dy_BTO))
    if _has_trainable_bias(layer):
        parts.append(_sq_norms(dy_BTO.sum(1)))
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _vector_sq_norms(layer: nn.Module, x_BI: Tensor, dy_BO: Tensor) -> Tensor:
    """One position a sample: the gradient dy x^T has rank one, and ||dy x^T|| = ||dy|| ||x||."""
    sq_norms = _sq_norms(dy_BO)
    if not layer.weight.requires_grad:
        return sq_norms
    sq_inputs = _sq_norms(x_BI)
    return sq_norms.mul_(sq_inputs.add_(1) if _has_trainable_bias(layer) else sq_inputs)


def _has_trainable_bias(layer: nn.Module) -> bool:
    return isinstance(layer.bias, Tensor) and layer.bias.requires_grad


def _positions(x: Tensor) -> Tensor:
    """(B, I) -> (B, 1, I) and (B, ..., I) -> (B, T, I)."""
    return x[:, None] if x.ndim == 2 else x.flatten(1, -2)


def _weight_sq_norms(x_BTI: Tensor, dy_BTO: Tensor) -> Tensor:
    _, num_positions, num_inputs = x_BTI.shape
    num_outputs = dy_BTO.shape[2]
    # The Gram form costs T^2 (I + O) per sample, the gradient itself T I O: take the cheaper.
    if num_positions * (num_inputs + num_outputs) < num_inputs * num_outputs:
        kernel, entries = _by_gram, num_positions**2
    else:
        kernel, entries = _by_gradient, num_inputs * num_outputs
    chunk = max(1, CHUNK_BYTES // (2 * entries * x_BTI.element_size()))
    return torch.cat([kernel(x, dy) for x, dy in zip(x_BTI.split(chunk), dy_BTO.split(chunk), strict=True)])


def _by_gram(x_BTI: Tensor, dy_BTO: Tensor) -> Tensor:
    """||sum_t dy_t x_t^T||^2 = sum over t, s of (x_t . x_s) (dy_t . dy_s)."""
    return (x_BTI @ x_BTI.mT).mul_(dy_BTO @ dy_BTO.mT).sum((1, 2))


def _by_gradient(x_BTI: Tensor, dy_BTO: Tensor) -> Tensor:
    return _sq_norms((dy_BTO.mT @ x_BTI).flatten(1))


def _sq_norms(x_BD: Tensor) -> Tensor:
    # vector_norm reads its input once and writes nothing but the norms; x.square().sum() writes a copy first.
    norms: Tensor = torch.linalg.vector_norm(x_BD, dim=1)
    return norms.square_()
