import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from divebatch.errors import BatchTooLargeError
from divebatch.lab.training import Clock, Passes, Setup, Step, Tally, train_epoch
from divebatch.lab.training.distributed import Parallel

CPU = torch.device("cpu")


def make_step(model: nn.Module, *, micro_batch_size: int | None = None) -> Step:
    setup = Setup(micro_batch_size=micro_batch_size)
    return Step(Passes(Parallel.alone(model), mse_loss, setup, Clock(CPU)), torch.optim.SGD(model.parameters(), 0.1))


def twins() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 1), nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    return model, twin


@pytest.mark.parametrize("micro_batch_size", [None, 1, 2, 3, 100])
def test_an_epoch_is_plain_sgd_and_its_loss_the_mean_over_samples(micro_batch_size):
    model, twin = twins()
    batches = [(torch.randn(n, 3), torch.randn(n, 1)) for n in (5, 2)]
    heard = []
    loss = train_epoch(make_step(model, micro_batch_size=micro_batch_size), batches, Tally(), lambda: heard.append(1))
    total = 0.0
    for x, y in batches:
        mean = (twin(x) - y).square().mean()
        total += mean.item() * len(y)
        gradients = torch.autograd.grad(mean, list(twin.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    assert loss == pytest.approx(total / 7)
    torch.testing.assert_close(model.weight, twin.weight)
    assert len(heard) == 2


class SmallMemory(nn.Module):
    """Takes at most `fits` samples at once."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        self.fits, self.layer = fits, nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.layer(x)


@pytest.mark.parametrize(
    ("fits", "micro_batch_size", "message"),
    [
        (20, None, "batch of 64 samples in micro-batches of 64. Micro-batches of 16 fit: use --micro-batch 16"),
        (5, 16, "batch of 64 samples in micro-batches of 16. Micro-batches of 4 fit: use --micro-batch 4"),
        (0, None, "batch of 64 samples in micro-batches of 64; not even one sample fits"),
    ],
)
def test_out_of_memory_names_the_sizes_and_what_fits(fits, micro_batch_size, message):
    step = make_step(SmallMemory(fits), micro_batch_size=micro_batch_size)
    with pytest.raises(BatchTooLargeError) as caught:
        step((torch.randn(64, 3), torch.randn(64, 1)))
    assert message in str(caught.value)


def test_what_is_advised_on_out_of_memory_runs():
    model = SmallMemory(20)
    make_step(model, micro_batch_size=16)((torch.randn(64, 3), torch.randn(64, 1)))
    assert model.layer.weight.grad is not None
