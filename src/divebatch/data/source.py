"""Batches of ordered data, from tensors in memory or through a DataLoader, and each rank's shard of a batch.

A source has one method, `batches(order, places, seed=...)`, which delivers one batch for each of the `places` in
`order`. Batches are made on request, or prefetched, so a change of size drops the prefetched ones. `seed` is (seed,
epoch, samples delivered before, rank); worker processes derive theirs from it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from divebatch.data.order import index_dtype, num_batches, worker_seed
from divebatch.ranks import Ranks, RankShard


class Numbers(TensorDataset):
    """A dataset on a device whose samples are their own numbers, 0 to size - 1."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(torch.arange(size, device=device))


class TensorSource:
    """Tensors in memory, indexed by whole batches: equal to a DataLoader's batches, but far faster."""

    def __init__(self, tensors: Sequence[Tensor], *, are_numbers: bool = False) -> None:
        self.tensors, self._are_numbers = tensors, are_numbers
        self._converted: tuple[Any, Tensor] | None = None
        """The current epoch's order and its converted form, if conversion was necessary."""

    def batches(
        self, order: Tensor | Sequence[Any], places: Iterable[slice], *, seed: tuple[int, ...]
    ) -> Iterator[list[Tensor]]:
        """Deliver lists of tensors, as torch's default collate makes of tuples."""
        indices = self._on_device(order)
        needs_long = self._are_numbers or any(tensor.is_sparse for tensor in self.tensors)
        # One index operation per batch: a DataLoader would fetch and collate sample by sample.
        for place in places:
            batch = indices[place].long() if needs_long else indices[place]
            # A batch of sample numbers is a slice of the order itself.
            yield [batch] if self._are_numbers else [tensor.index_select(0, batch) for tensor in self.tensors]

    def _on_device(self, order: Tensor | Sequence[Any]) -> Tensor:
        """Move `order` to the data's device, once an epoch and not at each change of size."""
        device, size = self.tensors[0].device, len(self.tensors[0])
        if isinstance(order, Tensor) and order.device == device:
            return order
        if self._converted is None or self._converted[0] is not order:
            # A user's sampler may use negative indices; index_select may not.
            tensor = order if isinstance(order, Tensor) else torch.tensor(order) % size
            self._converted = order, tensor.to(device, index_dtype(size))
        return self._converted[1]


class _Batches:
    """The batch sampler of a DataLoader; its lists are replaced for each epoch and size."""

    def __init__(self) -> None:
        self.pending: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.pending


class MapSource:
    """A map-style dataset behind a DataLoader, with the given workers and collate function."""

    def __init__(self, dataset: Any, settings: dict[str, Any]) -> None:
        self._batches = _Batches()
        self._generator = settings["generator"] or torch.Generator()
        settings = {**settings, "generator": self._generator}
        self.dataloader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._batches, **settings)

    def batches(
        self, order: Tensor | Sequence[Any], places: Iterable[slice], *, seed: tuple[int, ...]
    ) -> Iterator[Any]:
        """Deliver the DataLoader's batches; `seed` seeds the workers, and the global random state does not change."""
        # One list per batch at a time: as Python numbers, an order takes ten times the memory.
        self._batches.pending = (
            part.tolist() if isinstance(part := order[place], Tensor) else list(part) for place in places
        )
        self._generator.manual_seed(worker_seed(*seed))
        return iter(self.dataloader)


def make_source(dataset: Any, settings: dict[str, Any]) -> TensorSource | MapSource:
    """Return the fastest source whose batches equal those of `DataLoader(dataset, **settings)`."""
    # Exact types: a subclass may have its own __getitem__.
    if type(dataset) in (TensorDataset, Numbers) and _is_plain(dataset, settings):
        return TensorSource(dataset.tensors, are_numbers=isinstance(dataset, Numbers))
    return MapSource(dataset, settings)


def _is_plain(dataset: TensorDataset, settings: dict[str, Any]) -> bool:
    """Return whether the DataLoader has only default settings, and one index tensor suits all tensors."""
    default = settings["collate_fn"] in (None, default_collate)
    one_device = len({tensor.device for tensor in dataset.tensors}) == 1
    return default and one_device and not settings["num_workers"] and not settings["pin_memory"]


# Each rank's shard of a batch: contiguous parts that differ by one sample at most, the larger ones first


def rank_shard_of(num_samples: int, ranks: Ranks) -> RankShard:
    """Return this rank's shard of a batch of `num_samples`."""
    first, last = _bounds(num_samples, ranks)
    return RankShard(num_samples, last - first, ranks.size)


def shard_places(
    num_samples: int, batch_size: int, ranks: Ranks, *, drop_last: bool, start: int = 0
) -> Iterator[slice]:
    """Yield the place of this rank's shard of each batch in an epoch's order, from sample `start` on.

    If a short last batch leaves this rank without a sample, the place is that of the batch's first one. Places are
    computed on request, so that a change of size takes the same time however many samples are left.
    """
    end = start + num_batches(num_samples - start, batch_size, drop_last=drop_last) * batch_size
    stops = range(start + batch_size, end + batch_size, batch_size)
    if ranks.is_alone:
        return map(slice, range(start, end, batch_size), stops)
    return (_place(stop - batch_size, min(stop, num_samples), ranks) for stop in stops)


def _place(start: int, stop: int, ranks: Ranks) -> slice:
    first, last = _bounds(stop - start, ranks)
    # Every rank must take part in every collective, so a rank without a sample runs the first one, with weight zero.
    first, last = (first, last) if last > first else (0, 1)
    return slice(start + first, start + last)


def _bounds(num_samples: int, ranks: Ranks) -> tuple[int, int]:
    each, larger = divmod(num_samples, ranks.size)
    first = ranks.rank * each + min(ranks.rank, larger)
    return first, first + each + (ranks.rank < larger)


def size_without_stand_ins(num_samples: int, batch_size: int, ranks: Ranks) -> int:
    """Return the smallest size from `batch_size` on that gives every rank a sample of the last batch."""
    size = batch_size
    while size < num_samples and 0 < num_samples % size < ranks.size:
        size += 1
    return size
