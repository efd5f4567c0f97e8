"""What is added up over backward passes: what a meter has counted, kept on the device until somebody reads it."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Sums:
    """Sums over the measured ones of `num_steps` backward passes; the rest is extrapolated when it is read."""

    extrapolates: bool = False
    """Whether passes go by unmeasured, so that the spread between passes matters."""
    num_steps: int = 0
    """Backward passes in all, where some are not measured."""
    num_measured: int = 0
    num_samples: int | Tensor = 0
    """In the measured passes."""
    _loaded: float = 0.0
    """The total of an earlier life, extrapolated already."""
    _total: Tensor | float = 0.0
    """Of squared norms, in float64."""
    _squares: Tensor | float = 0.0
    """Of the passes' totals."""
    _variance: Tensor | float = 0.0
    """Of the sketches."""

    def add(self, sq_norms: Tensor, variance: Tensor | None, num_samples: int | Tensor) -> None:
        """One measured pass: its sum of squared norms and the variance of that, in float64."""
        self._total = _plus(self._total, sq_norms)
        if self.extrapolates:
            self._squares = _plus(self._squares, sq_norms.square())
        if variance is not None:
            self._variance = _plus(self._variance, variance)
        self.num_measured += 1
        self.num_samples = _plus(self.num_samples, num_samples)

    def load(self, total: float, num_samples: int) -> None:
        """Begin with the sum of an earlier life; where nothing is extrapolated, added to as if it had not ended."""
        self.num_samples = num_samples
        if self.extrapolates:
            self._loaded = total
        else:
            self._total = total

    def total(self) -> float:
        """The sum of squared norms over all passes."""
        return self._loaded + self._share() * float(self._total)

    def standard_error(self) -> float:
        """Of `total`: what the sketches add, and what the passes add that were not measured."""
        return math.sqrt(self._share() ** 2 * float(self._variance) + self._variance_of_choice())

    def _share(self) -> float:
        return max(1.0, self.num_steps / self.num_measured) if self.num_measured else 1.0

    def _variance_of_choice(self) -> float:
        """Of a sample without replacement, extrapolated to all passes; infinite from a single one."""
        measured, steps = self.num_measured, max(self.num_steps, self.num_measured)
        if measured == steps:
            return 0.0
        if measured < 2:
            return math.inf
        between = max(0.0, float(self._squares) - float(self._total) ** 2 / measured) / (measured - 1)
        return steps**2 * (1 - measured / steps) * between / measured


def _plus(total: Any, more: Any) -> Any:
    """In place once it is a tensor: a recorded pass that is replayed must find the sum where it was."""
    return total.add_(more) if isinstance(total, Tensor) else total + more


def addend(gradient: Tensor, total: Tensor) -> Tensor:
    """A gradient as it is added to a sum of gradients: dense, in the sum's type, cut off from the graph.

    Mostly it is that already: each needless operation is a microsecond or more, times the parameters, a step.
    """
    gradient = gradient.detach() if gradient.requires_grad else gradient
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient if gradient.dtype == total.dtype else gradient.to(total.dtype)
