"""Streams: an IterableDataset read in batches whose size may change, in epochs that may be parts of it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from divebatch.data.order import EpochProgress, worker_seed

Taken = list[list[int]]
"""Sizes of batches in the order they were taken, as pairs of a size and how many batches in a row had it."""


class Requests:
    """The requests to a stream's DataLoader: one list for each batch, as long as the batch shall be.

    A change of `size` reaches the next batch that is asked for: workers hold `prefetch_factor * num_workers` others.

    Args:
        size: samples of the batches to come.
        taken: batches that are asked for again first, to be dropped.
        part: samples of an epoch whose last batch is cut to fit; None: batches are never cut.
    """

    def __init__(self, size: int, *, taken: Taken, part: int | None) -> None:
        self.size, self._taken, self._part = size, taken, part
        self._left = part or 0
        """Samples of the current part that are still to be asked for."""
        self._waiting = 0
        """Samples that were asked for and have not come yet."""

    def __iter__(self) -> Iterator[list[None]]:
        for size, count in self._taken:
            for _ in range(count):
                yield [None] * size
        while True:
            size = self.size if self._part is None else min(self.size, self._left)
            self._waiting += size
            self._left = (self._left - size) or (self._part or 0)
            yield [None] * size

    def begin_part(self, samples_before: int) -> None:
        """Begin an epoch, or continue it after `samples_before`; workers may already hold requests for some of it."""
        if self._part is not None:
            self._left = self._part - (samples_before + self._waiting) % self._part

    def came(self, num_samples: int) -> None:
        """Note that a batch has come."""
        self._waiting -= num_samples


class _Asked:
    """The batch sampler that a DataLoader and its persistent workers keep; its requests are set anew each time."""

    def __init__(self) -> None:
        self.requests = Requests(1, taken=[], part=None)

    def __iter__(self) -> Iterator[list[None]]:
        return iter(self.requests)


def _counted(collate: Any, samples: list[Any]) -> tuple[int, Any]:
    """Send the number of samples along with the batch, also out of a worker process."""
    return len(samples), collate(samples)


class StreamSource:
    """An IterableDataset behind a DataLoader; each worker batches its own part of it, as torch does.

    It remembers which batches it took. A resume reads the stream again from its beginning and drops them, which is
    exact if the stream repeats itself.

    Args:
        dataset: the stream.
        settings: those of its DataLoader.
        drop_last: whether to leave out a last batch that is shorter.
        part: samples of an epoch, each of which continues where the one before ended; None: each begins anew.
    """

    def __init__(self, dataset: Any, settings: dict[str, Any], *, drop_last: bool, part: int | None) -> None:
        collate = partial(_counted, settings["collate_fn"] or default_collate)
        self._generator = settings["generator"] or torch.Generator()
        settings = {**settings, "collate_fn": collate, "generator": self._generator}
        self.dataloader: DataLoader[Any] = DataLoader(dataset, batch_size=1, drop_last=drop_last, **settings)
        self._part, self._cuts = part, not drop_last
        self._batches: Iterator[tuple[int, Any]] | None = None
        self._asked = _Asked()
        # A DataLoader takes no batch sampler for a stream and lets none be set, but asks the one it has made.
        object.__setattr__(self.dataloader, "batch_sampler", self._asked)
        self._taken: Taken = []
        self._round = 0
        """The number of times that a stream whose epochs are parts of it has ended."""
        self._is_resumed = False

    def rest(self, current: EpochProgress, seed: int) -> Iterator[tuple[int, Any]]:
        """Deliver what is left of the epoch, each batch with its number of samples; its size may change on the way."""
        if self._part is None and not self._is_resumed:
            self._taken, self._batches = [], None
        self._is_resumed = False
        try:
            while True:
                self._asked.requests.begin_part(current.samples)
                batches = self._reopened(current, seed) if self._batches is None else self._batches
                self._asked.requests.size = current.cut_size
                for counted in batches:
                    self._asked.requests.came(counted[0])
                    if self._taken and self._taken[-1][0] == counted[0]:
                        self._taken[-1][1] += 1
                    else:
                        self._taken.append([counted[0], 1])
                    yield counted
                    if current.is_used_up:
                        return
                    self._asked.requests.size = current.cut_size
                if self._part is None:
                    return
                # The stream is at its end: an epoch that would be empty begins it anew, any other ends there.
                was_read = bool(self._taken)
                self._taken, self._batches, self._round = [], None, self._round + 1
                if current.batches or not was_read:
                    return
        finally:
            if self._part is None:  # also if the loop leaves: no worker waits for one that does not come back
                self._batches = None

    def _reopened(self, current: EpochProgress, seed: int) -> Iterator[tuple[int, Any]]:
        """Read the stream from its beginning and drop what was taken."""
        requests = Requests(current.cut_size, taken=self._taken, part=self._part if self._cuts else None)
        requests.begin_part(current.samples)  # before workers are asked for anything
        number = current.epoch if self._part is None else self._round
        self._batches = self._open(requests, (seed, number))
        for _ in range(sum(count for _, count in self._taken)):
            if next(self._batches, None) is None:
                break
        return self._batches

    def _open(self, requests: Requests, seed: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
        self._asked.requests = requests
        self._generator.manual_seed(worker_seed(*seed))
        return iter(self.dataloader)

    def first(self, size: int, *, seed: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
        """Deliver an epoch's number of samples from the stream's beginning, or all of it, in batches of one size."""
        count = 0
        for counted in self._open(Requests(size, taken=[], part=self._part), seed):
            yield counted
            count += counted[0]
            if count == self._part:
                return

    def state_dict(self, *, has_begun: bool) -> dict[str, Any]:
        """Return the batches taken since the stream began; `has_begun` says whether an epoch is under way."""
        taken = self._taken if has_begun or self._part is not None else []
        return {"round": self._round, "taken": [list(pair) for pair in taken]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved source stood."""
        self._round, self._taken = state["round"], [list(pair) for pair in state["taken"]]
        self._batches, self._is_resumed = None, bool(self._taken)


def length_of_stream(dataset: Any) -> int | None:
    """Return the number of its samples if the stream knows it."""
    return len(dataset) if hasattr(dataset, "__len__") else None
