"""Rules that are compared on the frontier's workloads and are no part of the library."""

import math
from dataclasses import KW_ONLY, dataclass, field, replace

from divebatch.measurement import Decision, Measurement
from divebatch.policies import Auto, Policy

STEPS_LEFT = 40
"""The fewest steps at a new size."""


@dataclass(frozen=True, slots=True)
class Growing(Policy):
    """Sizes that only grow, by doublings of the first or in finer steps, while there are steps left for them."""

    decides_within_epochs = True
    run_settings = frozenset({"total_samples"})

    max_batch_size: int
    _: KW_ONLY
    sizes: str = "doublings"
    total_samples: int | None = None

    def next(self, seen: Measurement) -> Decision:
        wanted = self.wanted(seen)
        if math.isnan(wanted) or wanted < 1:
            return Decision(batch_size=seen.batch_size)
        first = seen.first_batch_size
        most = min(wanted, self.max_batch_size / first)
        doubled = first << math.floor(math.log2(most) + 1e-9)
        size = doubled if self.sizes == "doublings" else int(most * first / 8) * 8
        left = (self.total_samples or math.inf) - seen.samples
        size = max(size, seen.batch_size)
        while size > seen.batch_size and left < STEPS_LEFT * size:
            size = max(seen.batch_size, size // 2 if self.sizes == "doublings" else int(left / STEPS_LEFT / 8) * 8)
        return Decision(batch_size=size, reason=f"{wanted:.3g} first batches" if size != seen.batch_size else "")

    def wanted(self, seen: Measurement) -> float:
        """Return the size that is wanted, in first batches."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Anneal(Growing):
    """(1 / rho)^power * 2^offset first batches, rho the schedule's rate over its highest."""

    lr_coupling = None
    needs_lr_coupling = True

    _: KW_ONLY
    power: float = 1.0
    offset: float = 0.5

    def wanted(self, seen: Measurement) -> float:
        rho = seen.lr_schedule_ratio
        if rho is None or math.isnan(rho):
            return math.nan
        return 2**self.offset * max(rho, 1e-6) ** -self.power


@dataclass(frozen=True, slots=True)
class Horizon(Growing):
    """((1 + e) / (1 - x + e))^power first batches after the part x of all samples."""

    lr_coupling = "none"

    _: KW_ONLY
    power: float = 0.5
    e: float = 0.02

    def wanted(self, seen: Measurement) -> float:
        assert self.total_samples is not None
        return float(((1 + self.e) / (1 - min(1.0, seen.samples / self.total_samples) + self.e)) ** self.power)


@dataclass(frozen=True, slots=True)
class LargerOfBoth(Anneal):
    """The larger of `Anneal` and the library's rule by the noise scale."""

    needs = frozenset({"diversity"})
    estimator = "moments"

    by_noise: Auto = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_noise", Auto(self.max_batch_size))

    def next(self, seen: Measurement) -> Decision:
        by_schedule = Anneal.next(self, seen)
        by_noise = self.by_noise.next(seen)
        left = (self.total_samples or math.inf) - seen.samples
        if by_noise.batch_size <= by_schedule.batch_size or left < STEPS_LEFT * by_noise.batch_size:
            return by_schedule
        return replace(by_noise, lr_factor=1.0)


CANDIDATES: dict[str, type[Policy]] = {"anneal": Anneal, "horizon": Horizon, "larger-of-both": LargerOfBoth}
