"""Loss scaling: what a grad scaler multiplies the loss with must be known where norms are measured."""

from typing import Any

from divebatch.errors import ArgumentError
from divebatch.estimators import Estimator, make_estimator

_KNOW_THE_SCALE = ("trajectory", "per-sample")
_NEED_NO_SCALE = ("oracle",)


def under_scaler(estimator: str | Estimator | None, grad_scaler: Any) -> str | Estimator | None:
    """`estimator`, told of the framework's grad scaler where there is one and it was given by name."""
    if grad_scaler is None or not isinstance(estimator, str | None) or estimator in _NEED_NO_SCALE:
        return estimator
    name = estimator or "trajectory"
    if name not in _KNOW_THE_SCALE:
        raise ArgumentError(
            f"estimator {name!r} does not know the scale that 16-bit precision puts on the loss: "
            f"use bfloat16, which has none, or one of: {', '.join((*_KNOW_THE_SCALE, *_NEED_NO_SCALE))}"
        )
    return make_estimator(name, grad_scaler=grad_scaler)
