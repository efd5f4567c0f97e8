"""Data whose samples are their own numbers, and the numbers that were delivered."""

from collections.abc import Iterable, Iterator
from itertools import chain, count
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

WORKERS = [
    pytest.param({}, id="none"),
    pytest.param({"num_workers": 2}, id="two"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="two persistent", marks=pytest.mark.slow),
]
with_workers = pytest.mark.parametrize("workers", WORKERS)


class Stream(IterableDataset[int]):
    """The numbers below `size`, or all of them; each worker takes its share."""

    def __init__(self, size: int | None = 23) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(count(first, step) if self.size is None else range(first, self.size, step))


class SizedStream(Stream):
    def __len__(self) -> int:
        assert self.size is not None
        return self.size


def numbers(batches: Iterable[Any]) -> list[list[int]]:
    """Return each batch as a list, whether it is a tensor or a list of one."""
    return [(batch[0] if isinstance(batch, list) else batch).tolist() for batch in batches]


def flat(batches: Iterable[Any]) -> list[int]:
    return list(chain(*numbers(batches)))


def counted(loader: Any) -> list[Any]:
    """Return an epoch's batches of a loop that stops by their number."""
    return [batch for _, batch in zip(range(len(loader)), loader, strict=False)]
