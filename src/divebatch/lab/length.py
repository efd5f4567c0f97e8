"""The length of a run, its progress, and the parts that a run over one pass of data is recorded in."""

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
"""Steps of the first part of a run that ends by the clock: nothing is known of its speed yet."""
NEARLY = 0.25
"""The fraction of a part that may be missing at its end where parts end by the clock."""


@dataclass(slots=True, kw_only=True)
class RunLength:
    """The end of a run, in samples or in seconds of training, whichever comes first, and its equal parts.

    Args:
        loader: The loader that counts the run's samples.
        clock: The clock that counts its seconds, from the checkpoint's after a resume: neither the pause counts nor
            what was trained after the checkpoint and is trained again.
        samples: Samples of the whole run.
        parts: The number of its parts.
        seconds: Seconds of training, without evaluation and compilation. None: samples alone end it.
    """

    loader: AdaptiveLoader
    clock: Clock
    samples: int
    parts: int
    seconds: float | None = None
    done: int = 0
    """Parts that are over. One batch may carry a run over several, of which the last counts."""

    def fraction(self) -> float:
        """Return the part of the run that will be over after the next batch, from 0 to 1.

        At the end of that batch and not at its beginning, so that the last step reaches 1, whatever its size.
        """
        by_samples = (self.loader.samples_delivered + self.loader.batch_size) / self.samples
        by_seconds = 0.0 if self.seconds is None else self.clock.train_seconds / self.seconds
        return min(1.0, max(by_samples, by_seconds))

    def next_part(self) -> int:
        """Return the samples to the end of the next part, in whole batches but for the end of the run."""
        seen, size = self.loader.samples_delivered, self.loader.batch_size
        wanted = math.ceil((self.done + 1) * self.samples / self.parts) - seen
        if self.seconds is not None:
            if seen:  # the part's seconds, at the speed so far, to the nearest batch
                left = (self.done + 1) * self.seconds / self.parts - self.clock.train_seconds
                wanted = min(wanted, round(left * seen / self.clock.train_seconds / size) * size)
            else:
                wanted = FIRST_STEPS * size
        return min(max(1, math.ceil(wanted / size)) * size, self.samples - seen)

    def end_part(self) -> int:
        """End a part; return the number of parts that are over now."""
        seen = self.loader.samples_delivered
        by_samples = seen * self.parts // self.samples
        by_seconds = 0
        if self.seconds is not None:
            by_seconds = math.floor(self.clock.train_seconds / self.seconds * self.parts + NEARLY)
        self.done = min(self.parts, max(by_samples, by_seconds, self.done + 1))
        return self.done


class PartSampler(Sampler[int]):
    """The samples of a run's next part. Each epoch of the loader is a part, and passes continue from part to part.

    The order of a pass is a function of (seed, pass). Its length is that of the data, as policies must know it.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self.length: RunLength | None = None
        """Set once there is a loader."""

    def __len__(self) -> int:
        return self._size

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the next part begins after the samples that were delivered, after a resume too."""

    def __iter__(self) -> Iterator[int]:
        assert self.length is not None
        first, wanted = self.length.loader.samples_delivered, self.length.next_part()
        while wanted > 0:
            number, start = divmod(first, self._size)
            taken = order_of_pass(self._size, self._seed, number)[start : start + wanted].tolist()
            yield from taken
            first, wanted = first + len(taken), wanted - len(taken)


def order_of_pass(size: int, seed: int, number: int) -> Tensor:
    """Return the samples of a run's pass over the data, counted from 0, in their order."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(mixed_seed(seed, number)))
