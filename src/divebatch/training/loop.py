"""One epoch of training: forward, backward, step, in one place."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LossFn = Callable[[Any, Any], Tensor]


def train_epoch(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any], loss_fn: LossFn) -> float:
    """Train on each batch once; the mean loss over samples, each at the weights it met."""
    model.train()
    loss_sum, num_samples = torch.zeros(()), 0
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        # Summed on the device: reading each loss would wait for every step.
        loss_sum = loss_sum.to(loss.device) + loss.detach() * len(targets)
        num_samples += len(targets)
    return loss_sum.item() / num_samples
