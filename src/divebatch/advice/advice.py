"""An advice: the measurements, and the batch size, learning rate, cap and policy that follow from them. No torch here.

With noise scale B a batch of b samples needs 1 + B/b times the fewest possible steps (McCandlish et al. 2018), each at
the learning rate that suits it. A step takes t(b) seconds, so the same progress takes (1 + B/b) * t(b). With
t(b) = fixed + b * per_sample that is least at b = sqrt(B * fixed / per_sample).
"""

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from divebatch.checks import require_count, require_positive
from divebatch.errors import ArgumentError
from divebatch.measurement import Diversity, gain
from divebatch.policies import Auto, Fixed, Policy
from divebatch.policies.goodput import step_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SLACK = 0.05
"""A batch that takes at most this part longer than the best is as good; the smallest of several is taken."""
MOST_APART = 4
"""The largest factor between the batch sizes for both ends of the noise scale's interval of a clear advice."""
MOST_MISFIT = 0.25
"""The part by which a step's time may be off a straight line for the line to be used."""


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """The noise scale, in samples, over the steps `first` to `last`, with its 95 % interval, which may be infinite."""

    first: int
    last: int
    value: float | None
    """None: the mean gradient cannot be told from zero."""
    low: float
    high: float

    @classmethod
    def of(cls, diversity: Diversity, first: int, last: int) -> "NoiseEstimate":
        value = diversity.noise_scale if diversity.is_defined else None
        return cls(first, last, value, *diversity.noise_scale_interval())


@dataclass(frozen=True, slots=True)
class NoiseCourse:
    """The noise scale along the run, stretch by stretch, and over its second half: `now`."""

    stretches: tuple[NoiseEstimate, ...]
    now: NoiseEstimate


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a whole training step at each batch size that was timed, smallest first."""

    measured: tuple[tuple[int, float], ...]
    stopped: str = ""
    """Why no larger size was timed."""

    def __post_init__(self) -> None:
        for size, seconds in self.measured:
            require_count("batch_sizes", size)
            require_positive(f"the seconds of a step of {size} samples", seconds)
        if not self.measured or list(self.sizes) != sorted(set(self.sizes)):
            raise ArgumentError(f"step times need different batch sizes in rising order, got {self.measured}")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size, _ in self.measured)

    def line(self) -> tuple[float, float]:
        """Return (fixed, per_sample) of t(b) = fixed + b * per_sample, as `step_line` fits it."""
        return step_line(self.measured)

    @property
    def misfit(self) -> float:
        """Return the largest part by which a time is off the line."""
        fixed, per_sample = self.line()
        return max(abs(fixed + size * per_sample - seconds) / seconds for size, seconds in self.measured)

    @property
    def balance(self) -> float:
        """Return the samples whose own time equals a step's fixed cost: a smaller batch leaves the device idle."""
        fixed, per_sample = self.line()
        return fixed / per_sample if per_sample else math.inf


def time_to_progress(times: StepTimes, noise_scale: float) -> dict[int, float]:
    """Return the time to the same progress at each batch size, in units of the best.

    An infinite noise scale leaves samples a second alone.

    >>> time_to_progress(StepTimes(((1, 1.0), (10, 1.0))), 10.0)
    {1: 5.5, 10: 1.0}
    """
    per_sample = math.isinf(noise_scale)
    raw = {size: s * (1 / size if per_sample else 1 + noise_scale / size) for size, s in times.measured}
    best = min(raw.values())
    return {size: time / best for size, time in raw.items()}


def good_size(times: StepTimes, noise_scale: float) -> int:
    """Return the smallest batch size that takes at most `SLACK` longer to the same progress than the best one."""
    return next(size for size, time in time_to_progress(times, noise_scale).items() if time <= 1 + SLACK)


