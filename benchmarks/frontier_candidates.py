"""Rules that are compared on the frontier's workloads and are no part of the library."""

import math
from dataclasses import KW_ONLY, dataclass, field, replace

from divebatch.measurement import Decision, Measurement
from divebatch.policies import NoiseDoubling, Policy

STEPS_LEFT = 40
"""The fewest steps at a new size."""


GRIDS = {
    "doublings": lambda first: [first << k for k in range(7)],
    "halves": lambda first: sorted([first << k for k in range(7)] + [(3 * first << k) // 2 for k in range(6)]),
    "eighths": lambda first: [first * k // 8 for k in range(8, 513)],
}
"""The sizes that may be reached from a first batch: octaves, half octaves (nearly), eighths of the first."""


@dataclass(frozen=True, slots=True)
class Growing(Policy):
    """Sizes of a grid that only grow, while there are steps left for them."""

    decides_within_epochs = True
    run_settings = frozenset({"total_samples"})

    max_batch_size: int
    _: KW_ONLY
    sizes: str = "doublings"
    total_samples: int | None = None

    def next(self, seen: Measurement) -> Decision:
        wanted = self.wanted(seen)
        if math.isnan(wanted):
            return Decision(batch_size=seen.batch_size)
        most = min(wanted * seen.first_batch_size * (1 + 1e-9), self.max_batch_size)
        if self.total_samples is not None:
            most = min(most, (self.total_samples - seen.samples) / STEPS_LEFT)
        fitting = [size for size in GRIDS[self.sizes](seen.first_batch_size) if size <= most]
        size = max(seen.batch_size, *fitting, 1)
        return Decision(batch_size=size, reason=f"{wanted:.3g} first batches" if size != seen.batch_size else "")

    def wanted(self, seen: Measurement) -> float:
        """Return the size that is wanted, in first batches."""
        raise NotImplementedError


POWERS = {"linear": 1.0, "sqrt": 0.5, "adam": 0.5, "none": 0.0}
"""The power of the batch size that the learning rate follows with each coupling by name."""


@dataclass(frozen=True, slots=True)
class Anneal(Growing):
    """(1 / rho)^power * 2^offset first batches, rho the schedule's rate over its highest, `peak`.

    With `limited`, the rate in force never exceeds `peak`. With `lead`, the size runs ahead of 1 / rho up to 2^lead
    first batches only.
    """

    lr_coupling = None
    needs_lr_coupling = True

    _: KW_ONLY
    power: float = 1.0
    offset: float = 0.5
    limited: bool = False
    peak: float = 1.0
    lead: float | None = None

    def wanted(self, seen: Measurement) -> float:
        rho = seen.lr_schedule_ratio
        if rho is None or math.isnan(rho):
            return math.nan
        octaves = -math.log2(max(rho, 1e-6))
        wanted = self.power * octaves + self.offset
        return float(2 ** (wanted if self.lead is None else min(wanted, max(octaves, self.lead))))

    def next(self, seen: Measurement) -> Decision:
        decision = Growing.next(self, seen)
        rho, lr = seen.lr_schedule_ratio, seen.lr
        if not self.limited or not rho or not lr or seen.batch_size == decision.batch_size == seen.first_batch_size:
            return decision
        coupling = seen.lr_coupling
        power = POWERS[coupling] if isinstance(coupling, str) else coupling
        # What multiplies the schedule's own rate now, what it should be, and what the coupling will do by itself.
        now = lr / (rho * self.peak)
        wanted = min((decision.batch_size / seen.first_batch_size) ** power, 1 / rho)
        return replace(decision, lr_factor=wanted / now / (decision.batch_size / seen.batch_size) ** power)


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

    by_noise: NoiseDoubling = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_noise", NoiseDoubling(self.max_batch_size))

    def next(self, seen: Measurement) -> Decision:
        by_schedule = Anneal.next(self, seen)
        by_noise = self.by_noise.next(seen)
        left = (self.total_samples or math.inf) - seen.samples
        if by_noise.batch_size <= by_schedule.batch_size or left < STEPS_LEFT * by_noise.batch_size:
            return by_schedule
        return replace(by_noise, lr_factor=1.0)


CANDIDATES: dict[str, type[Policy]] = {"anneal": Anneal, "horizon": Horizon, "larger-of-both": LargerOfBoth}
