"""A problem whose tr(Sigma) and G are known: half the squared distance of the weights to each sample."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

DIM = 10


class Shift(nn.Module):
    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((DIM,), start))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight - x


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * outputs.square().sum(1).mean()


def dataset(*, distance: float = 1.0, num_samples: int = 2048) -> TensorDataset:
    """tr(Sigma) = 10; the mean lies `distance` from zero in every coordinate."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, DIM, generator=generator) + distance
    return TensorDataset(x, torch.zeros(num_samples))


def true_noise_scale(data: TensorDataset, weight: Tensor) -> float:
    x = data.tensors[0].double()
    mean = x.mean(0)
    return float((x - mean).square().sum(1).mean() / (weight.double() - mean).square().sum())
