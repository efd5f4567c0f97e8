"""In which order an epoch visits the samples."""

from collections.abc import Iterable, Sequence, Sized
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler

from divebatch.checks import require_count
from divebatch.errors import ArgumentError


def checked_seed(seed: int) -> int:
    """`seed` if it can seed anything, else an error."""
    require_count("seed", seed, at_least=0)
    return seed


def mixed_seed(seed: int, *purpose: int) -> int:
    """One well-mixed seed for each purpose: an epoch's order, its workers, a trial's data.

    A plain sum would give seed 0, epoch 1 the order of seed 1, epoch 0.
    """
    return int(np.random.SeedSequence(seed, spawn_key=purpose).generate_state(1, np.uint64)[0] >> np.uint64(1))


class Order(Protocol):
    """Draws the sample indices of an epoch."""

    def draw(self, epoch: int) -> Tensor | Sequence[Any]:
        """All indices of `epoch` (from 0), each once."""
        ...

    def __len__(self) -> int: ...


class Shuffled:
    """A permutation that depends on (seed, epoch) and nothing else."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, checked_seed(seed)

    def draw(self, epoch: int) -> Tensor:
        """A fresh permutation for each epoch, the same one for the same epoch."""
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
        return torch.randperm(self.size, generator=generator)

    def __len__(self) -> int:
        return self.size


class Sequential:
    """The dataset's own order."""

    def __init__(self, size: int) -> None:
        self.size = size

    def draw(self, epoch: int) -> Tensor:
        """0, 1, 2, ..."""
        return torch.arange(self.size)

    def __len__(self) -> int:
        return self.size


class FromSampler:
    """The order of a sampler the user brought; told the epoch where it listens (`set_epoch`)."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        if not isinstance(sampler, Sized):
            raise ArgumentError(f"sampler {type(sampler).__name__} has no length: the epoch's size must be known")
        if len(sampler) == 0:
            raise ArgumentError(f"the dataset is empty: sampler {type(sampler).__name__} has no samples")
        self.sampler: Any = sampler
        self._last: list[Any] | None = None

    @property
    def last_drawn(self) -> list[Any]:
        """The indices of the latest epoch: drawing again would advance a random sampler."""
        return self.draw(0) if self._last is None else self._last

    @last_drawn.setter
    def last_drawn(self, order: list[Any]) -> None:
        self._last = order

    def draw(self, epoch: int) -> list[Any]:
        """What the sampler yields now."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        self._last = list(self.sampler)
        return self._last

    def __len__(self) -> int:
        return len(self.sampler)


def size_of(dataset: Any) -> int:
    """Its length, which must be at least 1."""
    try:
        size = len(dataset)
    except TypeError as error:
        raise ArgumentError(f"{type(dataset).__name__} has no length; make it an IterableDataset") from error
    if size == 0:
        raise ArgumentError(f"the dataset is empty: len({type(dataset).__name__}) is 0")
    return size


def order_of(sampler: Any, seed: int) -> Order:
    """Ours for torch's two plain samplers, so that epochs repeat and resume; else the sampler itself."""
    if type(sampler) is SequentialSampler:
        return Sequential(size_of(sampler.data_source))
    if type(sampler) is RandomSampler and not sampler.replacement:
        size = size_of(sampler.data_source)
        if sampler.num_samples == size:
            return Shuffled(size, seed)
    return FromSampler(sampler)
