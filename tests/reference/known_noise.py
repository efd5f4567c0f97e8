"""A problem whose noise is known: y = w* x + noise, x standard normal, at weights w* + e. Its Hessian is 1."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

DIMENSION, OFFSET, NOISE = 12, 0.5, 1.0
TRACE = (DIMENSION + 1) * OFFSET**2 + DIMENSION * NOISE**2
SQ_NORM = OFFSET**2


def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean() / 2


def draws(generator: torch.Generator, num_batches: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(num_batches):
        x = torch.randn(batch_size, DIMENSION, generator=generator, dtype=torch.float64)
        yield x, NOISE * torch.randn(batch_size, 1, generator=generator, dtype=torch.float64)


def linear() -> nn.Linear:
    model = nn.Linear(DIMENSION, 1, bias=False).double()
    nn.init.constant_(model.weight, OFFSET / math.sqrt(DIMENSION))  # w* is zero
    return model
