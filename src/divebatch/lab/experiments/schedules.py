"""Learning-rate schedules by kind, stepped once an epoch. A new one is one dataclass and one row."""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, StepLR

from divebatch.checks import require_count, require_positive


class ScheduleSettings(Protocol):
    """A dataclass of settings that can drive an optimizer."""

    epoch_settings: ClassVar[frozenset[str]]
    """Its settings that count epochs: an experiment that is shortened shortens them with it."""

    def build(self, optimizer: Optimizer) -> LRScheduler | None:
        """A scheduler, or None where the rate stays."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The rate stays."""

    epoch_settings: ClassVar[frozenset[str]] = frozenset()

    def build(self, optimizer: Optimizer) -> LRScheduler | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecay:
    """Times `factor` after every `every_epochs` epochs."""

    epoch_settings: ClassVar[frozenset[str]] = frozenset({"every_epochs"})

    factor: float
    every_epochs: int

    def __post_init__(self) -> None:
        require_positive("factor", self.factor)
        require_count("every_epochs", self.every_epochs)

    def build(self, optimizer: Optimizer) -> LRScheduler | None:
        return StepLR(optimizer, step_size=self.every_epochs, gamma=self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """Half a cosine from the first rate to zero after `over_epochs` epochs."""

    epoch_settings: ClassVar[frozenset[str]] = frozenset({"over_epochs"})

    over_epochs: int

    def __post_init__(self) -> None:
        require_count("over_epochs", self.over_epochs)

    def build(self, optimizer: Optimizer) -> LRScheduler | None:
        return CosineAnnealingLR(optimizer, T_max=self.over_epochs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestones:
    """Times `factor` after each of the epochs in `after_epochs`."""

    epoch_settings: ClassVar[frozenset[str]] = frozenset({"after_epochs"})

    factor: float
    after_epochs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_positive("factor", self.factor)
        for epoch in self.after_epochs:
            require_count("after_epochs", epoch)

    def build(self, optimizer: Optimizer) -> LRScheduler | None:
        return MultiStepLR(optimizer, milestones=self.after_epochs, gamma=self.factor)


SCHEDULES: dict[str, type[ScheduleSettings]] = {
    "constant": Constant,
    "step": StepDecay,
    "cosine": Cosine,
    "milestones": Milestones,
}


def warm_up(optimizer: Optimizer, steps: int) -> LRScheduler | None:
    """A factor beside any schedule, stepped with every batch: 1/steps at the first, 2/steps, ..., 1 from then on."""
    return LinearLR(optimizer, start_factor=1 / steps, total_iters=steps - 1) if steps > 1 else None
