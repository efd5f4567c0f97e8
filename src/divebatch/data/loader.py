"""A DataLoader whose batch size may change, that sees every sample once an epoch and resumes exactly."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

import torch.distributed as dist
from torch.utils.data import DataLoader

from divebatch.checks import require_count
from divebatch.data.epoch_progress import EpochProgress
from divebatch.data.from_dataloader import Parts, parts_of
from divebatch.data.listeners import Listener, Listeners
from divebatch.data.order import Order, checked_seed, drawn_seed, in_parts, order_over, restore, state_of
from divebatch.data.passes import Passes
from divebatch.data.rank_shards import LocalPlaces, enough_for, every_sample, rank_shard_of, require_shareable
from divebatch.data.sampler import checked_batch_size, num_batches
from divebatch.data.source import make_source
from divebatch.data.stream import StreamReader, StreamSource, length_of_stream
from divebatch.errors import ArgumentError, UsageError
from divebatch.ranks import Ranks, RankShard
from divebatch.state_checks import require_same

STATE_VERSION = 1
_OURS = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}

Transform = Callable[[Any], Any]
ProcessGroup = dist.ProcessGroup | Literal["alone"] | None


class AdaptiveLoader:
    """Drop-in for a DataLoader whose batch size may change, with every sample exactly once an epoch.

    Set `batch_size` at any time: it reads back at once and is in force from the next epoch on. `resize_now` changes the
    rest of the epoch under way too. Leaving a pass early (`break`, `next(iter(loader))`) does not count: the epoch
    starts again from its beginning. To evaluate on the training data use `full_pass()`, which counts nothing.

    Unlike a DataLoader it shuffles unless told otherwise, and the order of an epoch depends on (seed, epoch) alone, so
    that runs repeat and resume whatever their batch sizes were.

    Under an initialised process group `batch_size` and all counts are those of all ranks together, the epoch's order
    is that of one process, and each rank gets its shard of each batch (`rank_shard`). Nothing is padded or repeated. A
    rank that a short last batch leaves without a sample gets the batch's first one as a stand-in of weight zero: it
    counts for nothing, except in a SyncBatchNorm's statistics of that batch (`drop_last=True` avoids it). All ranks
    must iterate alike.

    Args:
        dataset: a map-style dataset, or an IterableDataset, which keeps its own order.
        batch_size: samples per batch.
        shuffle: whether each epoch has a new random order. An IterableDataset is never shuffled.
        seed: decides on the orders and on what worker processes draw. None: one is drawn from `generator`, where you
            pass one, else from torch's default one, so `torch.manual_seed` decides; ranks take rank 0's. `loader.seed`
            and the state tell it.
        drop_last: whether to leave out a last batch that is shorter.
        order: what draws the epochs' orders in the place of plain shuffling, such as `StratifiedBatches(labels)`.
        transform: called in this process with each batch as it is delivered; its result takes the batch's place.
        delivery_size: samples per delivered batch where that is not `batch_size`: for a loop that sums several of them
            up for one optimizer step.
        epoch_samples: samples of an epoch where that is not one pass over the data. A stream then goes on in each epoch
            where the last one left it, for endless streams; one that ends begins anew, after an epoch that may be
            shorter. Each pass over a map-style dataset falls into equal epochs of at most so many samples. None: an
            epoch is one pass.
        process_group: whose ranks share each batch. None: those of the group that is initialised when the loader is
            first used, if there is one. "alone": this process by itself, whatever group there is.
        **dataloader_kwargs: passed on to `torch.utils.data.DataLoader`; any collate function will do.

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
        parts = Parts(dataset, batch_size, order, drop_last, dataloader_kwargs, dataloader_kwargs.get("generator"))
        self._setup(parts, seed, transform, delivery_size, epoch_samples, process_group)

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
        """Take over an existing DataLoader: its dataset, sampler, collate, workers and batch size.

        torch's plain shuffling becomes ours; a sampler of your own keeps drawing the order. The arguments are those of
        the class, but that a seed which is not given is drawn from the DataLoader's own generator, if it has one.
        """
        loader = cls.__new__(cls)
        loader._setup(parts_of(dataloader), seed, transform, delivery_size, epoch_samples, process_group)
        return loader

    def _setup(
        self,
        parts: Parts,
        seed: int | None,
        transform: Transform | None,
        delivery_size: int | None,
        epoch_samples: int | None,
        process_group: ProcessGroup,
    ) -> None:
        if parts.settings.get("in_order") is False:
            raise ArgumentError("in_order=False cannot be used: batches must come in the order they were drawn")
        if delivery_size is not None:
            require_count("delivery_size", delivery_size)
        self.dataset, self.drop_last = parts.dataset, parts.drop_last
        self.transform, self.delivery_size = transform, delivery_size
        self.epoch_samples, self._settings = epoch_samples, parts.settings
        self._order = in_parts(parts.order, length_of_stream(parts.dataset), epoch_samples)
        self._num_workers: int = parts.settings.get("num_workers") or 0
        self._is_seed_drawn = seed is None
        self._reseed(drawn_seed(parts.generator) if seed is None else checked_seed(seed))
        self._source = make_source(parts.dataset, drop_last=parts.drop_last, settings=parts.settings)
        self._reader: StreamReader | None = None
        if isinstance(self._source, StreamSource):
            self._reader = StreamReader(self._source, part=epoch_samples, cuts=not parts.drop_last)
        self._passes = Passes()
        self._stream_size: int | None = None
        """Samples of an epoch of a stream, where a state told it."""
        self._ranks: Ranks | None = None
        self.batch_size = parts.batch_size
        if process_group is not None:
            self._join(Ranks.alone() if process_group == "alone" else Ranks.here(process_group))
        self.rank_shard, self.local_samples_delivered = RankShard(0, 0), 0
        self._listeners = Listeners()

    # What a user reads and sets

    @property
    def batch_size(self) -> int:
        """Samples per batch from the next pass on."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        size = checked_batch_size(value, dataset_size=self.dataset_size, drop_last=self.drop_last)
        self._batch_size = size if self._ranks is None else enough_for(self._ranks, size)

    def resize_now(self, batch_size: int) -> None:
        """Set `batch_size` and cut with it what the epoch under way has not delivered yet: still each sample once.

        Batches that workers prefetched are thrown away and fetched anew; those of a stream, which cannot go back, come
        first (`prefetch_factor * num_workers` of them). With `drop_last` the epoch ends where what is left fills no
        batch of the new size.
        """
        self.batch_size = batch_size
        if (current := self._passes.under_way) is not None:
            current.resize(self.batch_size)

    @property
    def dataset_size(self) -> int | None:
        """Samples in one epoch; None for a stream of unknown length before its first epoch is over."""
        if self._order is not None:
            return len(self._order)
        if self.epoch_samples is not None:
            return self.epoch_samples
        ended = self._passes.finished
        return length_of_stream(self.dataset) or (self._stream_size if ended is None else ended.samples)

    @property
    def epoch(self) -> int:
        """Complete passes so far."""
        return self._passes.epoch

    @property
    def batches_delivered(self) -> int:
        """Batches of all epochs, the one under way included."""
        return self._passes.batches

    @property
    def samples_delivered(self) -> int:
        """Samples of all epochs, the one under way included."""
        return self._passes.samples

    @property
    def is_at_end(self) -> bool:
        """Whether no batch is left of the pass under way, or none is under way."""
        return self._passes.is_at_end

    @property
    def ranks(self) -> Ranks:
        """Who shares each batch; found when first asked for, since a group may be initialised after the loader."""
        return self._ranks or self._join(Ranks.here())

    def _join(self, ranks: Ranks) -> Ranks:
        require_shareable(self._order, ranks)
        self._ranks = ranks
        if self._is_seed_drawn:
            self._reseed(ranks.from_first(self.seed))
        self.batch_size = self._batch_size
        return ranks

    def _reseed(self, seed: int) -> None:
        self.seed = seed
        self._order = None if self._order is None else self._order.seeded(seed)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` (from 0) the next one, from its beginning."""
        self._passes.jump(epoch)

    def __len__(self) -> int:
        """Batches in the pass under way, else in the next one."""
        current = self._passes.under_way
        if current is not None and current.num_batches is not None:
            return current.num_batches
        if self.dataset_size is None:
            raise TypeError("the length of this stream is not known")
        drop_last = self.drop_last and (self._reader is None or self.epoch_samples is None)
        return num_batches(self.dataset_size, self.delivery_size or self.batch_size, drop_last=drop_last)

    # Iterating

    def __iter__(self) -> Iterator[Any]:
        passes = self._passes
        passes.close_if_used_up()
        if not passes.is_resumed or passes.current is None:
            passes.current = self._new_pass()
        elif passes.current.batch_size < self.ranks.size:  # begun by fewer ranks than there are now
            passes.current.resize(self.ranks.size)
        passes.is_resumed = False
        return self._run(passes.current)

    def _new_pass(self) -> EpochProgress:
        ranks = self.ranks  # first: joining them may change seed and batch size
        order = None if self._order is None else self._order.draw(self.epoch)
        return self._progress(self.batch_size, self._agreed(order, ranks))

    def _progress(self, batch_size: int, order: Any, *, batches: int = 0, samples: int = 0) -> EpochProgress:
        progress = EpochProgress(self.epoch, batch_size, order, self.drop_last, self.delivery_size)
        progress.batches, progress.samples = batches, samples
        progress.end_at = self.epoch_samples if order is None else None
        progress.resize(batch_size)
        size = length_of_stream(self.dataset) if order is None and self.epoch_samples is None else None
        if size is not None and self._num_workers <= 1:  # of several workers each has a last batch of its own
            progress.num_batches = batches + num_batches(size - samples, progress.cut_size, drop_last=self.drop_last)
        return progress

    def _agreed(self, order: Any, ranks: Ranks) -> Any:
        """Rank 0's, where random states that may differ have drawn it."""
        return order if self._order is None or self._order.is_reproducible else ranks.from_first(order)

    def _run(self, current: EpochProgress) -> Iterator[Any]:
        current.begin()
        self._tell(current)
        size, batches = current.batch_size, self._rest(current)
        try:
            while (counted := next(batches, None)) is not None:
                if current is not self._passes.current:
                    raise UsageError(
                        "another pass over this loader began while this one ran: to look at the data in between use "
                        "loader.full_pass() or a loader of its own"
                    )
                yield self._delivered(current, *counted)
                self._tell(current)
                if current.batch_size != size and current.order is not None:
                    size, batches = current.batch_size, self._rest(current)
        finally:
            current.is_open = False
        if current is self._passes.current:
            self._passes.close(current)

    def _tell(self, current: EpochProgress) -> None:
        """The loop has come for a batch, so the step on the last one is made; after the very last nobody is told."""
        if current is self._passes.current and not current.is_used_up:
            self._listeners.tell(current)

    def _rest(self, current: EpochProgress) -> Iterator[tuple[int, Any]]:
        """What is still to be delivered here, cut with the size in force, each batch with its number of samples."""
        if isinstance(self._source, StreamSource):
            assert self._reader is not None
            return self._reader.rest(current, self.seed)
        if current.order is None or not current.samples_left:
            return iter(())
        places = LocalPlaces(len(current.order), current.cut_size, self.ranks, self.drop_last, start=current.samples)
        # Workers that begin within an epoch must not draw again what those before them drew, nor what other ranks do.
        seed = (self.seed, current.epoch, current.samples, self.ranks.rank)
        return self._source.batches(current.order, places, seed=seed)

    def _delivered(self, current: EpochProgress, num_samples: int, batch: Any) -> Any:
        """`num_samples` is what the source counted on this rank; a stream is never shared."""
        whole = num_samples if current.order is None else min(current.cut_size, current.samples_left)
        self.rank_shard = rank_shard_of(whole, self.ranks)
        self.local_samples_delivered += self.rank_shard.mine
        current.count(self.rank_shard)
        return batch if self.transform is None else self.transform(batch)

    def full_pass(self) -> Iterator[Any]:
        """Every sample once, in a fixed order and without counting; of a stream its first `epoch_samples`, or all.

        Several ranks see their shards, all of them the same number of batches and nobody a stand-in: batches are a
        little larger than `batch_size` where that needs it.
        """
        settings = {**self._settings, "persistent_workers": False}
        source = make_source(self.dataset, drop_last=False, settings=settings)
        seed, size = (self.seed, self.epoch, 0), self.delivery_size or self.batch_size
        order = None if self._order is None else self._agreed(self._order.fixed(), self.ranks)
        counted = every_sample(source, order, size, self.ranks, part=self.epoch_samples, seed=seed)
        batches = (batch for _, batch in counted)
        return batches if self.transform is None else map(self.transform, batches)

    # What a controller uses

    def _listen(self, listener: Listener, *, controls: bool = False) -> Callable[[], None]:
        """Call `listener` whenever the loop comes for a batch, before it is fetched; returns what ends that."""
        return self._listeners.add(listener, controls=controls)

    def _has_finished_pass(self, *, since: int) -> bool:
        return self._passes.has_finished(since=since)

    def _finished_pass(self, *, since: int) -> EpochProgress:
        return self._passes.finished_since(since)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, counting batches delivered and not merely prefetched."""
        order, reader, untouched = self._order, self._reader, self._passes.is_untouched
        return {
            **self._way_of_cutting(),
            "seed": self.seed,
            # The order of a pass that has delivered nothing is not saved: a resume draws it again.
            "sampler": {} if order is None else order.state_dict(without_last=untouched),
            "generator": state_of(self._settings.get("generator")),
            "stream": {} if reader is None else reader.state_dict(is_under_way=self._passes.has_begun),
            "batch_size": self.batch_size,
            **self._passes.state_dict(with_order=order is not None and not order.is_reproducible),
        }

    def _way_of_cutting(self) -> dict[str, Any]:
        """What must be equal for a resume: it decides which samples the rest of an epoch holds."""
        return {
            "version": STATE_VERSION,
            "dataset_size": self.dataset_size,
            "drop_last": self.drop_last,
            "order": type(self._order).__name__ if self._order is not None else "stream",
            "epoch_samples": self.epoch_samples or 0,
            "num_workers": self._num_workers if self._order is None else None,  # deals out a stream's samples
        }

    def _require_same_data(self, state: dict[str, Any], place: str = "loader") -> None:
        """Raise for the state of a loader over other data, or one that cuts them in another way."""
        mine = self._way_of_cutting()
        # A stream may not know its length before its first pass is over, here or there.
        if self._order is None and None in (mine["dataset_size"], state.get("dataset_size")):
            del mine["dataset_size"]
        if self._order is not None and self._order.is_reproducible:
            mine["sampler"] = self._order.state_dict()
        require_same(place, {name: state.get(name) for name in mine}, mine)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where the saved loader stood: the next pass yields exactly what it had not delivered."""
        self._require_same_data(state)
        self._passes.load_counts(state)
        self._is_seed_drawn = False
        self._reseed(state["seed"])
        restore(self._settings.get("generator"), state["generator"])
        if self._order is not None:
            self._order.load_state_dict(state["sampler"])
        if self._reader is not None:
            self._stream_size = state["dataset_size"]
            self._reader.load_state_dict(state["stream"])
        self.batch_size = state["batch_size"]
        self._passes.current = self._restored_pass(state["pass"]) if state["pass"] else None

    def _restored_pass(self, state: dict[str, Any]) -> EpochProgress:
        order = state["order"]
        if self._order is not None and order is None:
            order = self._order.draw(self.epoch)
        elif self._order is not None:
            self._order.remember(order)
        return self._progress(state["batch_size"], order, batches=state["batches"], samples=state["samples"])
