"""What can be put around any policy: calm, an outlet at the cap, and a gentle start after a jump."""

import math
from abc import abstractmethod
from collections.abc import Set
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Protocol, runtime_checkable

from divebatch.checks import require_count, require_positive
from divebatch.errors import ArgumentError
from divebatch.measurement import Decision, Measurement
from divebatch.policies.policy import Policy, require_policy


@dataclass(frozen=True, slots=True)
class Around(Policy):
    """Everything but `next` is the inner policy's."""

    policy: Policy
    needs: Set[str] = field(init=False, repr=False)
    estimator: str | None = field(init=False, repr=False)
    lr_coupling: str | None = field(init=False, repr=False)
    decides_within_epochs: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_policy(self.policy, example="NoiseScale(4096)")
        for name, value in (
            ("needs", self.policy.needs),
            ("estimator", self.policy.estimator),
            ("lr_coupling", self.policy.lr_coupling),
            ("decides_within_epochs", self.policy.decides_within_epochs),
        ):
            object.__setattr__(self, name, value)

    @abstractmethod
    def next(self, seen: Measurement) -> Decision:
        """The inner decision, changed."""

    def _inner(self, seen: Measurement) -> Decision:
        """No larger than the data: the controller would cut it, and what is made of it here must fit."""
        return self.policy.next(seen).at_most(seen.dataset_size)

    def measures(self, epoch: int, batch_size: int) -> bool:
        """As the inner policy says."""
        return self.policy.measures(epoch, batch_size)

    def check_start(self, batch_size: int) -> None:
        """As the inner policy says."""
        self.policy.check_start(batch_size)


@dataclass(frozen=True, slots=True)
class OfRate(Around):
    """Those that let the learning rate follow from the size that is decided."""


@dataclass(frozen=True, slots=True)
class OfSize(Around):
    """Those that have a say in the size. They come first, also where they stand around one of the rate.

    One of the rate must see the size that is really taken, or it would pay out what it never took.
    """

    def next(self, seen: Measurement) -> Decision:
        """`settled`, inside whatever moves the rate."""
        inner = self.policy.parts() if isinstance(self.policy, Composed) else self.policy
        if isinstance(inner, OfRate):
            return replace(inner, policy=replace(self, policy=inner.policy)).next(seen)
        return self.settled(self._inner(seen), seen)

    @abstractmethod
    def settled(self, decision: Decision, seen: Measurement) -> Decision:
        """The decision with the size that is taken."""


@runtime_checkable
class Composed(Protocol):
    """A policy that is made of one of the rate around another."""

    def parts(self) -> OfRate:
        """As they would be put around each other by hand."""
        ...


@dataclass(frozen=True, slots=True)
class Steady(OfSize):
    """No flapping: a size stays for at least `dwell` epochs, and changes by less than `threshold` are not made.

    Where the policy decides every so many steps, `dwell` counts those decisions.
    Each change costs recompiling and unsettles the optimizer. `threshold=1.25` lets through what is at least a quarter
    more, or as much less.
    """

    _: KW_ONLY
    dwell: int = 1
    threshold: float = 1.0

    def __post_init__(self) -> None:
        Around.__post_init__(self)
        require_count("dwell", self.dwell)
        require_positive("threshold", self.threshold)
        if self.threshold < 1:
            raise ArgumentError(f"threshold must be at least 1, got threshold={self.threshold!r}")

    def settled(self, decision: Decision, seen: Measurement) -> Decision:
        """The inner decision, or none yet."""
        change = max(decision.batch_size / seen.batch_size, seen.batch_size / decision.batch_size)
        if change == 1 or (seen.history.epochs_at_size >= self.dwell and change >= self.threshold):
            return decision
        reason = f"{decision.reason}; kept for now, {decision.batch_size} asked".lstrip("; ")
        return Decision(batch_size=seen.batch_size, reason=reason)


@dataclass(frozen=True, slots=True)
class Rounded(OfSize):
    """Sizes are rounded down to multiples, for compilers: each new one costs them half a minute.

    For rules that say where to be. One that goes by small steps from where it is would not move.
    """

    multiple_of: int

    def __post_init__(self) -> None:
        Around.__post_init__(self)
        require_count("multiple_of", self.multiple_of)

    def settled(self, decision: Decision, seen: Measurement) -> Decision:
        """The inner decision, rounded; the present size where rounding would lead past it."""
        now = seen.batch_size
        rounded = decision.batch_size // self.multiple_of * self.multiple_of
        if (rounded - now) * (decision.batch_size - now) <= 0 or rounded == 0:
            rounded = now
        return replace(decision, batch_size=rounded)


@dataclass(frozen=True, slots=True)
class SpillOver(OfRate):
    """At the cap what is wanted beyond it goes into the learning rate: lr times size over wanted.

    lr / b then falls as if the batch had grown. When less is wanted again the rate comes back.
    """

    def measures(self, epoch: int, batch_size: int) -> bool:
        """At the cap too, where some policies stop: what spills over depends on it."""
        return self.policy.measures(epoch, 1) or self.policy.measures(epoch, batch_size)

    def next(self, seen: Measurement) -> Decision:
        """The inner decision, with its spill against the one already in force."""
        decision = self._inner(seen)
        says_something = decision.wanted is not None and math.isfinite(decision.wanted)
        wanted = decision.wanted if says_something else seen.history.wanted  # else the spill in force stays
        spill = _spill(decision.batch_size, wanted)
        factor = decision.lr_factor * spill / _spill(seen.batch_size, seen.history.wanted)
        reason = f"{decision.reason}; lr times {spill:g} for what is over the cap" if spill < 1 else decision.reason
        return replace(decision, lr_factor=factor, reason=reason, wanted=wanted)


def _spill(batch_size: int, wanted: float | None) -> float:
    if wanted is None or wanted < batch_size + 1:  # less than a sample over is rounding
        return 1.0
    return batch_size / wanted


@dataclass(frozen=True, slots=True)
class WarmUp(OfRate):
    """After a growth the learning rate starts from where it was and follows the coupling over `epochs` epochs.

    Where the policy decides every so many steps, `epochs` counts those decisions.
    For couplings that raise the rate with the batch; `power` is 1 for the linear one, 0.5 for the square root.
    """

    _: KW_ONLY
    epochs: int = 3
    power: float = 1.0

    def __post_init__(self) -> None:
        Around.__post_init__(self)
        require_count("epochs", self.epochs)
        require_positive("power", self.power)

    def next(self, seen: Measurement) -> Decision:
        """The inner decision, with a share of what the last jump still owes, less what this one takes."""
        decision = self._inner(seen)
        if decision.batch_size == seen.batch_size:
            return replace(decision, lr_factor=decision.lr_factor * self._owed(seen) ** self._share(seen))
        jump = max(1.0, decision.batch_size / seen.batch_size) ** self.power
        return replace(decision, lr_factor=decision.lr_factor * self._owed(seen) / jump)

    def _owed(self, seen: Measurement) -> float:
        """What the rate lacks after the last growth."""
        grown = max(1.0, seen.batch_size / (seen.history.previous_batch_size or seen.batch_size))
        return float(grown ** (self.power * self._left(seen) / self.epochs))

    def _share(self, seen: Measurement) -> float:
        return 1 / max(1, self._left(seen))

    def _left(self, seen: Measurement) -> int:
        """Epochs of the warm-up whose raise is still to come."""
        return max(0, self.epochs - (seen.history.epochs_at_size - 1))
