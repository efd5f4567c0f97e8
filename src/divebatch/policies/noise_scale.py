"""The gradient noise scale as the batch size (McCandlish et al. 2018)."""

import math
from dataclasses import dataclass

from divebatch.checks import require_positive
from divebatch.policies.from_noise import FromNoise
from divebatch.policies.paced import Paced


@dataclass(frozen=True, slots=True)
class NoiseScale(FromNoise):
    """The noise scale B itself: a batch whose gradient is half signal, half noise.

    At b = B training takes twice the fewest possible steps and twice the fewest possible samples. With a `price` r,
    what a unit of time is worth in samples, the batch is sqrt(r * B), which grows more slowly.

    >>> NoiseScale(4096).wanted(900.0), NoiseScale(4096, price=4).wanted(900.0)
    (900.0, 60.0)
    """

    price: float | None = None

    def __post_init__(self) -> None:
        Paced.__post_init__(self)
        if self.price is not None:
            require_positive("price", self.price)

    def wanted(self, noise_scale: float) -> float:
        """B, or sqrt(r * B)."""
        return noise_scale if self.price is None else math.sqrt(self.price * max(noise_scale, 0.0))
