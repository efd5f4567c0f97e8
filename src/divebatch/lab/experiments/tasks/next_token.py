"""At each position of a sequence, the token that comes next."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from divebatch.errors import ArgumentError
from divebatch.lab.training.task import Counts, Evaluation, Task
from divebatch.metric import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToken(Task):
    """Cross-entropy over positions, judged by bits per byte: tokens here are bytes. There is no accuracy."""

    metrics = (Metric("bits_per_byte", "lower"), Metric("val_loss", "lower"))

    @staticmethod
    def loss_fn(outputs: Any, targets: Any) -> Tensor:
        """Return the mean cross-entropy over all positions, from scores of shape (samples, positions, tokens)."""
        return cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def judge(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the sum of losses over positions, so that every byte counts alike in sequences of unequal length."""
        if outputs.shape[:-1] != targets.shape:
            raise ArgumentError(
                f"next-token prediction wants scores of all tokens for each position: outputs of shape "
                f"{tuple(outputs.shape)} do not fit targets of shape {tuple(targets.shape)}"
            )
        return torch.stack([self.loss_fn(outputs, targets).double() * targets.numel()])

    def conclude(self, sums: Sequence[float], counts: Counts) -> Evaluation:
        loss = sums[0] / counts.targets
        return Evaluation(loss, bits_per_byte=loss / math.log(2))
