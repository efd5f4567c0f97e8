"""A scheduler whose `step` sees its own rates and goes as far as is due."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from divebatch.lr.schedule_steps import ScheduleSteps

OwnRates = Callable[[Any], AbstractContextManager[bool]]
"""Shows a scheduler its own rates, and says whether one around it is at work already."""


class Adopted:
    """Takes over a scheduler's `step` until `release`.

    Args:
        scheduler: The scheduler, of torch or of any other kind.
        steps: Counts its steps.
        own_rates: Shows it its own rates.
    """

    def __init__(self, scheduler: Any, steps: ScheduleSteps, own_rates: OwnRates) -> None:
        self._scheduler, self._kind = scheduler, type(scheduler)
        self._steps, self._own_rates = steps, own_rates
        adopted, kind = self, self._kind

        class Coupled(kind):  # type: ignore[misc, valid-type]
            def step(self, *args: Any, **kwargs: Any) -> None:
                adopted._step(args, kwargs)

        Coupled.__name__, Coupled.__qualname__ = kind.__name__, kind.__qualname__
        # Not a wrapper around `step`: an attribute of the instance would be saved with the scheduler.
        scheduler.__class__ = Coupled

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._own_rates(self._scheduler) as is_nested:
            for _ in range(1 if is_nested else self._due((*args, *kwargs.values()))):
                self._kind.step(self._scheduler, *args, **kwargs)

    def _due(self, arguments: tuple[Any, ...]) -> int:
        place = next((value for value in arguments if value is not None), None)
        if place is None:
            return self._steps.due()
        self._steps.told(counts_calls=isinstance(place, int) or isinstance(self._scheduler, ReduceLROnPlateau))
        return 1

    def end_epoch(self) -> None:
        """Make the steps that are left of the epoch."""
        with self._own_rates(self._scheduler):
            for _ in range(self._steps.due_after_epoch()):
                self._kind.step(self._scheduler)

    def release(self) -> None:
        """Give the scheduler its own `step` back."""
        self._scheduler.__class__ = self._kind
