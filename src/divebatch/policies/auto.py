"""The default for those who do not want to choose: between the batch you know and the one the noise asks for."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from divebatch.checks import require_choice, require_coupling_power, require_positive
from divebatch.measurement import Decision, Measurement
from divebatch.policies.policy import Capped, require_diversity, wanted_size
from divebatch.policies.wrappers import ramped

POWERS = {"linear": 1.0, "sqrt": 0.5, "adam": 0.5}
"""The power of the batch size that the learning rate follows with each coupling by name."""


@dataclass(frozen=True)
class Auto(Capped):
    """sqrt(b0 * B): the geometric mean of the batch you start with and the noise scale B. Nothing to set but the cap.

    The first batch b0 is taken as the price of a step, in samples: at this price, sqrt(b0 * B) wastes least (McCandlish
    et al. 2018). Early in training B is about as large as a good fixed batch, so the size grows soon. Later B grows by
    orders of magnitude, and the size only with its root.

    It moves by doublings, so that a compiler sees few shapes, and never down. It moves only if the whole 95 % interval
    of the estimate lies above the present size. At the cap nothing is measured any more.

    Its estimator is "moments" unless the controller is given one. Without momentum, "moments" gives only an upper
    bound, and "per-sample" replaces it if the model has no BatchNorm and a norm rule for each layer; otherwise a
    warning says so, and nothing grows. Use "split" if batches go through in two or more parts, and for decisions within
    epochs: in the first steps of a training "moments" is several times too large. Do not use "trajectory", whose B is
    far too large.

    After each growth the learning rate reaches its new value over one further decision. The named couplings keep the
    noise of training as it was, so at the cap nothing is left for the learning rate to make up.

    >>> Auto(4096)
    Auto(max_batch_size=4096, step_cost=None, lr_coupling=None)

    Args:
        max_batch_size: The largest batch, in samples.
        step_cost: What one optimizer step is worth, in samples; None for the first batch. Where the fixed cost of a
            step is as long as that of many more samples than you start with, `advise` measures how many.
        lr_coupling: "linear", "sqrt", "adam", or a number p for the p-th power of the batch size; None for the one that
            suits the optimizer, linear for SGD and the square root for Adam-like ones.
    """

    needs = frozenset({"diversity"})
    estimator = "moments"
    needs_lr_coupling = True
    moves_lr = True
    decides_within_epochs = True

    _: KW_ONLY
    step_cost: float | None = None
    lr_coupling: Literal["linear", "sqrt", "adam"] | float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_cost is not None:
            require_positive("step_cost", self.step_cost)
        if isinstance(self.lr_coupling, str | None):
            require_choice("lr_coupling", self.lr_coupling, (*POWERS, None))
        else:
            require_coupling_power("lr_coupling", self.lr_coupling)

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Return True until the cap is reached: from there on nothing is left to decide."""
        return batch_size < self.max_batch_size

    def next(self, seen: Measurement) -> Decision:
        """Return the doubling nearest to the mean, and a learning rate that comes one decision after it."""
        coupling = self.lr_coupling or seen.lr_coupling
        power = POWERS.get(coupling, 0.0) if isinstance(coupling, str) else coupling
        # Cut to what can be had first: the learning rate must be made for the size that comes.
        return ramped(self._doubled(seen).at_most(seen.largest_batch_size), seen, decisions=1, power=power)

    def _doubled(self, seen: Measurement) -> Decision:
        if seen.diversity is None and not self.measures(seen.epoch, seen.batch_size):
            return Decision(batch_size=seen.batch_size)
        cost = self.step_cost or seen.first_batch_size

        def mean(noise_scale: float) -> float:
            return math.sqrt(cost * max(noise_scale, 0.0))

        wanted, reason = wanted_size(require_diversity(self, seen), seen.batch_size, mean)
        if wanted is None or math.isnan(wanted):
            return Decision(batch_size=seen.batch_size, reason=reason)
        size = max(seen.batch_size, self._nearest(seen.first_batch_size, wanted))
        of = "first batch" if self.step_cost is None else f"{self.step_cost:g}"
        reason = f"sqrt({of} * noise scale) = {wanted:.0f}" + (f", {reason}" if reason else "")
        return Decision(batch_size=size, reason=reason, unclamped=wanted)

    def _nearest(self, first: int, wanted: float) -> int:
        if wanted >= self.max_batch_size:
            return self.max_batch_size
        # By doublings, so that a compiler sees few shapes.
        doublings = round(math.log2(wanted / first)) if wanted > first else 0
        return min(first << doublings, self.max_batch_size)
