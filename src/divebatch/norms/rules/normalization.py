"""Normalisation layers: y = weight * x_hat + bias, with x_hat the normalised input.

The gradients of one sample are sums over its positions of dy * x_hat and of dy.

BatchNorm in training mode mixes the samples, so that no sample has its own loss. Here each sample's *contribution* to
the batch gradient is counted: its slice of dL/dy with its slice of x_hat. Contributions add up to the batch gradient
exactly, in all layers of such a network. In eval mode BatchNorm is an ordinary per-sample layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, layer_norm, rms_norm

from divebatch.norms import triton
from divebatch.norms.forms import Explicit, Form, cached_chunk, in_chunks
from divebatch.norms.registry import is_trainable, require_batch, rule_for
from divebatch.norms.sketch import sum_dtype


@rule_for(nn.LayerNorm)
def layer_normalization(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Measure a layer that normalises each position separately."""
    require_batch(layer, dy, len(layer.normalized_shape) + 1)
    x_hat = layer_norm(_at_least_float32(x), layer.normalized_shape, eps=layer.eps)
    return _summed(layer, x_hat, dy, 1, dy.ndim - len(layer.normalized_shape))


@rule_for(nn.RMSNorm)
def rms_normalization(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Measure a layer like LayerNorm, but without mean and bias."""
    # The epsilon of torch's computing type, not of x: nearly 1e5 times larger in bfloat16.
    eps = torch.finfo(sum_dtype(x.dtype)).eps if layer.eps is None else layer.eps
    require_batch(layer, dy, len(layer.normalized_shape) + 1)
    x_hat = rms_norm(_at_least_float32(x), layer.normalized_shape, eps=eps)
    return _summed(layer, x_hat, dy, 1, dy.ndim - len(layer.normalized_shape))


# Not a tuple, whose tensors a call would hold only weakly: nothing else holds these.
@dataclass(frozen=True, slots=True)
class Statistics:
    """Mean and inverse standard deviation as a layer keeps them: (C,) for a batch, (B, groups) for samples' groups."""

    mean: Tensor
    inverse_std: Tensor


def _saved_statistics(layer: Any, x: Tensor, output: Tensor) -> tuple[Tensor, Statistics] | Tensor:
    """Return the input with the statistics that the layer keeps for its own backward pass."""
    node: Any = output.grad_fn
    mean = getattr(node, "_saved_result1", None)
    by_running = getattr(layer, "running_mean", None) is not None and not layer.training
    # 16-bit statistics are too coarse to be used again; those of eval mode are the running ones.
    if by_running or mean is None or mean.numel() == 0 or mean.dtype.itemsize < 4:
        return x
    # Detached: GroupNorm's outputs know their node, whose hooks would keep them and with them the whole pass.
    return x, Statistics(mean.detach(), node._saved_result2.detach())


@rule_for(nn.GroupNorm, capture=_saved_statistics)
def group_normalization(layer: Any, x: Any, dy: Tensor) -> dict[str, Form]:
    """Measure a layer that normalises each sample's groups of channels over their positions."""
    if not isinstance(x, tuple):
        return _summed(layer, group_norm(_at_least_float32(x), layer.num_groups, eps=layer.eps), dy, 2, dy.ndim)
    x, saved = x
    size = layer.num_channels // layer.num_groups
    mean, inverse_std = (part.view(len(x), -1).repeat_interleave(size, 1) for part in (saved.mean, saved.inverse_std))
    return _by_statistics(layer, x, dy, mean, inverse_std)


@rule_for(nn.InstanceNorm1d)
@rule_for(nn.InstanceNorm2d)
@rule_for(nn.InstanceNorm3d)
def instance_normalization(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Measure a layer that normalises each sample's channels, or in eval mode uses running statistics if kept."""
    require_batch(layer, x, layer._get_no_batch_dim() + 1)
    if layer.training or layer.running_mean is None:
        return _summed(layer, group_norm(_at_least_float32(x), x.shape[1], eps=layer.eps), dy, 2, dy.ndim)
    return _by_statistics(layer, x, dy, layer.running_mean, (layer.running_var + layer.eps).rsqrt())


def _synchronised_statistics(layer: Any, x: Tensor, output: Tensor) -> tuple[Tensor, Statistics] | Tensor:
    """Return the statistics over all ranks, which only its function holds: (x, weight, mean, 1 / std, counts)."""
    saved = getattr(output.grad_fn, "saved_tensors", None)
    return _saved_statistics(layer, x, output) if saved is None else (x, Statistics(saved[2], saved[3]))


@rule_for(nn.SyncBatchNorm, capture=_synchronised_statistics)
@rule_for(nn.BatchNorm1d, capture=_saved_statistics)
@rule_for(nn.BatchNorm2d, capture=_saved_statistics)
@rule_for(nn.BatchNorm3d, capture=_saved_statistics)
def batch_normalization(layer: Any, x: Any, dy: Tensor) -> dict[str, Form]:
    """Return contributions in training mode (see above), and per-sample gradients in eval mode."""
    if isinstance(x, tuple):
        x, saved = x
        return _by_statistics(layer, x, dy, saved.mean, saved.inverse_std)
    if layer.training or layer.running_mean is None:
        mean, inverse_std = batch_statistics(x, layer.eps)
    else:
        mean, inverse_std = layer.running_mean, (layer.running_var + layer.eps).rsqrt()
    return _by_statistics(layer, x, dy, mean, inverse_std)


def batch_statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and inverse standard deviation of each channel, at least float32."""
    if x.is_cuda and not torch.compiler.is_compiling():  # reads bfloat16 without a float32 copy
        mean, inverse_std = torch.batch_norm_stats(x, eps)
        return mean, inverse_std
    dims = [dim for dim in range(x.ndim) if dim != 1]
    # Exactly the decomposition of torch's own batch_norm, so that a compiler computes it once for both.
    var, mean = torch.var_mean(_at_least_float32(x), dims, correction=0, keepdim=True)
    return mean.flatten(), torch.rsqrt(var + eps).flatten()


def _by_statistics(layer: nn.Module, x: Tensor, dy: Tensor, mean: Tensor, inverse_std: Tensor) -> dict[str, Form]:
    """Use sum_t dy_t x_hat_t = (sum_t dy_t x_t - mean * sum_t dy_t) / std, without a normalised copy of the input."""
    if _layer_kernel_applies(x, dy, mean):
        return _by_layer_kernel(layer, x, dy, mean, inverse_std)
    if x.ndim > 2 and not torch.compiler.is_compiling() and triton.applies(dy, x):
        return _trainable(layer, *triton.channel_sums(x, dy, mean, inverse_std))
    dtype = sum_dtype(x.dtype)
    dy_sums = dy.flatten(2).sum(2, dtype=dtype) if dy.ndim > 2 else dy.to(dtype)
    gradients: dict[str, Form] = {}
    if is_trainable(layer, "weight"):
        gradients["weight"] = Explicit((_sums_of_products(x, dy) - mean * dy_sums) * inverse_std)
    if is_trainable(layer, "bias"):
        gradients["bias"] = Explicit(dy_sums)
    return gradients


def _layer_kernel_applies(x: Tensor, dy: Tensor, mean: Tensor) -> bool:
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.ndim == 2:
        return False
    return x.is_contiguous() and dy.is_contiguous() and x.dtype == dy.dtype == mean.dtype


def _by_layer_kernel(layer: nn.Module, x: Tensor, dy: Tensor, mean: Tensor, inverse_std: Tensor) -> dict[str, Form]:
    """Use BatchNorm's own backward pass, with samples' channels as channels; this reads x and dy only once."""
    shape, one_sample = x.shape[:2], (1, -1, *x.shape[2:])
    statistics = [part.expand(shape).flatten() for part in (mean, inverse_std)]
    _, weight, bias = torch.ops.aten.native_batch_norm_backward(
        dy.view(one_sample), x.view(one_sample), None, None, None, *statistics, True, 0.0, [False, True, True]
    )
    return _trainable(layer, weight.view(shape), bias.view(shape))


def _trainable(layer: nn.Module, weight: Tensor, bias: Tensor) -> dict[str, Form]:
    found = {"weight": Explicit(weight), "bias": Explicit(bias)}
    return {name: form for name, form in found.items() if is_trainable(layer, name)}


def _sums_of_products(x: Tensor, dy: Tensor) -> Tensor:
    """Sum x * dy over positions, (B, C); the product is formed in chunks of samples."""
    dtype = sum_dtype(torch.promote_types(x.dtype, dy.dtype))
    if x.ndim == 2:
        return x.to(dtype) * dy
    return in_chunks(lambda a, b: (a * b).flatten(2).sum(2, dtype=dtype), x, dy, cached_chunk(x, x.shape[1:].numel()))


def _summed(layer: nn.Module, x_hat: Tensor, dy: Tensor, first: int, end: int) -> dict[str, Form]:
    """Sum over the dimensions from `first` up to, not including, `end`: the positions of a sample."""
    gradients: dict[str, Form] = {}
    positions = tuple(range(first, end))
    if is_trainable(layer, "weight"):
        gradients["weight"] = Explicit((x_hat * dy).sum(positions) if positions else x_hat * dy)
    if is_trainable(layer, "bias"):
        gradients["bias"] = Explicit(dy.sum(positions, dtype=sum_dtype(dy.dtype)) if positions else dy)
    return gradients


def _at_least_float32(x: Tensor) -> Tensor:
    return cast(x, sum_dtype(x.dtype))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to another type; return a tensor of that type unchanged.

    `x.to(x.dtype)` is the same tensor under a second name. torch 2.11's compiler makes this a second output of the
    custom function: the gradient then arrives at the wrong output and is silently lost.
    """
    return x if x.dtype == dtype else x.to(dtype)
