"""Normalisation layers: y = weight * x_hat + bias, with x_hat the normalised input.

The gradients of one sample are sums over its positions of dy * x_hat and of dy.

BatchNorm in train mode mixes the samples, so that no sample has a loss of its own. What is counted is each sample's
*contribution* to the batch gradient: its slice of dL/dy with its slice of x_hat. Contributions add up to the batch
gradient exactly, which is all that gradient diversity needs; the same holds for every other layer of such a network,
whose dy passes through BatchNorm. In eval mode BatchNorm is an ordinary per-sample layer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, layer_norm, rms_norm

from divebatch.norms.forms import Explicit, Form
from divebatch.norms.registry import is_trainable, rule_for
from divebatch.norms.sketch import sum_dtype


@rule_for(nn.LayerNorm)
def layer_normalization(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Each position is normalised by itself."""
    x_hat = layer_norm(_at_least_float32(x), layer.normalized_shape, eps=layer.eps)
    return _over_last_dims(layer, x_hat, dy)


@rule_for(nn.RMSNorm)
def rms_normalization(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Like LayerNorm, without mean and bias."""
    eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
    return _over_last_dims(layer, rms_norm(_at_least_float32(x), layer.normalized_shape, eps=eps), dy)


@rule_for(nn.GroupNorm)
def group_normalization(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Each sample's groups of channels are normalised over their positions."""
    return _over_channels(layer, group_norm(_at_least_float32(x), layer.num_groups, eps=layer.eps), dy)


@rule_for(nn.InstanceNorm1d)
@rule_for(nn.InstanceNorm2d)
@rule_for(nn.InstanceNorm3d)
def instance_normalization(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Each channel of each sample by itself, or by running statistics in eval mode where it tracks them."""
    if layer.training or layer.running_mean is None:
        return _over_channels(layer, group_norm(_at_least_float32(x), x.shape[1], eps=layer.eps), dy)
    return _over_channels(layer, _standardised(x, layer.running_mean, layer.running_var, layer.eps), dy)


@rule_for(nn.BatchNorm1d)
@rule_for(nn.BatchNorm2d)
@rule_for(nn.BatchNorm3d)
def batch_normalization(layer: Any, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Contributions in train mode (see above), per-sample gradients in eval mode."""
    if layer.training or layer.running_mean is None:
        dims = [dim for dim in range(x.ndim) if dim != 1]
        var, mean = torch.var_mean(_at_least_float32(x), dims, correction=0)
    else:
        var, mean = layer.running_var, layer.running_mean
    return _over_channels(layer, _standardised(x, mean, var, layer.eps), dy)


def _standardised(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    shape = (1, -1, *[1] * (x.ndim - 2))
    return (x - mean.view(shape)) * (var + eps).rsqrt().view(shape)


def _over_channels(layer: nn.Module, x_hat: Tensor, dy: Tensor) -> dict[str, Form]:
    """Channels are dimension 1; sums over the rest."""
    gradients: dict[str, Form] = {}
    if is_trainable(layer, "weight"):
        gradients["weight"] = Explicit((x_hat * dy).flatten(2).sum(2) if dy.ndim > 2 else x_hat * dy)
    if is_trainable(layer, "bias"):
        gradients["bias"] = Explicit(dy.flatten(2).sum(2, dtype=sum_dtype(dy.dtype)) if dy.ndim > 2 else dy)
    return gradients


def _over_last_dims(layer: Any, x_hat: Tensor, dy: Tensor) -> dict[str, Form]:
    """The parameters have the shape of the last dimensions; sums over those between."""
    between = tuple(range(1, dy.ndim - len(layer.normalized_shape)))
    gradients: dict[str, Form] = {}
    if is_trainable(layer, "weight"):
        gradients["weight"] = Explicit((x_hat * dy).sum(between) if between else x_hat * dy)
    if is_trainable(layer, "bias"):
        gradients["bias"] = Explicit(dy.sum(between, dtype=sum_dtype(dy.dtype)) if between else dy)
    return gradients


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(sum_dtype(x.dtype))
