"""Normalisation layers that count their samples' contributions on the way, for compiled models.

The gradients of weight and bias are sums of dy * x_hat and of dy over samples and positions. Here they are formed
sample by sample first, which is what is counted, and then added up: the activations are read as often as without
counting.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from divebatch.norms.normalization import batch_statistics, cast
from divebatch.norms.registry import require_batch
from divebatch.norms.sketch import sum_dtype

OwnTap = Callable[[Any, Tensor, torch.dtype, Tensor], Tensor]
"""From layer, input, the output's type and accumulator to the output; its backward pass adds a `message` to the
gradient of the accumulator."""


def own_tap(layer: nn.Module) -> OwnTap | None:
    """How to run a layer so that it counts by itself; None where a tap on its output must do."""
    if isinstance(layer, nn.LayerNorm):
        return layer_norm
    is_batch_norm = isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    by_batch = is_batch_norm and (layer.training or layer.running_mean is None)
    return batch_norm if by_batch and layer.weight is not None else None


def message(sq_norms: Tensor, variances: Tensor | None, num_samples: int) -> Tensor:
    """What a layer adds to the accumulator: the sum of squared norms, that of their variances, samples, and 1.

    `sq_norms` and `variances` may be cut into entries by samples or otherwise. One sum makes all four numbers, and what
    it adds up is nowhere in memory: a compiler needs one kernel a layer. Nothing comes from the host.
    """
    row = torch.arange(4, device=sq_norms.device).view(4, 1)
    is_first = torch.arange(len(sq_norms), device=sq_norms.device) == 0
    counts = torch.where(is_first & (row >= 2), torch.where(row == 2, num_samples, 1), 0)
    entries = torch.where(row == 0, sq_norms.double(), counts)
    return (entries if variances is None else torch.where(row == 1, variances.double(), entries)).sum(1)


def batch_norm(layer: Any, x: Tensor, dtype: torch.dtype, accumulator: Tensor) -> Tensor:
    """By the batch's own statistics."""
    output: Tensor = _BatchNorm.apply(x, layer.weight, layer.bias, accumulator, layer.eps, dtype)  # type: ignore[no-untyped-call]
    return output


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, accumulator: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        mean, inverse_std = batch_statistics(x, eps)
        ctx.save_for_backward(x, weight, mean, inverse_std)
        normal = (cast(x, mean.dtype) - _channels(mean, x)) * _channels(inverse_std, x)
        return cast(normal * _channels(weight, x) + _channels(bias, x), dtype)

    @staticmethod
    @once_differentiable  # statistics would count as constants in a second derivative
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, inverse_std = ctx.saved_tensors
        # Sums over positions and samples in 16 bits would lose the small contributions.
        wide_x, wide_dy = x.to(sum_dtype(x.dtype)), dy.to(sum_dtype(x.dtype))
        dy_BC = wide_dy.flatten(2).sum(2) if x.ndim > 2 else wide_dy
        dyx_BC = (wide_dy * wide_x).flatten(2).sum(2) if x.ndim > 2 else wide_dy * wide_x
        dw_BC = (dyx_BC - mean * dy_BC) * inverse_std
        dw, db = dw_BC.sum(0), dy_BC.sum(0)
        normal = (wide_x - _channels(mean, x)) * _channels(inverse_std, x)
        count = x.numel() // x.shape[1]
        centred = wide_dy - _channels(db / count, x) - normal * _channels(dw / count, x)
        dx = (centred * _channels(weight * inverse_std, x)).to(x.dtype)
        counted = _counted(ctx, dw_BC, dy_BC)
        return dx, dw.to(weight.dtype), db.to(weight.dtype), counted, None, None


def layer_norm(layer: Any, x: Tensor, dtype: torch.dtype, accumulator: Tensor) -> Tensor:
    """Each position by itself."""
    num_dims = len(layer.normalized_shape)
    require_batch(layer, x, num_dims + 1)
    settings = (layer.eps, dtype, num_dims)
    output: Tensor = _LayerNorm.apply(x, layer.weight, layer.bias, accumulator, *settings)  # type: ignore[no-untyped-call]
    return output


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        accumulator: Tensor,
        eps: float,
        dtype: torch.dtype,
        num_dims: int,
    ) -> Tensor:
        wide = cast(x, sum_dtype(x.dtype))
        ctx.dims = list(range(x.ndim - num_dims, x.ndim))
        var, mean = torch.var_mean(wide, ctx.dims, correction=0, keepdim=True)
        inverse_std = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, inverse_std)
        output = (wide - mean) * inverse_std * weight
        return cast(output if bias is None else output + bias, dtype)

    @staticmethod
    @once_differentiable  # statistics would count as constants in a second derivative
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, inverse_std = ctx.saved_tensors
        wide_dy, normal = dy.to(mean.dtype), (x.to(mean.dtype) - mean) * inverse_std
        between = list(range(1, ctx.dims[0]))
        dw_B, db_B = ((part.sum(between) if between else part) for part in (wide_dy * normal, wide_dy))
        dn = wide_dy * weight
        along = (dn * normal).mean(ctx.dims, keepdim=True)
        dx = (dn - dn.mean(ctx.dims, keepdim=True) - normal * along) * inverse_std
        dw, db = (part.sum(0).to(weight.dtype) for part in (dw_B, db_B))
        counted = _counted(ctx, dw_B, db_B)
        return dx.to(x.dtype), dw, db if ctx.needs_input_grad[2] else None, counted, None, None, None


def _counted(ctx: Any, dw_B: Tensor, db_B: Tensor) -> Tensor:
    """The message of a layer with these contributions to the gradients of weight and bias, as far as they train.

    Squares are added up over samples, as the contributions themselves are for the gradients: by the same kernel.
    """
    wanted = zip((dw_B, db_B), ctx.needs_input_grad[1:3], strict=True)
    squares = [each.square() for each, is_wanted in wanted if is_wanted]
    return message(sum(squares[1:], squares[0]).sum(0).flatten(), None, len(dw_B))


def _channels(vector: Tensor, like: Tensor) -> Tensor:
    """(C,) as it goes with (B, C, *positions)."""
    return vector.view(1, -1, *[1] * (like.ndim - 2))
