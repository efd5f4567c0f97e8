"""The central loop: forward, backward, step, in one place."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from divebatch.errors import BatchTooLargeError
from divebatch.training.accumulation import batch_length, micro_batches
from divebatch.training.passes import Passes


@dataclass(slots=True)
class Tally:
    """The mean loss over the samples of an epoch, each at the weights it met."""

    loss_sum: Tensor = field(default_factory=lambda: torch.zeros(()))
    num_samples: int = 0

    def add(self, loss: Tensor, num_samples: int) -> None:
        """Summed on the device: reading each loss would wait for every step."""
        self.loss_sum = self.loss_sum.to(loss.device) + loss * num_samples
        self.num_samples += num_samples

    def mean(self) -> float:
        """Waits for the device."""
        return self.loss_sum.item() / self.num_samples


@dataclass(slots=True)
class Step:
    """One optimizer step on one batch."""

    passes: Passes
    optimizer: Optimizer
    is_measuring: Callable[[], bool] = lambda: False
    replay_token: Callable[[], object] = lambda: True
    min_parts: Callable[[], int] = lambda: 1
    """Into how many parts a batch must be cut at least: some estimators compare the parts."""

    def __call__(self, batch: Any) -> Tensor:
        """Forward, backward, step. The batch's mean loss, at the weights before the step."""
        self.optimizer.zero_grad()
        loss = self._backward(batch)
        self.optimizer.step()
        return loss

    def _backward(self, batch: Any) -> Tensor:
        try:
            return self._accumulate(batch, self.part_size(batch_length(batch)))
        except torch.OutOfMemoryError:
            pass  # what failed holds memory until here, and the advice needs to try
        raise BatchTooLargeError(self._advice(batch))

    def _accumulate(self, batch: Any, size: int) -> Tensor:
        loss: Tensor | None = None
        for (inputs, targets), share in micro_batches(batch, size):
            part = self.passes(inputs, targets, share=share, measuring=self.is_measuring(), token=self.replay_token())
            loss = part if loss is None else loss + part
        assert loss is not None
        return loss

    def part_size(self, num_samples: int) -> int:
        """The samples of one backward pass of a batch."""
        return min(self.micro_batch_size or num_samples, math.ceil(num_samples / self.min_parts()))

    @property
    def micro_batch_size(self) -> int | None:
        """The most samples of one backward pass."""
        return self.passes.setup.micro_batch_size

    def _advice(self, batch: Any) -> str:
        num_samples = batch_length(batch)
        tried = self.part_size(num_samples)
        problem = f"out of memory: batch of {num_samples} samples in micro-batches of {tried}"
        fitting = self._fitting(batch, tried)
        if fitting is None:
            return f"{problem}; not even one sample fits"
        return f"{problem}. Micro-batches of {fitting} fit: use --micro-batch {fitting}"

    def _fitting(self, batch: Any, tried: int) -> int | None:
        """The largest half, quarter, ... of what was tried that runs."""
        while tried > 1:
            tried //= 2
            self.optimizer.zero_grad()
            part, _ = next(iter(micro_batches(batch, tried)))
            try:
                self._accumulate(part, tried)
            except torch.OutOfMemoryError:
                continue
            return tried
        return None


def train_epoch(
    step: Callable[[Any], Tensor], batches: Iterable[Any], tally: Tally, after_step: Callable[[], None]
) -> float:
    """One step on each batch; the mean loss over the epoch's samples."""
    for batch in batches:
        tally.add(step(batch), batch_length(batch))
        after_step()
    return tally.mean()
