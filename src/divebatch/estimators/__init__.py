"""Estimators of an epoch's gradient noise and signal, as a `Diversity`."""

from collections.abc import Callable
from typing import Any

from torch import nn

from divebatch.checks import require_choice
from divebatch.errors import ArgumentError
from divebatch.estimators.estimator import Estimator, TrainingContext
from divebatch.estimators.moments import Moments
from divebatch.estimators.oracle import Oracle
from divebatch.estimators.per_sample import PerSample
from divebatch.estimators.split import AcrossRanks, Split
from divebatch.estimators.trajectory import Trajectory
from divebatch.norms.sharded import is_sharded

__all__ = [
    "ESTIMATORS",
    "AcrossRanks",
    "Estimator",
    "Moments",
    "Oracle",
    "PerSample",
    "TrainingContext",
    "Split",
    "Trajectory",
    "make_estimator",
]

ESTIMATORS: dict[str, type[Estimator]] = {
    kind.name: kind for kind in (Trajectory, Oracle, PerSample, Split, Moments, AcrossRanks)
}
"""All estimators by the name that `Controller(estimator=...)` accepts."""


def names_where(holds: Callable[[type[Estimator]], bool]) -> str:
    """Return the names of the estimators for which `holds` is true, for error messages: "'split', 'moments'"."""
    return ", ".join(repr(name) for name, kind in ESTIMATORS.items() if holds(kind))


def require_fit(estimator: Estimator, model: nn.Module) -> None:
    """Raise if FSDP2 has sharded the gradients of `model` and `estimator` needs whole gradients."""
    if not estimator.works_on_shards and any(map(is_sharded, model.parameters())):
        raise ArgumentError(
            f"{type(estimator).__name__} needs whole gradients, and FSDP2 has sharded this model's: "
            f"use one of the estimators {names_where(lambda kind: kind.works_on_shards)}"
        )


def make_estimator(kind: str, **settings: Any) -> Estimator:
    """Build an estimator from its name and settings.

    Args:
        kind: A key of `ESTIMATORS`.
        settings: The arguments of the estimator's class.
    """
    require_choice("estimator", kind, tuple(ESTIMATORS))
    # The oracle runs the model by itself, so its name alone is not enough.
    if ESTIMATORS[kind].takes("loss_fn") and "loss_fn" not in settings:
        name = ESTIMATORS[kind].__name__
        raise ArgumentError(f"{kind!r} runs the model by itself and needs the loss: pass estimator={name}(loss_fn)")
    try:
        return ESTIMATORS[kind](**settings)
    except TypeError as error:
        raise ArgumentError(f"estimator {kind!r} cannot be built from {settings}: {error}") from error
