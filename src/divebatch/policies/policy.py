"""The base classes of policies, and the step from a measured noise scale to a decision."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar

from divebatch.checks import require_count
from divebatch.errors import ArgumentError, UsageError
from divebatch.measurement import Decision, Diversity, Measurement

NEEDS = ("diversity", "inner_variance", "loss", "throughputs")
"""Inputs that are not free: fields of `Measurement`, its `Diversity` and its `History`."""

_PLAIN = bool | int | float | str | None


class Policy(ABC):
    """A rule that turns a `Measurement` into a `Decision`: a frozen configuration and one pure method, `next`.

    State is kept elsewhere: equal measurements give equal decisions. Everything but `next` has a default. To write a
    policy, make a subclass, best a frozen dataclass, so that a checkpoint knows its settings:

        @dataclass(frozen=True)
        class Doubling(Policy):
            every_epochs: int = 10

            def next(self, seen: Measurement) -> Decision:
                due = seen.epoch % self.every_epochs == 0
                return Decision(batch_size=2 * seen.batch_size if due else seen.batch_size)

    A new policy of this library is a class in the file of its family and one row in `POLICIES`.
    """

    needs: Set[str] = frozenset()
    """The subset of "diversity", "inner_variance", "loss" and "throughputs" that `next` reads; no other is measured."""
    estimator: str | None = None
    """The name of the default estimator. None: "moments"."""
    lr_coupling: str | float | None = None
    """The coupling that the rule is made for. None: any."""
    needs_lr_coupling: bool = False
    """Whether the learning rate must follow the batch size; without a named coupling, as suits the optimizer."""
    adam_coupling: str = "sqrt"
    """The coupling for torch's Adam, AdamW, NAdam and Adamax in that case: "sqrt" or "adam-beta1"."""
    moves_lr: bool = False
    """Whether the decisions' `lr_factor` belongs to their size, so that no wrapper may change the size."""
    decides_within_epochs: bool = False
    """Whether `next` may be called every few steps. False for rules that count epochs or read their loss or speed."""
    epoch_settings: ClassVar[Set[str]] = frozenset()
    """Settings that count epochs; a shortened experiment also shortens these."""
    run_settings: ClassVar[Set[str]] = frozenset()
    """Settings determined by the length of a run, which an experiment fills in: "total_samples"."""
    has_many_sizes: ClassVar[bool] = False
    """Whether the policy proposes arbitrary sizes, which are rounded down if a compiler should see few shapes."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        needs = cls.__dict__.get("needs", frozenset())
        if isinstance(needs, str | list | tuple | Set):  # a property or a field can only be checked on objects
            require_known_needs(cls.__name__, needs)

    @property
    def cap(self) -> int | None:
        """The largest size that the policy chooses, in samples; None: no limit."""
        return None

    @abstractmethod
    def next(self, seen: Measurement) -> Decision:
        """Return the batch size to use from now on."""

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Return whether `epoch` (from 1), run at `batch_size`, must be measured. Unmeasured epochs cost nothing."""
        return True

    def check_start(self, batch_size: int) -> None:
        """Raise if training cannot start at `batch_size`."""
        if self.cap is not None and batch_size > self.cap:
            raise ArgumentError(
                f"max_batch_size={self.cap} is below the first batch size {batch_size}: raise max_batch_size or start "
                f"the loader with a smaller batch"
            )


def require_known_needs(owner: str, needs: Any) -> None:
    """Raise unless `needs` is a set of known names."""
    if not isinstance(needs, Set) or not needs <= set(NEEDS):
        raise ArgumentError(f"{owner}.needs must be a set of some of {', '.join(map(repr, NEEDS))}, got {needs!r}")


def require_policy(policy: Any, example: str = "DiveBatch(0.1, 4096)") -> None:
    """Raise unless `policy` is an instance of a subclass of `Policy`."""
    if isinstance(policy, type):
        raise ArgumentError(f"policy must be a policy object such as {example}, got the class {policy.__name__}")
    if not isinstance(policy, Policy):
        raise ArgumentError(
            f"policy must be a policy object such as {example}, got policy={policy!r}; a policy of your own is a "
            f"subclass of divebatch.Policy with a method `next`"
        )
    require_known_needs(type(policy).__name__, policy.needs)


