"""The default for those who do not want to choose: between the batch you know and the one the noise asks for."""

import math
from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count, require_positive
from divebatch.errors import ArgumentError
from divebatch.measurement import Decision, Measurement
from divebatch.policies.bounds import require_start_under_cap
from divebatch.policies.confidence import asked, require_diversity
from divebatch.policies.policy import Policy
from divebatch.policies.wrappers import WarmUp

POWERS = {"linear": 1.0, "sqrt": 0.5}


@dataclass(frozen=True, slots=True)
class _Doublings(Policy):
    """sqrt(price * B) to the nearest doubling of b0, which is the price unless one is given."""

    needs = frozenset({"diversity"})

    max_batch_size: int
    price: float | None

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Not at the cap, which it does not leave."""
        return batch_size < self.max_batch_size

    def next(self, seen: Measurement) -> Decision:
        """Up by doublings, where the whole interval is above the present size."""
        if seen.diversity is None and not self.measures(seen.epoch, seen.batch_size):
            return Decision(batch_size=seen.batch_size)

        def mean(noise_scale: float) -> float:
            return math.sqrt((self.price or seen.start) * max(noise_scale, 0.0))

        wanted, reason = asked(require_diversity(self, seen), seen.batch_size, mean)
        if wanted is None or math.isnan(wanted):
            return Decision(batch_size=seen.batch_size, reason=reason)
        size = max(seen.batch_size, self._nearest(seen.start, wanted))
        price = "first batch" if self.price is None else f"{self.price:g}"
        reason = f"sqrt({price} * noise scale) = {wanted:.0f}" + (f", {reason}" if reason else "")
        return Decision(batch_size=size, reason=reason, wanted=wanted)

    def _nearest(self, start: int, wanted: float) -> int:
        if wanted >= self.max_batch_size:
            return self.max_batch_size
        doublings = round(math.log2(wanted / start)) if wanted > start else 0
        return min(start << doublings, self.max_batch_size)


@dataclass(frozen=True, slots=True)
class Auto(Policy):
    """sqrt(b0 * B): the geometric mean of the batch you start with and the noise scale B. Nothing to set but the cap.

    Your first batch b0 is taken as what a step is worth to you, in samples: at such a price the batch that wastes least
    is sqrt(b0 * B) (McCandlish et al. 2018). `price` is another worth of a step, in samples: where a step's fixed cost
    is as long as that of many more samples than you start with, `advise` measures how many. Early in training B is
    about as large as a good fixed batch, so the size grows soon; later B grows by orders of magnitude, and the size
    only with its root.

    It moves by doublings, so that a compiler sees few shapes; never down; and only where the whole 95 % interval of the
    estimate lies above the present size. It takes the estimator "moments" unless the controller is given one. "split"
    is better where batches go through in two or more parts, where the optimizer has no momentum, and for decisions
    within epochs: in the first steps of a training "moments" is several times too large. Not for "trajectory", whose B
    is far too large.

    The learning rate follows linearly, or by the square root with `lr_coupling="sqrt"` for Adam-like optimizers; the
    controller takes that from here. After each growth it gets there over `warm_up` further decisions. Both couplings
    are made to leave the noise of training as it was, so at the cap nothing is left that had to go into the rate.

    >>> Auto(4096)
    Auto(max_batch_size=4096, price=None, warm_up=1, lr_coupling='linear')
    """

    needs = frozenset({"diversity"})
    estimator = "moments"
    decides_within_epochs = True

    max_batch_size: int
    _: KW_ONLY
    price: float | None = None
    warm_up: int = 1
    lr_coupling: str | None = "linear"

    def __post_init__(self) -> None:
        require_count("max_batch_size", self.max_batch_size)
        require_count("warm_up", self.warm_up)
        if self.price is not None:
            require_positive("price", self.price)
        if self.lr_coupling not in POWERS:
            raise ArgumentError(f"lr_coupling must be one of {', '.join(POWERS)}, got {self.lr_coupling!r}")

    def next(self, seen: Measurement) -> Decision:
        """The doubling nearest to the mean, and a learning rate that comes after it."""
        return self.parts().next(seen)

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Until the cap is reached: from there on nothing is left to decide, and nothing is measured."""
        return self.parts().measures(epoch, batch_size)

    def parts(self) -> WarmUp:
        """What it is made of."""
        return WarmUp(
            _Doublings(self.max_batch_size, self.price), epochs=self.warm_up, power=POWERS[self.lr_coupling or "linear"]
        )

    def check_start(self, batch_size: int) -> None:
        """Raise if the first batch is above the cap."""
        require_start_under_cap(batch_size, self.max_batch_size)
