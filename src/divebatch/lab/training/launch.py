"""What a launcher such as torchrun says of this process, and the group it belongs to."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from divebatch.errors import ArgumentError, DivebatchError, RankError
from divebatch.lab.training.roll_call import RollCall, is_about_ranks
from divebatch.ranks import Ranks

T = TypeVar("T")

TIMEOUT = 600.0
"""Seconds until a rank that waits for the others gives up; evaluation and loading take less."""
LOOK = 0.1
"""Seconds from one try to reach the store to the next."""
LONGER_FOR_NCCL = 60.0
"""Seconds by which gloo gives up before NCCL, which ends the process without a word."""

_roll_call: RollCall | None = None


def is_launched() -> bool:
    """Whether a launcher announced more processes than this one."""
    return _number("WORLD_SIZE", 1) > 1


def may_be_restarted() -> bool:
    """Whether torchrun has started this process, alone or with others: it starts a failed job anew."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_restarted() -> bool:
    """Whether torchrun has started this job anew, after a process had failed."""
    return may_be_restarted() and _num_restarts() > 0


@dataclass(frozen=True, slots=True)
class Place:
    """This process among its ranks, and where they find each other."""

    rank: int
    size: int
    host: str
    port: int
    launcher_keeps_store: bool
    """Else rank 0 does."""

    @classmethod
    def announced(cls) -> Self:
        """As the launcher has it in the environment."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        found = {name: os.environ.get(name, "") for name in names}
        for name, value in found.items():
            if not value or (name != "MASTER_ADDR" and not value.isdigit()):
                raise ArgumentError(
                    f"WORLD_SIZE is set, but not all that a launcher sets with it: {name} is {value!r}. Set "
                    f"{', '.join(names)}, or start the ranks with torchrun"
                )
        is_torchrun_s = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        rank, size, port = (int(found[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        return cls(rank, size, found["MASTER_ADDR"], port, is_torchrun_s)

    @property
    def keeper(self) -> str:
        """Who keeps the store, in words."""
        return "the launcher" if self.launcher_keeps_store else "rank 0"

    def connect(self, timeout: float, *, may_keep: bool = True) -> Store:
        """A connection to the store, which rank 0 opens where the launcher has not."""
        is_keeper = may_keep and self.rank == 0 and not self.launcher_keeps_store
        here, limit = f"{self.host}:{self.port} (MASTER_ADDR, MASTER_PORT)", timedelta(seconds=timeout)
        if not is_keeper and not self._is_opened_within(timeout):
            raise RankError(
                f"rank {self.rank} of {self.size}: {self.keeper} does not answer at {here} within the ranks' time "
                f"limit of {timeout:g} s: was it started? A larger rank_timeout waits longer"
            )
        try:
            # Not waiting for the others: the roll call does, and says who is missing.
            store = TCPStore(
                self.host, self.port, is_master=is_keeper, timeout=limit, wait_for_workers=False, multi_tenant=True
            )
        except dist.DistError as error:
            what = "open the ranks' store" if is_keeper else "use what answers"
            raise RankError(f"rank {self.rank} of {self.size} cannot {what} at {here}: {_first_line(error)}") from error
        return PrefixStore(f"start {_num_restarts()}", store)  # torchrun's own outlives the ranks that wrote into it

    def _is_opened_within(self, seconds: float) -> bool:
        """Whether somebody listens at the store's address; torch would wait, too, and then print its stack."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                socket.create_connection((self.host, self.port), timeout=seconds).close()
                return True
            except OSError:
                time.sleep(LOOK)
        return False


@contextmanager
def process_group(device: str, *, timeout: float = TIMEOUT) -> Iterator[tuple[str, Ranks]]:
    """Inside, this process is one of those announced, if any. Yields the device that is its own, and all ranks.

    A rank that waits `timeout` seconds for others gives up, with a `RankError` that names them. CPU tensors go through
    gloo and a GPU's through NCCL. After an error the group is left to the end of the process: to take leave of the
    others, which may be stuck, could take for ever.
    """
    global _roll_call
    if not is_launched():
        yield device, Ranks.here()
        return
    if device.startswith("cuda:"):
        raise ArgumentError(f"device {device}: each rank takes a GPU of its own; use device cuda")
    if device == "cuda":
        device = f"cuda:{_local_gpu()}"
        torch.cuda.set_device(torch.device(device))
    place = Place.announced()
    store, notes = place.connect(timeout), place.connect(timeout, may_keep=False)
    _roll_call = RollCall(notes, place.rank, place.size, keeper=place.keeper, timeout=timeout)
    with _naming_who_is_lost(place), _roll_call:
        _initialise(place, store, device, timeout)
        yield device, Ranks.here()
    _roll_call = None
    dist.destroy_process_group()


def _initialise(place: Place, store: Store, device: str, timeout: float) -> None:
    on_gpu = device.startswith("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout),
    )
    if on_gpu:
        group = dist.group.WORLD
        assert group is not None
        # Every few steps ranks wait for each other through gloo, too, and that raises an error that we can explain.
        nccl = group._get_backend(torch.device("cuda"))
        nccl._set_default_timeout(timedelta(seconds=timeout + LONGER_FOR_NCCL))


@contextmanager
def _naming_who_is_lost(place: Place) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_about_ranks(error):
            raise
        raise RankError(f"rank {place.rank} of {place.size}: {why(error)}") from error


def why(error: Exception) -> str:
    """An error in one line; where contact with other ranks was lost, it names them."""
    what = _first_line(error)
    return _roll_call.whom_we_lost(what) if _roll_call is not None and is_about_ranks(error) else what


def speaks_first() -> bool:
    """Whether nobody has said yet why the job ends: of many errors the first is the cause, and others follow."""
    return _roll_call is None or _roll_call.speaks_first()


def first_does(ranks: Ranks, work: Callable[[], T]) -> T:
    """Let rank 0 do `work` while the others wait: all return its result, or raise its error."""
    if ranks.is_alone:
        return work()
    answer: tuple[T | None, Exception | None] = (None, None)
    if ranks.is_first:
        try:
            answer = (work(), None)
        # Sent to all ranks: one that raised alone would leave the others waiting for its result.
        except (DivebatchError, OSError) as error:
            answer = (None, error)
    result, failed = ranks.from_first(answer)
    if failed is not None:
        raise failed
    return result  # type: ignore[no-any-return]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


def _num_restarts() -> int:
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def _local_gpu() -> int:
    local, count = _number("LOCAL_RANK", 0), torch.cuda.device_count()
    if local >= count:
        raise ArgumentError(
            f"local rank {local} has no GPU: torch finds {count} here. Start at most {count} processes on this machine"
        )
    return local


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else default
