import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from divebatch.errors import CheckpointError
from divebatch.training import evaluate, load_checkpoint, save_checkpoint, train_epoch

CPU = torch.device("cpu")


def test_train_epoch_is_plain_sgd_and_reports_the_mean_loss_over_samples():
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 1), nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    batches = [(torch.randn(n, 3), torch.randn(n, 1)) for n in (4, 2)]
    loss = train_epoch(model, torch.optim.SGD(model.parameters(), 0.1), batches, nn.functional.mse_loss)
    total = 0.0
    for x, y in batches:
        mean = (twin(x) - y).square().mean()
        total += mean.item() * len(y)
        gradients = torch.autograd.grad(mean, list(twin.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    assert loss == pytest.approx(total / 6)
    torch.testing.assert_close(model.weight, twin.weight)


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


def test_a_checkpoint_comes_back_and_a_failed_save_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "seed-0.ckpt"
    save_checkpoint(path, {"epoch": 1, "weight": torch.arange(3)})

    def die(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("divebatch.training.checkpoint.os.fsync", die)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(path, {"epoch": 2})
    state = load_checkpoint(path, device=CPU)
    assert state["epoch"] == 1
    assert torch.equal(state["weight"], torch.arange(3))


def test_a_broken_checkpoint_is_named(tmp_path):
    path = tmp_path / "seed-0.ckpt"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"cannot read checkpoint '.*seed-0.ckpt'"):
        load_checkpoint(path, device=CPU)
