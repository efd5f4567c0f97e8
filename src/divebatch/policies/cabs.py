"""CABS (Balles et al. 2017): the batch size coupled to the learning rate and the loss."""

import math
from dataclasses import dataclass

from divebatch.measurement import Diversity, Measurement
from divebatch.policies.confidence import ratio, require_diversity, require_loss
from divebatch.policies.periodic import Periodic


@dataclass(frozen=True, slots=True)
class CABS(Periodic):
    """lr * tr(Sigma) / loss, for a loss whose lowest value is near zero. It leaves the learning rate alone.

    The original decides at every step from exponential means that start at fixed values. Here the estimator averages,
    over the epoch or with its `decay`, debiased. The size stays where the interval of tr(Sigma) allows it. Its floor
    and cap were 16 and 2048.

    Args:
        max_batch_size: The largest batch, in samples.
        min_batch_size: The smallest batch, in samples.
        every_epochs: How many epochs lie between two decisions.
        monotone: Whether the batch never shrinks.
    """

    needs = frozenset({"diversity", "loss"})
    decides_within_epochs = False

    monotone: bool = False
    min_batch_size: int = 16

    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        diversity, loss = require_diversity(self, seen), require_loss(self, seen)
        low, value, high = (ratio((seen.lr or 0.0) * trace, loss) for trace in traces(diversity))
        reason = f"lr * tr(Sigma) / loss = {value:.1f}"
        # The interval comes before the value: where it holds the present size, nothing justifies a change.
        if low < high and low <= seen.batch_size <= high:
            return None, f"{reason}, between {low:.0f} and {high:.0f} with 95 % confidence: no change"
        return (round(value) if math.isfinite(value) else value), reason


def traces(diversity: Diversity) -> tuple[float, float, float]:
    """Return tr(Sigma) between the ends of its interval; a single estimate shows no scatter, so it has no upper end."""
    trace, spread = diversity.trace, diversity.spread
    if math.isnan(trace):
        return (math.nan, math.nan, math.nan)
    errors = 0.0 if spread is None else spread.quantile(0.95)
    reach = errors * math.sqrt(spread.trace_variance) if spread is not None and errors < math.inf else errors
    lowest = trace - reach if spread is None or spread.bounds_below else 0.0
    return (max(0.0, lowest), max(0.0, trace), trace + reach)
