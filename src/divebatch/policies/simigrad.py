"""SimiGrad (Qin et al. 2021): hold the likeness of two half-batch gradients at a target."""

from dataclasses import dataclass

from divebatch.checks import require_positive
from divebatch.errors import ArgumentError
from divebatch.measurement import Diversity, Measurement
from divebatch.policies.confidence import require_diversity
from divebatch.policies.periodic import Periodic


@dataclass(frozen=True, slots=True)
class SimiGrad(Periodic):
    """Ten per cent more where the halves of a batch differ too much, ten per cent less where they agree too well.

    The likeness is the cosine between the gradients of two halves. It is taken from the noise scale B, as
    1 / (1 + 2 B / b) for a batch of b, rather than from single noisy pairs. Where its interval holds the target,
    nothing changes. The original changes the size at every step; here every `every_epochs` epochs, or every so many
    steps. It brings the square-root coupling. It comes to rest at 2 * B * target / (1 - target).

    Args:
        max_batch_size: The largest batch, in samples.
        min_batch_size: The smallest batch, in samples.
        every_epochs: How many epochs lie between two decisions.
        monotone: Whether the batch never shrinks.
        target_cosine: The cosine to hold, between 0 and 1.
        multiple_of: Sizes are multiples of this many samples, and so is the least change.
    """

    lr_coupling = "sqrt"
    has_many_sizes = False  # it goes by tenths: rounded down from outside it would not move

    monotone: bool = False
    target_cosine: float = 0.3
    multiple_of: int = 1

    def __post_init__(self) -> None:
        Periodic.__post_init__(self)
        self.set_bounds(floor=self.min_batch_size, multiple_of=self.multiple_of)
        require_positive("target_cosine", self.target_cosine)
        if self.target_cosine >= 1:
            raise ArgumentError(f"target_cosine must be below 1, got target_cosine={self.target_cosine!r}")

    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        low, high = cosines(require_diversity(self, seen), seen.batch_size)
        b, least = seen.batch_size, self.multiple_of  # a smaller step would be rounded away, or down to nothing
        reason = f"likeness of halves {low:.3f} to {high:.3f}, target {self.target_cosine:g}"
        if high < self.target_cosine:
            return max(b + least, int(1.1 * b)), reason
        if low > self.target_cosine and b > least:
            return max(least, min(b - least, int(0.9 * b))), reason
        return None, reason


def cosines(diversity: Diversity, batch_size: int) -> tuple[float, float]:
    """Return the interval of the cosine of two half-batch gradients; 0 where the noise scale cannot be formed."""
    if diversity.spread is None and not diversity.is_defined:
        return (0.0, 0.0)
    low, high = diversity.noise_scale_interval()
    return (1 / (1 + 2 * max(high, 0.0) / batch_size), 1 / (1 + 2 * max(low, 0.0) / batch_size))
