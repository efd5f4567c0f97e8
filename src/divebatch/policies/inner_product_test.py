"""The inner product test (Bollapragada et al. 2018): noise along the gradient, and across it."""

import math
from dataclasses import dataclass

from divebatch.checks import require_positive
from divebatch.errors import UsageError
from divebatch.measurement import Diversity, Measurement
from divebatch.policies.confidence import asked, require_diversity
from divebatch.policies.paced import Paced


@dataclass(frozen=True, slots=True)
class InnerProductTest(Paced):
    """A batch whose gradient is a descent direction often enough: less strict than the norm test.

    The standard deviation of <g_i, g> over the batch may be `theta` times ||g||^2, and what is left of the noise, at
    right angles to g, `nu` times ||g||; `nu=None` leaves the second test out. With a = the share of the noise along the
    gradient these are a * B / theta^2 and (1 - a) * B / nu^2 samples; the larger counts, and the size only grows.

    The share comes from chunks of a batch, the last one against the others: from the estimators "split" and "moments".
    It takes the noisy g as the original does, which makes it too large: 1 + B / b times for noise that is
    alike in all directions.
    """

    needs = frozenset({"diversity", "inner_variance"})

    theta: float = 0.5
    nu: float | None = 1.0

    def __post_init__(self) -> None:
        Paced.__post_init__(self)
        require_positive("theta", self.theta)
        if self.nu is not None:
            require_positive("nu", self.nu)

    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        """The larger of both, as far as the noise scale is known."""
        diversity = require_diversity(self, seen)
        if math.isnan(diversity.trace):  # a step or two that show nothing are no reason to stop
            return None, "nothing was seen that would justify a change"
        along = share_along(diversity)
        across = (1 - along) / self.nu**2 if self.nu is not None else 0.0
        factor = max(along / self.theta**2, across)
        size, remark = asked(diversity, seen.batch_size, lambda noise_scale: factor * noise_scale if factor else 0.0)
        remark = f"{along:.1%} of the noise is along the gradient" + (f"; {remark}" if remark else "")
        return (math.ceil(size) if size is not None and math.isfinite(size) else size), remark


def share_along(diversity: Diversity) -> float:
    """Var_i<g_i, g> / (tr(Sigma) ||G||^2), between 0 and 1; 1, the strictest, where it cannot be formed."""
    if diversity.inner_variance is None:
        raise UsageError(
            "the inner product test needs the noise along the gradient: use estimator='moments' or 'split'"
        )
    below = diversity.trace * diversity.sq_norm
    share = diversity.inner_variance / below if below > 0 else math.nan
    return min(1.0, max(0.0, share)) if math.isfinite(share) else 1.0
