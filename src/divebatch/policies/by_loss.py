"""Policies that follow the training loss."""

from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count, require_positive
from divebatch.measurement import Decision, Measurement
from divebatch.policies.policy import Capped, decided, ratio, require_loss, times_first


@dataclass(frozen=True)
class AdaDamp(Capped):
    """AdaDamp (Sievert): ceil(b0 * loss_0 / loss). The batch grows as the loss falls, and shrinks if the loss rises.

    loss_0 is the first epoch's loss. The lowest possible loss must be near zero.

    Args:
        max_batch_size: The largest batch, in samples.
    """

    needs = frozenset({"loss"})
    has_many_sizes = True

    def next(self, seen: Measurement) -> Decision:
        loss = require_loss(self, seen)
        factor = ratio(loss if seen.history.first_loss is None else seen.history.first_loss, loss)
        return times_first(seen, factor, self.max_batch_size, f"the loss fell by {factor:g}")


@dataclass(frozen=True)
class Plateau(Capped):
    """A batch size that grows by a factor after some epochs without a new lowest loss.

    Args:
        max_batch_size: The largest batch, in samples.
        factor: The factor of the batch size, above 1.
        patience: The number of epochs without a new lowest loss before the batch grows.
    """

    needs = frozenset({"loss"})
    epoch_settings = frozenset({"patience"})

    _: KW_ONLY
    factor: float = 2
    patience: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("patience", self.patience)
        require_positive("factor", self.factor, above=1)

    def next(self, seen: Measurement) -> Decision:
        require_loss(self, seen)
        # Epochs before the last growth had another size and say nothing about this one.
        waited = min(seen.history.epochs_since_best, seen.history.decisions_at_size)
        if waited < self.patience or seen.batch_size >= self.max_batch_size:
            return Decision(batch_size=seen.batch_size)
        wanted = max(seen.batch_size * self.factor, seen.batch_size + 1)
        reason = f"no lower loss for {waited} epochs: times {self.factor:g}"
        return decided(seen, wanted, self.max_batch_size, at_least=seen.batch_size, reason=reason)
