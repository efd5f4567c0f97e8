"""A plain training step: what `advise` runs where it is not handed another."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.data.micro_batches import batch_length, micro_batches
from divebatch.estimators import Estimator

LossFn = Callable[[Any, Any], Tensor]
"""Gets the model's outputs and the targets; gives the mean loss over the samples."""
Step = Callable[[Any], Tensor]
"""Trains on one batch (inputs, targets); gives its mean loss at the weights before the step."""
PRECISIONS = ("fp32", "bf16")


class MakeStep(Protocol):
    """Builds the training step that `advise` measures."""

    def __call__(self, model: nn.Module, optimizer: Optimizer, batch_size: int, estimator: Estimator | None) -> Step:
        """Build a step.

        Args:
            model: The copy to train, on its device.
            optimizer: The optimizer of that copy.
            batch_size: Samples in each batch the step will get, but for the last one of an epoch.
            estimator: Watches the backward passes, cut into as many micro-batches as it needs; None while timing.
        """
        ...


class PlainStep:
    """Forward, backward, optimizer step.

    Args:
        model: The model to train.
        optimizer: Its optimizer.
        loss_fn: The mean loss of outputs and targets.
        precision: "fp32", or "bf16" for a forward pass under autocast.
        compile: Whether forward pass and loss go through torch.compile, anew for each batch size.
        min_micro_batches: Into how many backward passes each batch is cut at least.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        *,
        precision: str = "fp32",
        compile: bool = False,
        min_micro_batches: int = 1,
    ) -> None:
        self._optimizer = optimizer
        self._min_micro_batches = min_micro_batches
        mean_loss = _compiled_mean_loss() if compile else _mean_loss
        self._loss = partial(mean_loss, model, loss_fn, precision == "bf16")

    def __call__(self, batch: Any) -> Tensor:
        self._optimizer.zero_grad()
        size = -(-batch_length(batch) // self._min_micro_batches)
        losses = []
        for (inputs, targets), weight in micro_batches(batch, size):
            loss = self._loss(inputs, targets) * weight
            loss.backward()
            losses.append(loss.detach())
        self._optimizer.step()
        return torch.stack(losses).sum()


def _mean_loss(model: nn.Module, loss_fn: LossFn, is_bf16: bool, inputs: Any, targets: Any) -> Tensor:
    if not is_bf16:
        return loss_fn(model(inputs), targets)
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
        outputs = model(inputs)
    return loss_fn(outputs.float(), targets)


@cache
def _compiled_mean_loss() -> Callable[..., Tensor]:
    """One for all steps of a process, so that a size that was compiled once is not compiled again."""
    return torch.compile(_mean_loss, dynamic=False)
