"""What the rules share that measure every few epochs and keep to a floor and a cap."""

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass

from divebatch.checks import require_count
from divebatch.measurement import Decision, Measurement
from divebatch.policies.bounds import Capped
from divebatch.policies.confidence import asked, decided, require_diversity


@dataclass(frozen=True, slots=True)
class Periodic(Capped):
    """After each `every_epochs`-th epoch what `proposal` says, within floor and cap."""

    needs = frozenset({"diversity"})
    estimator = "moments"
    decides_within_epochs = True
    epoch_settings = frozenset({"every_epochs"})
    has_many_sizes = True

    _: KW_ONLY
    min_batch_size: int = 1
    every_epochs: int = 1
    monotone: bool = True

    def __post_init__(self) -> None:
        require_count("every_epochs", self.every_epochs)
        self.set_bounds(floor=self.min_batch_size)

    @abstractmethod
    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        """Return the wanted batch size, None for the present one, and the reason."""

    def measures(self, epoch: int, batch_size: int) -> bool:
        """Every `every_epochs`-th epoch, but not at a cap that it never leaves."""
        return epoch % self.every_epochs == 0 and not (self.monotone and batch_size >= self.max_batch_size)

    def reachable(self, seen: Measurement) -> Collection[int]:
        return self.bounds.sizes(at_least=seen.batch_size if self.monotone else 1)

    def next(self, seen: Measurement) -> Decision:
        is_measured = seen.diversity is not None or self.measures(seen.epoch, seen.batch_size)
        if seen.epoch % self.every_epochs or not is_measured:
            return Decision(batch_size=seen.batch_size)
        wanted, reason = self.proposal(seen)
        return decided(seen, wanted, self.bounds, at_least=seen.batch_size if self.monotone else 1, reason=reason)


@dataclass(frozen=True, slots=True)
class FromNoise(Periodic):
    """With an estimate that has an interval, the size changes only where the whole interval asks for it."""

    @abstractmethod
    def wanted(self, noise_scale: float) -> float:
        """Return the batch size for this noise scale; it must grow with it."""

    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        size, remark = asked(require_diversity(self, seen), seen.batch_size, self.wanted)
        name = type(self).__name__
        return size, remark if size is None else f"{name} wants {size:.1f}" + (f", {remark}" if remark else "")
