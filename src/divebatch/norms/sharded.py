"""Parameters sharded by FSDP2, whose gradients arrive summed over ranks, each rank with its own piece."""

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from divebatch.errors import ArgumentError
from divebatch.norms.sketch import sum_dtype
from divebatch.ranks import Ranks


def is_sharded(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor, without the slow import of that class."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def unsharded_type(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the module's own class, which `fully_shard` has combined with FSDPModule."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    is_sharded_type = fsdp is not None and kind.__bases__[:1] == (fsdp.FSDPModule,) and len(kind.__bases__) > 1
    return kind.__bases__[1] if is_sharded_type else kind


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached: its shard of a DTensor, else all of it."""
    sharded: Any = tensor
    return sharded.to_local().detach() if is_sharded(tensor) else tensor.detach()


class Shards:
    """This rank's part of some parameters: its shards if FSDP2 has sharded them, else all of them.

    Sums over coordinates, such as products and squared norms, add up over `ranks` to those of the whole gradients. In
    hybrid sharding, ranks with copies of the same shards each add up over their own copy.

    Args:
        parameters: The trained parameters, by name; raises if they are not all sharded in the same way.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.is_any_sharded = any(map(is_sharded, parameters.values()))
        self.ranks = _common_ranks(parameters)
        """The ranks that hold one copy of the parameters together; this process alone if nothing is sharded."""
        self.offsets = {} if self.ranks.is_alone else {name: self._offset(name) for name in parameters}
        """The position of each parameter's first local entry, among all its entries."""

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of tensors that are sharded like their parameters, by the parameters' names."""
        return {name: local(tensor) for name, tensor in tensors.items()}

    def save(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of local parts for a checkpoint, sharded like the parameters."""
        return {name: _like(self.parameters[name], each.clone()) for name, each in held.items()}

    def load(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of saved tensors, which are sharded as here, or whole."""
        return {name: _piece(self.parameters[name], value) for name, value in saved.items()}

    def require_rows(self) -> None:
        """Raise for shards that are not rows: only the entries of rows are contiguous."""
        for name, parameter in self.parameters.items():
            if not self.ranks.is_alone and (dim := _sharding(name, parameter)[1].dim) != 0:
                raise ArgumentError(
                    f"a sketch needs parameters that are sharded by rows, and '{name}' is by dimension {dim}: leave "
                    f"shard_placement_fn out of fully_shard, or use 'moments' with sketch=False"
                )

    def _offset(self, name: str) -> int:
        parameter = self.parameters[name]
        rows = parameter.shape[0]
        return first_row(rows, self.ranks.rank, self.ranks.size) * (parameter.numel() // max(1, rows))


def first_row(rows: int, rank: int, num_ranks: int) -> int:
    """Return the number of a rank's first row as torch shards: in equal parts, the last ones smaller or empty."""
    return min(rows, rank * -(-rows // num_ranks))


def _common_ranks(parameters: Mapping[str, nn.Parameter]) -> Ranks:
    """Return the ranks over which the parameters are sharded; raise if these differ between parameters."""
    found: dict[tuple[int, ...], tuple[str, Ranks]] = {}
    for name, parameter in parameters.items():
        mesh_dim = _sharding(name, parameter)[0] if is_sharded(parameter) else None
        mesh: Any = getattr(parameter, "device_mesh", None)
        ranks = Ranks.alone() if mesh_dim is None else Ranks(mesh.get_group(mesh_dim))
        members = () if ranks.is_alone else tuple(dist.get_process_group_ranks(ranks._group))
        found.setdefault(members, (name, ranks))
    if len(found) > 1:
        places = (f"over the ranks {list(members)}" if members else "not at all" for members in found)
        told = " and ".join(f"'{name}' {place}" for (name, _), place in zip(found.values(), places, strict=True))
        raise ArgumentError(
            f"parameters are sharded unlike each other: {told}. Shard all that are trained with fully_shard on one "
            f"mesh and without ignored_params, or freeze the others"
        )
    return next((ranks for _, ranks in found.values()), Ranks.alone())


def _sharding(name: str, parameter: Any) -> tuple[int | None, Any]:
    """Return a parameter's sharded mesh dimension and its layout; raise for two dimensions, or for sums."""
    placements = list(enumerate(parameter.placements))
    sharded = [(dim, placement) for dim, placement in placements if placement.is_shard()]
    if len(sharded) > 1 or any(placement.is_partial() for _, placement in placements):
        raise ArgumentError(
            f"'{name}' is laid out as {parameter.placements} over a mesh of {tuple(parameter.device_mesh.shape)}: "
            f"fully_shard must shard over one dimension of a mesh, with copies over another, without tensor parallelism"
        )
    return sharded[0] if sharded else (None, None)


class ShardSums:
    """Sums of gradient shards over backward passes, without any full gradient.

    `scale` turns a gradient from FSDP2, a mean over ranks, into the sum over the batch's samples.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], scale: Callable[[], float]) -> None:
        self._parameters: dict[str, Any] = {name: p for name, p in parameters.items() if is_sharded(p)}
        self._scale = scale
        held = {name: p.to_local() for name, p in self._parameters.items()}
        self._sums = {name: torch.zeros_like(p, dtype=sum_dtype(p.dtype)) for name, p in held.items()}
        self._before: dict[str, Tensor] = {}
        self.received: set[str] = set()
        """Names of the parameters that received gradients."""
        # FSDP2's gradients reach no parameter hook: the averaged piece exists only after accumulation.
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
        """Begin a backward pass; gradients already in `.grad` are not part of it."""
        held = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._before = {name: grad.to_local().detach().clone() for name, grad in held.items()}

    def _receive(self, name: str, parameter: Any) -> None:
        self.received.add(name)
        gradient = parameter.grad.to_local().detach()
        before = self._before.pop(name, None)
        # `.grad` may include earlier passes of an accumulated batch, which were counted before.
        fresh = gradient if before is None else gradient - before
        self._sums[name].add_(fresh.to(self._sums[name].dtype), alpha=self._scale())

    def sq_norm(self) -> float:
        """Return this rank's part of ||sum||^2; the parts add up over ranks."""
        parts = []
        for name, total in self._sums.items():
            layout = zip(self._parameters[name].placements, self._parameters[name].device_mesh.shape, strict=True)
            # In hybrid sharding several ranks hold the same piece, and the sum over ranks must count it once.
            copies = math.prod(size for placement, size in layout if not placement.is_shard())
            parts.append(torch.linalg.vector_norm(total, dtype=torch.float64) ** 2 / copies)
        return float(torch.stack(parts).sum()) if parts else 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums, sharded like the parameters."""
        return {name: _like(self._parameters[name], total.clone()) for name, total in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load sums from shards with the layout used here, or from whole tensors."""
        for name, total in self._sums.items():
            total.copy_(_piece(self._parameters[name], state[name]))


def _like(parameter: Any, held: Tensor) -> Any:
    """Return a local part as a tensor that is sharded like the parameter, if the parameter is."""
    if not is_sharded(parameter):
        return held
    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    kind, where, how = type(parameter.data), parameter.device_mesh, parameter.placements
    return kind.from_local(held, where, how, run_check=False, **layout)


def _piece(parameter: Any, value: Any) -> Any:
    """Return this rank's part of a tensor that is whole, or sharded like the parameter."""
    if not is_sharded(parameter):
        return local(value)
    where, how = parameter.device_mesh, parameter.placements
    if is_sharded(value):
        return value.redistribute(where, how).to_local()
    tensors, there = sys.modules["torch.distributed.tensor"], value.to(parameter.to_local().device)
    return tensors.distribute_tensor(there, where, how, src_data_rank=None).to_local()
