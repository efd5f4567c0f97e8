"""What a learning rate means that the user's loop writes into a parameter group."""

import math
from typing import Any, Literal

from divebatch.checks import warn_user

Reading = Literal["own", "in force"]


class HandSetRates:
    """Tells the schedule's own rate from what a loop wrote.

    `group["lr"] = lr_at(step)` knows nothing of the batch size's factor and writes the schedule's own rate.
    `group["lr"] *= 0.99` has read the rate in force and writes what shall be in force. While the factor is 1 both are
    the same; after that each reading says where a course that goes on as before must come next, a factor apart. What
    fits one of them decides for all that comes. What fits neither is taken as the schedule's own, with a warning.

    Args:
        reading: How to read all that is written; None to find out.
    """

    def __init__(self, reading: Reading | None = None) -> None:
        self._reading = reading
        self._ratios: dict[int, float] = {}
        """By what each group's own rate was multiplied at its last write, where that is known."""
        self._has_warned = False

    def own_rate(self, group: int, written: float, *, own: float, factor: float) -> float:
        """Return the schedule's own rate of the group with that index; `own` is the one before."""
        if factor != 1 and self._reading is None:
            self._reading = self._recognised(written, own * self._ratios.get(group, 1.0), factor)
        is_known = factor == 1 or self._reading is not None or written == 0
        if not is_known:
            self._warn(written, factor)
        taken = written / factor if self._reading == "in force" else written
        # A ratio that rests on an assumption would prove that assumption right at the next write.
        self._ratios.pop(group, None)
        if is_known and own > 0 and taken > 0:
            self._ratios[group] = taken / own
        return taken

    def _recognised(self, written: float, expected: float, factor: float) -> Reading | None:
        if not (written > 0 and expected > 0):
            return None
        margin = abs(math.log(factor)) / 4
        off_own = math.log(written / expected)
        if abs(off_own) <= margin:
            return "own"
        return "in force" if abs(off_own - math.log(factor)) <= margin else None

    def _warn(self, written: float, factor: float) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warn_user(
            f"the learning rate was set to {written:.4g} by hand while the batch size multiplies it by {factor:.4g}: "
            f"{written:.4g} is taken as the schedule's own rate, so {written * factor:.4g} is in force. If "
            f"that is meant, pass Controller(..., hand_set_lr='own'); if {written:.4g} was to be in force, as after "
            f"`group['lr'] *= ...`, pass hand_set_lr='in force'"
        )

    def state_dict(self) -> dict[str, Any]:
        """How writes are read, and the course so far."""
        return {"reading": self._reading, "ratios": dict(self._ratios), "has_warned": self._has_warned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one stood."""
        self._reading, self._has_warned = state["reading"], state["has_warned"]
        self._ratios = dict(state["ratios"])
