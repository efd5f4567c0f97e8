"""Learning-rate schedules by kind, stepped after every epoch or, if they follow samples, after every batch.

A new schedule is a dataclass and a row.
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
    """The settings that count epochs, which scale with the experiment's epochs."""
    has_end: ClassVar[bool] = False
    """Whether the schedule is made for one length of training, beyond which no run can continue."""
    is_by_samples: ClassVar[bool] = False
    """Whether the schedule follows the completed fraction of the run, stepped after every batch."""

    @abstractmethod
    def build(self, optimizer: Optimizer, fraction: Callable[[], float]) -> LRScheduler | None:
        """Build the scheduler; None: the rate is constant.

        `fraction` returns the fraction of the run that will be over after the next batch, from 0 to 1.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(ScheduleSettings):
    """A constant rate."""

    def build(self, optimizer: Optimizer, fraction: Callable[[], float]) -> LRScheduler | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecay(ScheduleSettings):
    """A rate that is multiplied by `factor` after every `every_epochs` epochs."""

    epoch_settings = frozenset({"every_epochs"})

    factor: Positive
    every_epochs: Count

    def build(self, optimizer: Optimizer, fraction: Callable[[], float]) -> LRScheduler | None:
        return StepLR(optimizer, step_size=self.every_epochs, gamma=self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(ScheduleSettings):
    """Half a cosine from the first rate down to zero after `over_epochs` epochs."""

    epoch_settings = frozenset({"over_epochs"})
    has_end = True

    over_epochs: Count

    def build(self, optimizer: Optimizer, fraction: Callable[[], float]) -> LRScheduler | None:
        return CosineAnnealingLR(optimizer, T_max=self.over_epochs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestones(ScheduleSettings):
    """A rate that is multiplied by `factor` after each epoch in `after_epochs`."""

    epoch_settings = frozenset({"after_epochs"})

    factor: Positive
    after_epochs: list[Count] = field(default_factory=list)

    def build(self, optimizer: Optimizer, fraction: Callable[[], float]) -> LRScheduler | None:
        return MultiStepLR(optimizer, milestones=self.after_epochs, gamma=self.factor)


class FractionLR(LRScheduler):
    """A scheduler whose rates are the first ones times `course(fraction())`.

    Every batch size follows the same course to its floor; a repeated step changes nothing.
    """

    def __init__(self, optimizer: Optimizer, course: Callable[[float], float], fraction: Callable[[], float]) -> None:
        self._course, self._fraction = course, fraction
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        factor = self._course(self._fraction())
        return [rate * factor for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return torch's entries without the functions, which follow from the configuration."""
        return {name: value for name, value in super().state_dict().items() if name not in ("_course", "_fraction")}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosine(ScheduleSettings):
    """A linear rise over the first `warmup` of the run, then half a cosine down to `floor` of the rate."""

    is_by_samples = True
    has_end = True

    warmup: Fraction = 0.02
    floor: Fraction = 0.1

    def course(self, fraction: float) -> float:
        """Return the rate as a fraction of the highest."""
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
    """Make a scheduler with the factors 1/steps, 2/steps, ..., 1, stepped after every batch, beside any schedule."""
    return LinearLR(optimizer, start_factor=1 / steps, total_iters=steps - 1) if steps > 1 else None
