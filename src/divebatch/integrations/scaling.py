"""Loss scaling: what a grad scaler multiplies the loss with must be known where norms are measured."""

from typing import Any

from divebatch.errors import ArgumentError
from divebatch.estimators import ESTIMATORS, Estimator, make_estimator
from divebatch.estimators.catalog import names_where


def under_scaler(estimator: str | Estimator | None, grad_scaler: Any) -> str | Estimator | None:
    """Return `estimator`, told of the framework's grad scaler where there is one and it was given by name."""
    if grad_scaler is None or not isinstance(estimator, str | None):
        return estimator
    name = estimator or "trajectory"
    kind = ESTIMATORS.get(name)
    if kind is None or kind.undoes_grad_scale:
        return name
    if not kind.measures_norms:
        known = names_where(lambda kind: kind.undoes_grad_scale or kind.measures_norms)
        raise ArgumentError(
            f"estimator {name!r} does not know the scale that 16-bit precision puts on the loss: "
            f"use bfloat16, which has none, or one of: {known}"
        )
    return make_estimator(name, grad_scaler=grad_scaler)
