"""Who delivers samples to an estimator in a loop that has no loader."""

from collections.abc import Callable, Iterable
from typing import Any

from divebatch.ranks import Ranks, RankShard


class Delivered:
    """Batches whose sizes show in a count of all samples so far, which the loop keeps."""

    ranks = Ranks.alone()

    def __init__(self, count: Callable[[], int], full_pass: Callable[[], Iterable[Any]] = list) -> None:
        self._count, self.full_pass = count, full_pass
        self._before, self._size = count(), 0

    @property
    def samples_delivered(self) -> int:
        self._look()
        return self._before

    @property
    def local_samples_delivered(self) -> int:
        return self.samples_delivered

    @property
    def rank_shard(self) -> RankShard:
        self._look()
        return RankShard(self._size, self._size)

    def _look(self) -> None:
        now = self._count()
        if now != self._before:
            self._size, self._before = now - self._before, now
