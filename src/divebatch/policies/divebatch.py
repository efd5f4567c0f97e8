"""DiveBatch: the batch size that gradient diversity asks for (the paper's Algorithm 1, last line)."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

from divebatch.checks import require_count, require_positive
from divebatch.measurement import Decision, Diversity, Measurement
from divebatch.policies.bounds import Bounds, require_start_under_cap
from divebatch.policies.confidence import asked, decided, require_diversity
from divebatch.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class DiveBatch(Policy):
    """Set the batch size to delta * n * diversity after each `every`-th epoch, within floor and cap.

    n * diversity is one plus the gradient noise scale, so `delta` says how large a part of it a batch may be. In words
    to choose by: training takes about 1 + delta times the samples that tiny batches would need, and 1 + 1/delta times
    the fewest steps that huge ones would. 1 pays twice the samples for twice the fewest steps; 0.1, the choice of
    `without_delta`, a tenth more samples. This reading holds for estimators at fixed weights ("split", "per-sample",
    "moments", "oracle"). The paper's, "trajectory", comes out ten to hundreds of times larger, and so does its delta.

    Where an estimate has an interval, the size changes only if the whole interval asks for it.

    `monotone` (the default) never lets the size fall: only that fits the paper's figures. A diversity that cannot be
    formed (gradients that sum to zero, NaN, infinity) counts as infinite and gives the cap, as in the authors' code.
    `measure_at_cap=False` stops measuring for good once a monotone size has reached its cap.

    >>> seen = Measurement(epoch=1, batch_size=128, dataset_size=50_000, diversity=Diversity(0.02, 1.0, 50_000))
    >>> DiveBatch(0.1, 2048, monotone=False).next(seen).batch_size, DiveBatch(0.1, 2048).next(seen).batch_size
    (100, 128)
    """

    needs = frozenset({"diversity"})
    estimator = "trajectory"
    decides_within_epochs = True
    epoch_settings = frozenset({"every"})
    has_many_sizes = True

    delta: float
    max_batch_size: int
    _: KW_ONLY
    min_batch_size: int = 1
    every: int = 1
    monotone: bool = True
    multiple_of: int = 1
    measure_at_cap: bool = True

    def __post_init__(self) -> None:
        require_positive("delta", self.delta)
        require_count("every", self.every)
        self._bounds()

    @classmethod
    def without_delta(cls, max_batch_size: int, *, extra_samples: float = 0.1, **settings: Any) -> Self:
        """For estimators at fixed weights: batches that cost about `extra_samples` more samples than tiny ones."""
        return cls(extra_samples, max_batch_size, **settings)

    @classmethod
    def paper_text(cls, delta: float, max_batch_size: int) -> Self:
        """Algorithm 1 to the letter: every epoch, and the size may fall."""
        return cls(delta, max_batch_size, monotone=False)

    @classmethod
    def paper_code(cls, delta: float, max_batch_size: int, *, every: int = 20) -> Self:
        """What the authors ran on real data: every 20th epoch, never smaller, no measuring once at the cap."""
        return cls(delta, max_batch_size, every=every, measure_at_cap=False)

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Every `every`-th epoch; at the cap only where `measure_at_cap` says so or the size may fall again."""
        if self.monotone and not self.measure_at_cap and batch_size >= self.max_batch_size:
            return False
        return epoch % self.every == 0

    def next(self, seen: Measurement) -> Decision:
        """delta * n * diversity within the bounds (Algorithm 1, line 11); the same size where nothing is due."""
        if not self.measures(seen.epoch, seen.batch_size):
            return Decision(batch_size=seen.batch_size)
        diversity = require_diversity(self, seen)
        if diversity.spread is not None:
            return self._on_evidence(diversity, seen)
        proposal = self._proposal(diversity, seen.dataset_size)
        size = self._bounds().clamp(proposal, at_least=seen.batch_size if self.monotone else 1)
        return Decision(batch_size=size, reason=self._reason(diversity, proposal), wanted=proposal)

    def _on_evidence(self, diversity: Diversity, seen: Measurement) -> Decision:
        wanted, remark = asked(diversity, seen.batch_size, lambda noise_scale: self.delta * (1 + noise_scale))
        reason = remark if wanted is None else f"delta * (1 + noise scale) = {wanted:.1f}, {remark}"
        return decided(seen, wanted, self._bounds(), monotone=self.monotone, reason=reason)

    def check_start(self, batch_size: int) -> None:
        """Raise if the first batch is above the cap."""
        require_start_under_cap(batch_size, self.max_batch_size)

    def _proposal(self, diversity: Diversity, dataset_size: int) -> float:
        return self.delta * dataset_size * diversity.value if diversity.is_defined else math.inf

    def _bounds(self) -> Bounds:
        return Bounds(self.min_batch_size, self.max_batch_size, self.multiple_of)

    def _reason(self, diversity: Diversity, proposal: float) -> str:
        if not diversity.is_defined:
            return f"diversity undefined, so the cap {self.max_batch_size}: {diversity.problem}"
        capped = f", capped at {self.max_batch_size}" if proposal > self.max_batch_size else ""
        return f"delta * n * diversity = {proposal:.1f}{capped}"
