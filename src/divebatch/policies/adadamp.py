"""AdaDamp and its kin (Sievert): damp the gradient noise as training comes closer to its end."""

import math
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count, require_positive
from divebatch.measurement import Decision, Measurement
from divebatch.policies.bounds import Capped
from divebatch.policies.confidence import decided, ratio, require_diversity, require_loss


@dataclass(frozen=True, slots=True)
class _Damping(Capped):
    """Never below the first batch, never above the cap. `SpillOver` sends what is over the cap to the learning rate."""

    has_many_sizes = True

    def reachable(self, seen: Measurement) -> Collection[int]:
        return self.bounds.sizes(at_least=seen.first_batch_size)

    def _grown(self, seen: Measurement, factor: float, reason: str) -> Decision:
        first = seen.first_batch_size
        return decided(seen, _wanted(first, factor), self.bounds, at_least=first, reason=reason)


def _wanted(first_batch_size: int, factor: float) -> float:
    wanted = first_batch_size * factor
    # The rule rounds up, but a rounding error above a whole number is no sample more.
    return float(math.ceil(wanted - 1e-9)) if math.isfinite(wanted) else wanted


@dataclass(frozen=True, slots=True)
class AdaDamp(_Damping):
    """ceil(b0 * loss_0 / loss): the batch grows as the training loss falls, and shrinks if it rises again.

    loss_0 is the first epoch's loss. The loss must have its lowest value near zero.

    Args:
        max_batch_size: The largest batch, in samples.
    """

    needs = frozenset({"loss"})

    def next(self, seen: Measurement) -> Decision:
        loss = require_loss(self, seen)
        factor = ratio(loss if seen.history.first_loss is None else seen.history.first_loss, loss)
        return self._grown(seen, factor, f"the loss fell by {factor:g}")


@dataclass(frozen=True, slots=True)
class GradientDamp(_Damping):
    """ceil(b0 * ||G_0||^2 / ||G||^2): AdaDamp's rule for networks, by the squared norm of the mean gradient.

    G_0 is the first one measured. An estimate of ||G||^2 that is not above zero leaves the size as it is.

    Args:
        max_batch_size: The largest batch, in samples.
    """

    needs = frozenset({"diversity"})
    estimator = "moments"
    decides_within_epochs = True

    def next(self, seen: Measurement) -> Decision:
        now = require_diversity(self, seen).sq_norm
        first = now if seen.history.first_sq_norm is None else seen.history.first_sq_norm
        factor = ratio(first, now) if now > 0 else math.nan
        return self._grown(seen, factor, f"the squared gradient norm fell by {factor:g}")


@dataclass(frozen=True, slots=True)
class PadaDamp(_Damping):
    """b0 + rate * step: AdaDamp's growth on a straight line, with nothing to measure.

    Args:
        max_batch_size: The largest batch, in samples.
        rate: How many samples the batch grows by with each step.
    """

    decides_within_epochs = True

    _: KW_ONLY
    rate: float = 0.1

    def __post_init__(self) -> None:
        _Damping.__post_init__(self)
        require_positive("rate", self.rate)

    def next(self, seen: Measurement) -> Decision:
        return self._grown(seen, 1 + self.rate * seen.step / seen.first_batch_size, f"after {seen.step} steps")


@dataclass(frozen=True, slots=True)
class GeoDamp(_Damping):
    """b0 * factor^(epoch // every_epochs): growth by a factor at fixed times.

    Args:
        max_batch_size: The largest batch, in samples.
        factor: What the batch size is multiplied by.
        every_epochs: How many epochs lie between two changes.
    """

    epoch_settings = frozenset({"every_epochs"})
    has_many_sizes = False

    _: KW_ONLY
    factor: float = 2
    every_epochs: int = 5

    def __post_init__(self) -> None:
        _Damping.__post_init__(self)
        require_positive("factor", self.factor)
        require_count("every_epochs", self.every_epochs)

    def next(self, seen: Measurement) -> Decision:
        power = seen.epoch // self.every_epochs
        reason = f"epoch {seen.epoch}: {self.factor:g}^{power} times the first batch"
        return self._grown(seen, self._factor(power), reason)

    def reachable(self, seen: Measurement) -> Collection[int]:
        first, sizes = seen.first_batch_size, {seen.first_batch_size}
        power = 1
        while self.factor > 1 and max(sizes) < self.max_batch_size:
            sizes.add(self.bounds.clamp(_wanted(first, self._factor(power)), at_least=first))
            power += 1
        return sizes

    def _factor(self, power: int) -> float:
        # A long run may grow past what a float holds; the cap applies all the same.
        try:
            return float(self.factor) ** power
        except OverflowError:
            return math.inf
