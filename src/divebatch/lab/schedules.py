"""Learning-rate schedules by kind, stepped once an epoch or, by samples seen, at every step.

A new one is one dataclass and one row.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, StepLR

from divebatch.lab.tables import Count, Fraction, Positive


class ScheduleSettings(ABC):
    """A dataclass of settings that can drive an optimizer."""

    epoch_settings: ClassVar[frozenset[str]] = frozenset()
    """Its settings that count epochs, which shrink with the experiment."""
    has_end: ClassVar[bool] = False
    """Whether it is made for one length of training, beyond which no run continues."""
    is_by_samples: ClassVar[bool] = False
    """Whether it follows the part of the run that is over, and is stepped after every batch, not every epoch."""

    @abstractmethod
    def build(self, optimizer: Optimizer, fraction: Callable[[], float]) -> LRScheduler | None:
        """Return a scheduler, or None where the rate stays.

        `fraction` gives the part of the run that will be over after the next batch, from 0 to 1.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(ScheduleSettings):
    """The rate stays."""

    def build(self, optimizer: Optimizer, fraction: Callable[[], float]) -> LRScheduler | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecay(ScheduleSettings):
    """Times `factor` after every `every_epochs` epochs."""

    epoch_settings = frozenset({"every_epochs"})

    factor: Positive
    every_epochs: Count

    def build(self, optimizer: Optimizer, fraction: Callable[[], float]) -> LRScheduler | None:
        return StepLR(optimizer, step_size=self.every_epochs, gamma=self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(ScheduleSettings):
    """Half a cosine from the first rate to zero after `over_epochs` epochs."""

    epoch_settings = frozenset({"over_epochs"})
    has_end = True

    over_epochs: Count

    def build(self, optimizer: Optimizer, fraction: Callable[[], float]) -> LRScheduler | None:
        return CosineAnnealingLR(optimizer, T_max=self.over_epochs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestones(ScheduleSettings):
    """Times `factor` after each of the epochs in `after_epochs`."""

    epoch_settings = frozenset({"after_epochs"})

    factor: Positive
    after_epochs: list[Count] = field(default_factory=list)

    def build(self, optimizer: Optimizer, fraction: Callable[[], float]) -> LRScheduler | None:
        return MultiStepLR(optimizer, milestones=self.after_epochs, gamma=self.factor)


class FractionLR(LRScheduler):
    """The first rates times `course` of the part of the run that is over; a second step there changes nothing.

    So every batch size has the same course and ends at its floor.
    """

    def __init__(self, optimizer: Optimizer, course: Callable[[float], float], fraction: Callable[[], float]) -> None:
        self._course, self._fraction = course, fraction
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        factor = self._course(self._fraction())
        return [rate * factor for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return torch's entries; course and run belong to the configuration."""
        return {name: value for name, value in super().state_dict().items() if name not in ("_course", "_fraction")}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosine(ScheduleSettings):
    """Up in a straight line over the first `warmup` of the run, then half a cosine down to `floor` of the rate."""

    is_by_samples = True
    has_end = True

    warmup: Fraction = 0.02
    floor: Fraction = 0.1

    def course(self, fraction: float) -> float:
        """Return the rate relative to its highest."""
        if fraction < self.warmup:
            return fraction / self.warmup
        down = (fraction - self.warmup) / (1 - self.warmup)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * down)) / 2

    def build(self, optimizer: Optimizer, fraction: Callable[[], float]) -> LRScheduler | None:
        return FractionLR(optimizer, self.course, fraction)


SCHEDULES: dict[str, type[ScheduleSettings]] = {
    "constant": Constant,
    "step": StepDecay,
    "cosine": Cosine,
    "milestones": Milestones,
    "warmup-cosine": WarmupCosine,
}


def warm_up(optimizer: Optimizer, steps: int) -> LRScheduler | None:
    """Make a factor beside any schedule, stepped with every batch: 1/steps at the first, 2/steps, ..., then 1."""
    return LinearLR(optimizer, start_factor=1 / steps, total_iters=steps - 1) if steps > 1 else None
