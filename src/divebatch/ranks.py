"""The processes that train one model together: how many there are, which one this is, and sums over them."""

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
"""Most that one all-reduce carries, and all the memory that adding over ranks takes."""


class Ranks:
    """The processes that share each batch. Every method but the properties is a collective: all ranks must call it.

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
        """This process by itself, whatever group there is."""
        return cls(None)

    @classmethod
    def here(cls, group: dist.ProcessGroup | None = None) -> Self:
        """The ranks of `group`, or else of the group that was initialised; this process alone if there is none."""
        if group is not None:
            return cls(group)
        if dist.is_available() and dist.is_initialized():
            return cls(dist.group.WORLD)
        _require_no_launcher()
        return cls.alone()

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, whose word counts and who writes files."""
        return self.rank == 0

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks. All ranks pass the same shapes and types in the same order."""
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
        """The squared norm, in float64, of the sum over ranks of all tensors as one vector; they stay as they are."""
        if self.is_alone:
            summed: Sequence[Tensor] = tensors
        else:
            flat = [tensor.detach().contiguous().view(-1) for tensor in tensors]
            summed = [self._summed(bucket) for bucket in _buckets(flat)]
        # In float64: squares of many small gradients would be lost in a float32 sum.
        sq_norms = [torch.linalg.vector_norm(total, dtype=torch.float64) ** 2 for total in summed]
        return float(torch.stack(sq_norms).sum()) if sq_norms else 0.0

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Each number's sum over ranks, in float64."""
        summed = torch.tensor(numbers, dtype=torch.float64)
        self.sum_([summed])
        return summed.tolist()

    def mean(self, value: float | None, weight: float) -> float | None:
        """The weighted mean over ranks; unweighted if all weights are 0, None if no rank passes a value."""
        told = 0.0 if value is None else value
        weighted = weight * told if weight else 0.0
        total, weights, plain, count = self.sum_numbers([weighted, weight, told, value is not None])
        if weights:
            return total / weights
        return plain / count if count else None

    def from_first(self, value: Any) -> Any:
        """Return what rank 0 passed; anything that can be pickled."""
        if self.is_alone:
            return value
        (carried,) = self._carried([value] if self.is_first else [])
        return carried

    def gather(self, value: Any) -> list[Any]:
        """Return what each rank passed, in the order of ranks."""
        return [value] if self.is_alone else self._carried([value])

    def require_same(self, facts: dict[str, Any]) -> None:
        """Raise the same error on all ranks if they do not all pass the same facts."""
        gathered = self.gather(facts)
        for name in dict.fromkeys(name for each in gathered for name in each):
            values = [each.get(name) for each in gathered]
            if any(value != values[0] for value in values):
                told = ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values))
                raise ArgumentError(f"the ranks disagree on {name}: {told}. All ranks must be set up alike")

    def _carried(self, values: list[Any]) -> list[Any]:
        """Return what ranks passed, in their order: each adds its own bytes to places where the others have zeros."""
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
        """One all-reduce, on a device that the group's backend can reach: the only collective there is here."""
        here = bucket[0].device
        kinds = self._group._device_types if self._group is not None else []
        reachable = here.type in [kind.type for kind in kinds]
        summed = torch.cat(bucket).to(here if reachable else _present(kinds[0]))
        dist.all_reduce(summed, group=self._group)
        _wait_until_let_go(summed)
        return summed.to(here)


@dataclass(frozen=True, slots=True)
class RankShard:
    """One rank's samples of one batch.

    >>> RankShard(num_samples=37, mine=10, num_ranks=4).loss_weight  # 10 of 37 samples, where 9.25 would be the mean
    1.0810810810810811
    """

    num_samples: int
    """Samples of the batch, all ranks together."""
    mine: int
    """Samples of it on this rank; 0 where the rank has only a dummy sample."""
    num_ranks: int = 1

    @property
    def loss_weight(self) -> float:
        """The factor for the mean loss over this rank's samples; 1 where all ranks hold equally many.

        The mean over ranks, which DDP and FSDP take, is then the mean over the batch. A `Controller` applies it.
        """
        return self.num_ranks * self.mine / self.num_samples if self.num_samples else 1.0

    def weight_for(self, loss_reduction: str) -> float:
        """The factor for a mean or a sum over samples. Sums add up by themselves, except that a dummy counts 0."""
        return self.loss_weight if loss_reduction == "mean" else float(not self.is_stand_in)

    @property
    def is_stand_in(self) -> bool:
        """Whether no sample was left for this rank, so that it got the batch's first one as a dummy.

        Every rank must take part in every collective. The dummy's weight is zero, so its gradient counts for nothing.
        """
        return self.mine == 0 < self.num_samples


def inside_ddp(model: nn.Module) -> nn.Module:
    """The model that DistributedDataParallel wraps; any other model as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _present(kind: torch.device) -> torch.device:
    """This process's own device of that kind."""
    return torch.device(kind.type, torch.get_device_module(kind).current_device()) if kind.type != "cpu" else kind


def _wait_until_let_go(tensor: Tensor, *, at_most: float = 1.0) -> None:
    """Wait until gloo's worker thread has dropped the tensor it reduced, which it does a moment after saying so.

    To drop it takes the interpreter's lock, and a thread that asks for the lock of an interpreter that is leaving
    aborts the process (seen in torch 2.13): a program that ends right after a collective of ours would exit with -6.
    """
    holders = getattr(tensor, "_use_count", lambda: 1)  # not public: a torch without it is not waited for
    deadline = time.monotonic() + at_most
    while tensor.device.type == "cpu" and holders() > 1 and time.monotonic() < deadline:
        time.sleep(0)  # gives the lock away


def _buckets(flat: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Pieces of the tensors, cut and put together so that each list holds one type on one device and is not large."""

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
    """A launcher that announced several processes to a program that never joined them would train each one alone."""
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced.isdigit() and int(announced) > 1:
        raise UsageError(
            f"the environment announces WORLD_SIZE={announced} processes, but no process group is initialised: call "
            f"torch.distributed.init_process_group() first, or pass AdaptiveLoader(..., process_group='alone')"
        )
