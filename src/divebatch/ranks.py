"""The processes that train one model together: their number, the rank of this one, and sums over them."""

import os
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from divebatch.errors import ArgumentError, UsageError

BUCKET_BYTES = 32 * 2**20
"""The most bytes that one all-reduce carries, and that a sum over ranks needs as memory."""


class Ranks:
    """The processes that share each batch. Every method is a collective that all ranks must call; properties are not.

    >>> alone = Ranks.alone()
    >>> alone.rank, alone.size, alone.from_first("as it is")
    (0, 1, 'as it is')
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def alone(cls) -> Self:
        """Return the group of this process alone, whatever groups exist."""
        return cls(None)

    @classmethod
    def here(cls, group: dist.ProcessGroup | None = None) -> Self:
        """Return the ranks of `group`; None: of the initialised group, or this process alone if there is none."""
        if group is not None:
            return cls(group)
        if dist.is_available() and dist.is_initialized():
            return cls(dist.group.WORLD)
        _require_no_launcher()
        return cls.alone()

    @property
    def is_alone(self) -> bool:
        """Whether there are no other processes."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides and writes files."""
        return self.rank == 0

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks. All ranks must pass equal shapes and types in equal order."""
        if self.is_alone:
            return
        flat = [tensor.detach().contiguous().view(-1) for tensor in tensors]
        for bucket in _buckets(flat):
            parts = self._summed(bucket).split([part.numel() for part in bucket])
            torch._foreach_copy_(bucket, list(parts))
        for tensor, summed in zip(tensors, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.detach().copy_(summed.view(tensor.shape))

    def sq_norm_of_sum(self, tensors: Sequence[Tensor]) -> float:
        """Return the squared norm, in float64, of the sum over ranks of all tensors as one vector; change no tensor."""
        if self.is_alone:
            summed: Sequence[Tensor] = tensors
        else:
            flat = [tensor.detach().contiguous().view(-1) for tensor in tensors]
            summed = [self._summed(bucket) for bucket in _buckets(flat)]
        # In float64: a float32 sum would lose the squares of many small gradients.
        sq_norms = [torch.linalg.vector_norm(total, dtype=torch.float64) ** 2 for total in summed]
        return float(torch.stack(sq_norms).sum()) if sq_norms else 0.0

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return each number's sum over ranks, in float64."""
        summed = torch.tensor(numbers, dtype=torch.float64)
        self.sum_([summed])
        return summed.tolist()

    def mean(self, value: float | None, weight: float) -> float | None:
        """Return the weighted mean over ranks; unweighted if all weights are 0, None if no rank passes a value."""
        told = 0.0 if value is None else value
        weighted = weight * told if weight else 0.0
        total, weights, plain, count = self.sum_numbers([weighted, weight, told, value is not None])
        if weights:
            return total / weights
        return plain / count if count else None

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value, which may be anything that can be pickled."""
        if self.is_alone:
            return value
        (carried,) = self._carried([value] if self.is_first else [])
        return carried

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks."""
        return [value] if self.is_alone else self._carried([value])

    def require_same(self, facts: dict[str, Any]) -> None:
        """Raise the same error on all ranks if their facts differ."""
        gathered = self.gather(facts)
        for name in dict.fromkeys(name for each in gathered for name in each):
            values = [each.get(name) for each in gathered]
            if any(value != values[0] for value in values):
                told = ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values))
                raise ArgumentError(f"the ranks disagree on {name}: {told}. All ranks must be set up alike")

    def _carried(self, values: list[Any]) -> list[Any]:
        """Return the values of all ranks in order: each rank adds its bytes where the others have zeros."""
        payload = np.frombuffer(b"".join(pickle.dumps(value) for value in values), dtype=np.uint8)
        lengths = np.zeros(self.size)
        lengths[self.rank] = payload.size
        ends = np.cumsum(self.sum_numbers(lengths.tolist())).astype(int)
        everyone = np.zeros(ends[-1], dtype=np.uint8)
        everyone[ends[self.rank] - payload.size : ends[self.rank]] = payload
        self.sum_([torch.from_numpy(everyone)])
        parts = [part.tobytes() for part in np.split(everyone, ends[:-1])]
        return [pickle.loads(part) for part in parts if part]

    def _summed(self, bucket: list[Tensor]) -> Tensor:
        """Run one all-reduce, on a device that the group's backend supports; all collectives here use this one."""
        here = bucket[0].device
        kinds = self._group._device_types if self._group is not None else []
        reachable = here.type in [kind.type for kind in kinds]
        summed = torch.cat(bucket).to(here if reachable else _present(kinds[0]))
        dist.all_reduce(summed, group=self._group)
        _wait_until_let_go(summed)
        return summed.to(here)


