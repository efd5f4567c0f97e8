import math

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from divebatch.errors import ArgumentError
from divebatch.lab import evaluate
from divebatch.lab.tasks import TASKS

CLASSIFICATION, NEXT_TOKEN = TASKS["classification"](), TASKS["next-token"]()


def test_evaluation_counts_samples_not_batches_and_puts_the_mode_back():
    model = nn.Identity()
    batches = [(torch.tensor([[2.0], [-1.0], [3.0]]), torch.tensor([[1.0], [1.0], [1.0]]))]
    batches.append((torch.tensor([[-4.0]]), torch.tensor([[0.0]])))
    seen = evaluate(model, batches, CLASSIFICATION)
    assert seen.accuracy == 0.75
    assert seen.bits_per_byte is None
    together = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    assert seen.loss == pytest.approx(binary_cross_entropy_with_logits(*together).item())
    assert model.training


def test_several_scores_are_judged_by_the_largest():
    batches = [(torch.tensor([[0.1, 0.9, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([1, 2]))]
    seen = evaluate(nn.Identity(), batches, CLASSIFICATION)
    assert seen.accuracy == 0.5
    assert seen.loss == pytest.approx(cross_entropy(*batches[0]).item())


def test_of_a_text_every_byte_counts_alike_and_there_is_no_accuracy():
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(samples, length, 256, generator=generator), torch.randint(256, (samples, length)))
        for samples, length in ((3, 5), (1, 2))
    ]
    seen = evaluate(nn.Identity(), batches, NEXT_TOKEN)
    losses = [
        -scores[i, t].log_softmax(0)[targets[i, t]].item()
        for scores, targets in batches
        for i in range(targets.shape[0])
        for t in range(targets.shape[1])
    ]
    assert len(losses) == 17
    assert seen.loss == pytest.approx(sum(losses) / 17, rel=1e-6)
    assert seen.bits_per_byte == pytest.approx(sum(losses) / 17 / math.log(2), rel=1e-6)
    assert seen.accuracy is None


@pytest.mark.parametrize(("task", "scores"), [(CLASSIFICATION, (2, 3, 5)), (NEXT_TOKEN, (2, 4, 3))])
def test_outputs_of_another_shape_are_an_error(task, scores):
    """Token targets once gave an accuracy of 5.0."""
    outputs, targets = torch.zeros(scores), torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ArgumentError, match=r"outputs of shape .* do not fit targets of shape \(2, 5\)"):
        evaluate(nn.Identity(), [(outputs, targets)], task)
