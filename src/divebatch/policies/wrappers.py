"""Wrappers around a policy, to damp changes, round sizes, or spread changes of the learning rate.

Put wrappers that change the size inside those that change the learning rate: `WarmUp(Steady(NoiseScale(4096)))`.
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
    """A policy that changes the decisions of an inner policy; everything else is the inner policy's."""

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
        """Return the inner policy's decision, changed."""

    def measures(self, epoch: int, batch_size: int) -> bool:
        return self.policy.measures(epoch, batch_size)

    def check_start(self, batch_size: int) -> None:
        self.policy.check_start(batch_size)

    def _inner(self, seen: Measurement) -> Decision:
        # Limited here: a later limit would not match the rest of the decision.
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
    """A policy that keeps each size for some decisions and ignores small changes.

    Each change of size costs a recompilation and disturbs the optimizer.

    Args:
        policy: The inner policy.
        dwell: The fewest decisions at one size: one an epoch, or one every `every_steps` steps.
        threshold: The smallest change, as a factor: 1.25 allows changes by a quarter more, or as much less.
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
    """A policy that rounds sizes down; the current size stays if rounding would reverse the change or give zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_free_size()

    @abstractmethod
    def rounded(self, size: int, seen: Measurement) -> int:
        """Return the largest allowed size up to `size`; 0 if there is none."""

    def next(self, seen: Measurement) -> Decision:
        decision, now = self._inner(seen), seen.batch_size
        size = self.rounded(decision.batch_size, seen)
        if (size - now) * (decision.batch_size - now) <= 0 or size == 0:
            size = now
        return replace(decision, batch_size=size)


@dataclass(frozen=True)
class Rounded(_RoundedDown):
    """A policy with sizes rounded down to multiples, since a compiler may take half a minute for each new size.

    Under a rule with only small changes the size would never change. The current size stays if rounding would reverse
    the change or give zero.

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

    Under a rule with only small changes the size would never change. `NoiseDoubling` and `AdaBatch` already use
    doublings.

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
    """A policy that turns a wish for more than the cap into a lower learning rate: lr * size / wanted size.

    lr / b then falls as if the batch had grown, and rises again with a smaller wish. Below the cap the rate does not
    change, even if sizes are rounded down.

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
        """Return whether the epoch must be measured, as if below the cap: the spill depends on measurements."""
        # Some policies stop at the cap, so they are asked as if below it.
        return self.policy.measures(epoch, 1) or self.policy.measures(epoch, batch_size)

    def next(self, seen: Measurement) -> Decision:
        """Return the inner policy's decision, its rate multiplied by the new spill over the current one."""
        decision = self._inner(seen)
        says_something = decision.unclamped is not None and math.isfinite(decision.unclamped)
        unclamped = decision.unclamped if says_something else seen.history.unclamped  # else the current spill stays
        assert self.policy.cap is not None
        cap = min(self.policy.cap, seen.dataset_size or self.policy.cap)
        spill = _spill(decision.batch_size, unclamped, cap)
        factor = decision.lr_factor * spill / _spill(seen.batch_size, seen.history.unclamped, cap)
        reason = f"{decision.reason}; lr times {spill:g} for what is over the cap" if spill < 1 else decision.reason
        return replace(decision, lr_factor=factor, reason=reason, unclamped=unclamped)


def _spill(batch_size: int, unclamped: float | None, cap: int) -> float:
    # Less than one sample above the cap is rounding, and so is a size below a cap that the wish does not reach.
    if unclamped is None or unclamped < max(cap, batch_size) + 1:
        return 1.0
    return batch_size / unclamped


@dataclass(frozen=True)
class WarmUp(Around):
    """A policy whose learning rate reaches the coupling's value over several decisions after the batch has grown.

    Args:
        policy: The inner policy.
        epochs: The number of decisions until the rate is reached: one an epoch, or one every `every_steps` steps.
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

    The factor adds part of what the rate still lacks since the last growth, and holds back what this growth adds.
    """
    left = max(0, decisions - (seen.history.decisions_at_size - 1))
    grown = max(1.0, seen.batch_size / (seen.history.previous_batch_size or seen.batch_size))
    lacking = float(grown ** (power * left / decisions))
    if decision.batch_size == seen.batch_size:
        paid = lacking ** (1 / max(1, left))
        return replace(decision, lr_factor=decision.lr_factor * paid, lr_owed=paid if left > 1 else 1.0)
    jump = max(1.0, decision.batch_size / seen.batch_size) ** power
    return replace(decision, lr_factor=decision.lr_factor * lacking / jump, lr_owed=jump ** (1 / decisions))