def settings_of(policy: Policy) -> dict[str, Any]:
    """Return a policy's class and settings in plain containers, as a checkpoint keeps them.

    Settings are a dataclass's fields, or any other object's attributes that are numbers, strings or policies.
    """
    if is_dataclass(policy):
        values = {entry.name: getattr(policy, entry.name) for entry in fields(policy)}
    else:
        values = {name: value for name, value in vars(policy).items() if isinstance(value, _PLAIN | Policy)}
    return {"class": type(policy).__name__, **{name: _plain(value) for name, value in values.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, Policy):
        return settings_of(value)
    return value if isinstance(value, _PLAIN) else repr(value)


@dataclass(frozen=True)
class Capped(Policy):
    """A policy with a largest size; training may not start above this size."""

    max_batch_size: int

    def __post_init__(self) -> None:
        require_count("max_batch_size", self.max_batch_size)

    @property
    def cap(self) -> int:
        return self.max_batch_size


@dataclass(frozen=True)
class Periodic(Capped):
    """A rule that decides every `every_epochs` epochs, by a `proposal` within floor and cap."""

    needs = frozenset({"diversity"})
    estimator = "moments"
    decides_within_epochs = True
    epoch_settings = frozenset({"every_epochs"})
    has_many_sizes = True
    multiple_of = 1

    _: KW_ONLY
    min_batch_size: int = 1
    every_epochs: int = 1
    monotone: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("min_batch_size", self.min_batch_size)
        require_count("every_epochs", self.every_epochs)
        if self.max_batch_size < self.min_batch_size:
            raise ArgumentError(f"max_batch_size={self.max_batch_size} is below min_batch_size={self.min_batch_size}")

    @abstractmethod
    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        """Return the wanted batch size, or None for the current one, and the reason."""

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Return True every `every_epochs` epochs, unless the size stays at its cap for good."""
        return epoch % self.every_epochs == 0 and not (self.monotone and batch_size >= self.max_batch_size)

    def next(self, seen: Measurement) -> Decision:
        """Return the proposal within the bounds; the current size in epochs without a decision."""
        is_measured = seen.diversity is not None or self.measures(seen.epoch, seen.batch_size)
        if seen.epoch % self.every_epochs or not is_measured:
            return Decision(batch_size=seen.batch_size)
        wanted, reason = self.proposal(seen)
        least = max(self.min_batch_size, seen.batch_size if self.monotone else 1)
        return decided(seen, wanted, self.max_batch_size, at_least=least, multiple_of=self.multiple_of, reason=reason)


def clamp(proposal: float, cap: int, *, at_least: int = 1, multiple_of: int = 1) -> int:
    """Return the nearest allowed size below `proposal`. The cap wins over the floor; both win over the multiple.

    >>> clamp(1000.7, 4096, multiple_of=64), clamp(1000.7, 4096, at_least=2048), clamp(float("inf"), 4096)
    (960, 2048, 4096)
    """
    # The cap wins: the current size of a rule that never shrinks must not carry a batch over it.
    lowest = min(at_least, cap)
    # Truncated, not rounded: this is how we read the paper's rule.
    whole = int(min(max(proposal, lowest), cap))
    return max(whole - whole % multiple_of, lowest)


def decided(
    seen: Measurement, wanted: float | None, cap: int, *, at_least: int = 1, multiple_of: int = 1, reason: str
) -> Decision:
    """Return a decision for `wanted` within the bounds; for the current size if `wanted` is None or NaN."""
    if wanted is None:
        return Decision(batch_size=seen.batch_size, reason=reason)
    if math.isnan(wanted):
        return Decision(batch_size=seen.batch_size, reason=f"{reason}: not a number, so no change")
    capped = f", capped at {cap}" if wanted > cap else ""
    size = clamp(wanted, cap, at_least=at_least, multiple_of=multiple_of)
    return Decision(batch_size=size, reason=f"{reason}{capped}", unclamped=wanted)


def times_first(seen: Measurement, factor: float, cap: int, reason: str) -> Decision:
    """Return ceil(b0 * `factor`) within first batch and cap. `SpillOver` lowers the rate for the part above the cap."""
    first = seen.first_batch_size
    wanted = first * factor
    # A rounding error above a whole number does not add a sample.
    wanted = float(math.ceil(wanted - 1e-9)) if math.isfinite(wanted) else wanted
    return decided(seen, wanted, cap, at_least=first, reason=reason)


def require_diversity(policy: object, seen: Measurement) -> Diversity:
    """Return the epoch's diversity, or raise if none was measured."""
    if seen.diversity is None:
        name = type(policy).__name__
        raise UsageError(f"{name} needs the diversity of epoch {seen.epoch}, and none was measured")
    return seen.diversity


def require_loss(policy: object, seen: Measurement) -> float:
    """Return the epoch's loss, or raise if none was given."""
    if seen.loss is None:
        raise UsageError(f"{type(policy).__name__} needs the loss of epoch {seen.epoch}: control.step(loss=...)")
    return seen.loss


def wanted_size(diversity: Diversity, batch_size: int, rule: Callable[[float], float]) -> tuple[float | None, str]:
    """Apply `rule`, which grows with the noise scale, as far as the evidence allows; return its size and a remark.

    If the sizes for the noise scale's interval lie on both sides of the current size, no change is justified: the size
    is None. If the interval has no upper end, ||G||^2 cannot be distinguished from zero, and dividing by it may give
    any value; so the lower end is used. Without a spread the value is used as it is, and an undefined value counts as
    infinite. If there is a spread, nothing changes if it excludes no noise scale, or if most samples were left out;
    the remark gives the reason.

    >>> wanted_size(Diversity(0.02, 1.0, 50_000), 128, lambda noise_scale: 0.1 * (1 + noise_scale))
    (100.0, '')
    """
    if diversity.spread is None:
        return (rule(diversity.noise_scale), "") if diversity.is_defined else (math.inf, diversity.undefined_reason)
    ends = diversity.noise_scale_interval()
    low, high = map(rule, ends)
    # The interval is checked first: sizes on both sides of the current one justify no change.
    if low <= batch_size <= high or diversity.has_diverged:
        if ends == (0.0, math.inf):
            why = diversity.undefined_reason or "the estimates scatter too much"
            return None, f"the noise scale is not known, as {why}: no change"
        return None, f"wants {_range(diversity, low, high)} with 95 % confidence: no change"
    if diversity.is_defined and high < math.inf:
        return rule(diversity.noise_scale), f"{_range(diversity, low, high)} with 95 % confidence"
    return low, f"at least {low:.0f} with 95 % confidence"


def _range(diversity: Diversity, low: float, high: float) -> str:
    if diversity.spread is not None and not diversity.spread.bounds_below:
        # Without momentum, moments cannot separate the weights' motion from noise.
        return f"at most {high:.0f}, how far below only estimator='split' or 'per-sample' can tell here,"
    return f"between {low:.0f} and {high:.0f}" if high < math.inf else f"at least {low:.0f}"


def ratio(above: float, below: float) -> float:
    """Return above / below for positive quantities: infinite if `below` is zero, NaN if nothing is known."""
    if math.isnan(above) or math.isnan(below) or above < 0 or math.isinf(below) or above == below == 0:
        return math.nan
    return above / below if below > 0 and above / below < math.inf else math.inf


def in_multiples(
    policy: Policy, seen: Measurement, unit: int, *, at_most: float = math.inf, at_least: int = 1
) -> Decision:
    """Return the policy's decision, rounded down to a multiple of `unit`, but not to zero.

    A unit is a step's batches, or the samples of a pass. A step has `at_most` samples and `at_least` units.
    """
    # Rounded down, so that the policy's cap holds. The learning rate may not follow a batch that does not exist.
    decision = policy.next(seen)
    decision = (decision if decision.batch_size <= at_most else decision.at_most(int(at_most))).at_least(at_least)
    size = max(at_least, decision.batch_size // unit) * unit
    if policy.moves_lr and size < decision.batch_size:  # decide again, for a learning rate that belongs to this size
        decision = replace(policy.next(replace(seen, largest_batch_size=size)), reason=decision.reason)
    reason = f"{decision.reason}; in multiples of {unit}".lstrip("; ")
    return decision if size == decision.batch_size else replace(decision, batch_size=size, reason=reason)
