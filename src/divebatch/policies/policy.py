"""What a policy is."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Set
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

from divebatch.errors import ArgumentError
from divebatch.measurement import Decision, Measurement

NEEDS = ("diversity", "inner_variance", "loss", "throughputs")
"""What a policy may need that is not free: fields of `Measurement`, its `Diversity` and its `History`."""

_PLAIN = bool | int | float | str | None


class Policy(ABC):
    """A rule that turns a `Measurement` into a `Decision`: a frozen configuration and one pure method, `next`.

    State lives elsewhere: equal measurements give equal decisions. Everything but `next` has a default. A policy of
    your own is a subclass, best a frozen dataclass, so that a checkpoint knows its settings:

        @dataclass(frozen=True)
        class Doubling(Policy):
            every_epochs: int = 10

            def next(self, seen: Measurement) -> Decision:
                due = seen.epoch % self.every_epochs == 0
                return Decision(batch_size=2 * seen.batch_size if due else seen.batch_size)

    A new policy of this library is one file in this folder and one row in `catalog.py`.
    """

    needs: Set[str] = frozenset()
    """Which of "diversity", "inner_variance", "loss" and "throughputs" `next` reads; nothing else is measured."""
    estimator: str | None = None
    """The name of the estimator that measures for it where the controller is given none; None for "moments"."""
    lr_coupling: str | float | None = None
    """The coupling that the rule is made for; None where any will do."""
    needs_lr_coupling: bool = False
    """Whether the learning rate must follow the batch size: where no coupling is named, as suits the optimizer."""
    moves_lr: bool = False
    """Whether the decisions' `lr_factor` is made for their size, so that nothing around may change the size."""
    decides_within_epochs: bool = False
    """Whether `next` makes sense every so many steps. Not where it counts epochs, or reads an epoch's loss or speed."""
    epoch_settings: ClassVar[Set[str]] = frozenset()
    """Its settings that count epochs: an experiment that is shortened shortens them with it."""
    run_settings: ClassVar[Set[str]] = frozenset()
    """Its settings that follow from how long a run is, which an experiment fills in: "total_samples"."""
    has_many_sizes: ClassVar[bool] = False
    """Whether it proposes sizes of all values, which are rounded down where a compiler must see few shapes."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        needs = cls.__dict__.get("needs", frozenset())
        if isinstance(needs, str | list | tuple | Set):  # a property or a field can be checked on objects only
            require_known_needs(cls.__name__, needs)

    @property
    def cap(self) -> int | None:
        """The largest size it asks for, in samples; None where it has none."""
        return None

    @abstractmethod
    def next(self, seen: Measurement) -> Decision:
        """Return the batch size to use from now on."""

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Whether `epoch` (from 1), run at `batch_size`, must be measured. Unmeasured epochs cost nothing."""
        return True

    def reachable(self, seen: Measurement) -> Collection[int]:
        """Return the sizes that it may ask for from here on, so that a compiler can be ready for each (`warm_shapes`).

        Of `seen` only the sizes count. A policy that says nothing may ask for every size up to its cap.
        """
        return range(1, min(self.cap or seen.largest_batch_size, seen.largest_batch_size) + 1)

    def check_start(self, batch_size: int) -> None:  # noqa: B027 (most have nothing to check)
        """Raise if training cannot start at `batch_size`."""


def require_known_needs(owner: str, needs: Any) -> None:
    """Raise unless `needs` is a set of words that a controller knows."""
    if not isinstance(needs, Set) or not needs <= set(NEEDS):
        raise ArgumentError(f"{owner}.needs must be a set of some of {', '.join(map(repr, NEEDS))}, got {needs!r}")


def require_policy(policy: Any, example: str = "DiveBatch(0.1, 4096)") -> None:
    """Raise unless `policy` is an object of a subclass of `Policy`."""
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

    Settings are a dataclass's fields, or any other object's attributes that are numbers, words or policies.
    """
    if is_dataclass(policy):
        values = {entry.name: getattr(policy, entry.name) for entry in fields(policy) if entry.init}
    else:
        values = {name: value for name, value in vars(policy).items() if isinstance(value, _PLAIN | Policy)}
    return {"class": type(policy).__name__, **{name: _plain(value) for name, value in values.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, Policy):
        return settings_of(value)
    return value if isinstance(value, _PLAIN) else repr(value)
