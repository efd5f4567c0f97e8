"""Streams: an IterableDataset read in batches whose size may change, in passes that may be parts of it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from divebatch.data.epoch_progress import EpochProgress
from divebatch.data.order import worker_seed

MOST_OF_STREAM = 10_000_000
"""Samples of a batch in a state: a stream is asked for a batch by a list of as many entries."""

Taken = list[list[int]]
"""Sizes of batches in the order they were taken, as pairs of a size and how many had it one after the other."""


class Requests:
    """The sizes of the batches that a DataLoader asks a stream for, one list of that length each.

    The list decides when it is sent, so a change of `size` is in force with the next batch that is asked for: the next
    one of all without workers, and after `prefetch_factor * num_workers` of them with workers.

    Args:
        size: Samples of the batches to come.
        taken: Batches that are asked for again first, to be dropped.
        part: Samples of a pass, where passes are parts of the stream; its last batch is then cut to that.
    """

    def __init__(self, size: int, *, taken: Taken, part: int | None) -> None:
        self.size, self._taken, self._part = size, taken, part
        self._left = part or 0
        """Samples that this part of the stream still has to be asked for."""
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
        """A pass begins, or goes on after so many samples: workers may have been asked for some of it already."""
        if self._part is not None:
            self._left = self._part - (samples_before + self._waiting) % self._part

    def came(self, num_samples: int) -> None:
        """A batch has come."""
        self._waiting -= num_samples


class _Asked:
    """The batch sampler that a DataLoader keeps; whose requests it passes on is set anew each time."""

    def __init__(self) -> None:
        self.requests = Requests(1, taken=[], part=None)

    def __iter__(self) -> Iterator[list[None]]:
        return iter(self.requests)


class _CountingCollate:
    """Sends the number of samples along with the batch, also out of a worker process."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        return len(samples), self.collate(samples)


class StreamSource:
    """An IterableDataset behind a DataLoader; each worker batches its own part of it, as torch does."""

    def __init__(self, dataset: Any, *, drop_last: bool, settings: dict[str, Any]) -> None:
        collate = _CountingCollate(settings.pop("collate_fn", None) or default_collate)
        self._generator = torch.Generator()
        settings = {"generator": self._generator, **settings}
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=1, drop_last=drop_last, collate_fn=collate, **settings
        )
        self._asked = _Asked()
        # A DataLoader takes no batch sampler for a stream and lets none be set, but asks the one it has made.
        object.__setattr__(self._loader, "batch_sampler", self._asked)

    def open(self, requests: Requests, *, seed: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
        """The stream from its beginning, in batches as requested, each with its number of samples."""
        self._asked.requests = requests
        self._generator.manual_seed(worker_seed(*seed))
        yield from self._loader

    def first(self, num_samples: int | None, size: int, *, seed: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
        """The first samples of the stream, or all of them, in batches of one size."""
        count = 0
        for counted in self.open(Requests(size, taken=[], part=num_samples), seed=seed):
            yield counted
            count += counted[0]
            if count == num_samples:
                return


class StreamReader:
    """Reads a stream pass by pass, and remembers which batches it took, so that a resume can skip them.

    To go on in the middle the stream is read again from its beginning and what was taken is dropped, which is exact
    where the stream repeats itself.

    Args:
        source: The stream.
        part: Samples of a pass, where each goes on where the one before ended; None where each begins anew.
        cuts: Whether the last batch of such a pass is cut to fit; else it ends with the first batch that reaches it.
    """

    def __init__(self, source: StreamSource, *, part: int | None, cuts: bool) -> None:
        self._source, self._part, self._cuts = source, part, cuts
        self._batches: Iterator[tuple[int, Any]] | None = None
        self._requests: Requests | None = None
        self._taken: Taken = []
        self._round = 0
        """How often the stream has come to its end, where passes are parts of it."""
        self._is_resumed = False

    @property
    def goes_on(self) -> bool:
        """Whether each pass goes on where the one before ended."""
        return self._part is not None

    def rest(self, current: EpochProgress, seed: int) -> Iterator[tuple[int, Any]]:
        """What the pass has still to deliver; its size may change on the way."""
        self._begin(current, seed)
        try:
            while (counted := self._next(current)) is not None or self._begins_again(current, seed):
                if counted is not None:
                    yield counted
                if current.is_used_up:
                    return
        finally:
            if self._part is None:  # also where the loop leaves: no worker waits for one that does not come back
                self._batches = None

    def _begin(self, current: EpochProgress, seed: int) -> None:
        if self._part is None and not self._is_resumed:
            self._taken, self._batches = [], None
        if self._batches is None or self._requests is None:
            self._open(current, seed)
        else:
            self._requests.begin_part(current.samples)
        self._is_resumed = False

    def _open(self, current: EpochProgress, seed: int) -> None:
        self._requests = Requests(current.cut_size, taken=self._taken, part=self._part if self._cuts else None)
        self._requests.begin_part(current.samples)  # before workers are asked for anything
        number = current.epoch if self._part is None else self._round
        self._batches = self._source.open(self._requests, seed=(seed, number))
        for _ in range(sum(count for _, count in self._taken)):
            if next(self._batches, None) is None:
                break

    def _next(self, current: EpochProgress) -> tuple[int, Any] | None:
        assert self._requests is not None
        assert self._batches is not None
        self._requests.size = current.cut_size
        counted = next(self._batches, None)
        if counted is not None:
            self._requests.came(counted[0])
            self._take(counted[0])
        return counted

    def _begins_again(self, current: EpochProgress, seed: int) -> bool:
        """The stream is at its end: a pass that would be empty begins it anew, any other ends there."""
        if self._part is None:
            return False
        was_read = bool(self._taken)
        self._taken, self._batches, self._round = [], None, self._round + 1
        if current.batches or not was_read:
            return False
        self._begin(current, seed)
        return True

    def _take(self, size: int) -> None:
        if self._taken and self._taken[-1][0] == size:
            self._taken[-1][1] += 1
        else:
            self._taken.append([size, 1])

    def state_dict(self, *, is_under_way: bool) -> dict[str, Any]:
        """Which batches were taken since the stream began."""
        taken = self._taken if is_under_way or self._part is not None else []
        return {"round": self._round, "taken": [list(pair) for pair in taken]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another reader stood."""
        self._round, self._taken = state["round"], [list(pair) for pair in state["taken"]]
        self._batches, self._is_resumed = None, bool(self._taken)


def length_of_stream(dataset: Any) -> int | None:
    """Its samples, where it says so."""
    return len(dataset) if hasattr(dataset, "__len__") else None
