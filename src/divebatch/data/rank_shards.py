"""Which part of each batch a rank gets: contiguous parts that differ by one sample at most, the larger ones first."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler

from divebatch.data.order import FromSampler, Order
from divebatch.data.sampler import cut
from divebatch.data.source import BatchSource
from divebatch.data.stream import StreamSource
from divebatch.errors import ArgumentError
from divebatch.ranks import Ranks, RankShard


def rank_shard_of(num_samples: int, ranks: Ranks) -> RankShard:
    """This rank's part of a batch of `num_samples`."""
    if ranks.is_alone:  # asked for with every batch
        return RankShard(num_samples, num_samples)
    first, last = _bounds(num_samples, ranks)
    return RankShard(num_samples, last - first, ranks.size)


@dataclass(frozen=True, slots=True)
class LocalPlaces:
    """Where this rank's part of each batch lies in the epoch's order, from sample `start` on.

    Where a short last batch has no sample for a rank, its first one stands in.
    """

    num_samples: int
    batch_size: int
    ranks: Ranks
    drop_last: bool
    start: int = 0

    def __iter__(self) -> Iterator[slice]:
        for whole in cut(self.num_samples, self.batch_size, drop_last=self.drop_last, start=self.start):
            first, last = _bounds(whole.stop - whole.start, self.ranks)
            # Every rank must take part in every collective, so one without a sample runs the first, with weight zero.
            first, last = (first, last) if last > first else (0, 1)
            yield slice(whole.start + first, whole.start + last)


def every_sample(
    source: BatchSource | StreamSource,
    order: Any,
    size: int,
    ranks: Ranks,
    *,
    part: int | None,
    seed: tuple[int, ...],
) -> Iterator[tuple[int, Any]]:
    """This rank's batches of all samples of `order`, nobody's a stand-in; of a stream `part` samples, or all."""
    if isinstance(source, StreamSource):
        return source.first(part, size, seed=seed)
    size = size_without_stand_ins(len(order), size, ranks)
    return source.batches(order, LocalPlaces(len(order), size, ranks, drop_last=False), seed=(*seed, ranks.rank))


def size_without_stand_ins(num_samples: int, batch_size: int, ranks: Ranks) -> int:
    """The first size from `batch_size` on that leaves no rank without a sample in the last batch."""
    size = batch_size
    while size < num_samples and 0 < num_samples % size < ranks.size:
        size += 1
    return size


def enough_for(ranks: Ranks, batch_size: int) -> int:
    """`batch_size`, or as many samples as there are ranks, with a warning."""
    if batch_size < ranks.size:
        told = f"batch_size={batch_size} is below the {ranks.size} ranks that share a batch: raised to it"
        warnings.warn(told, stacklevel=3)
    return max(batch_size, ranks.size)


def require_shareable(order: Order | None, ranks: Ranks) -> None:
    """Raise for data that several ranks cannot share."""
    if ranks.is_alone:
        return
    if order is None:
        raise ArgumentError(
            f"an IterableDataset has no order that {ranks.size} ranks could share: use a map-style dataset, or one "
            f"process"
        )
    if isinstance(order, FromSampler) and isinstance(order.sampler, DistributedSampler):
        raise ArgumentError(
            f"the loader itself deals each batch out to {ranks.size} ranks, and a DistributedSampler would do it a "
            f"second time: leave it out, and let batch_size be that of all ranks together"
        )
    if len(order) < ranks.size:
        raise ArgumentError(f"{len(order)} samples cannot be shared by {ranks.size} ranks")


def _bounds(num_samples: int, ranks: Ranks) -> tuple[int, int]:
    each, larger = divmod(num_samples, ranks.size)
    first = ranks.rank * each + min(ranks.rank, larger)
    return first, first + each + (ranks.rank < larger)
