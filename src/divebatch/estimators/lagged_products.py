"""Products of gradients one and two steps apart, from which that of gradients no step apart is extrapolated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from divebatch.estimators.average import Norms, inner_variance, read
from divebatch.estimators.gradient_sketch import with_shared_error
from divebatch.estimators.kept_gradients import Kept
from divebatch.estimators.step_gradients import StepGradients
from divebatch.measurement import Spread

FARTHEST = 2.5
"""The largest factor of the extrapolation below: it multiplies the noise of the products, too."""
KEPT = 3


def extrapolation(optimizer: Optimizer) -> float:
    """f in ||G||^2 = L1 + f * (L1 - L2), L1 and L2 the products of gradients one and two steps apart.

    A gradient's noise moves the weights, and they move the gradients that follow against it: by c after one step and,
    with momentum m, by (1 + m) c after two; Nesterov's (1 + m) c and (1 + m + m^2) c. So f is 1 / m, or
    (1 + m) / m^2. It is 0 where that would be above 2.5: momentum below 0.4, Nesterov's below 0.87, and NAdam, whose
    momentum rises over thousands of steps. Without momentum both steps show the same, and nothing can be told. Of
    parameter groups the largest one's counts.
    """
    return _factor(optimizer.param_groups[_largest_group(optimizer)])


def _largest_group(optimizer: Optimizer) -> int:
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    return sizes.index(max(sizes))


def _factor(group: Mapping[str, Any]) -> float:
    momentum = float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
    # Without momentum both lags show the same; NAdam's momentum rises over thousands of steps.
    if momentum <= 0 or "momentum_decay" in group:
        return 0.0
    factor = (1 + momentum) / momentum**2 if group.get("nesterov") else 1 / momentum
    # The extrapolation multiplies the noise of the products too.
    return factor if factor <= FARTHEST else 0.0


@dataclass(frozen=True, slots=True)
class LaggedRow:
    """What a step and the two before it showed."""

    sizes: tuple[int, int]
    """Samples of the step before and of this one."""
    factor: float
    parts: Sequence[Norms]
    """||g||^2 of the step before and of this one; the products of this one with the last and with the one before."""

    @property
    def num_samples(self) -> int:
        """Samples of this step."""
        return self.sizes[1]

    def numbers(self, values: Sequence[float]) -> tuple[float, float, float, float]:
        """tr(Sigma), ||G||^2, Var_i<g_i, g> and what of the first was taken off for the second."""
        (size, own_size), (before, own, one, two) = self.sizes, values
        sq_norm = one + self.factor * (one - two)
        mean = (size**2 * before + 2 * size * own_size * one + own_size**2 * own) / (size + own_size) ** 2
        inner = inner_variance((before, own), self.sizes, mean)
        return own_size * (own - sq_norm), sq_norm, inner, own_size * sq_norm


class Lagged:
    """The mean gradients of the last three steps, whole or sketched, and their products."""

    needed = KEPT
    reach = KEPT - 1
    """An estimate has gradients in common with so many of those before it, where there is one a step."""
    bounds_below, has_inner_variance = True, True

    def __init__(self, kept: Kept, optimizer: Optimizer) -> None:
        self.kept, self._optimizer, self._group = kept, optimizer, _largest_group(optimizer)
        self.forget()

    def forget(self) -> None:
        """Drop all steps."""
        self._count = 0
        self._sizes: list[int] = []
        """Samples of the last steps, the newest first, as in the following."""
        self._sq_norms: list[Norms] = []

    @property
    def num_chunks(self) -> int:
        """Steps whose gradients are kept."""
        return min(self._count, KEPT)

    def widened(self, spread: Spread, means: Sequence[float]) -> Spread:
        """The spread with what a sketch's error adds that all steps share."""
        return with_shared_error(spread, means, self.kept.relative_variance)

    def add_step(self, step: StepGradients, num_samples: int) -> None:
        """A step on `num_samples` samples."""
        sq_norm = self.kept.put(self._count % KEPT, step)
        self._count += 1
        self._sizes = [num_samples, *self._sizes[: KEPT - 1]]
        self._sq_norms = [sq_norm, *self._sq_norms[: KEPT - 1]]

    def row(self) -> LaggedRow:
        """The row of the last three steps."""
        newest, last, before = ((self._count - lag) % KEPT for lag in (1, 2, 3))
        products = [self.kept.dot(newest, last), self.kept.dot(newest, before)]
        factor = _factor(self._optimizer.param_groups[self._group])  # it may change, and groups are replaced by a load
        return LaggedRow((self._sizes[1], self._sizes[0]), factor, [self._sq_norms[1], self._sq_norms[0], *products])

    def state_dict(self) -> dict[str, Any]:
        """The gradients that the next steps will be multiplied with."""
        # The oldest of the three is written over by the next step, so two are enough.
        held = [(self._count - lag) % KEPT for lag in range(1, min(self._count, KEPT - 1) + 1)]
        sq_norms = self.kept.shards.summed(read(self._sq_norms[: len(held)]))
        gradients = [self.kept.state_of(slot) for slot in held]
        return {"sizes": self._sizes[: len(held)], "sq_norms": sq_norms, "gradients": gradients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved gradients."""
        self.forget()
        for gradients in reversed(state["gradients"]):
            self.kept.load(self._count, gradients)
            self._count += 1
        self._sizes, self._sq_norms = list(state["sizes"]), [*self.kept.shards.share(state["sq_norms"])]
