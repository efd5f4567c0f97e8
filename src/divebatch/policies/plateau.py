"""Grow the batch where the training loss has stopped falling."""

from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count, require_positive
from divebatch.errors import ArgumentError
from divebatch.measurement import Decision, Measurement
from divebatch.policies.bounds import Bounds, require_start_under_cap
from divebatch.policies.confidence import decided, require_loss
from divebatch.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Plateau(Policy):
    """Multiply the batch size by `factor` after `patience` epochs at one size without a new lowest loss."""

    needs = frozenset({"loss"})
    epoch_settings = frozenset({"patience"})

    max_batch_size: int
    _: KW_ONLY
    factor: float = 2
    patience: int = 3

    def __post_init__(self) -> None:
        require_count("max_batch_size", self.max_batch_size)
        require_count("patience", self.patience)
        require_positive("factor", self.factor)
        if self.factor <= 1:
            raise ArgumentError(f"factor must be above 1, got factor={self.factor!r}")

    def next(self, seen: Measurement) -> Decision:
        """Up, or as it is."""
        require_loss(self, seen)
        waited = min(seen.history.epochs_since_best, seen.history.epochs_at_size)
        if waited < self.patience or seen.batch_size >= self.max_batch_size:
            return Decision(batch_size=seen.batch_size)
        wanted = max(seen.batch_size * self.factor, seen.batch_size + 1)
        reason = f"no lower loss for {waited} epochs: times {self.factor:g}"
        return decided(seen, wanted, Bounds(1, self.max_batch_size), monotone=True, reason=reason)

    def check_start(self, batch_size: int) -> None:
        """Raise if the first batch is above the cap."""
        require_start_under_cap(batch_size, self.max_batch_size)
