"""A DataLoader whose batch size may change, that delivers every sample once an epoch and resumes exactly."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from divebatch.checks import require_count, require_same, warn_user
from divebatch.data.order import (
    EpochProgress,
    FromSampler,
    InParts,
    Order,
    checked_seed,
    drawn_seed,
    num_batches,
    order_of,
    order_over,
    restore,
    state_of,
)
from divebatch.data.source import (
    MapSource,
    TensorSource,
    make_source,
    rank_shard_of,
    shard_places,
    size_without_stand_ins,
)
from divebatch.data.stream import StreamSource, length_of_stream
from divebatch.errors import ArgumentError, UsageError
from divebatch.ranks import Ranks, RankShard

STATE_VERSION = 2
MANY_BATCHES = 10_000
"""The number of batches in a stream's first epoch after which the stream may be endless."""

Transform = Callable[[Any], Any]
ProcessGroup = dist.ProcessGroup | Literal["alone"] | None

_SAMPLERS = ("sampler", "batch_sampler")
_OURS = {"batch_size", "shuffle", "drop_last", *_SAMPLERS}
_TAKEN_OVER = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


class AdaptiveLoader:
    """A replacement for a DataLoader whose batch size may change; every epoch has each sample exactly once.

    Set `batch_size` at any time: the new size applies from the next epoch on. `resize_now` changes the rest of the
    current epoch too. An epoch that is left early (`break`, `next(iter(loader))`) does not count, and starts again from
    its beginning. To evaluate on the training data use `full_pass()`, which counts nothing.

    Unlike a DataLoader, this class shuffles by default. The order of an epoch depends only on (seed, epoch), so runs
    repeat and resume whatever their batch sizes were. The settings of a DataLoader (`num_workers`, `collate_fn`, ...)
    can be read as attributes; there is no `sampler` and no `batch_sampler`.

    Under an initialised process group, `batch_size` and all counts are those of all ranks together. The epoch's order
    is that of one process, and each rank gets its shard of each batch (`rank_shard`). Nothing is padded or repeated. If
    the last batch is too short, a rank without a sample gets a copy of the first one with weight 0, which counts only
    in a SyncBatchNorm's statistics; `drop_last=True` avoids this. All ranks must iterate in the same way.

    Args:
        dataset: A map-style dataset, or an IterableDataset, which keeps its own order.
        batch_size: The number of samples in a batch.
        shuffle: Whether each epoch has a new random order. An IterableDataset is never shuffled.
        seed: The seed of the orders and of worker processes, also saved with the state. None: drawn from `generator` if
            you pass one, else from torch's default generator; all ranks use rank 0's.
        drop_last: Whether to leave out a shorter last batch.
        order: The epochs' orders, instead of plain shuffling, such as `StratifiedBatches(labels)`.
        transform: A function called in this process with each delivered batch; its result replaces the batch.
        delivery_size: The number of samples in a delivered batch, for a loop that accumulates several of them for one
            optimizer step. None: `batch_size`.
        epoch_samples: The number of samples in an epoch. A stream then continues in each epoch where the last one
            ended; a stream that ends begins again, after an epoch that may be shorter. A map-style dataset is cut into
            equal epochs of at most this size, with each sample in one of them. None: an epoch is all the data.
        process_group: The ranks that share each batch, or "alone" for this process by itself. None: the ranks of the
            group that is initialised when the loader is first used, if there is one.
        **dataloader_kwargs: Arguments for `torch.utils.data.DataLoader`; any collate function works.

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
        seed: int | None = None,
        drop_last: bool = False,
        order: Order | None = None,
        transform: Transform | None = None,
        delivery_size: int | None = None,
        epoch_samples: int | None = None,
        process_group: ProcessGroup = None,
        **dataloader_kwargs: Any,
    ) -> None:
        clash = sorted(_OURS & dataloader_kwargs.keys())
        if clash:
            raise ArgumentError(f"{', '.join(clash)} cannot be passed on; use AdaptiveLoader.wrap(DataLoader(...))")
        order = order_over(dataset, order, shuffle=shuffle)
        # The DataLoader knows every default, and refuses what a DataLoader refuses.
        template: DataLoader[Any] = DataLoader(dataset, **dataloader_kwargs)
        own = transform, delivery_size, epoch_samples, process_group
        self._setup(template, batch_size, order, drop_last, seed, template.generator, *own)

    @classmethod
    def wrap(
        cls,
        dataloader: "DataLoader[Any]",
        *,
        seed: int | None = None,
        transform: Transform | None = None,
        delivery_size: int | None = None,
        epoch_samples: int | None = None,
        process_group: ProcessGroup = None,
    ) -> Self:
        """Take over an existing DataLoader: its dataset, sampler, collate function, workers and batch size.

        torch's plain shuffling is replaced by that of this class; a sampler of your own still draws the order. The
        other arguments are those of the class. Without a `seed`, one is drawn from the DataLoader's own generator, if
        there is one.
        """
        if not isinstance(dataloader, DataLoader):
            raise ArgumentError(f"wrap takes a DataLoader, got {type(dataloader).__name__}")
        cutting: Any = dataloader.batch_sampler
        # A user's own batch sampler chooses the batches, so there is no size to set.
        if type(cutting) is not BatchSampler:
            kind = "none (batch_size=None)" if cutting is None else type(cutting).__name__
            raise ArgumentError(
                f"cannot change the batch size of this DataLoader; its batch sampler is: {kind}. Pass batch_size=..., "
                f"with a sampler= of your own if need be, or only watch its noise scale with NoiseMeter"
            )
        dataset, sampler = dataloader.dataset, cutting.sampler
        if isinstance(dataset, IterableDataset) or isinstance(sampler, Order):
            order = order_over(dataset, sampler if isinstance(sampler, Order) else None, shuffle=True)
        else:
            order = order_of(sampler)
        loader = cls.__new__(cls)
        generator = dataloader.generator or getattr(sampler, "generator", None)
        own = transform, delivery_size, epoch_samples, process_group
        loader._setup(dataloader, cutting.batch_size, order, cutting.drop_last, seed, generator, *own)
        return loader

    def _setup(
        self,
        dataloader: "DataLoader[Any]",
        batch_size: int,
        order: Order | None,
        drop_last: bool,
        seed: int | None,
        generator: torch.Generator | None,
        transform: Transform | None,
        delivery_size: int | None,
        epoch_samples: int | None,
        process_group: ProcessGroup,
    ) -> None:
        if not dataloader.in_order:
            raise ArgumentError("in_order=False cannot be used: batches must come in the order they were drawn")
        if delivery_size is not None:
            require_count("delivery_size", delivery_size)
        self.dataset: Any = dataloader.dataset
        self.drop_last = drop_last
        self.transform, self.delivery_size, self.epoch_samples = transform, delivery_size, epoch_samples
        self._settings = {name: getattr(dataloader, name) for name in _TAKEN_OVER}
        if epoch_samples is not None:
            require_count("epoch_samples", epoch_samples)
            length = length_of_stream(self.dataset)
            if length is not None and epoch_samples > length:
                raise ArgumentError(
                    f"epoch_samples={epoch_samples} is more than the {length} samples of the dataset: leave it out, "
                    f"and an epoch visits each sample once"
                )
            order = None if order is None else InParts(order, epoch_samples)
        self._order = order
        self._is_seed_drawn = seed is None
        self._reseed(drawn_seed(generator) if seed is None else checked_seed(seed))
        self._source = self._make_source(self._settings, drop_last=drop_last)
        self.epoch, self.batches_delivered, self.samples_delivered, self.local_samples_delivered = 0, 0, 0, 0
        self._at_last_step = 0, 0, 0
        """Batches, samples and local samples delivered before the last optimizer step."""
        self.current: EpochProgress | None = None
        """The epoch that began last, until its end; also an epoch that was left early, or comes from a saved state."""
        self._finished: EpochProgress | None = None
        """The epoch that ended last."""
        self._is_resumed = False
        """Whether `current` comes from a saved state and no batch of it was requested yet."""
        self._stream_size: int | None = None
        """Samples in an epoch of a stream, once known from an epoch or a saved state."""
        self._observer: Callable[[EpochProgress], None] | None = None
        self._ranks: Ranks | None = None
        self.batch_size = batch_size
        if process_group is not None:
            self._join(Ranks.alone() if process_group == "alone" else Ranks.here(process_group))
        self.rank_shard = RankShard(0, 0)
        """This rank's share of the latest batch."""

    def _make_source(self, settings: dict[str, Any], *, drop_last: bool) -> TensorSource | MapSource | StreamSource:
        if self._order is None:
            return StreamSource(self.dataset, settings, drop_last=drop_last, part=self.epoch_samples)
        return make_source(self.dataset, settings)

    # What a user reads and sets

    def __getattr__(self, name: str) -> Any:
        """Return the DataLoader's setting `name`, as it was given."""
        settings = self.__dict__.get("_settings", {})
        if name in settings:
            return settings[name]
        if name not in _SAMPLERS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(
            f"{type(self).__name__} has no {name}: drop the line that asks for it. The loader orders each epoch by "
            f"itself, without {name}.set_epoch(epoch), and continues after load_state_dict without skip_first_batches"
        )

    @property
    def batch_size(self) -> int:
        """The number of samples in a batch, from the next epoch on."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        require_count("batch_size", value)
        size = self.dataset_size
        if self.drop_last and size is not None and value > size:
            raise ArgumentError(
                f"batch_size={value} is larger than the {size} samples of an epoch, and drop_last=True leaves none: "
                f"use a smaller batch or drop_last=False"
            )
        if self._ranks is not None and value < self._ranks.size:
            warn_user(f"batch_size={value} is below the {self._ranks.size} ranks that share a batch: raised to it")
            value = self._ranks.size
        self._batch_size = value

    def resize_now(self, batch_size: int) -> None:
        """Set `batch_size` and apply the new size to the rest of the current epoch; each sample still comes once.

        Prefetched batches are discarded and fetched again. A stream cannot go back, so its prefetched batches come
        first (`prefetch_factor * num_workers` of them). With `drop_last` the epoch ends if the remaining samples fill
        no batch of the new size.
        """
        self.batch_size = batch_size
        if self.current is not None and self.current.is_open:
            self.current.resize(self.batch_size)

    @property
    def dataset_size(self) -> int | None:
        """The number of samples in one epoch; None for a stream of unknown length before its first epoch has ended."""
        if self._order is not None:
            return len(self._order)
        return self.epoch_samples or length_of_stream(self.dataset) or self._stream_size

    @property
    def worker_init_fn(self) -> Any:
        """The DataLoader's `worker_init_fn`. Set it before the workers start."""
        return self._settings["worker_init_fn"]

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        self._settings["worker_init_fn"] = value
        if not isinstance(self._source, TensorSource):
            self._source.dataloader.worker_init_fn = value

    @property
    def is_at_end(self) -> bool:
        """Whether the current epoch has no batch left, or no epoch has begun."""
        return self.current is None or self.current.is_used_up

    @property
    def ranks(self) -> Ranks:
        """The processes that share each batch; looked up at first use, since a group may be initialised late."""
        return self._ranks or self._join(Ranks.here())

    def _join(self, ranks: Ranks) -> Ranks:
        order, count = self._order, ranks.size
        if order is None and count > 1:
            raise ArgumentError(f"an IterableDataset has no order that {count} ranks could share: use a map-style one")
        if isinstance(order, FromSampler) and isinstance(order.sampler, DistributedSampler) and count > 1:
            raise ArgumentError(
                f"the loader deals batches out to {count} ranks, and a DistributedSampler would do it a second time: "
                f"leave it out, and let batch_size be that of all ranks together"
            )
        if order is not None and len(order) < count:
            raise ArgumentError(f"{len(order)} samples cannot be shared by {count} ranks")
        self._ranks = ranks
        if self._is_seed_drawn:
            self._reseed(ranks.from_first(self.seed))
        self.batch_size = self._batch_size
        return ranks

    def _reseed(self, seed: int) -> None:
        self.seed = seed
        self._order = None if self._order is None else self._order.seeded(seed)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` (from 0) the next epoch, starting from its beginning."""
        self._drop_current()
        self.epoch = epoch
        self._finished = None

    def __len__(self) -> int:
        """Return the number of batches in the epoch under way, else in the next one."""
        current = self.current
        if current is not None and current.num_batches is not None and current.is_open:
            return current.num_batches
        size = self.dataset_size
        if size is None:
            raise TypeError("the length of this stream is not known")
        drop_last = self.drop_last and (self._order is not None or self.epoch_samples is None)
        return num_batches(size, self.delivery_size or self.batch_size, drop_last=drop_last)

    # Iterating

    def __iter__(self) -> Iterator[Any]:
        ranks = self.ranks  # first, since joining may change seed and batch size
        current = self.current
        if current is None or not self._is_resumed:
            if current is not None and current.is_used_up:  # a loop that counts batches stops after the last one
                self._end(current)
            self._drop_current()
            order = None if self._order is None else self._agreed(self._order.draw(self.epoch))
            current = self.current = self._progress(self.batch_size, order)
        elif current.batch_size < ranks.size:  # begun by fewer ranks than there are now
            current.resize(ranks.size)
        self._is_resumed = False
        return self._run(current)

    def _drop_current(self) -> None:
        """Remove an epoch that was left early from the counts."""
        if self.current is not None:
            self.batches_delivered -= self.current.batches
            self.samples_delivered -= self.current.samples
        self.current, self._is_resumed = None, False

    def _progress(self, batch_size: int, order: Any, *, batches: int = 0, samples: int = 0) -> EpochProgress:
        progress = EpochProgress(self.epoch, batch_size, order, self.drop_last, self.delivery_size)
        progress.batches, progress.samples = batches, samples
        progress.end_at = self.epoch_samples if order is None else None
        progress.resize(batch_size)
        size = length_of_stream(self.dataset) if order is None and self.epoch_samples is None else None
        if size is not None and self.num_workers <= 1:  # of several workers each has a last batch of its own
            progress.num_batches = batches + num_batches(size - samples, progress.cut_size, drop_last=self.drop_last)
        return progress

    def _agreed(self, order: Any) -> Any:
        """Return rank 0's order if ranks may have drawn different ones."""
        return order if self._order is None or self._order.is_reproducible else self.ranks.from_first(order)

    def _run(self, current: EpochProgress) -> Iterator[Any]:
        ranks, size = self.ranks, 0
        batches: Iterator[tuple[int, Any]] = iter(())
        current.begin()
        self._mark_step()
        try:
            while True:
                # The loop requests a batch, so the step on the previous one is complete. After the very last batch
                # there is no such request.
                if self._observer is not None and current is self.current and not current.is_used_up:
                    self._observer(current)
                if not size or (current.batch_size != size and current.order is not None):
                    size, batches = current.batch_size, iter(())  # old workers end before new ones start
                    batches = self._rest(current, ranks)
                counted = next(batches, None)
                if counted is None:
                    break
                if current is not self.current:
                    raise UsageError(
                        "another pass over this loader began while this one ran: use loader.full_pass() for a look"
                    )
                num_samples, batch = counted
                counted = None  # or zip would keep the first batch for the whole epoch
                if num_samples != self.rank_shard.num_samples:
                    self.rank_shard = rank_shard_of(num_samples, ranks)
                mine = self.rank_shard.mine
                current.batches += 1
                current.samples += num_samples
                current.local_samples += mine
                self.batches_delivered += 1
                self.samples_delivered += num_samples
                self.local_samples_delivered += mine
                yield batch if self.transform is None else self.transform(batch)
        finally:
            current.is_open = False
        if current is self.current:
            self._end(current)

    def _rest(self, current: EpochProgress, ranks: Ranks) -> Iterator[tuple[int, Any]]:
        """Return the rest of the epoch in batches of the current size, each with its number of samples on all ranks."""
        order, left, size = current.order, current.samples_left, current.cut_size
        if isinstance(self._source, StreamSource):
            return self._source.rest(current, self.seed)
        if order is None or not left:
            return iter(())
        places = shard_places(len(order), size, ranks, drop_last=self.drop_last, start=current.samples)
        # Workers that begin within an epoch must not repeat random numbers of earlier workers or of other ranks.
        seed = (self.seed, current.epoch, current.samples, ranks.rank)
        sizes = chain(repeat(size, left // size), repeat(left % size))
        return zip(sizes, self._source.batches(order, places, seed=seed), strict=False)

    def _end(self, current: EpochProgress) -> None:
        """Finish the epoch and its counts."""
        if current.batches == 0:
            raise ArgumentError(
                f"epoch {current.epoch + 1} had no batch of {current.batch_size} samples: "
                f"the stream is empty, or shorter than one batch with drop_last=True"
            )
        current.end()
        self.epoch, self.current, self._finished = current.epoch + 1, None, current
        self._stream_size = current.samples

    def full_pass(self) -> Iterator[Any]:
        """Deliver every sample once in a fixed order, without counting; from a stream, an epoch's samples or all.

        Each rank gets its shards, in the same number of batches on all ranks and without dummies. So batches may be a
        little larger than `batch_size`.
        """
        source = self._make_source({**self._settings, "persistent_workers": False}, drop_last=False)
        seed, size, ranks = (self.seed, self.epoch, 0), self.delivery_size or self.batch_size, self.ranks
        batches: Iterator[Any]
        if isinstance(source, StreamSource):
            batches = (batch for _, batch in source.first(size, seed=seed))
        else:
            assert self._order is not None
            order = self._agreed(self._order.fixed())
            size = size_without_stand_ins(len(order), size, ranks)
            places = shard_places(len(order), size, ranks, drop_last=False)
            batches = source.batches(order, places, seed=(*seed, ranks.rank))
        return batches if self.transform is None else map(self.transform, batches)

    # What a controller uses

    def observe(self, before_batch: Callable[[EpochProgress], None]) -> Callable[[], None]:
        """Call `before_batch` before each batch is fetched; return the function that stops these calls."""
        self.require_no_controller()
        self._observer = before_batch

        def stop() -> None:
            if self._observer == before_batch:
                self._observer = None

        return stop

    def require_no_controller(self) -> None:
        """Raise if a controller observes this loader."""
        if self._observer is not None:
            raise UsageError(
                "this loader has a Controller already, and two would set its batch size in turn: close() the first one "
                "before you make another, or make a loader for each"
            )

    def since_last_step(self) -> tuple[int, int, int]:
        """Return how many batches, samples and samples of this rank were delivered since the last call."""
        batches, samples, local = self._at_last_step
        now = self.batches_delivered, self.samples_delivered, self.local_samples_delivered
        self._at_last_step = now
        return now[0] - batches, now[1] - samples, now[2] - local

    def _mark_step(self) -> None:
        self._at_last_step = self.batches_delivered, self.samples_delivered, self.local_samples_delivered

    def has_finished_epoch(self, *, since: int) -> bool:
        """Return whether epoch `since` (from 0) or a later one has ended."""
        return self._finished is not None and self._finished.epoch >= since

    def finished_epoch(self, *, since: int) -> EpochProgress:
        """Return epoch `since` (from 0); raise unless this is the epoch that ended last."""
        current = self.current
        if current is not None and current.is_used_up:
            self._end(current)
        finished = self._finished
        if finished is not None and finished.epoch == since:
            if self.current is not None and not self.current.is_open:
                self._drop_current()  # a look with next(iter(loader)) after the epoch's end
            return finished
        if finished is not None and finished.epoch > since:
            raise UsageError(
                f"step() must be called once after each epoch: {finished.epoch + 1 - since} epochs have ended "
                f"since the last call. A complete pass for evaluation counts as one: use loader.full_pass() instead"
            )
        if current is None or current.batches == 0:
            raise UsageError("no epoch has ended since the last step(): iterate over the loader to its end first")
        raise UsageError(
            f"epoch {current.epoch + 1} has not ended: {current.batches} of {current.num_batches or '?'} batches were "
            f"delivered. Call step() after the loop over the batches. If you mean to leave epochs early, pass "
            f"AdaptiveLoader(..., epoch_samples=N) instead: an epoch is then N samples, also of a stream without an "
            f"end. For a trial of a few batches (--dry-run) skip step()"
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, counted in delivered batches, not in prefetched ones."""
        order, current, source = self._order, self.current, self._source
        cannot_redraw = order is not None and not order.is_reproducible
        # After a resume, an epoch without a batch begins again, with its order if that cannot be drawn again.
        has_begun = current is not None and (current.batches > 0 or cannot_redraw)
        return {
            **self._settings_of_epochs(),
            "seed": self.seed,
            "sampler": {} if order is None else order.state_dict(),
            "generator": state_of(self.generator),
            "stream": source.state_dict(has_begun=has_begun) if isinstance(source, StreamSource) else {},
            "batch_size": self.batch_size,
            "epoch": self.epoch,
            "batches_before": self.batches_delivered - (current.batches if current is not None else 0),
            "samples_before": self.samples_delivered - (current.samples if current is not None else 0),
            "pass": current.state_dict(with_order=cannot_redraw) if current is not None and has_begun else None,
        }

    def _settings_of_epochs(self) -> dict[str, Any]:
        """Return the settings that determine the remaining samples of an epoch."""
        order = self._order.order if isinstance(self._order, InParts) else self._order
        return {
            "version": STATE_VERSION,
            "dataset_size": self.dataset_size,
            "drop_last": self.drop_last,
            "order": "stream" if order is None else type(order).__name__,
            "epoch_samples": self.epoch_samples,
            "num_workers": self.num_workers if order is None else None,  # deals out a stream's samples
        }

    def require_same_data(self, state: Mapping[str, Any], place: str = "loader") -> None:
        """Raise if a saved state has another version, other data or another division into epochs."""
        mine = self._settings_of_epochs()
        # A stream may not know its length before its first epoch has ended, here or in the saved state.
        if self._order is None and None in (mine["dataset_size"], state.get("dataset_size")):
            del mine["dataset_size"]
        if self._order is not None and self._order.is_reproducible:
            mine["sampler"] = self._order.state_dict()
        require_same(place, {name: state.get(name) for name in mine}, mine)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved loader stood: the next epoch delivers exactly the samples that were left."""
        self.require_same_data(state)
        self._is_seed_drawn = False
        self._reseed(state["seed"])
        restore(self.generator, state["generator"])
        if self._order is not None:
            self._order.load_state_dict(state["sampler"])
        if isinstance(self._source, StreamSource):
            self._stream_size = state["dataset_size"]
            self._source.load_state_dict(state["stream"])
        self.batch_size, self.epoch = state["batch_size"], state["epoch"]
        self.batches_delivered, self.samples_delivered = state["batches_before"], state["samples_before"]
        self.current, self._finished, self._is_resumed = None, None, state["pass"] is not None
        if state["pass"] is not None:
            current = self.current = self._restored(**state["pass"])
            self.batches_delivered += current.batches
            self.samples_delivered += current.samples
        self._mark_step()

    def _restored(self, batch_size: int, batches: int, samples: int, order: Any) -> EpochProgress:
        if self._order is not None and order is None:
            order = self._order.draw(self.epoch)
        elif self._order is not None:
            self._order.remember(order)
        return self._progress(batch_size, order, batches=batches, samples=samples)


def warn_if_endless(current: EpochProgress) -> None:
    """Warn once if a stream's first epoch seems endless, since decisions are made only at an epoch's end."""
    if current.batches == MANY_BATCHES and current.epoch == 0 and current.order is None and not current.num_batches:
        warn_user(
            f"{current.batches} batches of this stream were delivered and its end is not known: the batch size is "
            f"decided at an epoch's end. Pass AdaptiveLoader(..., epoch_samples=N) or Controller(..., every_steps=N)"
        )
