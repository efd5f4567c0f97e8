"""What a launcher such as torchrun says of this process, and the group it belongs to."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from divebatch.errors import ArgumentError, DivebatchError
from divebatch.ranks import Ranks

T = TypeVar("T")

TIMEOUT = 600.0
"""Seconds until a rank that waits for the others gives up; evaluation and loading take less."""

_store: Store | None = None


def is_launched() -> bool:
    """Whether a launcher announced more processes than this one."""
    return _number("WORLD_SIZE", 1) > 1


def may_be_restarted() -> bool:
    """Whether torchrun has started this process, alone or with others: it starts a failed job anew."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_restarted() -> bool:
    """Whether torchrun has started this job anew, after a process had failed."""
    return may_be_restarted() and _num_restarts() > 0


@contextmanager
def process_group(device: str, *, timeout: float = TIMEOUT) -> Iterator[tuple[str, Ranks]]:
    """Inside, this process is one of those announced, if any. Yields the device that is its own, and all ranks.

    A rank that waits `timeout` seconds for another gives up. CPU tensors go through gloo and a GPU's through NCCL.
    After an error the group is left to the end of the process: to take leave of the others, which may be stuck, could
    take for ever.
    """
    global _store
    if not is_launched():
        yield device, Ranks.here()
        return
    if device.startswith("cuda:"):
        raise ArgumentError(f"device {device}: each rank takes a GPU of its own; use device cuda")
    limit = timedelta(seconds=timeout)
    store, rank, size = _rendezvous(limit)
    _store = PrefixStore(f"start {_num_restarts()}", store)  # torchrun's own outlives the ranks that wrote into it
    if device == "cuda":
        device = f"cuda:{_local_gpu()}"
        torch.cuda.set_device(torch.device(device))
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=PrefixStore("group", _store), rank=rank, world_size=size, timeout=limit)
    yield device, Ranks.here()
    _store = None
    dist.destroy_process_group()


def speaks_first() -> bool:
    """Whether nobody has said yet why the job ends: of many errors the first is the cause, and others follow."""
    if _store is None:
        return True
    try:
        # The rank that brings the counter to one failed first; the others fail because of it.
        return PrefixStore("said", _store).add("why", 1) == 1
    except Exception:  # the store went down with the rank that kept it
        # torchrun keeps the store itself and tells of a killed rank; without it nobody else would say a word.
        return not may_be_restarted()


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


def _rendezvous(timeout: timedelta) -> tuple[Store, int, int]:
    try:
        return next(rendezvous("env://", timeout=timeout))  # type: ignore[no-any-return]
    except ValueError as error:
        raise ArgumentError(f"WORLD_SIZE is set, but not all that a launcher sets with it: {error}") from error


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
