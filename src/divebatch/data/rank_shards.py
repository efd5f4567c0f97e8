"""Which part of each batch a rank gets: contiguous parts that differ by one sample at most, the larger ones first."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from divebatch.data.order import FromSampler, Order
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


def local_order(order: Tensor | Sequence[Any], batch_size: int, ranks: Ranks, *, drop_last: bool) -> Any:
    """This rank's samples of an epoch, in the order of its batches; and a stand-in where the last one has none for it.

    Cut by this rank's part of `batch_size` it falls into as many parts as `order` has batches.
    """
    full = len(order) // batch_size * batch_size
    first, last = _bounds(batch_size, ranks)
    rest = order[full : full if drop_last else len(order)]
    if len(rest):
        begin, end = _bounds(len(rest), ranks)
        # Every rank must take part in every collective, so one without a sample runs the first one, with weight zero.
        rest = rest[begin:end] if end > begin else rest[:1]
    if isinstance(order, Tensor):
        return torch.cat([order[:full].view(-1, batch_size)[:, first:last].flatten(), torch.as_tensor(rest)])
    mine = [index for start in range(0, full, batch_size) for index in order[start + first : start + last]]
    return [*mine, *rest]


def local_batches(
    source: BatchSource,
    order: Any,
    batch_size: int,
    ranks: Ranks,
    *,
    drop_last: bool,
    seed: tuple[int, ...],
) -> Iterator[tuple[int, Any]]:
    """This rank's batches of an epoch, each with its number of samples here."""
    if ranks.is_alone:
        return source.batches(order, batch_size, start=0, seed=seed)
    mine = local_order(order, batch_size, ranks, drop_last=drop_last)
    # Workers of different ranks must not draw alike; rank 0 draws what a single process would.
    return source.batches(mine, rank_shard_of(batch_size, ranks).mine, start=0, seed=(*seed, ranks.rank))


def every_sample(
    source: BatchSource, order: Any, size: int, ranks: Ranks, *, part: int | None, seed: tuple[int, ...]
) -> Iterator[tuple[int, Any]]:
    """This rank's batches of all samples of `order`, nobody's a stand-in; of a stream `part` samples, or all."""
    if isinstance(source, StreamSource):
        return source.first(part, size, seed=seed)
    size = size_without_stand_ins(len(order), size, ranks)
    return local_batches(source, order, size, ranks, drop_last=False, seed=seed)


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
