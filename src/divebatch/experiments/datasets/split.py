"""What every dataset gives an experiment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from divebatch.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Split:
    """Training data to batch, and validation data in batches."""

    train: Dataset[Any]
    validation: Sequence[Any]
    num_features: int


def require_fraction(name: str, value: float) -> None:
    """Raise unless both parts of a split get something."""
    if not 0 < value < 1:
        raise ArgumentError(f"{name} must lie between 0 and 1, got {name}={value}")
