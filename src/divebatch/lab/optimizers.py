"""Optimizers by kind, without the learning rate, which a method sets. A new optimizer is a dataclass and a row."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from divebatch.errors import ArgumentError
from divebatch.lab.tables import Fraction, NotNegative, Positive


class OptimizerSettings(ABC):
    """A dataclass of settings that can build its optimizer."""

    takes_adam_coupling: ClassVar[bool] = False
    """Whether the optimizer works with `lr_coupling = "adam"`."""

    @abstractmethod
    def build(self, model: nn.Module, lr: float, *, fused: bool | None = None) -> Optimizer:
        """Build the optimizer of all trainable parameters; `fused` is torch's argument. None: torch chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd(OptimizerSettings):
    """The settings of torch.optim.SGD."""

    momentum: NotNegative = 0.0
    weight_decay: NotNegative = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ArgumentError("nesterov=True needs a momentum above 0, got momentum=0.0")

    def build(self, model: nn.Module, lr: float, *, fused: bool | None = None) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, **asdict(self), fused=fused)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(OptimizerSettings):
    """The settings of torch.optim.AdamW. `decay_vectors`: whether vectors such as biases decay too, as in torch."""

    takes_adam_coupling = True

    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.01
    decay_vectors: bool = True

    def build(self, model: nn.Module, lr: float, *, fused: bool | None = None) -> Optimizer:
        decaying: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter in model.parameters():
            (decaying if self.decay_vectors or parameter.ndim >= 2 else others).append(parameter)
        groups = [{"params": decaying, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=fused)


OPTIMIZERS: dict[str, type[OptimizerSettings]] = {"sgd": Sgd, "adamw": AdamW}
