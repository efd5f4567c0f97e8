"""What every dataset gives an experiment, and what it is told about the machine."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from divebatch.data import AdaptiveLoader
from divebatch.errors import ArgumentError
from divebatch.ranks import Ranks


@dataclass(frozen=True, slots=True)
class DataPlace:
    """Where data is read from and where batches must end up."""

    device: torch.device
    folder: Path | None = None
    """Holds cifar-10-batches-py, cifar-100-python, tiny-imagenet-200; None for data that is drawn."""
    channels_last: bool = False
    """Memory format of image batches."""
    on_device: bool = True
    """False: images stay in host memory, or on disk, and come through a DataLoader."""
    num_workers: int = 0
    """Processes of that DataLoader."""
    compile: bool = False
    """Whether what is done to images on the device goes through the compiler."""


class MakeLoader(Protocol):
    """Gives a new loader over the training data."""

    def __call__(self, batch_size: int, *, seed: int) -> AdaptiveLoader:
        """Order and augmentation follow from `seed`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Training data to batch, and validation data in batches."""

    loader: MakeLoader
    validation: Iterable[Any]
    """(inputs, targets) on the device, of several ranks each its own; can be iterated again and again."""
    num_features: int = 0
    """Of flat data; 0 for images."""
    num_classes: int = 1
    """1 for a single logit."""


def own_part(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the samples that are this rank's to evaluate: all, where there is one."""
    ranks = Ranks.here()
    if len(targets) < ranks.size:
        raise ArgumentError(f"{len(targets)} samples for validation cannot be shared by {ranks.size} ranks")
    return inputs.tensor_split(ranks.size)[ranks.rank], targets.tensor_split(ranks.size)[ranks.rank]


def require_fraction(name: str, value: float) -> None:
    """Raise unless both parts of a split get something."""
    if not 0 < value < 1:
        raise ArgumentError(f"{name} must lie between 0 and 1, got {name}={value}")
