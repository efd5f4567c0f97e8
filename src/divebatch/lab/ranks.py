"""Several processes that train one model: their group, DDP and FSDP2, and stopping together."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only, tree_map_with_path

from divebatch.errors import ArgumentError, DivebatchError, RankError
from divebatch.norms.sharded import is_sharded
from divebatch.ranks import Ranks

T = TypeVar("T")

TIMEOUT = 600.0
"""Seconds after which a rank stops waiting for the others; evaluation and loading take less."""
LONGER_FOR_NCCL = 60.0
"""Seconds that NCCL waits longer than gloo, because NCCL ends the process without a message."""
PATIENCE = 5.0
"""Seconds within which a rank must answer after another rank has lost contact."""


# The group of processes


def is_restarted() -> bool:
    """Return whether torchrun has restarted this job after a process failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def process_group(device: str) -> Iterator[str]:
    """Join the processes that a launcher such as torchrun started, if any; yield this process's device.

    CPU tensors use gloo and GPU tensors NCCL. An error names the ranks that do not answer. After an error the group
    ends with the process, because closing the group could wait forever for ranks that are stuck.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield device
        return
    if device.startswith("cuda:"):
        raise ArgumentError(f"device {device}: each rank takes a GPU of its own; use device cuda")
    on_gpu = device == "cuda"
    if on_gpu:
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= count:
            raise ArgumentError(
                f"local rank {local} has no GPU: torch finds {count} here. Start at most {count} processes on this "
                f"machine"
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(torch.device(device))
    limit = timedelta(seconds=TIMEOUT)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        # torchrun's store outlives the ranks that wrote to it.
        store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (ValueError, RuntimeError) as error:
        me = f"rank {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']}"
        raise RankError(f"{me} cannot join the others: {_first_line(error)}. Start the ranks with torchrun") from error
    if on_gpu:
        group: Any = dist.group.WORLD
        # Every few steps ranks also meet through gloo, which raises an error that can be explained.
        nccl = group._get_backend(torch.device("cuda"))
        nccl._set_default_timeout(timedelta(seconds=TIMEOUT + LONGER_FOR_NCCL))
    try:
        yield device
    except DivebatchError:
        raise
    except Exception as error:
        what = _first_line(error)
        # gloo's errors have no class.
        is_about_ranks = isinstance(error, dist.DistError) or re.search("gloo|NCCL|ProcessGroup", str(error))
        if is_about_ranks and (lost := _silent_ranks(store, rank, size)):
            names = ", ".join(f"rank {each}" for each in lost)
            what = f"no answer from {names}: killed, stopped, out of reach, or ended by an error of its own"
        raise RankError(f"rank {rank} of {size}: {what}") from error
    dist.destroy_process_group()


def _silent_ranks(store: Store, rank: int, size: int) -> list[int]:
    """Return the ranks that do not answer within `PATIENCE`, or rank 0 if its store does not answer."""
    signs = [f"alive {each}" for each in range(size)]
    silent = [0]

    def ask() -> None:
        with suppress(dist.DistError):
            store.set(signs[rank], "")
            with suppress(dist.DistError):
                store.wait(signs, timedelta(seconds=PATIENCE))
            silent[:] = [each for each, sign in enumerate(signs) if not store.check([sign])]

    # Ask in a thread: torch waits forever for a store that accepts the question but does not answer.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * PATIENCE)
    return silent


def first_does(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do `work` on rank 0 while the others wait; all ranks return its result or raise its error."""
    if ranks.is_alone:
        return work()
    answer: tuple[T | None, Exception | None] = (None, None)
    if ranks.is_first:
        try:
            answer = (work(), None)
        # Send the error to all ranks: if rank 0 raised alone, the others would wait for its result.
        except (DivebatchError, OSError) as error:
            answer = (None, error)
    result, failed = ranks.from_first(answer)
    if failed is not None:
        raise failed
    return result  # type: ignore[no-any-return]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


# The model: copies whose gradients are averaged (DDP), or one model sharded over the ranks (FSDP2)

SHARDINGS = ("ddp", "fsdp")
_NEW_NAME = "forward_sync_buffers"
_SYNC_BUFFERS = _NEW_NAME if _NEW_NAME in signature(DistributedDataParallel).parameters else "broadcast_buffers"


