"""Parameters that FSDP2 has sharded: their gradients arrive summed over ranks, each rank its own piece of them."""

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from divebatch.norms.sketch import sum_dtype


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor; asked without importing them, which takes a while."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def unsharded_type(kind: type[nn.Module]) -> type[nn.Module]:
    """`fully_shard` gives a module a class made of FSDPModule and the module's own: that own one."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and kind.__bases__[:1] == (fsdp.FSDPModule,) and len(kind.__bases__) > 1:
        own: type[nn.Module] = kind.__bases__[1]
        return own
    return kind


class ShardSums:
    """Sums of gradient shards over backward passes; a full gradient is nowhere.

    `scale` turns a gradient as FSDP2 leaves it, a mean over ranks, into the sum over the batch's samples.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], scale: Callable[[], float]) -> None:
        self._parameters: dict[str, Any] = {name: p for name, p in parameters.items() if is_sharded(p)}
        self._scale = scale
        self._sums = {name: _zeros(p) for name, p in self._parameters.items()}
        self._before: dict[str, Tensor] = {}
        self.received: set[str] = set()
        """Names of the parameters that had gradients."""
        # FSDP2's gradients reach no parameter hook: only after accumulation is the averaged piece there.
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._receive, name)) for name, p in self._parameters.items()
        ]

    def detach(self) -> None:
        """Stop counting and free the sums."""
        while self._handles:
            handle: RemovableHandle = self._handles.pop()
            handle.remove()
        self._sums, self._before = {}, {}

    def begin(self) -> None:
        """A backward pass begins: what `.grad` holds already is not of this one."""
        held = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._before = {name: grad.to_local().detach().clone() for name, grad in held.items()}

    def _receive(self, name: str, parameter: Any) -> None:
        self.received.add(name)
        gradient = parameter.grad.to_local().detach()
        before = self._before.pop(name, None)
        # `.grad` may hold earlier passes of an accumulated batch, which were counted already.
        fresh = gradient if before is None else gradient - before
        self._sums[name].add_(fresh.to(self._sums[name].dtype), alpha=self._scale())

    def sq_norm(self) -> float:
        """This rank's part of ||sum||^2: parts add up over ranks."""
        parts = [
            # Under hybrid sharding several ranks hold the same piece, and the sum over ranks must count it once.
            torch.linalg.vector_norm(total, dtype=torch.float64) ** 2 / _num_copies(self._parameters[name])
            for name, total in self._sums.items()
        ]
        return float(torch.stack(parts).sum()) if parts else 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """The sums, sharded as the parameters are."""
        return {name: _like(self._parameters[name], total.clone()) for name, total in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load sums from shards laid out as here, or from whole tensors."""
        for name, total in self._sums.items():
            total.copy_(_piece(self._parameters[name], state[name]))


def _zeros(parameter: Any) -> Tensor:
    local = parameter.to_local()
    return torch.zeros_like(local, dtype=sum_dtype(local.dtype))


def _num_copies(parameter: Any) -> int:
    """How many ranks hold the same piece."""
    layout = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in layout if not placement.is_shard())


def _like(parameter: Any, local: Tensor) -> Any:
    kind = type(parameter.data)
    return kind.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _piece(parameter: Any, value: Any) -> Tensor:
    if is_sharded(value):
        return value.redistribute(parameter.device_mesh, parameter.placements).to_local()  # type: ignore[no-any-return]
    tensors = sys.modules["torch.distributed.tensor"]
    where, how = parameter.device_mesh, parameter.placements
    whole = value.to(parameter.to_local().device)
    return tensors.distribute_tensor(whole, where, how, src_data_rank=None).to_local()  # type: ignore[no-any-return]
