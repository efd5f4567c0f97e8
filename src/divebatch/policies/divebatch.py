"""The DiveBatch policy: a batch size proportional to gradient diversity (the paper's Algorithm 1, last line)."""

import math
from dataclasses import dataclass
from typing import Any, Self

from divebatch.checks import require_positive
from divebatch.measurement import Measurement
from divebatch.policies.policy import Periodic, Policy, require_diversity, wanted_size


@dataclass(frozen=True)
class _Delta(Policy):
    """A base class with `delta` before the cap: a dataclass lists the fields of its bases first."""

    delta: float


@dataclass(frozen=True)
class DiveBatch(Periodic, _Delta):
    """The paper's rule: the batch size is delta * n * diversity, within floor and cap.

    n * diversity is one plus the gradient noise scale, and `delta` is the batch size as a fraction of this number.
    Training then takes about 1 + delta times the samples that tiny batches would need, and 1 + 1/delta times the fewest
    steps that huge ones would. This holds for estimators at fixed weights, which `with_extra_samples` uses. The default
    here is the paper's, "trajectory": its values are ten to hundreds of times larger, as if delta were.

    If an estimate has an interval, the size changes only if the whole interval asks for a change. An undefined
    diversity (gradients that sum to zero, NaN, infinity) counts as infinite and gives the cap, as in the authors' code.

    >>> from divebatch import Diversity
    >>> seen = Measurement(epoch=1, batch_size=128, dataset_size=50_000, diversity=Diversity(0.02, 1.0, 50_000))
    >>> DiveBatch(0.1, 2048, monotone=False).next(seen).batch_size, DiveBatch(0.1, 2048).next(seen).batch_size
    (100, 128)

    Args:
        delta: The factor of n * diversity that gives the batch size.
        max_batch_size: The largest batch, in samples.
        min_batch_size: The smallest batch, in samples.
        every_epochs: Epochs between two decisions; epochs in between are not measured.
        monotone: Whether the batch never shrinks; only this agrees with the paper's figures. At the cap nothing is
            measured any more.
    """

    estimator = "trajectory"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("delta", self.delta)

    @classmethod
    def algorithm_1(cls, delta: float, max_batch_size: int) -> Self:
        """Return the paper's Algorithm 1 to the letter: decisions every epoch, and the size may shrink."""
        return cls(delta, max_batch_size, monotone=False)

    @classmethod
    def as_published(cls, delta: float, max_batch_size: int, *, every_epochs: int = 20) -> Self:
        """Return the authors' setting for real data: every 20th epoch, never smaller, no measurements at the cap."""
        return cls(delta, max_batch_size, every_epochs=every_epochs)

    @staticmethod
    def with_extra_samples(extra_samples: float, max_batch_size: int, **settings: Any) -> "ExtraSamples":
        """Return the rule for estimators at fixed weights, chosen by its cost in samples.

        Args:
            extra_samples: The samples beyond those that tiny batches need, as a fraction: 0.1 for a tenth more, 1 for
                twice the samples and twice the fewest steps.
            max_batch_size: The largest batch, in samples.
            settings: Further arguments of `DiveBatch`: min_batch_size, every_epochs, monotone.
        """
        return ExtraSamples(extra_samples, max_batch_size, **settings)

    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        """Return delta * n * diversity (Algorithm 1, line 11)."""
        diversity = require_diversity(self, seen)
        if diversity.spread is not None:
            wanted, remark = wanted_size(diversity, seen.batch_size, lambda noise: self.delta * (1 + noise))
            return wanted, remark if wanted is None else f"delta * (1 + noise scale) = {wanted:.1f}, {remark}"
        if not diversity.is_defined:
            # Infinite, and so the cap, as in the authors' code.
            return math.inf, f"diversity undefined ({diversity.undefined_reason})"
        wanted = self.delta * seen.known_dataset_size * diversity.value
        return wanted, f"delta * n * diversity = {wanted:.1f}"


@dataclass(frozen=True)
class ExtraSamples(DiveBatch):
    """The policy of `DiveBatch.with_extra_samples`: the paper's rule on an estimate at fixed weights."""

    estimator = "moments"
