"""What accumulated passes are compared with: loops that put each step's samples through the model at once."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from divebatch import AdaptiveLoader, Controller, Decision, EpochRecord, Measurement, Policy
from divebatch.integrations.accumulation import InMultiples

NUM_TEXTS = 95
"""Neither passes nor two processes can share them evenly."""


@dataclass(frozen=True)
class BySteps(Policy):
    """Another size every `every` steps, written down; everything is measured all the same."""

    needs: ClassVar[frozenset[str]] = frozenset({"diversity"})
    estimator: ClassVar[str | None] = "moments"
    decides_within_epochs: ClassVar[bool] = True
    sizes: tuple[int, ...] = (6, 18, 12, 30)
    every: int = 4

    def next(self, seen: Measurement) -> Decision:
        return Decision(batch_size=self.sizes[seen.step // self.every % len(self.sizes)])


def texts() -> TensorDataset:
    """(number, ids): each text and which one it is."""
    ids = torch.randint(0, 16, (NUM_TEXTS, 8), generator=torch.Generator().manual_seed(0))
    return TensorDataset(torch.arange(NUM_TEXTS), ids)


class TinyGpt2(nn.Module):
    """transformers' GPT-2 with one layer, which returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.net = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=ids, labels=ids).loss
        return loss


def cosine(optimizer: Optimizer, steps: int) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, steps)


@dataclass
class Course:
    """What a run ends with, and the rates of its steps."""

    model: nn.Module
    records: list[EpochRecord]
    rates: list[float]
    scheduler: Any


def whole_steps(policy: Policy, *, unit: int, batch_size: int, every_steps: int | None, steps: int) -> Course:
    """The README's loop on `TinyGpt2`, until it has seen what `steps` steps of the first size hold."""
    model = TinyGpt2()
    optimizer = AdamW(model.parameters(), lr=0.01)
    loader = AdaptiveLoader(texts(), batch_size, seed=3)
    epochs = steps // len(loader)
    assert steps == epochs * len(loader)
    scheduler = cosine(optimizer, steps)
    settings: dict[str, Any] = {"lr_coupling": "sqrt", "every_steps": every_steps}
    settings |= {"scheduler": scheduler, "scheduler_unit": "step"}
    course = Course(model, [], [], scheduler)
    with Controller(model, optimizer, loader, InMultiples(policy, unit), **settings) as control:
        optimizer.register_step_pre_hook(lambda o, *_: course.rates.append(o.param_groups[0]["lr"]))
        for _ in range(epochs):
            for _, ids in loader:
                optimizer.zero_grad()
                model(ids).backward()
                optimizer.step()
                scheduler.step()
            course.records.append(control.step())
    return course


def size_of(model: nn.Module) -> float:
    """One number that tells two trainings apart."""
    return math.fsum(float(p.detach().double().abs().sum()) for p in model.parameters())
