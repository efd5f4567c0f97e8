"""The result of `advise`: its measurements, and what follows from them."""

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from divebatch.advice.deadline import Deadline
from divebatch.advice.noise import NoiseCourse
from divebatch.advice.tradeoff import StepTimes, good_size, lr_factor, time_to_progress
from divebatch.policies import Auto, Fixed, Policy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_APART = 4
"""An advice is clear if the batch sizes for both ends of the noise scale's interval differ by this factor at most."""
MOST_MISFIT = 0.25
"""Part by which a step's time may be off a straight line for the line to be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A batch size and learning rate to start with, a cap, a policy, and the measurements they follow from.

    `str(advice)` says it in words; `advice.draw()` is the picture.

    Args:
        noise: The noise scale over the run, in samples, and as it stands at the end.
        times: What a step takes at each batch size that was timed, in seconds.
        reference_batch_size: The size that your learning rate belongs to, and at which noise was measured.
        reference_lr: Your learning rate; None where no optimizer was given.
        adaptive: Whether the optimizer is Adam-like.
        estimator: The policy's estimator: "split" where the optimizer has too little momentum for "moments".
        dataset_size: How many samples there are; None for a stream.
        device: Where steps were timed, in words.
    """

    noise: NoiseCourse
    times: StepTimes
    reference_batch_size: int
    reference_lr: float | None
    adaptive: bool
    estimator: str = "moments"
    dataset_size: int | None = None
    device: str = ""

    @property
    def batch_size_range(self) -> tuple[int, int]:
        """The good batch sizes for both ends of the noise scale's interval."""
        return good_size(self.times, self.noise.now.low), good_size(self.times, self.noise.now.high)

    @property
    def is_clear(self) -> bool:
        """Whether the measurement is sure enough for an advice."""
        low, high = self.batch_size_range
        return self.noise.now.value is not None and high <= MOST_APART * low

    @property
    def batch_size(self) -> int | None:
        """To start with: the smallest that reaches the same progress about as fast as any. None: not clear."""
        value = self.noise.now.value
        return good_size(self.times, value) if self.is_clear and value is not None else None

    @property
    def lr(self) -> float | None:
        """To start with; None where that is not clear or no optimizer was given."""
        factor = self.lr_factor
        return None if factor is None or self.reference_lr is None else self.reference_lr * factor

    @property
    def lr_factor(self) -> float | None:
        """The factor of your learning rate; None where the advice is not clear."""
        size, value = self.batch_size, self.noise.now.value
        if size is None or value is None:
            return None
        return lr_factor(size, self.reference_batch_size, value, adaptive=self.adaptive)

    def for_deadline(self, seconds: float, *, samples: int | None = None) -> Deadline:
        """Say how far each batch size gets in so many seconds of training, and which one gets farthest.

        Args:
            seconds: Seconds of steps: evaluation and the loading of data are not counted.
            samples: How many samples there are, if they may be gone through once only.
        """
        return Deadline(advice=self, seconds=seconds, samples=samples)

    @property
    def max_batch_size(self) -> int:
        """Where growth stops paying, however large the noise: the device handles no more samples a second."""
        return max(good_size(self.times, math.inf), self.batch_size or 1)

    @property
    def lr_coupling(self) -> Literal["linear", "sqrt"]:
        """How the learning rate should follow the batch size from there on."""
        return "sqrt" if self.adaptive else "linear"

    @property
    def policy(self) -> Policy | None:
        """One that grows with the noise up to the cap; `Fixed` where nothing is gained by growth, None: not clear."""
        if self.batch_size is None:
            return None
        if self.max_batch_size <= self.batch_size:
            return Fixed()
        return Auto(self.max_batch_size, step_cost=self.step_cost, lr_coupling="sqrt" if self.adaptive else None)

    @property
    def step_cost(self) -> float | None:
        """What a step is worth in samples, by its fixed cost; None where the first batch, `Auto`'s own, is above it."""
        balance, size = self.times.balance, self.batch_size
        is_line = self.times.misfit <= MOST_MISFIT and balance < math.inf
        return float(f"{balance:.3g}") if is_line and size is not None and balance > size else None

    def __str__(self) -> str:
        from divebatch.advice.text import in_words

        return in_words(self)

    def draw(self) -> "Figure":
        """The picture, as a figure of matplotlib: save it with `savefig`. Needs the extra `report`."""
        from divebatch.advice.plot import draw_advice

        return draw_advice(self)

    def to_dict(self) -> dict[str, Any]:
        """All values, ready for JSON."""
        value = self.noise.now.value
        return {
            "batch_size": self.batch_size,
            "batch_size_range": self.batch_size_range,
            "lr": self.lr,
            "lr_factor": self.lr_factor,
            "lr_coupling": self.lr_coupling,
            "max_batch_size": self.max_batch_size,
            "policy": None if self.policy is None else repr(self.policy),
            "estimator": self.estimator,
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
            "relative_time": None if value is None else dict(time_to_progress(self.times, value)),
            "words": str(self),
        }
