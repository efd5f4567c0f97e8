"""What a meter has counted: sums over measured backward passes, kept on the device until somebody reads them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Sums:
    """Sums over the measured ones of `num_steps` backward passes; the rest is extrapolated when it is read."""

    num_steps: int = 0
    """Backward passes in all, measured or not."""
    num_measured: int = 0
    num_samples: int | Tensor = 0
    """In the measured passes."""
    _loaded: float = 0.0
    """The total of an earlier life, extrapolated already."""
    _totals: Tensor | None = None
    """(3,) in float64: sum of squared norms, its squares pass by pass, variance of the sketches."""

    def add(self, sq_norms: Tensor, variance: Tensor | None, num_samples: int | Tensor) -> None:
        """One measured pass: its sum of squared norms and the variance of that, in float64."""
        zero = torch.zeros_like(sq_norms) if variance is None else variance
        added = torch.stack([sq_norms, sq_norms.square(), zero])
        self._totals = added if self._totals is None else self._totals.add_(added)
        self.num_measured += 1
        self.num_samples = self.num_samples + num_samples

    def load(self, total: float, num_samples: int) -> None:
        """Begin with the sum of an earlier life."""
        self._loaded, self.num_samples = total, num_samples

    def total(self) -> float:
        """The sum of squared norms over all passes."""
        return self._loaded + (0.0 if self._totals is None else self._share() * float(self._totals[0]))

    def standard_error(self) -> float:
        """Of `total`: what the sketches add, and what the passes add that were not measured."""
        if self._totals is None:
            return 0.0
        total, squares, variance = self._totals.tolist()
        return math.sqrt(self._share() ** 2 * variance + self._variance_of_choice(total, squares))

    def _share(self) -> float:
        return max(1.0, self.num_steps / self.num_measured) if self.num_measured else 1.0

    def _variance_of_choice(self, total: float, squares: float) -> float:
        """Of a sample without replacement, extrapolated to all passes; infinite from a single one."""
        measured, steps = self.num_measured, max(self.num_steps, self.num_measured)
        if measured == steps:
            return 0.0
        if measured < 2:
            return math.inf
        between = max(0.0, squares - total**2 / measured) / (measured - 1)
        return steps**2 * (1 - measured / steps) * between / measured
