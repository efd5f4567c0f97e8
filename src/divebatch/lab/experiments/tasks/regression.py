"""One number for each sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from divebatch.errors import ArgumentError
from divebatch.lab.training.task import Counts, Evaluation, Task
from divebatch.metric import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression(Task):
    """The mean squared error, which also judges. There is no accuracy."""

    metrics = (Metric("val_loss", "lower"),)

    @staticmethod
    def loss_fn(outputs: Any, targets: Any) -> Tensor:
        """Return the mean squared error of outputs of shape (samples, 1)."""
        return mse_loss(outputs.squeeze(-1), targets)

    def judge(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the sum of squared errors."""
        if outputs.shape != (*targets.shape, 1):
            raise ArgumentError(
                f"regression wants one number a sample: outputs of shape {tuple(outputs.shape)} do not fit targets "
                f"of shape {tuple(targets.shape)}"
            )
        return torch.stack([self.loss_fn(outputs, targets).double() * len(targets)])

    def conclude(self, sums: Sequence[float], counts: Counts) -> Evaluation:
        return Evaluation(sums[0] / counts.samples)
