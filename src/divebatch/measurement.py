"""What is measured and what is decided: the only objects that pass between estimators, policies and controller."""

import math
from dataclasses import dataclass

from divebatch.errors import UndefinedDiversityError


@dataclass(frozen=True, slots=True)
class Diversity:
    """Gradient diversity (the paper's Definition 1) as its two raw sums over `num_samples` samples.

    Both sums are over gradients g_i of each sample's own, unaveraged loss. Partial results over different samples
    may add `sum_of_sq_norms`; `sq_norm_of_sum` may not be added: add the gradient vectors, then square.

    >>> Diversity(sum_of_sq_norms=8.0, sq_norm_of_sum=4.0, num_samples=10).value
    2.0
    """

    sum_of_sq_norms: float
    sq_norm_of_sum: float
    num_samples: int

    @property
    def is_defined(self) -> bool:
        """Whether the ratio exists and is finite."""
        if not 0 < self.sq_norm_of_sum < math.inf:
            return False
        return math.isfinite(self.sum_of_sq_norms / self.sq_norm_of_sum)

    @property
    def value(self) -> float:
        """sum_i ||g_i||^2 / ||sum_i g_i||^2, dimensionless: 1/n if all gradients agree, 1 if all are orthogonal."""
        if not self.is_defined:
            raise UndefinedDiversityError(f"diversity is undefined: {self.problem}")
        return self.sum_of_sq_norms / self.sq_norm_of_sum

    @property
    def problem(self) -> str:
        """Why the ratio does not exist, in words; empty where it does."""
        if self.is_defined:
            return ""
        if self.sq_norm_of_sum == 0.0 and math.isfinite(self.sum_of_sq_norms):
            return f"the gradients of {self.num_samples} samples sum to zero"
        sums = f"sum_of_sq_norms={self.sum_of_sq_norms}, sq_norm_of_sum={self.sq_norm_of_sum}"
        if math.isfinite(self.sum_of_sq_norms) and math.isfinite(self.sq_norm_of_sum):
            return f"the ratio of the sums is not a finite number ({sums})"
        return f"NaN or infinite gradients ({sums})"

    @property
    def noise_scale(self) -> float:
        """tr(Sigma) / ||G||^2 = n * diversity - 1, in samples; exact where all gradients share the same weights."""
        return self.num_samples * self.value - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """All that a policy may see. Counters are as of now; `batch_size` is the one that was in force."""

    epoch: int
    """Finished epochs, so 1 at the first decision."""
    batch_size: int
    dataset_size: int
    """Samples in one epoch: the paper's n."""
    first_batch_size: int | None = None
    """The one training started with."""
    step: int = 0
    """Batches delivered so far, one an optimizer step."""
    samples: int = 0
    """Samples seen so far."""
    diversity: Diversity | None = None
    """None where the policy did not ask for it."""
    lr: float | None = None
    """Learning rate in force, first parameter group."""
    lr_schedule_ratio: float | None = None
    """The schedule's own course relative to its start, without any coupling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a policy wants next. `lr_factor` multiplies the learning rate from now on, beside the coupling."""

    batch_size: int
    lr_factor: float = 1.0
    reason: str = ""
