"""A model on several ranks: copies whose gradients are averaged (DDP), or one that is spread over them (FSDP2)."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from divebatch.norms.sharded import is_sharded
from divebatch.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SHARDINGS = ("ddp", "fsdp")
_NEW_NAME = "forward_sync_buffers"
_SYNC_BUFFERS = _NEW_NAME if _NEW_NAME in signature(DistributedDataParallel).parameters else "broadcast_buffers"


@dataclass(frozen=True, slots=True)
class Parallel:
    """How a model is run: `module` is called in training, `model` has the parameters, the state and the hooks."""

    model: nn.Module
    module: nn.Module
    ranks: Ranks

    @classmethod
    def alone(cls, model: nn.Module) -> "Parallel":
        """In this process only."""
        return cls(model, model, Ranks.alone())

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of each parameter, and a forward pass brings them together."""
        return hasattr(self.model, "set_requires_gradient_sync")  # what `fully_shard` adds

    @contextmanager
    def adding_up(self, *, is_last: bool) -> Iterator[None]:
        """Inside, gradients stay on their rank unless this is the last backward pass of the batch."""
        model: Any = self.model
        if self.is_sharded:
            model.set_requires_gradient_sync(is_last)
        module = self.module
        # Ranks need the sum over a batch's passes only, so the passes before the last communicate nothing.
        with module.no_sync() if isinstance(module, DistributedDataParallel) and not is_last else nullcontext():
            yield

    def average_buffers(self) -> None:
        """Running statistics, such as BatchNorm's of each rank's own samples, become their mean over ranks."""
        moving = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        self.ranks.sum_(moving)
        if moving and not self.ranks.is_alone:
            torch._foreach_div_(moving, self.ranks.size)

    def layout(self, optimizer: Optimizer, place: tuple[Any, ...]) -> "DTensor | None":
        """What the tensor at a place in a trainer's state is sharded like: the parameter that it belongs to."""
        found: Any = None
        if place[:2] == ("optimizer", "state"):  # which numbers parameters group by group
            numbered = [each for group in optimizer.param_groups for each in group["params"]]
            found = dict(enumerate(numbered)).get(place[2])
        else:
            found = dict(self.model.named_parameters()).get(place[-1])
        return found if is_sharded(found) else None


def spread(model: nn.Module, ranks: Ranks, *, sharding: str = "ddp") -> Parallel:
    """Let the ranks train `model` together, which all of them have built alike."""
    if ranks.is_alone:
        return Parallel.alone(model)
    if sharding == "fsdp":
        _shard(model, ranks)
        return Parallel(model, model, ranks)
    # Buffers are averaged at the end of an epoch and not sent around before every forward pass.
    settings: dict[str, Any] = {"gradient_as_bucket_view": True, _SYNC_BUFFERS: False}
    module = DistributedDataParallel(model, **settings)
    return Parallel(model, module, ranks)


def _shard(model: nn.Module, ranks: Ranks) -> None:
    """Each child that has parameters is gathered by itself, those of a sequence one by one; the root takes the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # takes a second to import

    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.size,))  # by default a GPU's, if there is one
    for child in model.children():
        for part in child if isinstance(child, nn.Sequential) else [child]:
            if any(True for _ in part.parameters()):
                # Piece by piece: sharded as one whole, the model would be gathered as one whole in every pass.
                fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_finite_everywhere(tensor: Tensor) -> bool:
    """Whether a tensor, or this rank's shard of it, holds finite numbers only."""
    part: Any = tensor
    local = part.to_local() if is_sharded(tensor) else part
    return bool(local.isfinite().all())


def largest(ranks: Ranks, numbers: list[float]) -> list[float]:
    """Each number's maximum over ranks."""
    if ranks.is_alone:
        return numbers
    return [max(each) for each in zip(*ranks.gather(numbers), strict=True)]
