"""A framework's number of accumulated passes, where each optimizer step may have another."""

from typing import Any, Self


class PassCount(int):
    """How many backward passes an optimizer step has, for a framework that finds the ends of steps by a remainder.

    Lightning and the Hugging Face Trainer count the passes of an epoch and end a step where `count % passes` is 0,
    which is right only if all steps of the epoch have equally many. The remainder of this number counts from the first
    pass of the present step, so that it is 0 where that step begins and ends. In everything else, and in checkpoints,
    it is a plain number.

    >>> passes = PassCount(4, before=3)  # three passes came before this step, which has four
    >>> [count % passes == 0 for count in (3, 4, 5, 6, 7)]
    [True, False, False, False, True]

    Args:
        number: The passes of a full step.
        before: Passes of the epoch before this step.
        made: The passes that this step has: fewer than `number` where an epoch or the training ends; None for `number`.
    """

    before: int
    made: int

    def __new__(cls, number: int, *, before: int, made: int | None = None) -> Self:
        passes = super().__new__(cls, number)
        passes.before, passes.made = before, number if made is None else made
        return passes

    def __rmod__(self, count: Any) -> Any:
        return (count - self.before) % self.made

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return int, (int(self),)
