"""Grow the batch where the training loss has stopped falling."""

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count, require_positive
from divebatch.measurement import Decision, Measurement
from divebatch.policies.bounds import Capped
from divebatch.policies.confidence import decided, require_loss


@dataclass(frozen=True, slots=True)
class Plateau(Capped):
    """Multiply the batch size by a factor after some epochs at one size without a new lowest loss.

    Args:
        max_batch_size: The largest batch, in samples.
        factor: What the batch size is multiplied by, above 1.
        patience: How many epochs without a new lowest loss it waits.
    """

    needs = frozenset({"loss"})
    epoch_settings = frozenset({"patience"})

    _: KW_ONLY
    factor: float = 2
    patience: int = 3

    def __post_init__(self) -> None:
        Capped.__post_init__(self)
        require_count("patience", self.patience)
        require_positive("factor", self.factor, above=1)

    def reachable(self, seen: Measurement) -> Collection[int]:
        sizes = [seen.batch_size]
        while sizes[-1] < self.max_batch_size:
            sizes.append(self.bounds.clamp(self._wanted(sizes[-1])))
        return sizes

    def _wanted(self, batch_size: int) -> float:
        return max(batch_size * self.factor, batch_size + 1)

    def next(self, seen: Measurement) -> Decision:
        require_loss(self, seen)
        # Epochs before the last growth were at another size and say nothing of this one.
        waited = min(seen.history.epochs_since_best, seen.history.decisions_at_size)
        if waited < self.patience or seen.batch_size >= self.max_batch_size:
            return Decision(batch_size=seen.batch_size)
        wanted = self._wanted(seen.batch_size)
        reason = f"no lower loss for {waited} epochs: times {self.factor:g}"
        return decided(seen, wanted, self.bounds, at_least=seen.batch_size, reason=reason)
