"""SimiGrad (Qin et al. 2021): hold the likeness of two half-batch gradients at a target."""

from dataclasses import dataclass

from divebatch.checks import require_positive
from divebatch.errors import ArgumentError
from divebatch.measurement import Diversity, Measurement
from divebatch.policies.confidence import require_diversity
from divebatch.policies.paced import Paced


@dataclass(frozen=True, slots=True)
class SimiGrad(Paced):
    """Ten per cent more where the halves of a batch differ too much, ten per cent less where they agree too well.

    The likeness is the cosine between the gradients of two halves. It is taken from the noise scale B, as
    1 / (1 + 2 B / b) for a batch of b, rather than from single noisy pairs. Where its interval holds `target`, nothing
    changes. The original changes the size at every step; here at every `every`-th epoch. It is made for a learning rate
    that follows the square root of the batch size. It comes to rest at 2 * B * target / (1 - target).
    """

    lr_coupling = "sqrt"
    has_many_sizes = False  # it goes by tenths, and rounded down it would not move

    monotone: bool = False
    target: float = 0.3

    def __post_init__(self) -> None:
        Paced.__post_init__(self)
        require_positive("target", self.target)
        if self.target >= 1:
            raise ArgumentError(f"target must be below 1, got target={self.target!r}")

    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        """A tenth up or down, and at least one multiple."""
        low, high = cosines(require_diversity(self, seen), seen.batch_size)
        b, least = seen.batch_size, self.multiple_of  # a smaller step would be rounded away, or down to nothing
        reason = f"likeness of halves {low:.3f} to {high:.3f}, target {self.target:g}"
        if high < self.target:
            return max(b + least, int(1.1 * b)), reason
        if low > self.target and b > least:
            return max(least, min(b - least, int(0.9 * b))), reason
        return None, reason


def cosines(diversity: Diversity, batch_size: int) -> tuple[float, float]:
    """Between which values the cosine of two half-batch gradients lies; 0 where the noise scale cannot be formed."""
    if diversity.spread is None and not diversity.is_defined:
        return (0.0, 0.0)
    low, high = diversity.noise_scale_interval()
    return (1 / (1 + 2 * max(high, 0.0) / batch_size), 1 / (1 + 2 * max(low, 0.0) / batch_size))
