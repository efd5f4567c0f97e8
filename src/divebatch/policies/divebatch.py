"""DiveBatch: the batch size that gradient diversity asks for (the paper's Algorithm 1, last line)."""

import math
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

from divebatch.checks import require_count, require_positive
from divebatch.measurement import Decision, Diversity, Measurement
from divebatch.policies.bounds import Bounds, require_start_under_cap
from divebatch.policies.confidence import asked, decided, require_diversity
from divebatch.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class DiveBatch(Policy):
    """Set the batch size to delta * n * diversity every so many epochs, within floor and cap.

    n * diversity is one plus the gradient noise scale, so `delta` says how large a part of it a batch may be. In words
    to choose by: training takes about 1 + delta times the samples that tiny batches would need, and 1 + 1/delta times
    the fewest steps that huge ones would. This reading holds for estimators at fixed weights, which
    `with_extra_samples` takes. The paper's, "trajectory", which is the default here, comes out ten to hundreds of times
    larger, and so does its delta.

    Where an estimate has an interval, the size changes only if the whole interval asks for it. A diversity that cannot
    be formed (gradients that sum to zero, NaN, infinity) counts as infinite and gives the cap, as in the authors' code.

    >>> seen = Measurement(epoch=1, batch_size=128, dataset_size=50_000, diversity=Diversity(0.02, 1.0, 50_000))
    >>> DiveBatch(0.1, 2048, monotone=False).next(seen).batch_size, DiveBatch(0.1, 2048).next(seen).batch_size
    (100, 128)

    Args:
        delta: What n * diversity is multiplied by to give the batch size.
        max_batch_size: The largest batch, in samples.
        min_batch_size: The smallest batch, in samples.
        every_epochs: How many epochs lie between two decisions; epochs in between are not measured.
        monotone: Whether the batch never shrinks, which alone fits the paper's figures. At the cap nothing is measured
            any more.
    """

    needs = frozenset({"diversity"})
    estimator = "trajectory"
    decides_within_epochs = True
    epoch_settings = frozenset({"every_epochs"})
    has_many_sizes = True

    delta: float
    max_batch_size: int
    _: KW_ONLY
    min_batch_size: int = 1
    every_epochs: int = 1
    monotone: bool = True
    bounds: Bounds = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_positive("delta", self.delta)
        require_count("every_epochs", self.every_epochs)
        object.__setattr__(self, "bounds", Bounds(self.min_batch_size, self.max_batch_size))

    @classmethod
    def algorithm_1(cls, delta: float, max_batch_size: int) -> Self:
        """Return the paper's Algorithm 1 to the letter: every epoch, and the size may shrink."""
        return cls(delta, max_batch_size, monotone=False)

    @classmethod
    def as_published(cls, delta: float, max_batch_size: int, *, every_epochs: int = 20) -> Self:
        """Return what the authors ran on real data: every 20th epoch, never smaller, no measuring once at the cap."""
        return cls(delta, max_batch_size, every_epochs=every_epochs)

    @staticmethod
    def with_extra_samples(extra_samples: float, max_batch_size: int, **settings: Any) -> "ExtraSamples":
        """Return the rule for estimators at fixed weights, chosen by what it may cost.

        Args:
            extra_samples: How many more samples than tiny batches training may take: 0.1 for a tenth more, 1 for twice
                the samples and twice the fewest steps.
            max_batch_size: The largest batch, in samples.
            settings: `DiveBatch`'s min_batch_size, every_epochs, monotone.
        """
        return ExtraSamples(extra_samples, max_batch_size, **settings)

    @property
    def cap(self) -> int:
        return self.max_batch_size

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Every `every_epochs`-th epoch, but not at a cap that it never leaves."""
        return epoch % self.every_epochs == 0 and not (self.monotone and batch_size >= self.max_batch_size)

    def reachable(self, seen: Measurement) -> Collection[int]:
        return self.bounds.sizes(at_least=seen.batch_size if self.monotone else 1)

    def next(self, seen: Measurement) -> Decision:
        """Return delta * n * diversity within the bounds (Algorithm 1, line 11); the same size where none is due."""
        is_measured = seen.diversity is not None or self.measures(seen.epoch, seen.batch_size)
        if seen.epoch % self.every_epochs or not is_measured:
            return Decision(batch_size=seen.batch_size)
        wanted, reason = self._proposal(require_diversity(self, seen), seen)
        return decided(seen, wanted, self.bounds, at_least=seen.batch_size if self.monotone else 1, reason=reason)

    def _proposal(self, diversity: Diversity, seen: Measurement) -> tuple[float | None, str]:
        if diversity.spread is not None:
            wanted, remark = asked(diversity, seen.batch_size, lambda noise_scale: self.delta * (1 + noise_scale))
            return wanted, remark if wanted is None else f"delta * (1 + noise scale) = {wanted:.1f}, {remark}"
        if not diversity.is_defined:
            # Infinite and so the cap, as in the authors' code.
            return math.inf, f"diversity undefined ({diversity.undefined_reason})"
        proposal = self.delta * seen.known_dataset_size * diversity.value
        return proposal, f"delta * n * diversity = {proposal:.1f}"

    def check_start(self, batch_size: int) -> None:
        require_start_under_cap(batch_size, self.max_batch_size)


@dataclass(frozen=True, slots=True)
class ExtraSamples(DiveBatch):
    """`DiveBatch.with_extra_samples`: the paper's rule on an estimate at fixed weights."""

    estimator = "moments"
