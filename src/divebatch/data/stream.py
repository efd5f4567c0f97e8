"""Streams: IterableDatasets read in batches whose size may change, in epochs that may be parts of the stream."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from divebatch.data.order import EpochProgress, worker_seed

Taken = list[list[int]]
"""Sizes of batches in delivery order, as pairs of a size and the number of consecutive batches with that size."""


class Requests:
    """The requests to a stream's DataLoader: one list for each batch, with the length of the batch.

    A change of `size` applies to the next requested batch: workers hold `prefetch_factor * num_workers` others.

    Args:
        size: Samples in the coming batches.
        taken: Batches that are requested again first, to be dropped.
        part: Samples in an epoch whose last batch is cut to fit. None: batches are never cut.
    """

    def __init__(self, size: int, *, taken: Taken, part: int | None) -> None:
        self.size, self._taken, self._part = size, taken, part
        self._left = part or 0
        """Samples of the current part that were not requested yet."""
        self._waiting = 0
        """Samples that were requested and have not arrived yet."""

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
        """Note that a batch has arrived."""
        self._waiting -= num_samples


class _Asked:
    """The batch sampler that a DataLoader and its persistent workers keep; its requests are replaced each time."""

    def __init__(self) -> None:
        self.requests = Requests(1, taken=[], part=None)

    def __iter__(self) -> Iterator[list[None]]:
        return iter(self.requests)


def _counted(collate: Any, samples: list[Any]) -> tuple[int, Any]:
    """Return the number of samples along with the batch, so that it also leaves a worker process."""
    return len(samples), collate(samples)


class StreamSource:
    """An IterableDataset behind a DataLoader; each worker batches its own part, as in torch.

    The source remembers the batches it has delivered. A resume reads the stream again from its beginning and drops
    these batches, which is exact if the stream repeats itself.

    Args:
        dataset: The stream.
        settings: The settings of the stream's DataLoader.
        drop_last: Whether to leave out a shorter last batch.
        part: Samples in an epoch; each epoch continues where the one before ended. None: each epoch begins anew.
    """

    def __init__(self, dataset: Any, settings: dict[str, Any], *, drop_last: bool, part: int | None) -> None:
        collate = partial(_counted, settings["collate_fn"] or default_collate)
        self._generator = settings["generator"] or torch.Generator()
        settings = {**settings, "collate_fn": collate, "generator": self._generator}
        self.dataloader: DataLoader[Any] = DataLoader(dataset, batch_size=1, drop_last=drop_last, **settings)
        self._part, self._cuts = part, not drop_last
        self._batches: Iterator[tuple[int, Any]] | None = None
        self._asked = _Asked()
        # A DataLoader accepts no batch sampler for a stream, but uses the one it has made.
        object.__setattr__(self.dataloader, "batch_sampler", self._asked)
        self._taken: Taken = []
        self._round = 0
        """The number of times that a stream cut into epochs has ended."""
        self._is_resumed = False

    def rest(self, current: EpochProgress, seed: int) -> Iterator[tuple[int, Any]]:
        """Deliver the rest of the epoch, each batch with its number of samples; the batch size may change meanwhile."""
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
                # The stream has ended: an epoch that would be empty begins it anew, any other epoch ends here.
                was_read = bool(self._taken)
                self._taken, self._batches, self._round = [], None, self._round + 1
                if current.batches or not was_read:
                    return
        finally:
            if self._part is None:  # also if the loop leaves early, so that no worker waits forever
                self._batches = None

    def _reopened(self, current: EpochProgress, seed: int) -> Iterator[tuple[int, Any]]:
        """Read the stream from its beginning and drop the batches delivered before."""
        requests = Requests(current.cut_size, taken=self._taken, part=self._part if self._cuts else None)
        requests.begin_part(current.samples)  # before any request to workers
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
        """Deliver an epoch's number of samples, or all, from the stream's beginning, in batches of one size."""
        count = 0
        for counted in self._open(Requests(size, taken=[], part=self._part), seed):
            yield counted
            count += counted[0]
            if count == self._part:
                return

    def state_dict(self, *, has_begun: bool) -> dict[str, Any]:
        """Return the batches delivered since the stream began; `has_begun`: an epoch is under way."""
        taken = self._taken if has_begun or self._part is not None else []
        return {"round": self._round, "taken": [list(pair) for pair in taken]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved source stood."""
        self._round, self._taken = state["round"], [list(pair) for pair in state["taken"]]
        self._batches, self._is_resumed = None, bool(self._taken)


def length_of_stream(dataset: Any) -> int | None:
    """Return the number of samples in a stream; None if it is not known."""
    return len(dataset) if hasattr(dataset, "__len__") else None
