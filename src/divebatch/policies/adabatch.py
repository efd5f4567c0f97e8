"""AdaBatch (Devarakonda et al. 2018): grow the batch on a fixed timetable."""

from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count, require_positive
from divebatch.errors import ArgumentError
from divebatch.measurement import Decision, Measurement
from divebatch.policies.bounds import require_start_under_cap
from divebatch.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class AdaBatch(Policy):
    """Multiply the batch size by `factor` at the end of every `every`-th epoch, up to `max_batch_size`.

    Two readings exist. The DiveBatch paper leaves the learning rate alone (`lr_decay=1.0`, the default); the original
    AdaBatch multiplies it by 0.75 at each doubling (`lr_decay=0.75`). At the cap neither changes any more. Where more
    is wanted than the data holds, the batch is as many whole first batches as fit, and the learning rate is multiplied
    by what was got over what was wanted, as in the original.

    >>> AdaBatch(2048, lr_decay=0.75).next(Measurement(epoch=20, batch_size=128, dataset_size=50_000))
    Decision(batch_size=256, lr_factor=0.75, reason='epoch 20: times 2')
    """

    epoch_settings = frozenset({"every"})

    max_batch_size: int
    _: KW_ONLY
    factor: float = 2
    every: int = 20
    lr_decay: float = 1.0

    def __post_init__(self) -> None:
        require_count("max_batch_size", self.max_batch_size)
        require_count("every", self.every)
        require_positive("lr_decay", self.lr_decay)
        require_positive("factor", self.factor)
        if self.factor <= 1:
            raise ArgumentError(f"factor must be above 1, got factor={self.factor!r}")

    def next(self, seen: Measurement) -> Decision:
        """The batch size times `factor` where the timetable says so."""
        wanted = min(max(int(seen.batch_size * self.factor), seen.batch_size + 1), self.max_batch_size)
        grown = wanted if wanted <= seen.dataset_size else self._whole_first_batches(seen)
        if seen.epoch % self.every or grown <= seen.batch_size:
            return Decision(batch_size=seen.batch_size)
        reason = f"epoch {seen.epoch}: times {grown / seen.batch_size:g}"
        return Decision(batch_size=grown, lr_factor=self.lr_decay * grown / wanted, reason=reason)

    @staticmethod
    def _whole_first_batches(seen: Measurement) -> int:
        first = seen.first_batch_size or seen.batch_size
        return seen.dataset_size // first * first

    def check_start(self, batch_size: int) -> None:
        """Raise if the first batch is above the cap."""
        require_start_under_cap(batch_size, self.max_batch_size)
