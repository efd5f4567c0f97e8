"""torch's SyncBatchNorm runs on GPUs only. With its five GPU kernels written as formulas it runs on a CPU."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _channels(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (x.ndim - 2))


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(x, _dims(x), correction=0)
    return mean, torch.rsqrt(var + eps)


def _gather(x: Tensor, mean: Tensor, invstd: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _, _, _, eps, counts = others
    share = (counts / counts.sum())[:, None]
    middle = (share * mean).sum(0)
    var = (share * (invstd**-2 - eps + mean.square())).sum(0) - middle.square()
    return middle, torch.rsqrt(var + eps)


def _normal(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    return (x - _channels(mean, x)) * _channels(invstd * weight, x) + _channels(bias, x)


def _reduce(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, *_: Any) -> tuple[Tensor, ...]:
    sum_dy, sum_dy_xmu = dy.sum(_dims(x)), (dy * (x - _channels(mean, x))).sum(_dims(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy


def _backward(dy: Any, x: Any, mean: Any, invstd: Any, weight: Any, sum_dy: Any, sum_dy_xmu: Any, count: Any) -> Tensor:
    total = count.sum()
    centred = dy - _channels(sum_dy / total, x)
    centred = centred - (x - _channels(mean, x)) * _channels(invstd**2 * sum_dy_xmu / total, x)
    return centred * _channels(invstd * weight, x)


def _forward(layer: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """In training, without running statistics; torch's own refuses CPUs."""
    size = dist.get_world_size(layer.process_group)
    settings = (layer.running_mean, layer.running_var, layer.eps, layer.momentum, layer.process_group, size)
    return SyncBatchNorm.apply(x, layer.weight, layer.bias, *settings)


def install() -> None:
    """For the rest of this process."""
    torch.batch_norm_stats = _stats
    torch.batch_norm_gather_stats_with_counts = _gather
    torch.batch_norm_elemt = _normal
    torch.batch_norm_backward_reduce = _reduce
    torch.batch_norm_backward_elemt = _backward
    nn.SyncBatchNorm.forward = _forward
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # refuses CPUs
