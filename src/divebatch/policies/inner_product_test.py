"""The inner product test (Bollapragada et al. 2018): noise along the gradient, and across it."""

import math
from dataclasses import dataclass

from divebatch.checks import require_positive
from divebatch.errors import UsageError
from divebatch.measurement import Diversity, Measurement
from divebatch.policies.confidence import asked, require_diversity
from divebatch.policies.periodic import Periodic


@dataclass(frozen=True, slots=True)
class InnerProductTest(Periodic):
    """A batch whose gradient is a descent direction often enough: less strict than the norm test.

    With a = the fraction of the noise along the gradient the two tests want a * B / theta^2 and (1 - a) * B / nu^2
    samples; the larger counts.

    The fraction comes from chunks of a batch, the last one against the others: from the estimators "split" and
    "moments". It takes the noisy g as the original does, which makes it too large: 1 + B / b times for noise that is
    alike in all directions.

    Args:
        max_batch_size: The largest batch, in samples.
        min_batch_size: The smallest batch, in samples.
        every_epochs: How many epochs lie between two decisions.
        monotone: Whether the batch never shrinks.
        theta: The largest standard deviation of <g_i, g> over the batch, relative to ||g||^2.
        nu: The largest noise at right angles to g, relative to ||g||; None leaves the second test out.
    """

    needs = frozenset({"diversity", "inner_variance"})

    theta: float = 0.5
    nu: float | None = 1.0

    def __post_init__(self) -> None:
        Periodic.__post_init__(self)
        require_positive("theta", self.theta)
        if self.nu is not None:
            require_positive("nu", self.nu)

    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        diversity = require_diversity(self, seen)
        if math.isnan(diversity.trace):  # a step or two that show nothing are no reason to stop
            return None, "nothing was seen that would justify a change"
        along = fraction_along(diversity)
        across = (1 - along) / self.nu**2 if self.nu is not None else 0.0
        factor = max(along / self.theta**2, across)
        size, remark = asked(diversity, seen.batch_size, lambda noise_scale: factor * noise_scale if factor else 0.0)
        remark = f"{along:.1%} of the noise is along the gradient" + (f"; {remark}" if remark else "")
        return (math.ceil(size) if size is not None and math.isfinite(size) else size), remark


def fraction_along(diversity: Diversity) -> float:
    """Return Var_i<g_i, g> / (tr(Sigma) ||G||^2), between 0 and 1; 1, the strictest, where it cannot be formed."""
    if diversity.inner_variance is None:
        raise UsageError(
            "the inner product test needs the noise along the gradient, which this estimate lacks: use "
            "estimator='split' or 'moments'"
        )
    below = diversity.trace * diversity.sq_norm
    fraction = diversity.inner_variance / below if below > 0 else math.nan
    return min(1.0, max(0.0, fraction)) if math.isfinite(fraction) else 1.0
