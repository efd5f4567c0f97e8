"""What the rules share that measure every few epochs and keep to a floor and a cap."""

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count
from divebatch.measurement import Decision, Measurement
from divebatch.policies.bounds import Bounds, require_start_under_cap
from divebatch.policies.confidence import decided
from divebatch.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Paced(Policy):
    """After each `every`-th epoch what `proposal` says, within floor and cap; `monotone` never lets the size fall."""

    needs = frozenset({"diversity"})
    decides_within_epochs = True
    epoch_settings = frozenset({"every"})
    has_many_sizes = True

    max_batch_size: int
    _: KW_ONLY
    min_batch_size: int = 1
    every: int = 1
    multiple_of: int = 1
    monotone: bool = True

    def __post_init__(self) -> None:
        require_count("every", self.every)
        self._bounds()

    @abstractmethod
    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        """The wanted batch size, None for the present one, and the reason."""

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Every `every`-th epoch."""
        return epoch % self.every == 0

    def next(self, seen: Measurement) -> Decision:
        """The proposal where one is due."""
        if not self.measures(seen.epoch, seen.batch_size):
            return Decision(batch_size=seen.batch_size)
        wanted, reason = self.proposal(seen)
        return decided(seen, wanted, self._bounds(), monotone=self.monotone, reason=reason)

    def check_start(self, batch_size: int) -> None:
        """Raise if the first batch is above the cap."""
        require_start_under_cap(batch_size, self.max_batch_size)

    def _bounds(self) -> Bounds:
        return Bounds(self.min_batch_size, self.max_batch_size, self.multiple_of)