def lr_factor(batch_size: int, reference: int, noise_scale: float, *, adaptive: bool = False) -> float:
    """Return the factor of the learning rate from the `reference` batch, (1 + B/b_ref) / (1 + B/b).

    It is almost linear below the noise scale and flat above; for Adam-like optimizers it is the square root of that.

    >>> lr_factor(64, 32, float("inf")), lr_factor(64, 32, 0.0), lr_factor(64, 32, 64.0)
    (2.0, 1.0, 1.5)
    """
    factor = gain(batch_size / reference, noise_scale / reference)
    return math.sqrt(factor) if adaptive else factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A batch size and learning rate to start with, a cap, a policy, and the measurements they follow from.

    `str(advice)` says it in words; `advice.draw()` is the picture.

    Args:
        noise: The noise scale along the run, in samples, and at its end.
        times: The seconds of a step at each batch size that was timed.
        reference_batch_size: The size that your learning rate belongs to, and at which noise was measured.
        reference_lr: Your learning rate; None: no optimizer was given.
        adaptive: Whether the optimizer is Adam-like.
        dataset_size: The number of samples; None for a stream.
        device: The device on which steps were timed.
    """

    noise: NoiseCourse
    times: StepTimes
    reference_batch_size: int
    reference_lr: float | None
    adaptive: bool
    dataset_size: int | None = None
    device: str = ""

    @property
    def batch_size_range(self) -> tuple[int, int]:
        """Return the good batch sizes for both ends of the noise scale's interval."""
        return good_size(self.times, self.noise.now.low), good_size(self.times, self.noise.now.high)

    @property
    def is_clear(self) -> bool:
        """Return whether the measurement is sure enough for an advice."""
        low, high = self.batch_size_range
        return self.noise.now.value is not None and high <= MOST_APART * low

    @property
    def batch_size(self) -> int | None:
        """Return the smallest batch size that reaches the same progress about as fast as any; None: not clear."""
        value = self.noise.now.value
        return good_size(self.times, value) if self.is_clear and value is not None else None

    @property
    def lr_factor(self) -> float | None:
        """Return the factor of your learning rate; None: not clear."""
        size, value = self.batch_size, self.noise.now.value
        if size is None or value is None:
            return None
        return lr_factor(size, self.reference_batch_size, value, adaptive=self.adaptive)

    @property
    def lr(self) -> float | None:
        """Return the learning rate to start with; None: not clear, or no optimizer was given."""
        factor = self.lr_factor
        return None if factor is None or self.reference_lr is None else self.reference_lr * factor

    @property
    def max_batch_size(self) -> int:
        """Return the size at which growth stops paying, however large the noise: no more samples a second."""
        return max(good_size(self.times, math.inf), self.batch_size or 1)

    @property
    def lr_coupling(self) -> Literal["linear", "sqrt"]:
        """Return the coupling of the learning rate to the batch size from there on."""
        return "sqrt" if self.adaptive else "linear"

    @property
    def policy(self) -> Policy | None:
        """Return `Auto` up to the cap; `Fixed` if nothing is gained by growth; None: not clear."""
        if self.batch_size is None:
            return None
        return Auto(self.max_batch_size) if self.max_batch_size > self.batch_size else Fixed()

    def __str__(self) -> str:
        from divebatch.advice.text import in_words

        return in_words(self)

    def draw(self) -> "Figure":
        """Return the picture, as a figure of matplotlib: save it with `savefig`. Needs the extra `report`."""
        from divebatch.advice.plot import draw_advice

        return draw_advice(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all values, ready for JSON."""
        value = self.noise.now.value
        return {
            "batch_size": self.batch_size,
            "batch_size_range": self.batch_size_range,
            "lr": self.lr,
            "lr_factor": self.lr_factor,
            "lr_coupling": self.lr_coupling,
            "max_batch_size": self.max_batch_size,
            "policy": None if self.policy is None else repr(self.policy),
            "is_clear": self.is_clear,
            "reference_batch_size": self.reference_batch_size,
            "reference_lr": self.reference_lr,
            "device": self.device,
            "dataset_size": self.dataset_size,
            "noise_scale": asdict(self.noise),
            "step_seconds": [{"batch_size": size, "seconds": seconds} for size, seconds in self.times.measured],
            "step_line": dict(zip(("fixed", "per_sample"), self.times.line(), strict=True)),
            "step_line_misfit": self.times.misfit,
            "timing_stopped": self.times.stopped,
            "relative_time": None if value is None else time_to_progress(self.times, value),
            "words": str(self),
        }
