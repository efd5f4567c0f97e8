"""The gradient noise scale as the batch size (McCandlish et al. 2018)."""

import math
from dataclasses import dataclass

from divebatch.checks import require_positive
from divebatch.policies.periodic import FromNoise, Periodic


@dataclass(frozen=True, slots=True)
class NoiseScale(FromNoise):
    """The noise scale B itself: a batch whose gradient is half signal, half noise.

    At b = B training takes twice the fewest possible steps and twice the fewest possible samples. With a step cost r
    the batch is sqrt(r * B), which grows more slowly.

    >>> NoiseScale(4096).wanted(900.0), NoiseScale(4096, step_cost=4).wanted(900.0)
    (900.0, 60.0)

    Args:
        max_batch_size: The largest batch, in samples.
        min_batch_size: The smallest batch, in samples.
        every_epochs: How many epochs lie between two decisions.
        monotone: Whether the batch never shrinks.
        step_cost: What one optimizer step is worth, in samples; None for the rule B.
    """

    step_cost: float | None = None

    def __post_init__(self) -> None:
        Periodic.__post_init__(self)
        if self.step_cost is not None:
            require_positive("step_cost", self.step_cost)

    def wanted(self, noise_scale: float) -> float:
        return noise_scale if self.step_cost is None else math.sqrt(self.step_cost * max(noise_scale, 0.0))
