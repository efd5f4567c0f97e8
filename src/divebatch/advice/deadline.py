"""Which batch size gets farthest in a given time. No torch in here.

In S seconds a batch of b samples makes S / t(b) steps, or as many as the data last for. With noise scale B a step of it
is worth 1 / (1 + B/b) of one without noise (McCandlish et al. 2018), at the learning rate that suits it.
"""

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from divebatch.advice.noise import NoiseEstimate
from divebatch.advice.tradeoff import StepTimes, lr_factor
from divebatch.checks import require_count, require_positive
from divebatch.errors import ArgumentError

if TYPE_CHECKING:
    from divebatch.advice.result import Advice

CLOSE = 0.02
"""A batch that falls short of the best by at most this part is as good."""
LEAST_STEPS = 10
"""A batch that makes fewer is no candidate: a handful of steps is no training, whatever each is worth."""
GROWTH = 10.0
"""How much larger the noise scale may be at the end of training than at that of the short run; often it is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far training with one batch size gets.

    Args:
        batch_size: Samples of a step.
        steps: Whole steps that are made.
        seconds: The time they take, which is less than there is where the data end first.
        progress: What they are worth, the best batch size's as 1.
    """

    batch_size: int
    steps: int
    seconds: float
    progress: float

    @property
    def samples(self) -> int:
        """Samples that are gone through."""
        return self.steps * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """How far each batch size that was timed gets in some seconds, and which one gets farthest.

    `str(deadline)` says it in words.

    Args:
        advice: The measurements it follows from.
        seconds: The time to train for.
        samples: How many samples there are, where they may be gone through once only; None for as often as one likes.
    """

    advice: "Advice"
    seconds: float
    samples: int | None = None

    def __post_init__(self) -> None:
        require_positive("seconds", self.seconds)
        if self.samples is not None:
            require_count("samples", self.samples)
        if not self._candidates():
            size, step = min(self.times.measured, key=lambda entry: entry[1])
            there = "" if self.samples is None else f" of the {self.samples} samples there are"
            raise ArgumentError(
                f"seconds={self.seconds:g} are too few: the fastest step, of batch {size}, takes {step:.2g} s, and no "
                f"batch size that was timed makes {LEAST_STEPS} steps{there}"
            )

    @property
    def times(self) -> StepTimes:
        """What a step takes at each batch size."""
        return self.advice.times

    @property
    def noise(self) -> NoiseEstimate:
        """The noise scale at the end of the short run."""
        return self.advice.noise.now

    @property
    def reaches(self) -> list[Reach]:
        """One for each batch size that makes enough steps."""
        worth = {size: self._worth(size, self.middle_noise) for size in self._candidates()}
        best = max(worth.values())
        return [
            Reach(
                batch_size=size,
                steps=self._steps(size),
                seconds=self._steps(size) * self.times.seconds(size),
                progress=each / best,
            )
            for size, each in worth.items()
        ]

    @property
    def middle_noise(self) -> float:
        """The noise scale to reckon with, in samples: it grows in training, so some three times what was measured.

        That is its geometric mean, were it to grow tenfold. Where it was not measured, that of its lower end.
        """
        return math.sqrt(GROWTH) * (self.noise.low if self.noise.value is None else self.noise.value)

    def best_for(self, noise_scale: float) -> int:
        """The batch size that gets farthest, the smaller of equals; at infinite noise that which sees most samples."""
        return max(self._candidates(), key=lambda size: (self._worth(size, noise_scale), -size))

    @property
    def batch_size(self) -> int | None:
        """The best for noise that grows tenfold; None where the noise scale cannot be told."""
        return None if self.noise.value is None else self.best_for(self.middle_noise)

    @property
    def batch_size_range(self) -> tuple[int, int]:
        """The best ones for the least noise that the measurement allows, and for ten times the most."""
        return self.best_for(self.noise.low), self.best_for(GROWTH * self.noise.high)

    @property
    def chosen(self) -> Reach:
        """How far the best batch size gets; where the noise scale cannot be told, the best for its lower end."""
        return max(self.reaches, key=lambda reach: (reach.progress, -reach.batch_size))

    @property
    def ends_with_data(self) -> bool:
        """Whether the chosen batch size is through with the data before the time is over."""
        return self.samples is not None and self.chosen.samples + self.chosen.batch_size > self.samples

    @property
    def close(self) -> tuple[int, int]:
        """The smallest and the largest batch size that get nearly as far as the best."""
        sizes = [reach.batch_size for reach in self.reaches if reach.progress >= 1 - CLOSE]
        return sizes[0], sizes[-1]

    @property
    def lr(self) -> float | None:
        """The learning rate for the best batch size; None where that is not known, or no optimizer was given."""
        size, advice = self.batch_size, self.advice
        if size is None or advice.reference_lr is None:
            return None
        factor = lr_factor(size, advice.reference_batch_size, self.middle_noise, adaptive=advice.adaptive)
        return advice.reference_lr * factor

    def __str__(self) -> str:
        from divebatch.advice.text import deadline_in_words

        return deadline_in_words(self)

    def to_dict(self) -> dict[str, Any]:
        """All values, ready for JSON."""
        return {
            "seconds": self.seconds,
            "samples": self.samples,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "batch_size_range": self.batch_size_range,
            "within_2_percent": self.close,
            "noise_scale": self.middle_noise,
            "reaches": [{**asdict(reach), "samples": reach.samples} for reach in self.reaches],
            "words": str(self),
        }

    def _candidates(self) -> list[int]:
        return [size for size in self.times.sizes if self._steps(size) >= LEAST_STEPS]

    def _steps(self, size: int) -> int:
        by_time = int(self.seconds / self.times.seconds(size))
        return by_time if self.samples is None else min(by_time, self.samples // size)

    def _worth(self, size: int, noise_scale: float) -> float:
        """In steps without noise; in samples where noise is all there is."""
        steps = self._steps(size)
        return float(steps * size) if math.isinf(noise_scale) else steps / (1 + noise_scale / size)