@dataclass(frozen=True, slots=True)
class RankShard:
    """One rank's share of the samples of a batch.

    >>> RankShard(num_samples=37, mine=10, num_ranks=4).loss_weight  # 10 of 37 samples, where 9.25 would be the mean
    1.0810810810810811
    """

    num_samples: int
    """Samples of the batch, over all ranks."""
    mine: int
    """Samples of the batch on this rank; 0 if the rank has only a dummy sample."""
    num_ranks: int = 1

    @property
    def loss_weight(self) -> float:
        """The factor for the mean loss over this rank's samples; 1 if all ranks hold equally many.

        With this factor, DDP's and FSDP's mean over ranks is the mean over the batch. A `Controller` applies it.
        """
        return self.num_ranks * self.mine / self.num_samples if self.num_samples else 1.0

    def weight_for(self, loss_reduction: str) -> float:
        """Return the factor for a mean or a sum over samples; a sum needs none, except 0 for a dummy."""
        return self.loss_weight if loss_reduction == "mean" else float(not self.is_stand_in)

    @property
    def is_stand_in(self) -> bool:
        """Whether this rank has no sample of its own, only the batch's first one as a dummy.

        Every rank must take part in every collective. The dummy's weight is zero, so its gradient counts for nothing.
        """
        return self.mine == 0 < self.num_samples


def inside_ddp(model: nn.Module) -> nn.Module:
    """Return the model that DistributedDataParallel wraps; any other model as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _present(kind: torch.device) -> torch.device:
    """Return this process's own device of the given kind."""
    return torch.device(kind.type, torch.get_device_module(kind).current_device()) if kind.type != "cpu" else kind


def _wait_until_let_go(tensor: Tensor, *, at_most: float = 1.0) -> None:
    """Wait until gloo's worker thread has released the tensor that it reduced, a moment after it reports the result.

    Releasing takes the interpreter's lock. A thread that asks for the lock while the interpreter exits aborts the
    process (seen in torch 2.13): a program that ends right after a collective would exit with -6.
    """
    holders = getattr(tensor, "_use_count", lambda: 1)  # not public: without it, do not wait
    deadline = time.monotonic() + at_most
    while tensor.device.type == "cpu" and holders() > 1 and time.monotonic() < deadline:
        time.sleep(0)  # releases the lock


def _buckets(flat: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield pieces of the tensors in small lists, each of one type on one device."""

    def kind(tensor: Tensor) -> tuple[str, str]:
        return str(tensor.dtype), str(tensor.device)

    for _, alike in groupby(sorted(flat, key=kind), key=kind):
        bucket: list[Tensor] = []
        room = 0
        for tensor in alike:
            rest = tensor
            while rest.numel():
                if not room:
                    if bucket:
                        yield bucket
                    bucket, room = [], max(1, BUCKET_BYTES // rest.element_size())
                bucket.append(rest[:room])
                rest, room = rest[room:], room - bucket[-1].numel()
        if bucket:
            yield bucket


def _require_no_launcher() -> None:
    """Raise if a launcher announced several processes that never joined: each would train a model of its own."""
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced.isdigit() and int(announced) > 1:
        raise UsageError(
            f"the environment announces WORLD_SIZE={announced} processes, but no process group is initialised: call "
            f"torch.distributed.init_process_group() first, or pass AdaptiveLoader(..., process_group='alone')"
        )
