"""A DataLoader whose batch size may change, that sees every sample once an epoch and resumes exactly."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from divebatch.data.epoch_progress import Pass, why_not_finished
from divebatch.data.from_dataloader import parts_of
from divebatch.data.listeners import Listeners
from divebatch.data.order import FromSampler, Order, Sequential, Shuffled, checked_seed, size_of
from divebatch.data.rank_shards import local_batches, rank_shard_of, require_shareable, size_without_stand_ins
from divebatch.data.sampler import checked_batch_size, num_batches
from divebatch.data.source import length_of_stream, make_source
from divebatch.errors import ArgumentError, CheckpointError, UsageError
from divebatch.ranks import Ranks, RankShard

STATE_VERSION = 1
_OURS = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}


class AdaptiveLoader:
    """Drop-in for a DataLoader. Set `batch_size` at any time: it reads back at once and is in force next epoch.
    `recut` changes the rest of the epoch under way too.

    The order of an epoch depends on (seed, epoch) alone, so runs repeat and resume whatever the sizes were. Leaving a
    pass early (`break`, `next(iter(loader))`) does not count: the epoch starts again from its beginning. To evaluate on
    the training data use `full_pass()`, which counts nothing. An IterableDataset keeps its own order and is batched by
    the size in force. Any collate will do; further keyword arguments go to `torch.utils.data.DataLoader`.

    Under an initialised process group `batch_size` and all counts are those of all ranks together, the epoch's order
    is that of one process, and each rank gets its share of each batch. Nothing is padded or repeated. `share` tells of
    the batch delivered last; `local_samples_delivered` counts what came to this rank in this life. A rank
    that a short last batch leaves without a sample gets the batch's first one as a stand-in, with weight zero: it
    counts for nothing, except in a SyncBatchNorm's statistics of that batch (`drop_last=True` avoids it). `ranks` says
    who shares; the default is everybody in the group there is when the loader is first used. All ranks iterate alike.

    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.arange(5))
    >>> loader = AdaptiveLoader(data, 2, shuffle=False)
    >>> [x.tolist() for x, in loader]
    [[0, 1], [2, 3], [4]]
    >>> loader.batch_size = 3
    >>> [x.tolist() for x, in loader]
    [[0, 1, 2], [3, 4]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        ranks: Ranks | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        clash = sorted(_OURS & dataloader_kwargs.keys())
        if clash:
            raise ArgumentError(f"{', '.join(clash)} cannot be passed on; use AdaptiveLoader.wrap(DataLoader(...))")
        order: Order | None = None
        if not isinstance(dataset, IterableDataset):
            size = size_of(dataset)
            order = Shuffled(size, seed) if shuffle else Sequential(size)
        self._setup(dataset, batch_size, order, seed, drop_last, ranks, dataloader_kwargs)

    @classmethod
    def wrap(cls, dataloader: "DataLoader[Any]", *, seed: int = 0, ranks: Ranks | None = None) -> Self:
        """Take over an existing DataLoader: its dataset, sampler, collate, workers and batch size.

        torch's plain shuffling becomes ours, with `seed`; a sampler of your own keeps drawing the order.
        """
        taken = parts_of(dataloader, seed)
        loader = cls.__new__(cls)
        loader._setup(taken.dataset, taken.batch_size, taken.order, seed, taken.drop_last, ranks, taken.settings)
        return loader

    def _setup(
        self,
        dataset: Any,
        batch_size: int,
        order: Order | None,
        seed: int,
        drop_last: bool,
        ranks: Ranks | None,
        settings: dict[str, Any],
    ) -> None:
        if settings.get("in_order") is False:
            raise ArgumentError("in_order=False cannot be used: batches must come in the order they were drawn")
        self.dataset, self.drop_last, self.seed = dataset, drop_last, checked_seed(seed)
        self._order, self._settings = order, settings
        self._source = make_source(dataset, drop_last=drop_last, settings=settings)
        self._stream_size = length_of_stream(dataset) if order is None else None
        self._ranks: Ranks | None = None
        self.batch_size = batch_size
        if ranks is not None:
            self._join(ranks)
        self.rank_shard, self.local_samples_delivered = RankShard(0, 0), 0
        self._epoch = 0
        self._current: Pass | None = None
        self._finished: Pass | None = None
        self._resume, self._began = False, time.perf_counter()
        self._batches_before, self._samples_before = 0, 0
        self._on_new_pass, self._on_step = Listeners(), Listeners()

    # What a user reads and sets

    @property
    def batch_size(self) -> int:
        """Samples per batch from the next pass on."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        size = checked_batch_size(value, dataset_size=self.dataset_size, drop_last=self.drop_last)
        if self._ranks is not None and size < self._ranks.size:
            told = f"batch_size={size} is below the {self._ranks.size} ranks that share a batch: raised to it"
            warnings.warn(told, stacklevel=2)
            size = self._ranks.size
        self._batch_size = size

    def recut(self, batch_size: int) -> None:
        """Set `batch_size` and cut with it what the epoch under way has not delivered yet: still each sample once.

        Batches that workers prefetched are thrown away and fetched anew. With `drop_last` the epoch ends where what is
        left fills no batch of the new size.
        """
        if not self.can_recut:
            raise UsageError(
                "the batch size of a stream cannot change within an epoch: what its workers hold cannot be cut anew"
            )
        self.batch_size = batch_size
        current = self._current
        if current is not None and (current.is_open or self._resume):
            self._cut_rest(current, self.batch_size)

    def _cut_rest(self, current: Pass, batch_size: int) -> None:
        current.batch_size = batch_size
        current.num_batches = self._total_batches(current)

    @property
    def can_recut(self) -> bool:
        """False for a stream."""
        return self._order is not None

    @property
    def dataset_size(self) -> int | None:
        """Samples in one epoch; None for a stream of unknown length before its first epoch is over."""
        return self._stream_size if self._order is None else len(self._order)

    @property
    def epoch(self) -> int:
        """Complete passes so far."""
        return self._epoch

    @property
    def batches_delivered(self) -> int:
        """Over all epochs, the one under way included."""
        return self._batches_before + (self._current.batches if self._current else 0)

    @property
    def samples_delivered(self) -> int:
        """Over all epochs, the one under way included."""
        return self._samples_before + (self._current.samples if self._current else 0)

    @property
    def ranks(self) -> Ranks:
        """Who shares each batch; found when first asked for, since a group may be initialised after the loader."""
        if self._ranks is None:
            self._join(Ranks.here())
        assert self._ranks is not None
        return self._ranks

    def _join(self, ranks: Ranks) -> None:
        require_shareable(self._order, ranks)
        self._ranks = ranks
        self.batch_size = self._batch_size

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` (from 0) the next one, from its beginning."""
        self._epoch, self._current, self._resume = epoch, None, False

    def __len__(self) -> int:
        """Batches in the pass under way, else in the next one."""
        current = self._current
        if current is not None and current.num_batches is not None and (current.is_open or self._resume):
            return current.num_batches
        if self.dataset_size is None:
            raise TypeError("the length of this stream is not known")
        return num_batches(self.dataset_size, self.batch_size, drop_last=self.drop_last)

    # Iterating

    def __iter__(self) -> Iterator[Any]:
        if self._current is not None and not self._resume and self._current.is_used_up:
            self._close(self._current)
        if not self._resume or self._current is None:
            self._current = self._new_pass()
            self._on_new_pass()
        elif self._current.batch_size < self.ranks.size:  # begun by fewer ranks than there are now
            self._cut_rest(self._current, self.ranks.size)
        self._resume = False
        return self._run(self._current)

    def _new_pass(self) -> Pass:
        ranks = self.ranks  # first: they may raise the batch size
        order = None if self._order is None else self._order.draw(self._epoch)
        if isinstance(self._order, FromSampler):  # drawn from random states that may differ
            order = self._order.last_drawn = ranks.from_first(order)
        return Pass(self._epoch, self.batch_size, order, self._num_batches(order, self.batch_size))

    def _num_batches(self, order: Tensor | Sequence[Any] | None, batch_size: int) -> int | None:
        size = length_of_stream(self.dataset) if order is None else len(order)
        if size is None or (order is None and self._num_workers > 1):  # each worker has a last batch of its own
            return None
        return num_batches(size, batch_size, drop_last=self.drop_last)

    @property
    def _num_workers(self) -> int:
        return self._settings.get("num_workers") or 0

    def _run(self, current: Pass) -> Iterator[Any]:
        current.samples_before, self._began = current.samples, time.perf_counter()
        if current.batches:  # resumed: the state was taken before the loop came back for more
            self._tell_of_step(current)
        size, batches = current.batch_size, self._rest(current)
        try:
            while (counted := next(batches, None)) is not None:
                if current is not self._current:
                    raise UsageError(
                        "another pass over this loader began while this one ran: to look at the data in between use "
                        "loader.full_pass() or a loader of its own"
                    )
                num_samples, batch = counted
                self.rank_shard = self._rank_shard_of(current, num_samples)
                self.local_samples_delivered += self.rank_shard.mine
                current.local_samples += self.rank_shard.mine
                current.batches += 1
                current.samples += self.rank_shard.num_samples
                yield batch
                self._tell_of_step(current)
                if current.batch_size != size:
                    size, batches = current.batch_size, self._rest(current)
        finally:
            current.is_open = False
        if current is self._current:
            self._close(current)

    def _rest(self, current: Pass) -> Iterator[tuple[int, Any]]:
        """What is still to be delivered here, cut with the size in force, each batch with its number of samples."""
        seed, size, left = (self.seed, current.epoch), current.batch_size, current.left
        if left is None:
            return self._source.batches(None, size, start=current.batches, seed=seed)
        if not len(left):
            return iter(())
        return local_batches(self._source, left, size, self.ranks, drop_last=self.drop_last, seed=seed)

    def _rank_shard_of(self, current: Pass, num_samples: int) -> RankShard:
        """`num_samples` is what the source counted here."""
        if self.ranks.is_alone:  # a stream never has other ranks
            return RankShard(num_samples, num_samples)
        return rank_shard_of(min(current.batch_size, current.samples_left), self.ranks)

    def _total_batches(self, current: Pass) -> int | None:
        if current.order is None:
            return self._num_batches(None, current.batch_size)
        return current.batches + (self._num_batches(current.left, current.batch_size) or 0)

    def _tell_of_step(self, current: Pass) -> None:
        """The loop has come back for more, so the step on the last batch is made; after the last one nobody asks."""
        if current is self._current and not current.is_used_up:
            self._on_step(current)

    def _close(self, current: Pass) -> None:
        """The pass is over: its counts become final."""
        if current.batches == 0:
            raise ArgumentError(
                f"epoch {current.epoch + 1} had no batch of {current.batch_size} samples: "
                f"the stream is empty, or shorter than one batch with drop_last=True"
            )
        current.seconds = time.perf_counter() - self._began
        self._batches_before += current.batches
        self._samples_before += current.samples
        if self._order is None:
            self._stream_size = length_of_stream(self.dataset) or current.samples
        self._epoch, self._current, self._finished = current.epoch + 1, None, current

    # What a controller uses

    @property
    def finished_pass(self) -> Pass | None:
        """The pass that has ended and that nobody has taken note of yet."""
        return self._finished

    def require_finished_pass(self) -> Pass:
        """The same, also where the loop stopped at the last batch; an error says how far it came if there is none."""
        if self._current is not None and self._current.is_used_up:
            self._close(self._current)
        if self._finished is None:
            raise UsageError(why_not_finished(self._current))
        return self._finished

    def forget_finished_pass(self) -> None:
        """Note is taken."""
        self._finished = None

    def finish_epoch(self) -> Pass:
        """The pass that has ended since the last call; an error if none has."""
        finished = self.require_finished_pass()
        self.forget_finished_pass()
        return finished

    def full_pass(self) -> Iterator[Any]:
        """Every sample of an epoch once, in a fixed order and without counting, for measuring at fixed weights.

        Several ranks see their shares, all of them the same number of batches and nobody a stand-in: batches are a
        little larger than `batch_size` where that needs it.
        """
        settings = {**self._settings, "persistent_workers": False}
        source = make_source(self.dataset, drop_last=False, settings=settings)
        order, ranks, seed = self._plain_order(), self.ranks, (self.seed, self._epoch)
        size = self.batch_size if order is None else size_without_stand_ins(len(order), self.batch_size, ranks)
        return (batch for _, batch in local_batches(source, order, size, ranks, drop_last=False, seed=seed))

    def _plain_order(self) -> Tensor | Sequence[Any] | None:
        if isinstance(self._order, FromSampler):  # which samples there are, only the last drawing tells
            self._order.last_drawn = self.ranks.from_first(self._order.last_drawn)
            return self._order.last_drawn
        return None if self._order is None else Sequential(len(self._order)).draw(0)

    def on_new_pass(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever a pass starts from its beginning; returns what takes it off again."""
        return self._on_new_pass.add(listener)

    def on_step(self, listener: Callable[[Pass], None]) -> Callable[[], None]:
        """Call `listener` with the pass under way between two of its batches; returns what takes it off again."""
        return self._on_step.add(listener)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, counting batches delivered and not merely prefetched."""
        current = self._current
        return {
            "version": STATE_VERSION,
            **self._way_of_cutting(),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "epoch": self._epoch,
            "batches_before": self._batches_before,
            "samples_before": self._samples_before,
            "pass": None
            if current is None or current.batches == 0
            else current.state_dict(with_order=isinstance(self._order, FromSampler)),
        }

    def _way_of_cutting(self) -> dict[str, Any]:
        """What must be equal for a resume: it decides which samples the rest of an epoch holds."""
        return {
            "dataset_size": self.dataset_size,
            "drop_last": self.drop_last,
            "order": type(self._order).__name__ if self._order is not None else "stream",
            "num_workers": self._num_workers if self._order is None else None,  # deals the shares of a stream
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if `state` belongs to other data or another way of cutting it."""
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(f"loader state has version {state.get('version')}, this code reads {STATE_VERSION}")
        for key, here in self._way_of_cutting().items():
            if state[key] != here and None not in (state[key], here):
                raise CheckpointError(f"the checkpoint's loader has {key}={state[key]}, this one {key}={here}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where the saved loader stood: the next pass yields exactly what it had not delivered."""
        self.check_state(state)
        self.seed, self._epoch = state["seed"], state["epoch"]
        if isinstance(self._order, Shuffled):
            self._order = Shuffled(len(self._order), self.seed)
        if self._order is None:
            self._stream_size = length_of_stream(self.dataset) or state["dataset_size"]
        self.batch_size = state["batch_size"]
        self._batches_before, self._samples_before = state["batches_before"], state["samples_before"]
        self._finished, self._resume = None, state["pass"] is not None
        self._current = self._restored_pass(state["pass"]) if state["pass"] else None

    def _restored_pass(self, state: dict[str, Any]) -> Pass:
        order = state["order"]
        if order is None and self._order is not None:
            order = self._order.draw(self._epoch)
        elif isinstance(self._order, FromSampler):
            self._order.last_drawn = order
        restored = Pass(self._epoch, state["batch_size"], order, None, state["batches"], state["samples"])
        restored.num_batches = self._total_batches(restored)
        return restored
