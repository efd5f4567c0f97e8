"""Between which sizes a batch may move, and checks of a policy against its loader."""

from dataclasses import dataclass

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


def require_coupling(policy: Policy, lr_coupling: str) -> None:
    """Raise if the policy is made for another one."""
    wanted = policy.lr_coupling
    if wanted not in (None, lr_coupling):
        raise ArgumentError(
            f"{type(policy).__name__} moves the learning rate with the batch size: pass lr_coupling={wanted!r}, "
            f"got lr_coupling={lr_coupling!r}"
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Floor, cap and multiple of a batch size. The cap wins over the floor; both win over the multiple.

    >>> Bounds(floor=1, cap=4096, multiple_of=64).clamp(1000.7)
    960
    >>> Bounds(floor=1, cap=4096).clamp(1000.7, at_least=2048), Bounds(floor=1, cap=4096).clamp(float("inf"))
    (2048, 4096)
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
        """The allowed size nearest below `proposal`: clamped, then truncated (READING, "rounding")."""
        lowest = min(max(self.floor, at_least), self.cap)
        whole = int(min(max(proposal, lowest), self.cap))
        return max(whole - whole % self.multiple_of, lowest)
