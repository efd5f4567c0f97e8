"""Replayed passes against the same passes run one kernel at a time. Needs a GPU."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from divebatch.training import Clock, Passes, Setup, Step
from divebatch.training.distributed import Parallel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = [32, 32, 32, 32, 7, 32, 64, 64, 64, 5]
"""A first pass, a recorded one, replays, a short last batch; then another size."""


def trained(*, cuda_graphs: bool) -> tuple[dict[str, torch.Tensor], list[float], Passes]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    model = layers.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
    passes = Passes(Parallel.alone(model), cross_entropy, Setup(compile=True, cuda_graphs=cuda_graphs), Clock(device))
    step, losses = Step(passes, optimizer), []
    for size in SIZES:
        if size in (32, 64):
            passes.begin_epoch(size)
        inputs = torch.randn(size, 3, 12, 12, device=device).contiguous(memory_format=torch.channels_last)
        losses.append(step((inputs, torch.randint(4, (size,), device=device))).item())
    return model.state_dict(), losses, passes


def test_replayed_passes_train_the_same_weights_statistics_and_losses():
    plain, plain_losses, _ = trained(cuda_graphs=False)
    replayed, losses, passes = trained(cuda_graphs=True)
    assert passes._recording is not None
    assert passes.peak_memory_bytes > 0
    assert passes.num_compiled == 2
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    assert len(set(losses)) == len(losses)
    for name, value in plain.items():
        torch.testing.assert_close(replayed[name], value, rtol=1e-3, atol=1e-5)
