"""One label for each sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from divebatch.errors import ArgumentError
from divebatch.lab.training.task import Counts, Evaluation, Task
from divebatch.metric import Metric

SMOOTHING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification(Task):
    """Cross-entropy, judged by accuracy."""

    metrics = (Metric("val_accuracy", "higher"), Metric("val_loss", "lower"))

    @staticmethod
    def loss_fn(outputs: Any, targets: Any) -> Tensor:
        """Return the mean cross-entropy; a single output column is a logit of class 1."""
        if outputs.shape[-1] == 1:
            return binary_cross_entropy_with_logits(outputs, targets)
        return cross_entropy(outputs, targets)

    def judge(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the sums of losses and of right answers."""
        loss_sum = Classification.loss_fn(outputs, targets).double() * len(targets)
        return torch.stack([loss_sum, is_right(outputs, targets).sum()])

    def conclude(self, sums: Sequence[float], counts: Counts) -> Evaluation:
        loss_sum, num_right = sums
        return Evaluation(loss_sum / counts.samples, accuracy=num_right / counts.targets)


class SmoothedClassification(Classification):
    """Trained towards labels of which a tenth is spread over all classes; judged as any classification is."""

    @staticmethod
    def loss_fn(outputs: Any, targets: Any) -> Tensor:
        """Return the mean cross-entropy with the smoothed labels."""
        if outputs.shape[-1] == 1:
            raise ArgumentError(
                "smoothed-classification wants a score for each class, got a single logit: use the task classification"
            )
        return cross_entropy(outputs, targets, label_smoothing=SMOOTHING)


def is_right(outputs: Tensor, targets: Tensor) -> Tensor:
    """For each target: one output column is a logit of class 1, several are scores of which the largest wins."""
    if outputs.shape[-1] == 1:
        return (outputs > 0) == (targets > 0.5)
    predicted = outputs.argmax(-1)
    if predicted.shape != targets.shape:
        raise ArgumentError(
            f"classification wants one label a sample and the scores of its classes: outputs of shape "
            f"{tuple(outputs.shape)} do not fit targets of shape {tuple(targets.shape)}"
        )
    return predicted == targets
