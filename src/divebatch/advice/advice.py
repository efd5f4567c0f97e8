"""Advice: a batch size, learning rate, cap and policy that follow from measurements. No torch here.

With noise scale B a batch of b samples needs 1 + B/b times the fewest possible steps (McCandlish et al. 2018), each at
the learning rate that suits it. A step takes t(b) seconds, so the same progress takes (1 + B/b) * t(b). With
t(b) = fixed + b * per_sample this product is least at b = sqrt(B * fixed / per_sample).
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
"""Fraction by which a batch may take longer than the best and still be as good; the smallest of these is chosen."""
MOST_APART = 4
"""Largest factor between the batch sizes for the two ends of the noise scale's interval if advice is clear."""
MOST_MISFIT = 0.25
"""Largest fraction by which a step's time may miss the straight line."""


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """A noise scale in samples over the steps `first` to `last`, with its 95 % interval, which may be infinite."""

    first: int
    last: int
    value: float | None
    """The noise scale. None: the mean gradient cannot be distinguished from zero."""
    low: float
    high: float

    @classmethod
    def of(cls, diversity: Diversity, first: int, last: int) -> "NoiseEstimate":
        value = diversity.noise_scale if diversity.is_defined else None
        return cls(first, last, value, *diversity.noise_scale_interval())


@dataclass(frozen=True, slots=True)
class NoiseCourse:
    """The noise scale in each stretch of the run, and `now`, over the run's second half."""

    stretches: tuple[NoiseEstimate, ...]
    now: NoiseEstimate


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a whole training step at each timed batch size, smallest first."""

    measured: tuple[tuple[int, float], ...]
    stopped: str = ""
    """The reason why no larger size was timed."""

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
        """Return (fixed, per_sample) of t(b) = fixed + b * per_sample, fitted by `step_line`."""
        return step_line(self.measured)

    @property
    def misfit(self) -> float:
        """Return the largest fraction by which a time misses the line."""
        fixed, per_sample = self.line()
        return max(abs(fixed + size * per_sample - seconds) / seconds for size, seconds in self.measured)

    @property
    def balance(self) -> float:
        """Return the samples that take as long as a step's fixed cost; smaller batches leave the device idle."""
        fixed, per_sample = self.line()
        return fixed / per_sample if per_sample else math.inf


def time_to_progress(times: StepTimes, noise_scale: float) -> dict[int, float]:
    """Return the time to the same progress at each batch size, relative to the best.

    If the noise scale is infinite, only samples per second count.

    >>> time_to_progress(StepTimes(((1, 1.0), (10, 1.0))), 10.0)
    {1: 5.5, 10: 1.0}
    """
    per_sample = math.isinf(noise_scale)
    raw = {size: s * (1 / size if per_sample else 1 + noise_scale / size) for size, s in times.measured}
    best = min(raw.values())
    return {size: time / best for size, time in raw.items()}


def good_size(times: StepTimes, noise_scale: float) -> int:
    """Return the smallest batch size whose time to the same progress is within `SLACK` of the best."""
    return next(size for size, time in time_to_progress(times, noise_scale).items() if time <= 1 + SLACK)


def lr_factor(batch_size: int, reference: int, noise_scale: float, *, adaptive: bool = False) -> float:
    """Return the learning rate over that of the `reference` batch size, (1 + B/b_ref) / (1 + B/b).

    This factor is almost linear below the noise scale and flat above. Adam-like optimizers use its square root.

    >>> lr_factor(64, 32, float("inf")), lr_factor(64, 32, 0.0), lr_factor(64, 32, 64.0)
    (2.0, 1.0, 1.5)
    """
    factor = gain(batch_size / reference, noise_scale / reference)
    return math.sqrt(factor) if adaptive else factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A batch size and learning rate to start with, a cap, a policy, and the measurements they follow from.

    `str(advice)` puts the advice into words; `advice.draw()` draws a figure.

    Args:
        noise: The noise scale along the run, in samples, and at its end.
        times: The seconds of a step at each batch size that was timed.
        reference_batch_size: The size your learning rate was chosen for; noise was measured at this size.
        reference_lr: Your learning rate. None: no optimizer was given.
        adaptive: Whether the optimizer is Adam-like.
        dataset_size: The number of samples. None: the data is a stream.
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
        """Return whether the measurement is precise enough for advice."""
        low, high = self.batch_size_range
        return self.noise.now.value is not None and high <= MOST_APART * low

    @property
    def batch_size(self) -> int | None:
        """Return the smallest batch size that progresses about as fast as any; None: the advice is unclear."""
        value = self.noise.now.value
        return good_size(self.times, value) if self.is_clear and value is not None else None

    @property
    def lr_factor(self) -> float | None:
        """Return the factor for your learning rate; None: the advice is unclear."""
        size, value = self.batch_size, self.noise.now.value
        if size is None or value is None:
            return None
        return lr_factor(size, self.reference_batch_size, value, adaptive=self.adaptive)

    @property
    def lr(self) -> float | None:
        """Return the learning rate to start with; None: the advice is unclear, or no optimizer was given."""
        factor = self.lr_factor
        return None if factor is None or self.reference_lr is None else self.reference_lr * factor

    @property
    def max_batch_size(self) -> int:
        """Return the batch size above which samples per second no longer rise, so that growth stops paying."""
        return max(good_size(self.times, math.inf), self.batch_size or 1)

    @property
    def lr_coupling(self) -> Literal["linear", "sqrt"]:
        """Return the coupling of learning rate and batch size for further growth."""
        return "sqrt" if self.adaptive else "linear"

    @property
    def policy(self) -> Policy | None:
        """Return `Auto` up to the cap, or `Fixed` if growth gains nothing; None: the advice is unclear."""
        if self.batch_size is None:
            return None
        return Auto(self.max_batch_size) if self.max_batch_size > self.batch_size else Fixed()

    def __str__(self) -> str:
        from divebatch.advice.text import in_words

        return in_words(self)

    def draw(self) -> "Figure":
        """Draw the advice as a matplotlib figure; needs the extra `report`."""
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
