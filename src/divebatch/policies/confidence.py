"""How far a rule may trust what was measured, and how the size it asks for becomes a decision."""

import math
from collections.abc import Callable

from divebatch.errors import UsageError
from divebatch.measurement import Decision, Diversity, Measurement
from divebatch.policies.bounds import Bounds


def require_diversity(policy: object, seen: Measurement) -> Diversity:
    """Return the epoch's diversity, or raise where none was measured."""
    if seen.diversity is None:
        name = type(policy).__name__
        raise UsageError(f"{name} needs the diversity of epoch {seen.epoch}, and none was measured")
    return seen.diversity


def require_loss(policy: object, seen: Measurement) -> float:
    """Return the epoch's loss, or raise where none was given."""
    if seen.loss is None:
        raise UsageError(f"{type(policy).__name__} needs the loss of epoch {seen.epoch}: control.step(loss=...)")
    return seen.loss


def asked(diversity: Diversity, batch_size: int, rule: Callable[[float], float]) -> tuple[float | None, str]:
    """Return what `rule`, which grows with the noise scale, asks for on this evidence, and a remark on it.

    A noise scale comes with an interval. Where the sizes that the interval allows lie on both sides of the present
    one, nothing is known that would justify a change: None, for the present size. An interval without an upper end says
    that ||G||^2 cannot be told from zero; the value, a division by it, may then be anything, so the lower end is taken.
    Without a spread the value is taken as it is, and one that cannot be formed counts as infinite. With one, where no
    noise scale is ruled out, or most samples had to be left out, nothing changes, and the remark says which.

    >>> asked(Diversity(0.02, 1.0, 50_000), 128, lambda noise_scale: 0.1 * (1 + noise_scale))
    (100.0, '')
    """
    if diversity.spread is None:
        return (rule(diversity.noise_scale), "") if diversity.is_defined else (math.inf, diversity.undefined_reason)
    ends = diversity.noise_scale_interval()
    low, high = map(rule, ends)
    # The interval comes before the value: sizes on both sides of the present one justify no change.
    if low <= batch_size <= high or diversity.has_diverged:
        if ends == (0.0, math.inf):
            why = diversity.undefined_reason or "the estimates scatter too much"
            return None, f"the noise scale is not known, as {why}: no change"
        return None, f"the wanted size is {_range(diversity, low, high)} with 95 % confidence: no change"
    if diversity.is_defined and high < math.inf:
        return rule(diversity.noise_scale), f"{_range(diversity, low, high)} with 95 % confidence"
    # ||G||^2 cannot be told from zero, and a division by it may be anything: only the lower end is sure.
    return low, f"at least {low:.0f} with 95 % confidence"


def _range(diversity: Diversity, low: float, high: float) -> str:
    if diversity.spread is not None and not diversity.spread.bounds_below:
        # Gradients of successive steps without momentum: moments cannot tell the weights' motion from noise.
        return f"at most {high:.0f}, how far below only estimator='split' or 'per-sample' can tell here,"
    return f"between {low:.0f} and {high:.0f}" if high < math.inf else f"at least {low:.0f}"


def decided(seen: Measurement, wanted: float | None, bounds: Bounds, *, at_least: int = 1, reason: str) -> Decision:
    """Return `wanted` within the bounds; the present size where nothing is wanted or it is not a number."""
    if wanted is None:
        return Decision(batch_size=seen.batch_size, reason=reason)
    if math.isnan(wanted):
        return Decision(batch_size=seen.batch_size, reason=f"{reason}: not a number, so no change")
    size = bounds.clamp(wanted, at_least=at_least)
    capped = f", capped at {bounds.cap}" if wanted > bounds.cap else ""
    return Decision(batch_size=size, reason=f"{reason}{capped}", unclamped=wanted)


def ratio(above: float, below: float) -> float:
    """Return above / below for what should be positive; infinite where `below` is zero, NaN where nothing is known."""
    if math.isnan(above) or math.isnan(below) or above < 0 or math.isinf(below) or above == below == 0:
        return math.nan
    return above / below if below > 0 and above / below < math.inf else math.inf
