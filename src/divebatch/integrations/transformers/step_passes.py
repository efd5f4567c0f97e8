"""The Trainer's `gradient_accumulation_steps` where each optimizer step may have another number of passes."""

from typing import Any, Self


class StepPasses(int):
    """How many backward passes an optimizer step has, for a Trainer that finds the ends of steps by a remainder.

    It counts the passes of an epoch and takes a step to end where `count % gradient_accumulation_steps` is 0: right
    only if all steps of the epoch are alike. This number's remainder counts from the first pass of the step under way,
    so that it is 0 where that step begins and ends. In everything else, and in checkpoints, it is a plain number.

    >>> passes = StepPasses(4, before=3, made=4)  # three passes came before this step, which has four
    >>> [count % passes == 0 for count in (3, 4, 5, 6, 7)]
    [True, False, False, False, True]

    Args:
        number: The passes of a full step.
        before: Passes of the epoch before this step.
        made: The passes that this step has: fewer than `number` where an epoch or the training ends.
    """

    before: int
    made: int

    def __new__(cls, number: int, *, before: int, made: int) -> Self:
        passes = super().__new__(cls, number)
        passes.before, passes.made = before, made
        return passes

    def __rmod__(self, count: Any) -> Any:
        return (count - self.before) % self.made

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return int, (int(self),)
