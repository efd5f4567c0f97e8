"""Where batches come from: tensors in memory, a DataLoader over a map-style dataset, or a stream.

A source turns the part of an epoch that is still to come into `(num_samples, batch)` pairs. A new kind of source is
one class here and one line in `make_source`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from divebatch.data.order import index_dtype, worker_seed
from divebatch.data.stream import StreamSource


class BatchSource(Protocol):
    """Delivers batches of data that has an order."""

    def batches(
        self, order: Tensor | Sequence[Any], places: Iterable[slice], *, seed: tuple[int, ...]
    ) -> Iterator[tuple[int, Any]]:
        """One batch for each of the `places` in `order`, with its number of samples.

        Nothing is done for a batch before it is asked for, or prefetched: a change of size drops those that are left.
        `places` can be gone through more than once. `seed` is (seed, epoch, samples delivered before, rank), from which
        worker processes get theirs.
        """
        ...


class TensorSource:
    """Tensors in memory, indexed a whole batch at a time: what a DataLoader gives for them, far faster."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._converted: tuple[Any, Tensor] | None = None
        """The order of the pass under way, where it had to be converted, and what became of it."""

    def batches(
        self, order: Tensor | Sequence[Any], places: Iterable[slice], *, seed: tuple[int, ...]
    ) -> Iterator[tuple[int, Any]]:
        """Lists of tensors, as torch's default collate makes of tuples."""
        indices = self._on_device(order)
        # One index operation a batch: a DataLoader would fetch and collate sample by sample.
        for place in places:
            batch = indices[place].long()  # index_select takes nothing shorter for sparse tensors
            yield batch.numel(), self._look_up(batch)

    def _on_device(self, order: Tensor | Sequence[Any]) -> Tensor:
        """`order` as a tensor on the device of the data; made once an epoch and not with each change of size."""
        device, size = self.tensors[0].device, len(self.tensors[0])
        if isinstance(order, Tensor) and order.device == device:
            return order
        if self._converted is None or self._converted[0] is not order:
            # A sampler of the user's own may count from the end; index_select may not.
            tensor = order if isinstance(order, Tensor) else torch.tensor(order) % size
            self._converted = order, tensor.to(device, index_dtype(size))
        return self._converted[1]

    def _look_up(self, indices: Tensor) -> list[Tensor]:
        return [tensor.index_select(0, indices) for tensor in self.tensors]


class Numbers(TensorDataset):
    """A dataset whose samples are their own numbers, 0 .. size - 1, on a device."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(torch.arange(size, device=device))


class NumberSource(TensorSource):
    """A batch of numbers is a part of the order itself: there is nothing to look up."""

    def _look_up(self, indices: Tensor) -> list[Tensor]:
        return [indices]


class _Batches:
    """The batch sampler a DataLoader keeps; what it yields is set anew for each pass."""

    def __init__(self) -> None:
        self.pending: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.pending


class MapSource:
    """A map-style dataset behind a DataLoader, with whatever workers and collate it was given."""

    def __init__(self, dataset: Any, *, settings: dict[str, Any]) -> None:
        self._batches = _Batches()
        self._generator = torch.Generator()
        settings = {"generator": self._generator, **settings}
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._batches, **settings)

    def batches(
        self, order: Tensor | Sequence[Any], places: Iterable[slice], *, seed: tuple[int, ...]
    ) -> Iterator[tuple[int, Any]]:
        """The DataLoader's batches; workers are seeded by `seed`, the global random state is left alone."""
        # Lists of a batch at a time: as Python numbers an order takes ten times the memory.
        self._batches.pending = (_as_list(order[place]) for place in places)
        self._generator.manual_seed(worker_seed(*seed))
        yield from zip((place.stop - place.start for place in places), self._loader, strict=True)


def _as_list(indices: Tensor | Sequence[Any]) -> list[Any]:
    return list(indices.tolist()) if isinstance(indices, Tensor) else list(indices)


def make_source(dataset: Any, *, drop_last: bool, settings: dict[str, Any]) -> BatchSource | StreamSource:
    """The fastest source that gives what `DataLoader(dataset, **settings)` would."""
    if isinstance(dataset, IterableDataset):
        return StreamSource(dataset, drop_last=drop_last, settings=dict(settings))
    # Exact types: a subclass may have a __getitem__ of its own.
    if type(dataset) in (TensorDataset, Numbers) and _is_plain(dataset, settings):
        DataLoader(dataset, **settings)  # refuses what a DataLoader refuses
        kind = NumberSource if isinstance(dataset, Numbers) else TensorSource
        return kind(dataset.tensors)
    return MapSource(dataset, settings=settings)


def _is_plain(dataset: TensorDataset, settings: dict[str, Any]) -> bool:
    """Whether nothing but the default is asked of the DataLoader, and one index tensor serves all tensors."""
    default = settings.get("collate_fn") in (None, default_collate)
    one_device = len({tensor.device for tensor in dataset.tensors}) == 1
    return default and one_device and not settings.get("num_workers") and not settings.get("pin_memory")
