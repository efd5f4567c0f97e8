"""The length and progress of a run, and the parts into which records divide a run over one pass of data."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Sampler

from divebatch.data import AdaptiveLoader
from divebatch.data.order import mixed_seed
from divebatch.lab.clock import Clock

FIRST_STEPS = 4
"""Steps of the first part of a run that ends by the clock, whose speed is not known yet."""
NEARLY = 0.25
"""Fraction of a part that may be missing at its end if parts end by the clock."""


@dataclass(slots=True, kw_only=True)
class RunLength:
    """The end of a run, in samples or in seconds of training, whichever comes first, and its equal parts.

    Args:
        loader: The loader that counts the run's samples.
        clock: The clock of the run. After a resume it continues from the checkpoint: neither the pause counts nor
            training that is repeated.
        samples: Samples of the whole run.
        parts: Number of parts of the run.
        seconds: Seconds of training, without evaluation and compilation. None: only samples end the run.
    """

    loader: AdaptiveLoader
    clock: Clock
    samples: int
    parts: int
    seconds: float | None = None
    done: int = 0
    """Number of completed parts. One batch may complete several, of which only the last is recorded."""

    def fraction(self) -> float:
        """Return the fraction of the run that will be over after the next batch, from 0 to 1.

        The batch's end counts, not its beginning, so that the last step reaches 1, whatever its size.
        """
        by_samples = (self.loader.samples_delivered + self.loader.batch_size) / self.samples
        by_seconds = 0.0 if self.seconds is None else self.clock.train_seconds / self.seconds
        return min(1.0, max(by_samples, by_seconds))

    def next_part(self) -> int:
        """Return the samples up to the end of the next part, in whole batches except at the end of the run."""
        seen, size = self.loader.samples_delivered, self.loader.batch_size
        wanted = math.ceil((self.done + 1) * self.samples / self.parts) - seen
        if self.seconds is not None:
            if seen:  # the part's seconds at the speed so far, rounded to whole batches
                left = (self.done + 1) * self.seconds / self.parts - self.clock.train_seconds
                wanted = min(wanted, round(left * seen / self.clock.train_seconds / size) * size)
            else:
                wanted = FIRST_STEPS * size
        return min(max(1, math.ceil(wanted / size)) * size, self.samples - seen)

    def end_part(self) -> int:
        """End a part; return the number of completed parts."""
        seen = self.loader.samples_delivered
        by_samples = seen * self.parts // self.samples
        by_seconds = 0
        if self.seconds is not None:
            by_seconds = math.floor(self.clock.train_seconds / self.seconds * self.parts + NEARLY)
        self.done = min(self.parts, max(by_samples, by_seconds, self.done + 1))
        return self.done


class PartSampler(Sampler[int]):
    """A sampler of a run's parts: each epoch of the loader is a part, and passes continue from part to part.

    The order of a pass is a function of (seed, pass). The sampler's length is the data's, which policies need.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self.length: RunLength | None = None
        """The run's length, set once there is a loader."""

    def __len__(self) -> int:
        return self._size

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the next part begins after the delivered samples, also after a resume."""

    def __iter__(self) -> Iterator[int]:
        assert self.length is not None
        first, wanted = self.length.loader.samples_delivered, self.length.next_part()
        while wanted > 0:
            number, start = divmod(first, self._size)
            taken = order_of_pass(self._size, self._seed, number)[start : start + wanted].tolist()
            yield from taken
            first, wanted = first + len(taken), wanted - len(taken)


def order_of_pass(size: int, seed: int, number: int) -> Tensor:
    """Return the order of the samples in pass `number` (from 0) over the data."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(mixed_seed(seed, number)))
