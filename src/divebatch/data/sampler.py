"""A batch sampler whose batch size may change between epochs."""

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from divebatch.checks import require_count
from divebatch.data.order import Order, Sequential, Shuffled, checked_seed, drawn_seed
from divebatch.errors import ArgumentError


def checked_batch_size(batch_size: int, *, dataset_size: int | None, drop_last: bool) -> int:
    """`batch_size` if an epoch of at least one batch can be cut with it, else an error."""
    require_count("batch_size", batch_size)
    if drop_last and dataset_size is not None and batch_size > dataset_size:
        raise ArgumentError(
            f"batch_size={batch_size} is larger than the {dataset_size} samples of an epoch and drop_last=True "
            f"would leave no batch at all: use a smaller batch or drop_last=False"
        )
    return batch_size


def num_batches(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """How many batches an epoch has."""
    return num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)


def cut(num_samples: int, batch_size: int, *, drop_last: bool, start: int = 0) -> Iterator[slice]:
    """Where the batches of an epoch of `num_samples` lie in its order, from sample `start` on.

    Each is found when it is asked for, so that cutting anew takes the same time however many samples are left.
    """
    for number in range(num_batches(num_samples - start, batch_size, drop_last=drop_last)):
        first = start + number * batch_size
        yield slice(first, min(first + batch_size, num_samples))


class AdaptiveBatchSampler(Sampler[list[int]]):
    """Yields lists of indices; every sample exactly once an epoch, whatever the sizes.

    Fits `DataLoader(dataset, batch_sampler=...)`. The order depends on (seed, epoch) alone. `batch_size` may be set at
    any time and is in force from the next epoch. Each complete pass moves on to the next epoch; `set_epoch` jumps. A
    state knows whole epochs only: prefetching workers draw ahead, so for a resume within one use `AdaptiveLoader`.

    Args:
        dataset_size: samples in an epoch.
        batch_size: samples per batch.
        shuffle: whether each epoch has a new random order.
        seed: decides on the orders; None: one is drawn from torch's default generator. `sampler.seed` tells it.
        drop_last: whether to leave out a last batch that is shorter.

    >>> sampler = AdaptiveBatchSampler(5, 2, shuffle=False)
    >>> list(sampler)
    [[0, 1], [2, 3], [4]]
    >>> sampler.batch_size = 4
    >>> list(sampler)
    [[0, 1, 2, 3], [4]]
    """

    def __init__(
        self,
        dataset_size: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> None:
        require_count("dataset_size", dataset_size)
        self.dataset_size, self.drop_last, self.epoch = dataset_size, drop_last, 0
        self.seed = drawn_seed() if seed is None else checked_seed(seed)
        self.order: Order = Shuffled(dataset_size, self.seed) if shuffle else Sequential(dataset_size)
        self.batch_size = batch_size

    @property
    def batch_size(self) -> int:
        """Samples per batch from the next epoch on."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        self._batch_size = checked_batch_size(value, dataset_size=self.dataset_size, drop_last=self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` (from 0) the next one."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """The epoch that comes next, or the one under way from its beginning, with its seed and batch size."""
        return {"epoch": self.epoch, "seed": self.seed, "batch_size": self.batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Stand where the saved sampler stood at the beginning of its epoch."""
        self.epoch, self.seed, self.batch_size = state["epoch"], state["seed"], state["batch_size"]
        self.order = self.order.seeded(self.seed)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator itself: size and order are fixed here, not when a prefetching worker draws first.
        order = self.order.draw(self.epoch)
        places = cut(len(order), self.batch_size, drop_last=self.drop_last)
        return self._until_next_epoch(map(order.__getitem__, places), self.epoch)

    def _until_next_epoch(self, batches: Iterator[Any], epoch: int) -> Iterator[list[int]]:
        upcoming = next(batches)
        for after in batches:
            yield upcoming.tolist()
            upcoming = after
        self.epoch = epoch + 1  # with the last batch, not after it: some loops count batches and stop there
        yield upcoming.tolist()

    def __len__(self) -> int:
        return num_batches(self.dataset_size, self.batch_size, drop_last=self.drop_last)
