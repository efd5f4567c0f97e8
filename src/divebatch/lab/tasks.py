"""Tasks: the training loss, and the score on held-out data. A new task is a class and a row of `TASKS`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from divebatch.errors import ArgumentError
from divebatch.lab.step import predict
from divebatch.ranks import Ranks
from divebatch.records import Metric


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The score of a model on held-out data.

    Args:
        loss: The mean loss.
        accuracy: The fraction of correctly predicted targets, from 0 to 1. None: the task has no accuracy.
        bits_per_byte: The bits that the model needs per byte. None: targets are not bytes.
    """

    loss: float
    accuracy: float | None = None
    bits_per_byte: float | None = None


class Task(ABC):
    """A training loss and a score on held-out data, which `judge` sums over batches and `conclude` computes."""

    metrics: ClassVar[tuple[Metric, ...]]
    """The metrics by which runs may be judged; the first is the default."""

    # Static: a bound method would be a new function in each run, and be compiled again.
    @staticmethod
    @abstractmethod
    def loss_fn(outputs: Any, targets: Any) -> Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def judge(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the sums of a batch's scores, in float64 and on the device, because reading them would wait."""

    @abstractmethod
    def conclude(self, sums: Sequence[float], num_samples: int, num_targets: int) -> Evaluation:
        """Compute the score from the sums over all batches of all ranks.

        A sample has several targets if each of its positions has a target.
        """


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Any], task: Task, *, precision: str = "fp32", ranks: Ranks | None = None
) -> Evaluation:
    """Evaluate the model on this rank's `batches`, and score all ranks' sums; restore the model's mode."""
    was_training = model.training
    model.eval()
    sums, num_samples, num_targets = [], 0, 0
    for inputs, targets in batches:
        sums.append(task.judge(predict(model, inputs, precision), targets))
        num_samples += len(targets)
        num_targets += targets.numel()
    model.train(was_training)
    own = torch.stack(sums).sum(0).tolist()
    # Sums, not means: ranks may hold unequal numbers of samples.
    *totals, all_samples, all_targets = (ranks or Ranks.alone()).sum_numbers([*own, num_samples, num_targets])
    return task.conclude(totals, int(all_samples), int(all_targets))


# Tasks by kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification(Task):
    """Classification with cross-entropy, judged by accuracy."""

    metrics = (Metric("val_accuracy", "higher"), Metric("val_loss", "lower"))

    @staticmethod
    def loss_fn(outputs: Any, targets: Any) -> Tensor:
        """Return the mean cross-entropy; a single output column is a logit of class 1."""
        if outputs.shape[-1] == 1:
            return binary_cross_entropy_with_logits(outputs, targets)
        return cross_entropy(outputs, targets)

    def judge(self, outputs: Any, targets: Tensor) -> Tensor:
        loss_sum = self.loss_fn(outputs, targets).double() * len(targets)
        if outputs.shape[-1] == 1:
            return torch.stack([loss_sum, ((outputs > 0) == (targets > 0.5)).sum()])
        predicted = outputs.argmax(-1)
        if predicted.shape != targets.shape:
            raise ArgumentError(
                f"classification wants one label a sample and the scores of its classes: outputs of shape "
                f"{tuple(outputs.shape)} do not fit targets of shape {tuple(targets.shape)}"
            )
        return torch.stack([loss_sum, (predicted == targets).sum()])

    def conclude(self, sums: Sequence[float], num_samples: int, num_targets: int) -> Evaluation:
        loss_sum, num_right = sums
        return Evaluation(loss_sum / num_samples, accuracy=num_right / num_targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToken(Task):
    """Next-token prediction with cross-entropy, judged by bits per byte, since tokens are bytes."""

    metrics = (Metric("bits_per_byte", "lower"), Metric("val_loss", "lower"))

    @staticmethod
    def loss_fn(outputs: Any, targets: Any) -> Tensor:
        """Return the mean cross-entropy over all positions, from scores of shape (samples, positions, tokens)."""
        return cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def judge(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the sum of losses over positions, so that every byte counts equally."""
        if outputs.shape[:-1] != targets.shape:
            raise ArgumentError(
                f"next-token prediction wants scores of all tokens for each position: outputs of shape "
                f"{tuple(outputs.shape)} do not fit targets of shape {tuple(targets.shape)}"
            )
        return torch.stack([self.loss_fn(outputs, targets).double() * targets.numel()])

    def conclude(self, sums: Sequence[float], num_samples: int, num_targets: int) -> Evaluation:
        loss = sums[0] / num_targets
        return Evaluation(loss, bits_per_byte=loss / math.log(2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression(Task):
    """Regression with the mean squared error, which is also the score."""

    metrics = (Metric("val_loss", "lower"),)

    @staticmethod
    def loss_fn(outputs: Any, targets: Any) -> Tensor:
        """Return the mean squared error of outputs of shape (samples, 1)."""
        return mse_loss(outputs.squeeze(-1), targets)

    def judge(self, outputs: Any, targets: Tensor) -> Tensor:
        if outputs.shape != (*targets.shape, 1):
            raise ArgumentError(
                f"regression wants one number a sample: outputs of shape {tuple(outputs.shape)} do not fit targets "
                f"of shape {tuple(targets.shape)}"
            )
        return torch.stack([self.loss_fn(outputs, targets).double() * len(targets)])

    def conclude(self, sums: Sequence[float], num_samples: int, num_targets: int) -> Evaluation:
        return Evaluation(sums[0] / num_samples)


TASKS: dict[str, type[Task]] = {"classification": Classification, "next-token": NextToken, "regression": Regression}
