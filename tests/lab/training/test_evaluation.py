import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from divebatch.errors import ArgumentError
from divebatch.lab.training import evaluate


def test_evaluation_counts_samples_not_batches_and_puts_the_mode_back():
    model = nn.Identity()
    batches = [(torch.tensor([[2.0], [-1.0], [3.0]]), torch.tensor([[1.0], [1.0], [1.0]]))]
    batches.append((torch.tensor([[-4.0]]), torch.tensor([[0.0]])))
    seen = evaluate(model, batches, binary_cross_entropy_with_logits)
    assert seen.accuracy == 0.75
    together = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    assert seen.loss == pytest.approx(binary_cross_entropy_with_logits(*together).item())
    assert model.training


def test_several_scores_are_judged_by_the_largest():
    batches = [(torch.tensor([[0.1, 0.9, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([1, 2]))]
    assert evaluate(nn.Identity(), batches, cross_entropy).accuracy == 0.5


def token_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def test_of_several_targets_a_sample_each_counts():
    scores = torch.eye(3)[torch.tensor([[0, 1, 2, 0, 1], [2, 2, 2, 2, 2]])]
    targets = torch.tensor([[0, 1, 2, 0, 1], [2, 2, 0, 0, 0]])
    assert evaluate(nn.Identity(), [(scores, targets)], token_loss).accuracy == 0.7
    with pytest.raises(ArgumentError, match=r"outputs of shape \(2, 5, 3\) do not fit targets of shape \(5, 2\)"):
        evaluate(nn.Identity(), [(scores, targets.T)], token_loss)