@dataclass(frozen=True, slots=True)
class Parallel:
    """A model on all ranks: training calls `module`; `model` has the parameters, the state and the hooks."""

    model: nn.Module
    module: nn.Module
    ranks: Ranks

    @classmethod
    def alone(cls, model: nn.Module) -> "Parallel":
        """Wrap a model for this process only."""
        return cls(model, model, Ranks.alone())

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of each parameter, which forward passes gather."""
        return hasattr(self.model, "set_requires_gradient_sync")  # added by `fully_shard`

    @contextmanager
    def adding_up(self, *, is_last: bool) -> Iterator[None]:
        """Add gradients on each rank alone, unless this is the last backward pass of the batch."""
        model: Any = self.model
        if self.is_sharded:
            model.set_requires_gradient_sync(is_last)
        module = self.module
        # Only the sum over a batch's passes is needed, so the passes before the last do not communicate.
        with module.no_sync() if isinstance(module, DistributedDataParallel) and not is_last else nullcontext():
            yield

    def average_buffers(self) -> None:
        """Replace running statistics, such as BatchNorm's, by their mean over ranks."""
        moving = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        self.ranks.sum_(moving)
        if moving and not self.ranks.is_alone:
            torch._foreach_div_(moving, self.ranks.size)

    def gathered(self, state: Any) -> Any:
        """Return a state with sharded tensors gathered whole on rank 0; all ranks must call this method."""

        def gather(tensor: Any) -> Any:
            if not is_sharded(tensor):
                return tensor
            whole = tensor.full_tensor()
            return whole.cpu() if self.ranks.is_first else None

        return tree_map_only(Tensor, gather, state) if self.is_sharded else state

    def sharded(self, state: Any, optimizer: Optimizer) -> Any:
        """Return a state of whole tensors in which those of sharded parameters are cut to this rank's parts."""
        if not self.is_sharded:
            return state
        from torch.distributed.tensor import distribute_tensor  # takes a second to import, and few runs need it

        by_name = dict(self.model.named_parameters())
        # Optimizers number parameters group by group.
        by_number = dict(enumerate(each for group in optimizer.param_groups for each in group["params"]))

        def cut(path: tuple[Any, ...], tensor: Any) -> Any:
            place: list[Any] = [getattr(key, "key", None) for key in path]
            in_optimizer = place[:2] == ["optimizer", "state"]
            like: Any = by_number.get(place[2]) if in_optimizer else by_name.get(place[-1])
            if like is None or not is_sharded(like) or like.shape != getattr(tensor, "shape", None):
                return tensor
            return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

        return tree_map_with_path(cut, state)


def spread(model: nn.Module, ranks: Ranks, *, sharding: str = "ddp") -> Parallel:
    """Spread `model`, which all ranks have built alike, so that they train it together."""
    if ranks.is_alone:
        return Parallel.alone(model)
    if sharding == "fsdp":
        _shard(model, ranks)
        return Parallel(model, model, ranks)
    # Buffers are averaged at the end of an epoch, not sent before every forward pass.
    settings: dict[str, Any] = {"gradient_as_bucket_view": True, _SYNC_BUFFERS: False}
    module = DistributedDataParallel(model, **settings)
    return Parallel(model, module, ranks)


def _shard(model: nn.Module, ranks: Ranks) -> None:
    """Shard each child with parameters by itself, the layers of a sequence one by one; the root takes the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # takes a second to import

    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.size,))  # the default would be a GPU
    for child in model.children():
        for part in child if isinstance(child, nn.Sequential) else [child]:
            if any(True for _ in part.parameters()):
                # Shard piece by piece: every pass would gather a model that is sharded as a whole at once.
                fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


# Stopping

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AGREE_EVERY = 8
"""Steps between two exchanges of stop requests among ranks."""


class StopRequest:
    """A request by SIGTERM or Ctrl-C to stop after the current step; a second Ctrl-C interrupts at once.

    A request to any rank stops all ranks after the same step, so that none waits for a rank that has stopped.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.is_set, self._was_interrupted = False, False
        self._ranks, self._steps = ranks or Ranks.alone(), 0
        self._before: dict[signal.Signals, Any] = {}

    def after_step(self) -> bool:
        """Return whether to stop before the next step, with the same answer on all ranks, which must all call this."""
        self._steps += 1
        return self.now() if self._ranks.is_alone or self._steps % AGREE_EVERY == 0 else False

    def now(self) -> bool:
        """Return whether to stop here, with the same answer on all ranks, which must all call this."""
        return self._ranks.sum_numbers([float(self.is_set)])[0] > 0 if not self._ranks.is_alone else self.is_set

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers from this thread only
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside Python

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self._was_interrupted:
            raise KeyboardInterrupt
        self._was_interrupted = self._was_interrupted or number == signal.SIGINT
        self.is_set = True
