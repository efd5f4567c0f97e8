"""Wrappers around a policy, to damp changes, round sizes, or spread changes of the learning rate.

Wrappers that change the size go inside those that move the learning rate: `WarmUp(Steady(NoiseScale(4096)))`.
"""

import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass, replace

from divebatch.checks import require_count, require_positive
from divebatch.errors import ArgumentError
from divebatch.measurement import Decision, Measurement
from divebatch.policies.policy import Policy, require_policy

_OF_THE_INNER = "needs estimator lr_coupling needs_lr_coupling adam_coupling moves_lr decides_within_epochs"


@dataclass(frozen=True)
class Around(Policy):
    """A policy whose `next` changes another one's; everything else is the inner policy's."""

    policy: Policy

    def __post_init__(self) -> None:
        require_policy(self.policy, example="NoiseScale(4096)")
        for name in _OF_THE_INNER.split():
            object.__setattr__(self, name, getattr(self.policy, name))

    @property
    def cap(self) -> int | None:
        return self.policy.cap

    @abstractmethod
    def next(self, seen: Measurement) -> Decision:
        """Return the inner decision, changed."""

    def measures(self, epoch: int, batch_size: int) -> bool:
        return self.policy.measures(epoch, batch_size)

    def check_start(self, batch_size: int) -> None:
        self.policy.check_start(batch_size)

    def _inner(self, seen: Measurement) -> Decision:
        # No larger than possible: it would be cut later, and what is made of it here must fit.
        return self.policy.next(seen).at_most(seen.largest_batch_size)

    def _require_free_size(self) -> None:
        if self.policy.moves_lr:
            own, inner = type(self).__name__, type(self.policy).__name__
            raise ArgumentError(
                f"{own} changes the size for which {inner} has moved the learning rate: put {own} around what {inner} "
                f"is around, or leave it out ({inner} has few sizes as it is)"
            )


@dataclass(frozen=True)
class Steady(Around):
    """A policy that keeps a size for some decisions and leaves small changes out.

    Each change costs recompiling and unsettles the optimizer.

    Args:
        policy: The inner policy.
        dwell: The least number of decisions at one size: epochs, or every `every_steps` steps.
        threshold: The least change, as a factor: 1.25 lets through a quarter more, or as much less.
    """

    _: KW_ONLY
    dwell: int = 1
    threshold: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_free_size()
        require_count("dwell", self.dwell)
        require_positive("threshold", self.threshold)
        if self.threshold < 1:
            raise ArgumentError(f"threshold must be at least 1, got threshold={self.threshold!r}")

    def next(self, seen: Measurement) -> Decision:
        decision = self._inner(seen)
        change = max(decision.batch_size / seen.batch_size, seen.batch_size / decision.batch_size)
        if change == 1 or (seen.history.decisions_at_size >= self.dwell and change >= self.threshold):
            return decision
        reason = f"{decision.reason}; kept for now, {decision.batch_size} asked".lstrip("; ")
        return Decision(batch_size=seen.batch_size, reason=reason)


