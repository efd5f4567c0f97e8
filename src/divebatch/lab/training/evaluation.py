"""How good a model is on data it was not trained on."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from divebatch.lab.training.forward import predict
from divebatch.lab.training.task import Counts, Evaluation, Task
from divebatch.ranks import Ranks


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    task: Task,
    *,
    precision: str = "fp32",
    ranks: Ranks | None = None,
) -> Evaluation:
    """Judge the model in evaluation mode; the mode is put back afterwards. `batches` are this rank's own."""
    was_training = model.training
    model.eval()
    sums, num_samples, num_targets = [], 0, 0
    for inputs, targets in batches:
        sums.append(task.judge(predict(model, inputs, precision), targets))
        num_samples += len(targets)
        num_targets += targets.numel()
    model.train(was_training)
    own = torch.stack(sums).sum(0).tolist()
    # Sums and not means: ranks may hold unequal numbers of samples.
    *totals, all_targets, all_samples = (ranks or Ranks.alone()).sum_numbers([*own, num_targets, num_samples])
    return task.conclude(totals, Counts(samples=int(all_samples), targets=int(all_targets)))
