"""Who of the ranks is there: each notes in the job's store, again and again, that it lives and how far it has got."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from divebatch.errors import DivebatchError, RankError

T = TypeVar("T")

BEAT = 0.5
"""Seconds from one note to the next."""
PATIENCE = 5.0
"""Seconds after which a rank without a new note, or a store without an answer, counts as lost."""
CAUSES = "killed, stopped, out of reach, or ended by an error of its own"


class RollCall:
    """Inside, this rank makes its notes; those of the others tell who is lost.

    A thread makes them, so a process that computes or waits for others goes on with it, and one that is stopped does
    not. The beginning waits until all ranks are there.

    Args:
        store: A connection of its own to the job's store: one in which others wait would hold up the notes.
        rank: This process.
        size: The number of all.
        keeper: Who keeps the store, in words: a rank, or the launcher.
        timeout: Seconds that a rank waits for others.
    """

    def __init__(self, store: Store, rank: int, size: int, *, keeper: str, timeout: float) -> None:
        self._rank, self._size, self._keeper, self._timeout = rank, size, keeper, timeout
        self._notes, self._said = PrefixStore("notes", store), PrefixStore("said", store)
        self._names = [str(each) for each in range(size)]
        self._is_reachable = True
        self._is_over = threading.Event()
        self._writer = threading.Thread(target=self._write_notes, daemon=True)

    def __enter__(self) -> Self:
        missing = self._answered(self._not_here_in_time, None, self._timeout + PATIENCE)
        if missing is None:
            raise RankError(f"rank {self._rank} of {self._size}: {self._lost_keeper}")
        if missing:
            raise RankError(
                f"rank {self._rank} of {self._size}: {_ranks(missing)} did not come within the ranks' time limit of "
                f"{self._timeout:g} s. A larger rank_timeout waits longer"
            )
        self._writer.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._is_over.set()
        self._writer.join(BEAT)

    def speaks_first(self) -> bool:
        """Whether nobody has said yet why the job ends."""
        # Where the store is gone nobody can tell, and twice is better than never.
        return self._answered(lambda: self._said.add("why", 1), 1, PATIENCE) == 1

    def whom_we_lost(self, what: str) -> str:
        """The ranks that do not answer, or that keep the others waiting; `what` torch says where none does."""
        if self._answered(lambda: self._said.add("why", 0), 0, PATIENCE) > 0:
            return what  # one has failed and says why, which nobody can tell better
        silent, behind = self._answered(self._silent_and_behind, (list[int](), list[int]()), 2 * PATIENCE)
        if not self._is_reachable:
            return self._lost_keeper
        if silent:
            return f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer: {CAUSES}"
        if behind:
            return (
                f"{_ranks(behind)} took longer than the ranks' time limit of {self._timeout:g} s for what the others "
                f"have done. A larger rank_timeout waits longer"
            )
        return f"lost contact with another rank ({what[:200]})"

    @property
    def _lost_keeper(self) -> str:
        return f"{self._keeper}, which keeps the ranks' store, does not answer: {CAUSES}"

    def _not_here_in_time(self) -> list[int]:
        self._notes.set(str(self._rank), "0 0")
        with suppress(dist.DistError):
            self._notes.wait(self._names, timedelta(seconds=self._timeout))
            return []
        return [rank for rank, name in enumerate(self._names) if not self._notes.check([name])]

    def _silent_and_behind(self) -> tuple[list[int], list[int]]:
        """The ranks that make no more notes, and those that have entered fewer collectives than others."""
        before, deadline = self._notes.multi_get(self._names), time.monotonic() + PATIENCE
        while True:
            time.sleep(BEAT)
            notes = self._notes.multi_get(self._names)
            silent = [rank for rank in range(self._size) if notes[rank] == before[rank]]
            if not silent or time.monotonic() > deadline:
                break
        entered = [int(note.split()[1]) for note in notes]
        return silent, [rank for rank in range(self._size) if entered[rank] < max(entered)]

    def _write_notes(self) -> None:
        number = 0
        with suppress(Exception):  # the store is gone: who asks for the notes will say so
            while not self._is_over.wait(BEAT):
                number += 1
                self._notes.set(str(self._rank), f"{number} {_collectives_entered()}")

    def _answered(self, ask: Callable[[], T], otherwise: T, seconds: float) -> T:
        """The store's answer; `otherwise` where it is gone, or where its keeper is stopped."""
        answers: list[T] = []

        def wait_for_it() -> None:
            with suppress(Exception):
                answers.append(ask())

        if self._is_reachable:
            # In a thread: torch itself waits for ever for a keeper that takes the question and does not answer.
            asking = threading.Thread(target=wait_for_it, daemon=True)
            asking.start()
            asking.join(seconds)
            self._is_reachable = bool(answers)
        return answers[0] if answers else otherwise


def is_about_ranks(error: Exception) -> bool:
    """Whether torch tells of other ranks with it; gloo's errors have no class of their own."""
    if isinstance(error, DivebatchError):
        return False
    of_gloo = isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "ProcessGroup"))
    return of_gloo or isinstance(error, dist.DistError)


def _collectives_entered() -> int:
    """By this rank so far, over all backends."""
    with suppress(Exception):  # not public: a torch without it does not say who is behind
        group: Any = dist.group.WORLD
        backends = {group._get_backend(device) for device in group._device_types}
        return int(sum(backend._get_sequence_number_for_group() for backend in backends))
    return 0


def _ranks(numbers: list[int]) -> str:
    """`rank 1`, or `ranks 1, 3`."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
