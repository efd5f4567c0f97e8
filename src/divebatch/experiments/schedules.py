"""Learning-rate schedules by kind, stepped once an epoch. A new one is one dataclass and one row."""

from dataclasses import dataclass
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR


class ScheduleSettings(Protocol):
    """A dataclass of settings that can drive an optimizer."""

    def build(self, optimizer: Optimizer) -> LRScheduler | None:
        """A scheduler, or None where the rate stays."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The rate stays."""

    def build(self, optimizer: Optimizer) -> LRScheduler | None:
        """No scheduler."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Times `factor` after every `every_epochs` epochs."""

    factor: float
    every_epochs: int

    def build(self, optimizer: Optimizer) -> LRScheduler | None:
        """torch's StepLR."""
        return StepLR(optimizer, step_size=self.every_epochs, gamma=self.factor)


SCHEDULES: dict[str, type[ScheduleSettings]] = {"constant": Constant, "step": Step}
