"""Optimizers by kind, beside the learning rate, which a method has. A new one is one dataclass and one row."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from divebatch.checks import require_positive
from divebatch.errors import ArgumentError


class OptimizerSettings(ABC):
    """A dataclass of settings that can build its optimizer."""

    takes_adam_coupling: ClassVar[bool] = False
    """Whether `lr_coupling = "adam"` is for it."""

    @abstractmethod
    def build(self, model: nn.Module, lr: float, *, fused: bool | None = None) -> Optimizer:
        """Make the optimizer of all trainable parameters; `fused` is torch's, with None for torch's own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd(OptimizerSettings):
    """torch.optim.SGD."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _require_not_negative(momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and not self.momentum:
            raise ArgumentError("nesterov=True needs a momentum above 0, got momentum=0.0")

    def build(self, model: nn.Module, lr: float, *, fused: bool | None = None) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, **asdict(self), fused=fused)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(OptimizerSettings):
    """torch.optim.AdamW. `decay_vectors`: whether biases and the scales of norm layers decay too, as torch has it."""

    takes_adam_coupling = True

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay_vectors: bool = True

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be at least 0 and below 1, got {name}={getattr(self, name)}")
        require_positive("eps", self.eps)
        _require_not_negative(weight_decay=self.weight_decay)

    def build(self, model: nn.Module, lr: float, *, fused: bool | None = None) -> Optimizer:
        betas = (self.beta1, self.beta2)
        decaying: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter in model.parameters():
            (decaying if self.decay_vectors or parameter.ndim >= 2 else others).append(parameter)
        groups = [{"params": decaying, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=lr, betas=betas, eps=self.eps, fused=fused
        )


OPTIMIZERS: dict[str, type[OptimizerSettings]] = {"sgd": Sgd, "adamw": AdamW}


def _require_not_negative(**values: float) -> None:
    for name, value in values.items():
        if value != 0:
            require_positive(name, value)