@dataclass(frozen=True)
class _RoundedDown(Around):
    """A wrapper that leaves few sizes. The present size stays if rounding would lead past it, or to nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_free_size()

    @abstractmethod
    def rounded(self, size: int, seen: Measurement) -> int:
        """Return the largest size it knows that is at most `size`; 0 for none."""

    def next(self, seen: Measurement) -> Decision:
        decision, now = self._inner(seen), seen.batch_size
        size = self.rounded(decision.batch_size, seen)
        if (size - now) * (decision.batch_size - now) <= 0 or size == 0:
            size = now
        return replace(decision, batch_size=size)


@dataclass(frozen=True)
class Rounded(_RoundedDown):
    """A policy with sizes rounded down to multiples, for compilers: each new size costs them half a minute.

    A rule that moves by small steps from the present size would not move. The present size stays if rounding would
    lead past it, or to nothing.

    Args:
        policy: The inner policy.
        multiple_of: The multiple, in samples.
    """

    multiple_of: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("multiple_of", self.multiple_of)

    def rounded(self, size: int, seen: Measurement) -> int:
        return size // self.multiple_of * self.multiple_of


@dataclass(frozen=True)
class Doublings(_RoundedDown):
    """A policy with the fewest sizes: the cap, and doublings and halvings of the first batch, rounded down.

    A rule that moves by small steps from the present size would not move. `NoiseDoubling` and `AdaBatch` move by
    doublings already.

    Args:
        policy: The inner policy.
    """

    def rounded(self, size: int, seen: Measurement) -> int:
        if size in (0, self.cap):
            return size
        first = seen.first_batch_size
        if size < first:
            return first >> (first // (size + 1)).bit_length()
        return first << (size // first).bit_length() - 1


@dataclass(frozen=True)
class SpillOver(Around):
    """A policy that turns what is wanted beyond the cap into a lower learning rate: lr times size over wanted.

    lr / b then falls as if the batch had grown. When less is wanted again the rate comes back. Below the cap the rate
    is left alone, also if sizes are rounded down.

    Args:
        policy: The inner policy; it must have a `cap`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "moves_lr", True)
        if self.policy.cap is None:
            name = type(self.policy).__name__
            raise ArgumentError(
                f"SpillOver lowers the rate by what is wanted over the cap, and {name} has none: leave SpillOver out, "
                f"or give {name} a property `cap`"
            )

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Measure at the cap too: the spill depends on it."""
        # Some policies stop at the cap; they are asked as if below it.
        return self.policy.measures(epoch, 1) or self.policy.measures(epoch, batch_size)

    def next(self, seen: Measurement) -> Decision:
        """Return the inner decision, with its spill relative to the present one."""
        decision = self._inner(seen)
        says_something = decision.unclamped is not None and math.isfinite(decision.unclamped)
        unclamped = decision.unclamped if says_something else seen.history.unclamped  # else the spill in force stays
        assert self.policy.cap is not None
        cap = min(self.policy.cap, seen.dataset_size or self.policy.cap)
        spill = _spill(decision.batch_size, unclamped, cap)
        factor = decision.lr_factor * spill / _spill(seen.batch_size, seen.history.unclamped, cap)
        reason = f"{decision.reason}; lr times {spill:g} for what is over the cap" if spill < 1 else decision.reason
        return replace(decision, lr_factor=factor, reason=reason, unclamped=unclamped)


def _spill(batch_size: int, unclamped: float | None, cap: int) -> float:
    # Less than a sample over is rounding, and so is a size below a cap that the wish does not reach.
    if unclamped is None or unclamped < max(cap, batch_size) + 1:
        return 1.0
    return batch_size / unclamped


@dataclass(frozen=True)
class WarmUp(Around):
    """A policy whose learning rate, after a growth, reaches the value of the coupling over some decisions.

    Args:
        policy: The inner policy.
        epochs: The number of decisions until then: epochs, or every `every_steps` steps.
        power: The power of the batch size that the coupling follows: 1 for the linear one, 0.5 for the square root.
    """

    _: KW_ONLY
    epochs: int = 3
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "moves_lr", True)
        require_count("epochs", self.epochs)
        require_positive("power", self.power)

    def next(self, seen: Measurement) -> Decision:
        return ramped(self._inner(seen), seen, decisions=self.epochs, power=self.power)


def ramped(decision: Decision, seen: Measurement, *, decisions: int, power: float) -> Decision:
    """Return `decision` with a learning rate that reaches its value `decisions` decisions after a growth.

    The factor pays out a part of what the rate still lacks since the last growth, and holds back what this one adds.
    """
    left = max(0, decisions - (seen.history.decisions_at_size - 1))
    grown = max(1.0, seen.batch_size / (seen.history.previous_batch_size or seen.batch_size))
    lacking = float(grown ** (power * left / decisions))
    if decision.batch_size == seen.batch_size:
        paid = lacking ** (1 / max(1, left))
        return replace(decision, lr_factor=decision.lr_factor * paid, lr_owed=paid if left > 1 else 1.0)
    jump = max(1.0, decision.batch_size / seen.batch_size) ** power
    return replace(decision, lr_factor=decision.lr_factor * lacking / jump, lr_owed=jump ** (1 / decisions))
