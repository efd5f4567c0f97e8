"""How good a model is on data it was not trained on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from divebatch.errors import ArgumentError
from divebatch.lab.training.forward import LossFn, predict
from divebatch.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean loss over samples, and the fraction of targets that were predicted right (0..1)."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    *,
    precision: str = "fp32",
    ranks: Ranks | None = None,
) -> Evaluation:
    """Loss and accuracy in evaluation mode; the mode is put back afterwards. `batches` are this rank's own."""
    was_training = model.training
    model.eval()
    sums, num_samples, num_targets = [], 0, 0
    for inputs, targets in batches:
        sums.append(_judged(predict(model, inputs, precision), targets, loss_fn))
        num_samples += len(targets)
        num_targets += targets.numel()
    model.train(was_training)
    loss_sum, num_right = torch.stack(sums).sum(0).tolist()
    # Sums and not means: ranks may hold unequal numbers of samples.
    totals = (ranks or Ranks.alone()).sum_numbers([loss_sum, num_right, num_targets, num_samples])
    return Evaluation(totals[0] / totals[3], totals[1] / totals[2])


def _judged(outputs: Tensor, targets: Tensor, loss_fn: LossFn) -> Tensor:
    """(sum of losses, right answers), left on the device: reading each batch's would wait for it."""
    return torch.stack([loss_fn(outputs, targets).double() * len(targets), is_right(outputs, targets).sum()])


def is_right(outputs: Tensor, targets: Tensor) -> Tensor:
    """For each target: one output column is a logit of class 1, several are scores of which the largest wins."""
    if outputs.shape[-1] == 1:
        return (outputs > 0) == (targets > 0.5)
    predicted = outputs.argmax(-1)
    if predicted.shape != targets.shape:
        raise ArgumentError(
            f"evaluation wants the scores of a target's classes in the last dimension of the outputs: outputs of shape "
            f"{tuple(outputs.shape)} do not fit targets of shape {tuple(targets.shape)}"
        )
    return predicted == targets
