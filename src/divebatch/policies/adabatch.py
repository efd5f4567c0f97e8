"""AdaBatch (Devarakonda et al. 2018): grow the batch on a fixed timetable."""

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count, require_positive
from divebatch.measurement import Decision, Measurement
from divebatch.policies.bounds import Capped


@dataclass(frozen=True, slots=True)
class AdaBatch(Capped):
    """Multiply the batch size by a factor every so many epochs, up to a cap.

    Two readings exist. The DiveBatch paper leaves the learning rate alone (`lr_decay=1.0`); the original AdaBatch
    multiplies it by 0.75 at each doubling (`lr_decay=0.75`). At the cap neither changes any more. Where more is wanted
    than the data holds, the batch is as many whole first batches as fit, and the learning rate is multiplied by what
    was got over what was wanted, as in the original.

    >>> AdaBatch(2048, lr_decay=0.75).next(Measurement(epoch=20, batch_size=128, dataset_size=50_000))
    Decision(batch_size=256, lr_factor=0.75, reason='epoch 20: times 2')

    Args:
        max_batch_size: The largest batch, in samples.
        factor: What the batch size is multiplied by, above 1.
        every_epochs: How many epochs lie between two changes.
        lr_decay: What the learning rate is multiplied by at each change.
    """

    epoch_settings = frozenset({"every_epochs"})

    _: KW_ONLY
    factor: float = 2
    every_epochs: int = 20
    lr_decay: float = 1.0

    def __post_init__(self) -> None:
        Capped.__post_init__(self)
        require_count("every_epochs", self.every_epochs)
        require_positive("lr_decay", self.lr_decay)
        require_positive("factor", self.factor, above=1)

    def reachable(self, seen: Measurement) -> Collection[int]:
        sizes, first, most = [seen.batch_size], seen.first_batch_size, seen.largest_batch_size
        while (size := self._within(self._wanted(sizes[-1]), first, most)) > sizes[-1]:
            sizes.append(size)
        return sizes

    def _wanted(self, batch_size: int) -> int:
        # At least one sample more: a small factor of a small batch would truncate to no growth at all.
        return min(max(int(batch_size * self.factor), batch_size + 1), self.max_batch_size)

    def _within(self, wanted: int, first: int, most: int) -> int:
        """As much of what is wanted as there is, in whole first batches."""
        return wanted if wanted <= most else most // first * first

    def next(self, seen: Measurement) -> Decision:
        wanted = self._wanted(seen.batch_size)
        grown = self._within(wanted, seen.first_batch_size, seen.known_dataset_size)
        if seen.epoch % self.every_epochs or grown <= seen.batch_size:
            return Decision(batch_size=seen.batch_size)
        reason = f"epoch {seen.epoch}: times {grown / seen.batch_size:g}"
        return Decision(batch_size=grown, lr_factor=self.lr_decay * grown / wanted, reason=reason)
