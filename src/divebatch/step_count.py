"""What an optimizer step really holds: the loader's batches and the optimizer's steps, counted against each other.

A loop that adds up the gradients of several batches before it steps says so to nobody. But both sides are seen, so k,
the batches of a step, is counted and not told.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from divebatch.checks import require_count
from divebatch.errors import ArgumentError, UsageError
from divebatch.measurement import Decision, Measurement
from divebatch.policies import Policy

SURE = 3
"""Steps that must agree before a loop is told that it does something else than was said."""


class Deliverer(Protocol):
    """What is asked of the loader."""

    @property
    def batches_delivered(self) -> int:
        """Batches so far."""
        ...

    @property
    def batch_size(self) -> int:
        """Samples of a batch from the next pass on."""
        ...

    @property
    def delivery_size(self) -> int | None:
        """Samples of a delivered batch, where a step takes several that make one of `batch_size`."""
        ...

    @property
    def is_at_end(self) -> bool:
        """Whether the epoch under way has no batch left, or there is none under way."""
        ...


class StepCount:
    """Counts optimizer steps, and how many of the loader's batches each takes.

    k is the median of the steps since the last decision, so what happens to single ones does not matter: a GradScaler
    that skips a step, which leaves two batches between two steps; a loop's prefetching, which adds to the first; the
    last batches of an epoch, which may make a step of fewer, be carried into the next epoch, or be dropped. While
    nothing is decided yet each step corrects k at once, so that the learning rate is right from the first step on.

    Args:
        deliverer: Who delivers the batches.
        told: k, where the loop's author has told it; None to count it.
        on_change: Called where k turns out to be another before anything was decided.
    """

    def __init__(self, deliverer: Deliverer, *, told: int | None, on_change: Callable[[], None]) -> None:
        _require_one_way(told, deliverer.delivery_size)
        self._deliverer, self._told, self._on_change = deliverer, told, on_change
        self.batches_per_step = told or 1
        """k: the batches of a step."""
        self._is_settled = told is not None or deliverer.delivery_size is not None
        self._before = deliverer.batches_delivered // self.batches_per_step
        """Steps of the epochs that are over."""
        self._at_step = deliverer.batches_delivered
        """Batches that had been delivered at the last step."""
        self._is_open, self._in_epoch, self._skips_first = False, 0, False
        self._begin_window()
        self._handles: list[RemovableHandle] = []

    def watch(self, optimizer: Optimizer) -> None:
        """Count this optimizer's steps."""
        # Before the step: the rate that it uses may depend on what it is found to hold.
        self._handles.append(optimizer.register_step_pre_hook(self._on_step))

    def close(self) -> None:
        """Count no more."""
        while self._handles:
            self._handles.pop().remove()

    @property
    def unit(self) -> int:
        """How many batches of the loader's `batch_size` a step holds."""
        return 1 if self._deliverer.delivery_size is not None else self.batches_per_step

    @property
    def batch_size(self) -> int:
        """Samples of a step from the next pass on."""
        return self._deliverer.batch_size * self.unit

    @property
    def made(self) -> int:
        """Steps so far, those of the epoch under way included."""
        return self._before + self._in_epoch

    def begin_epoch(self) -> None:
        """A pass begins; what was counted of one that was broken off does not count."""
        self._is_open, self._in_epoch = True, 0
        self._begin_window()
        # Batches of the last epoch without a step may be in the first one of this epoch, or may have been dropped.
        self._skips_first = self._at_step < self._deliverer.batches_delivered
        self._at_step = self._deliverer.batches_delivered

    def _begin_window(self) -> None:
        self._in_window = 0
        """Steps since the last decision."""
        self._inner: Counter[int] = Counter()
        """How many steps took so many batches each, of those with batches before and after them."""
        self._at_end, self._steps_at_end = 0, 0
        """Batches and steps at an epoch's end."""
        self._has_stepped = False

    def _on_step(self, *_: Any) -> None:
        if not self._is_open or torch.compiler.is_compiling():  # not a step of training, or one that no hook sees
            return
        taken = self._deliverer.batches_delivered - self._at_step
        self._at_step += taken
        self._in_epoch += 1
        self._in_window += 1
        self._has_stepped = True
        if self._deliverer.is_at_end:
            self._at_end, self._steps_at_end = self._at_end + taken, self._steps_at_end + 1
        elif not self._skips_first:
            self._inner[taken] += 1
        self._skips_first = False
        if not self._is_settled and (found := self._found()) != self.batches_per_step:
            self.batches_per_step = found
            self._on_change()

    def came_after_step(self) -> bool:
        """Whether a step was made since this was last asked: the loop comes for a batch, and stands between steps."""
        has_stepped, self._has_stepped = self._has_stepped, False
        return has_stepped

    def is_due(self, every_steps: int) -> bool:
        """Whether a decision is due after so many steps."""
        return self._in_window >= every_steps

    def settle(self, batch_size: int) -> None:
        """A decision is about to be made: k is what was told, or what most steps since the last decision took.

        `batch_size` is the loader's that was in force.
        """
        delivered = self._deliverer.delivery_size
        told = self._told if delivered is None else math.ceil(batch_size / delivered)
        self._require_countable(told)
        self.batches_per_step = self._found() if told is None else told
        self._is_settled = True

    def end_window(self) -> None:
        """A decision was made within the epoch."""
        self._begin_window()

    def end_epoch(self) -> None:
        """The epoch's decision was made."""
        self._before, self._in_epoch, self._is_open = self.made, 0, False
        self._begin_window()

    def complete(self, batches: int, *, every_steps: int | None) -> None:
        """An epoch of so many batches has ended. Where no hook saw its steps, they were as many as its batches make."""
        if self._in_epoch:
            return
        if every_steps is not None:
            raise UsageError(
                f"every_steps={every_steps} counts steps of the optimizer, and none was seen in this epoch: pass the "
                f"optimizer that steps, or leave every_steps out where its step is compiled or recorded"
            )
        self._in_epoch = max(1, batches // self.batches_per_step)

    def _found(self) -> int:
        """Return k by what was seen; few steps that agree with the k in force leave it alone."""
        steps = self._inner.total() + self._steps_at_end
        batches = sum(taken * count for taken, count in self._inner.items()) + self._at_end
        if not batches or (self._is_settled and steps < SURE and self._agrees(batches, steps)):
            return self.batches_per_step
        # A prefetching loop makes its last steps when all batches were delivered: together they tell.
        return max(1, _median(self._inner) if self._inner else round(batches / steps))

    def _agrees(self, batches: int, steps: int) -> bool:
        return steps in (batches // self.batches_per_step, math.ceil(batches / self.batches_per_step))

    def _require_countable(self, told: int | None) -> None:
        steps = self._inner.total()
        if steps < SURE:
            return
        seen = _median(self._inner)
        if told is None and self._inner[0] * 2 >= steps:
            raise UsageError(
                f"the optimizer stepped {steps} times on {sum(k * n for k, n in self._inner.items())} batches of the "
                f"loader: what one step holds cannot be counted. Let the loader deliver what a step takes "
                f"(batch_size=...), or, where each step takes the whole batch, pass Controller(..., batches_per_step=1)"
            )
        if told is not None and seen != told and (seen, told) != (0, 1):  # the same batch again is one batch
            raise UsageError(
                f"{told} of the loader's batches were to make one optimizer step (batches_per_step, or batch_size over "
                f"delivery_size), and the optimizer steps once in {seen}: step once in {told} batches, or pass "
                f"batches_per_step={seen} and no delivery_size"
            )

    def state_dict(self) -> dict[str, Any]:
        """All counts, as plain numbers."""
        return {
            "batches_per_step": self.batches_per_step,
            "is_settled": self._is_settled,
            "before": self._before,
            "in_epoch": self._in_epoch,
            "in_window": self._in_window,
            "inner": [list(pair) for pair in sorted(self._inner.items())],
            "at_end": [self._at_end, self._steps_at_end],
            "has_stepped": self._has_stepped,
            "since_step": self._deliverer.batches_delivered - self._at_step,
            "is_open": self._is_open,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another count stood; the loader has its state already."""
        self.batches_per_step = state["batches_per_step"]
        self._is_settled, self._is_open = state["is_settled"], state["is_open"]
        self._before, self._in_epoch, self._in_window = state["before"], state["in_epoch"], state["in_window"]
        self._inner = Counter(dict(state["inner"]))
        self._at_end, self._steps_at_end = state["at_end"]
        self._has_stepped = state["has_stepped"]
        self._at_step = self._deliverer.batches_delivered
        # The gradients of batches without a step were not saved, and a resumed loop counts them anew, or not.
        self._skips_first = state["since_step"] > 0


def _require_one_way(told: int | None, delivery_size: int | None) -> None:
    """Raise where both loader and controller are told that a step takes several batches."""
    if told is not None:
        require_count("batches_per_step", told)
    if told is not None and delivery_size is not None:
        raise ArgumentError(
            f"the loader's delivery_size={delivery_size} says already how much of a step it delivers: leave "
            f"batches_per_step={told} out, or delivery_size"
        )


def _median(counts: Counter[int]) -> int:
    """The lower median: what disturbs a count makes it larger, never smaller."""
    half, place = (counts.total() + 1) // 2, 0
    for value in sorted(counts):
        place += counts[value]
        if place >= half:
            return value
    raise ValueError("no counts")  # pragma: no cover


def in_multiples(
    policy: Policy, seen: Measurement, unit: int, *, at_most: float = math.inf, at_least: int = 1
) -> Decision:
    """Return what `policy` decides, rounded down to a multiple of `unit`, but not to nothing.

    Args:
        policy: Who decides.
        seen: What it sees.
        unit: What a size must be a multiple of: a step's batches, or the samples of one backward pass.
        at_most: The most samples that a step may hold.
        at_least: The fewest units that a step may hold.
    """
    # Rounded down: a policy's cap stays one. And no learning rate may follow a batch that does not exist.
    decision = policy.next(seen)
    decision = (decision if decision.batch_size <= at_most else decision.at_most(int(at_most))).at_least(at_least)
    size = max(at_least, decision.batch_size // unit) * unit
    if policy.moves_lr and size < decision.batch_size:  # asked again, for a learning rate that belongs to this size
        decision = replace(policy.next(replace(seen, largest_batch_size=size)), reason=decision.reason)
    reason = f"{decision.reason}; in multiples of {unit}".lstrip("; ")
    return decision if size == decision.batch_size else replace(decision, batch_size=size, reason=reason)
