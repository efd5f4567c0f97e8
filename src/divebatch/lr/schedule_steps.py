"""How far a scheduler goes at a call of its `step`, where the number of calls changes with the batch size."""

import math
from collections import Counter
from typing import Any, Literal

from divebatch.checks import warn_user
from divebatch.data.loader import AdaptiveLoader
from divebatch.data.order import EpochProgress, num_batches
from divebatch.errors import UsageError

ScheduleIn = Literal["epochs", "steps", "calls"]
Rest = Literal["left out", "own step", "carried over"]

_STATE = (
    "first_size",
    "first_delivery",
    "first_epoch",
    "is_by_steps",
    "is_resized",
    "is_told",
    "has_warned",
    "made",
    "anchor",
    "called_at",
    "first_gap",
    "rest",
)
"""The attributes that are saved as they are."""


class ScheduleSteps:
    """Counts one scheduler's steps so that it stands where the loop at its first batch size would stand.

    A scheduler that is called within epochs was made for as many calls as there are at the first size. While that size
    is in force each call is one step, as without a controller. From the first other size on samples count: a call moves
    the scheduler by 0, 1 or several steps. One that is called after whole epochs moves by one step a call.

    Args:
        name: The scheduler's, for messages.
        loader: Delivers the batches.
        schedule_in: What `Controller` was told; None to find out.
    """

    def __init__(self, name: str, loader: AdaptiveLoader, schedule_in: ScheduleIn | None) -> None:
        self.name, self.schedule_in, self._loader = name, schedule_in, loader
        self._first_size = loader.batch_size
        self._first_delivery = loader.delivery_size or loader.batch_size
        """Samples of a delivered batch at the first size; fewer than that where several make one step."""
        self._first_epoch = loader.epoch
        self._is_by_steps, self._is_resized = schedule_in == "steps", False
        self._is_told, self._has_warned = False, False
        self._made, self._anchor = 0, 0
        """Steps made so far; and how many more that is than the samples say: fixed when the size first changes."""
        self._called_at = loader.batches_delivered
        self._gaps: Counter[int] = Counter()
        """How often there were so many batches between two calls: more than one for accumulated gradients."""
        # Where the loader says how many batches make a step, so many are expected between two calls.
        self._first_gap = math.ceil(self._first_size / self._first_delivery) if loader.delivery_size else 0
        self._rest: Rest = "own step" if loader.delivery_size else "left out"
        """What becomes of an epoch's last batches where they are fewer than those between two calls."""

    def due(self) -> int:
        """The loop has called `step`: return how many steps of its own the scheduler must make."""
        self._look()
        steps = self._missing() if self._goes_by_samples else 1
        self._made += steps
        if not self._is_resized:
            self._anchor = self._made - self._place()
        return steps

    def due_after_epoch(self) -> int:
        """An epoch has ended: return how many steps are left of it, where no call came after its last samples."""
        # With drop_last, or where the loop leaves out a rest that fills no step.
        steps = self._missing() if self._goes_by_samples else 0
        self._made += steps
        return steps

    @property
    def _goes_by_samples(self) -> bool:
        return self._is_by_steps and self._is_resized and not self._is_told and self.schedule_in != "calls"

    def _missing(self) -> int:
        return max(0, self._place() + self._anchor - self._made)

    def told(self, *, counts_calls: bool) -> None:
        """The loop has called `step` with an argument: where to stand, or how good the model is. Samples cannot help.

        `counts_calls` says whether what the scheduler does then depends on the number of calls.
        """
        self._is_told = True
        self._look()
        is_off = counts_calls and self._is_resized and self._is_within_epoch()
        if is_off and self.schedule_in is None and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"{self.name}.step(...) is called within epochs and counts its calls, whose number changes with the "
                f"batch size: it was {self._first_size} at first and is {self._loader.batch_size} now. Call it after "
                f"each epoch, or pass Controller(..., schedule_in='calls') if that is meant"
            )

    def _look(self) -> None:
        """Learn from when the call comes."""
        current = self._loader.current
        if self._is_within_epoch():
            if self.schedule_in == "epochs":
                raise UsageError(
                    f"{self.name}.step() was called within an epoch, and Controller has schedule_in='epochs': leave it "
                    f"out, or call {self.name}.step() after each epoch"
                )
            self._is_by_steps = True
        done = current or self._loader._finished
        size = self._first_size if done is None else done.batch_size
        self._is_resized = self._is_resized or size != self._first_size
        self._learn_gap(current)

    def _learn_gap(self, current: EpochProgress | None) -> None:
        gap = self._loader.batches_delivered - self._called_at
        at_end = current is None or current.is_used_up
        if at_end and 0 < gap < self._gap:
            self._rest = "own step"
        elif current is not None and current.batches < min(gap, self._gap):
            self._rest = "carried over"
        elif current is not None and gap > 0 and not at_end:
            self._count_gap(min(gap, current.batches))
        elif self._first_gap == 0:  # it is called once an epoch
            self._first_gap = gap
        self._called_at += gap

    def _count_gap(self, gap: int) -> None:
        if self._first_gap == 0:
            self._first_gap = gap
        elif not self._is_resized or not (self._gaps or self._loader.delivery_size):
            self._gaps[gap] += 1

    def _is_within_epoch(self) -> bool:
        current = self._loader.current
        return current is not None and current.batches > 0 and not current.is_used_up

    @property
    def _gap(self) -> int:
        """Batches between two calls."""
        # The most frequent: the first call may come late, and a GradScaler's overflow leaves one out.
        return self._gaps.most_common(1)[0][0] if self._gaps else self._first_gap or 1

    def _place(self) -> int:
        """Where the loop at the first batch size would stand after as many samples."""
        current, size = self._loader.current, self._loader.dataset_size
        whole = 0 if size is None else num_batches(size, self._first_delivery, drop_last=self._loader.drop_last)
        epochs = self._loader.epoch - self._first_epoch
        before, after = (self._at_end(whole, epochs + more) for more in (0, 1))
        if current is None:
            return before
        if current.is_used_up:
            return after
        batches = math.ceil(current.samples / self._first_delivery)
        carried = epochs * whole % self._gap if self._rest == "carried over" else 0
        place = before + math.ceil((batches + carried) / self._gap)
        return place if size is None else min(place, after)

    def _at_end(self, batches: int, epochs: int) -> int:
        """Steps after so many epochs of so many batches each."""
        if self._rest == "carried over":
            return epochs * batches // self._gap
        return epochs * (math.ceil(batches / self._gap) if self._rest == "own step" else batches // self._gap)

    def state_dict(self) -> dict[str, Any]:
        """All that was counted and learned, as plain values."""
        return {name: getattr(self, f"_{name}") for name in _STATE} | {"gaps": dict(self._gaps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one stood."""
        for name in _STATE:
            setattr(self, f"_{name}", state[name])
        self._gaps = Counter(state["gaps"])
