"""Where batches come from: tensors in memory, a DataLoader over a map-style dataset, or a stream.

A source turns the part of an epoch that is still to come into `(num_samples, batch)` pairs. A new kind of source is
one class here and one line in `make_source`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from divebatch.data.order import worker_seed
from divebatch.data.sampler import cut
from divebatch.data.stream import StreamSource


class BatchSource(Protocol):
    """Delivers batches."""

    def batches(
        self, order: Tensor | Sequence[Any] | None, batch_size: int, *, start: int, seed: tuple[int, ...]
    ) -> Iterator[tuple[int, Any]]:
        """Batches from number `start` on, each with its number of samples. `order` is None for streams only.

        `seed` is (seed, epoch, samples delivered before, rank), from which worker processes get theirs.
        """
        ...


class TensorSource:
    """Tensors in memory, indexed a whole batch at a time: what a DataLoader gives for them, far faster."""

    def __init__(self, tensors: Sequence[Tensor], *, drop_last: bool) -> None:
        self.tensors, self.drop_last = tensors, drop_last

    def batches(
        self, order: Tensor | Sequence[Any] | None, batch_size: int, *, start: int, seed: tuple[int, ...]
    ) -> Iterator[tuple[int, Any]]:
        """Lists of tensors, as torch's default collate makes of tuples."""
        if not isinstance(order, Tensor):  # a sampler of the user's own may count from the end; index_select may not
            order = torch.tensor(order) % len(self.tensors[0])
        indices = order.to(self.tensors[0].device)
        # One index operation a batch: a DataLoader would fetch and collate sample by sample.
        for batch in indices.split(batch_size)[start:]:
            if batch.numel() == batch_size or not self.drop_last:
                yield batch.numel(), self._look_up(batch)

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
        self.pending: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pending)

    def __len__(self) -> int:
        return len(self.pending)


class MapSource:
    """A map-style dataset behind a DataLoader, with whatever workers and collate it was given."""

    def __init__(self, dataset: Any, *, drop_last: bool, settings: dict[str, Any]) -> None:
        self.drop_last = drop_last
        self._batches = _Batches()
        self._generator = torch.Generator()
        settings = {"generator": self._generator, **settings}
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._batches, **settings)

    def batches(
        self, order: Tensor | Sequence[Any] | None, batch_size: int, *, start: int, seed: tuple[int, ...]
    ) -> Iterator[tuple[int, Any]]:
        """The DataLoader's batches; workers are seeded by `seed`, the global random state is left alone."""
        assert order is not None
        indices = order.tolist() if isinstance(order, Tensor) else order
        self._batches.pending = list(cut(indices, batch_size, drop_last=self.drop_last, start=start))
        self._generator.manual_seed(worker_seed(*seed))
        yield from zip(map(len, self._batches.pending), self._loader, strict=True)


def make_source(dataset: Any, *, drop_last: bool, settings: dict[str, Any]) -> BatchSource:
    """The fastest source that gives what `DataLoader(dataset, **settings)` would."""
    if isinstance(dataset, IterableDataset):
        return StreamSource(dataset, drop_last=drop_last, settings=dict(settings))
    # Exact types: a subclass may have a __getitem__ of its own.
    if type(dataset) in (TensorDataset, Numbers) and _is_plain(dataset, settings):
        DataLoader(dataset, **settings)  # refuses what a DataLoader refuses
        kind = NumberSource if isinstance(dataset, Numbers) else TensorSource
        return kind(dataset.tensors, drop_last=drop_last)
    return MapSource(dataset, drop_last=drop_last, settings=settings)


def _is_plain(dataset: TensorDataset, settings: dict[str, Any]) -> bool:
    """Whether nothing but the default is asked of the DataLoader, and one index tensor serves all tensors."""
    default = settings.get("collate_fn") in (None, default_collate)
    one_device = len({tensor.device for tensor in dataset.tensors}) == 1
    return default and one_device and not settings.get("num_workers") and not settings.get("pin_memory")
