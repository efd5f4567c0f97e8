"""The estimators by name. A new estimator adds one row."""

from collections.abc import Callable
from typing import Any

from divebatch.errors import ArgumentError
from divebatch.estimators.across_ranks import AcrossRanks
from divebatch.estimators.estimator import Estimator
from divebatch.estimators.moments import Moments
from divebatch.estimators.oracle import Oracle
from divebatch.estimators.per_sample import PerSample
from divebatch.estimators.split import Split
from divebatch.estimators.trajectory import Trajectory

ESTIMATORS: dict[str, Callable[..., Estimator]] = {
    "trajectory": Trajectory,
    "oracle": Oracle,
    "per-sample": PerSample,
    "split": Split,
    "moments": Moments,
    "ranks": AcrossRanks,
}


def make_estimator(kind: str, **settings: Any) -> Estimator:
    """Build an estimator from its name and settings."""
    if kind not in ESTIMATORS:
        raise ArgumentError(f"unknown estimator {kind!r}; known: {', '.join(ESTIMATORS)}")
    try:
        return ESTIMATORS[kind](**settings)
    except TypeError as error:
        raise ArgumentError(f"estimator {kind!r} cannot be built from {settings}: {error}") from error
