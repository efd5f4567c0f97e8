"""What the rules share that follow the gradient noise scale."""

from abc import abstractmethod
from dataclasses import dataclass

from divebatch.measurement import Measurement
from divebatch.policies.confidence import asked, require_diversity
from divebatch.policies.paced import Paced


@dataclass(frozen=True, slots=True)
class FromNoise(Paced):
    """With an estimate that has an interval, the size changes only where the whole interval asks for it."""

    @abstractmethod
    def wanted(self, noise_scale: float) -> float:
        """The batch size for this noise scale; grows with it."""

    def proposal(self, seen: Measurement) -> tuple[float | None, str]:
        """`wanted`, as far as the measurement carries it."""
        size, remark = asked(require_diversity(self, seen), seen.batch_size, self.wanted)
        name = type(self).__name__
        return size, remark if size is None else f"{name} wants {size:.1f}" + (f", {remark}" if remark else "")
