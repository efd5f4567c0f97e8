"""Between which sizes a batch may move."""

from collections.abc import Collection
from dataclasses import dataclass, field

from divebatch.checks import require_count
from divebatch.errors import ArgumentError
from divebatch.policies.policy import Policy


def require_start_under_cap(batch_size: int, max_batch_size: int) -> None:
    """Raise if training would start above the largest size the policy allows."""
    if batch_size > max_batch_size:
        raise ArgumentError(
            f"max_batch_size={max_batch_size} is below the first batch size {batch_size}: "
            f"raise max_batch_size or start the loader with a smaller batch"
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Floor, cap and multiple of a batch size. The cap wins over the floor; both win over the multiple.

    >>> Bounds(floor=1, cap=4096, multiple_of=64).clamp(1000.7)
    960
    >>> Bounds(floor=1, cap=4096).clamp(1000.7, at_least=2048), Bounds(floor=1, cap=4096).clamp(float("inf"))
    (2048, 4096)

    Args:
        floor: The smallest size, in samples.
        cap: The largest size, in samples.
        multiple_of: Sizes are rounded down to multiples of this many samples.
    """

    floor: int
    cap: int
    multiple_of: int = 1

    def __post_init__(self) -> None:
        require_count("min_batch_size", self.floor)
        require_count("max_batch_size", self.cap)
        require_count("multiple_of", self.multiple_of)
        if self.cap < self.floor:
            raise ArgumentError(f"max_batch_size={self.cap} is below min_batch_size={self.floor}")

    def clamp(self, proposal: float, *, at_least: int = 1) -> int:
        """Return the allowed size nearest below `proposal`: clamped, then truncated."""
        # The cap wins: `at_least`, the present size of a monotone rule, must not carry a batch over it.
        lowest = min(max(self.floor, at_least), self.cap)
        # Truncated and not rounded: that is how the paper's rule is read here.
        whole = int(min(max(proposal, lowest), self.cap))
        return max(whole - whole % self.multiple_of, lowest)

    def sizes(self, *, at_least: int = 1) -> Collection[int]:
        """Return all that `clamp` may give."""
        lowest = self.clamp(0, at_least=at_least)
        first_multiple = -(-lowest // self.multiple_of) * self.multiple_of
        multiples = range(first_multiple, self.cap + 1, self.multiple_of)
        return multiples if lowest in multiples else (lowest, *multiples)


@dataclass(frozen=True, slots=True)
class Capped(Policy):
    """A policy with a largest size, above which training may not start."""

    max_batch_size: int
    bounds: Bounds = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.set_bounds()

    def set_bounds(self, *, floor: int = 1, multiple_of: int = 1) -> None:
        """Check the bounds and keep them, once and for all."""
        object.__setattr__(self, "bounds", Bounds(floor, self.max_batch_size, multiple_of))

    @property
    def cap(self) -> int:
        return self.max_batch_size

    def check_start(self, batch_size: int) -> None:
        require_start_under_cap(batch_size, self.max_batch_size)
