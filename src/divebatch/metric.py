"""The number that a run is judged by. No torch in here."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from divebatch.errors import ArgumentError

MetricName = Literal["val_accuracy", "val_loss", "bits_per_byte"]
WORDS = {"val_accuracy": "accuracy", "val_loss": "loss", "bits_per_byte": "bits per byte"}
"""What each is called."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The number that a run is judged by.

    Args:
        name: A field of `EpochRecord`: "val_accuracy" (from 0 to 1), "val_loss" or "bits_per_byte".
        better: Whether a "higher" or a "lower" value is the better one.
    """

    name: MetricName = "val_accuracy"
    better: Literal["higher", "lower"] = "higher"

    def __post_init__(self) -> None:
        for key, known in (("name", get_args(MetricName)), ("better", ("higher", "lower"))):
            if getattr(self, key) not in known:
                raise ArgumentError(f"a metric's {key} must be one of {', '.join(known)}, got {getattr(self, key)!r}")

    @property
    def is_accuracy(self) -> bool:
        """Whether it is a share from 0 to 1, which is shown in percent."""
        return self.name == "val_accuracy"

    @property
    def word(self) -> str:
        """Its name in a sentence."""
        return WORDS[self.name]

    @property
    def loss_word(self) -> str:
        """What a loss is called in the unit of this metric, where a loss has it."""
        return self.word if self.name == "bits_per_byte" else WORDS["val_loss"]

    @property
    def loss_factor(self) -> float:
        """The number that brings a loss into that unit: losses are in nats."""
        return 1 / math.log(2) if self.name == "bits_per_byte" else 1.0

    @property
    def higher_is_better(self) -> bool:
        """Whether a run tries to raise it."""
        return self.better == "higher"

    def of(self, record: Any) -> float | None:
        """The value of an `EpochRecord`; None where it has none or none that is finite."""
        value: float | None = getattr(record, self.name)
        return value if value is not None and math.isfinite(value) else None

    def text(self, value: float) -> str:
        """A value with its unit, for instance `92.83 %` of accuracy, or a loss of `1.0826`."""
        return f"{100 * value:.2f} %" if self.is_accuracy else f"{value:.5g}"

    def best(self, values: Iterable[float]) -> float | None:
        """The best of some values; None where there are none."""
        return (max if self.higher_is_better else min)(values, default=None)

    @property
    def worst(self) -> float:
        """What a run that diverged is worth: an accuracy of 0, an infinite loss."""
        return 0.0 if self.higher_is_better else math.inf
