"""The norm test (Byrd et al. 2012; for adaptive optimizers Lau et al. 2024)."""

import math
from dataclasses import dataclass

from divebatch.checks import require_positive
from divebatch.policies.periodic import FromNoise, Periodic


@dataclass(frozen=True, slots=True)
class NormTest(FromNoise):
    """The smallest batch whose gradient's standard deviation is at most `eta` times its norm: ceil(B / eta^2).

    The original compares the variance with the noisy batch gradient's norm. Here both come from an estimator, so the
    test is not fooled by noise. It leaves the learning rate alone.

    >>> NormTest(4096, eta=0.5).wanted(100.3)
    402.0

    Args:
        max_batch_size: The largest batch, in samples.
        min_batch_size: The smallest batch, in samples.
        every_epochs: How many epochs lie between two decisions.
        monotone: Whether the batch never shrinks.
        eta: The largest standard deviation of the batch gradient, relative to the gradient's norm.
    """

    eta: float = 0.5

    def __post_init__(self) -> None:
        Periodic.__post_init__(self)
        require_positive("eta", self.eta)

    def wanted(self, noise_scale: float) -> float:
        needed = noise_scale / self.eta**2
        return float(math.ceil(needed)) if math.isfinite(needed) else needed
