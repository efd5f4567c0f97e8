"""Train-mode BatchNorm that counts its samples' contributions on the way, for compiled models.

Its backward pass needs the sums of dy and dy * x over all samples and positions. Here they are formed sample by sample
first, which is what is counted, and then added up: the activations are read as often as without counting.
"""

from typing import Any

import torch
from torch import Tensor, nn

from divebatch.norms.normalization import batch_statistics
from divebatch.norms.sketch import sum_dtype


def uses_batch_statistics(layer: nn.Module) -> bool:
    """Whether this is a BatchNorm that normalises by its batch at the moment."""
    is_batch_norm = isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    return is_batch_norm and (layer.training or layer.running_mean is None) and layer.weight is not None


def message(sq_norms: Tensor, variance: Tensor | None, num_samples: int) -> Tensor:
    """What a layer adds to the accumulator: squared norms, their variance, samples, 1; nothing comes from the host."""
    variance = torch.zeros_like(sq_norms) if variance is None else variance
    return torch.stack([sq_norms, variance, torch.full_like(sq_norms, num_samples), torch.ones_like(sq_norms)])


def batch_norm(layer: Any, x: Tensor, accumulator: Tensor) -> Tensor:
    """The layer's output; the backward pass adds (squared norms, 0, samples, 1) to the accumulator's gradient."""
    output: Tensor = _BatchNormTap.apply(x, layer.weight, layer.bias, accumulator, layer.eps)  # type: ignore[no-untyped-call]
    return output


class _BatchNormTap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, accumulator: Tensor, eps: float) -> Tensor:
        mean, inverse_std = batch_statistics(x, eps)
        ctx.save_for_backward(x, weight, mean, inverse_std)
        normal = (x.to(mean.dtype) - _channels(mean, x)) * _channels(inverse_std, x)
        return (normal * _channels(weight, x) + _channels(bias, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, inverse_std = ctx.saved_tensors
        wide_x, wide_dy = x.to(sum_dtype(x.dtype)), dy.to(sum_dtype(x.dtype))
        dy_BC = wide_dy.flatten(2).sum(2) if x.ndim > 2 else wide_dy
        dyx_BC = (wide_dy * wide_x).flatten(2).sum(2) if x.ndim > 2 else wide_dy * wide_x
        dw_BC = (dyx_BC - mean * dy_BC) * inverse_std
        dw, db = dw_BC.sum(0), dy_BC.sum(0)
        normal = (wide_x - _channels(mean, x)) * _channels(inverse_std, x)
        count = x.numel() // x.shape[1]
        centred = wide_dy - _channels(db / count, x) - normal * _channels(dw / count, x)
        dx = (centred * _channels(weight * inverse_std, x)).to(x.dtype)
        counted = [grad for grad, wanted in zip((dw_BC, dy_BC), ctx.needs_input_grad[1:3], strict=True) if wanted]
        sq_norms = torch.stack([grad.square().sum(dtype=torch.float64) for grad in counted]).sum()
        return dx, dw.to(weight.dtype), db.to(weight.dtype), message(sq_norms, None, x.shape[0]), None


def _channels(vector: Tensor, like: Tensor) -> Tensor:
    """(C,) as it goes with (B, C, *positions)."""
    return vector.view(1, -1, *[1] * (like.ndim - 2))
