"""Which schedulers drive an optimizer, and whether the controller was given all of them."""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from divebatch.errors import ArgumentError


def require_all_schedulers(optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
    """Raise for a scheduler of another optimizer, and for one that was not passed: it would undo the coupling."""
    for scheduler in schedulers:
        _require_scheduler(scheduler, optimizers)
    passed = {id(part) for scheduler in schedulers for part in _with_parts(scheduler)}
    missing = sorted({type(found).__name__ for found in _living(optimizers) if id(found) not in passed})
    if missing:
        raise ArgumentError(
            f"the optimizer has a scheduler that was not passed: {', '.join(missing)}. "
            f"Pass scheduler=... (a list for several) so that the learning rate stays right."
        )


def _require_scheduler(scheduler: Any, optimizers: Sequence[Optimizer]) -> None:
    name = type(scheduler).__name__
    if not callable(getattr(scheduler, "step", None)):
        raise ArgumentError(f"scheduler must be an object with a method step(), or a list of such, got {name}")
    # One of another kind may write to the groups without keeping the optimizer.
    driven = getattr(scheduler, "optimizer", None)
    is_one_of_them = any(driven is optimizer for optimizer in optimizers)
    if not is_one_of_them and (driven is not None or isinstance(scheduler, LRScheduler)):
        raise ArgumentError(f"scheduler {name} does not drive the optimizer that was passed")


def _living(optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
    # An optimizer does not know its schedulers (ReduceLROnPlateau leaves no trace on it at all); the garbage
    # collector does. type() and not isinstance(), which would wake lazy objects; some 60 ms, once a run.
    driven = {id(optimizer) for optimizer in optimizers}
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), LRScheduler) and id(getattr(found, "optimizer", None)) in driven
    ]


def _with_parts(scheduler: Any) -> Iterator[Any]:
    """The scheduler and those inside it (SequentialLR, ChainedScheduler)."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _with_parts(part)
