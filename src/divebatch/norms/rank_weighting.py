"""Exact gradients of a batch that ranks share unevenly, although DDP and FSDP average over ranks.

Rank r holds b_r of the m samples. The mean over W ranks of their mean losses is the mean over samples only if each is
multiplied by W * b_r / m. That is done where the backward pass enters the model: at its outputs. Whatever the loss, all
gradients behind are then right, also those that travel between ranks, as in SyncBatchNorm.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from divebatch.errors import UsageError

_is_paused = False


@contextmanager
def without_weighing() -> Iterator[None]:
    """Inside, models run as if nobody shared their batches: for passes that are no training."""
    global _is_paused
    outer, _is_paused = _is_paused, True
    try:
        yield
    finally:
        _is_paused = outer


def weigh_gradients(model: nn.Module, weight: Callable[[], float]) -> Callable[[], None]:
    """Multiply what enters `model` backwards by `weight()`, asked for in the forward pass; returns what undoes it.

    Only the outermost of nested calls counts: a module may call itself. Costs next to nothing while the weight is 1.
    """
    depth = 0

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal depth
        depth += module is model  # a deep copy has these hooks too

    def leave(module: nn.Module, _: Any, output: Any) -> Any:
        nonlocal depth
        depth -= module is model
        factor = 1.0 if _is_paused or depth or module is not model else weight()
        return output if factor == 1.0 else _weighed(output, factor)

    handles = [
        model.register_forward_pre_hook(enter, prepend=True),
        model.register_forward_hook(leave, always_call=True),  # also where the forward pass fails
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _weighed(output: Any, factor: float) -> Any:
    if output is None or not torch.is_grad_enabled():
        return output
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
        raise UsageError(
            f"the model's output, a {type(output).__name__}, shows no tensor, and this rank's gradients must count "
            f"{factor:.4g}-fold: return tensors in tuples, lists or dicts, or multiply the loss by "
            f"loader.rank_shard.loss_weight and pass Controller(..., weigh_gradients=False)"
        )
    return tree_map_only(Tensor, lambda tensor: _through(tensor, factor), output)


def _through(tensor: Tensor, factor: float) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    weighed: Tensor = _Weighed.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return weighed


class _Weighed(torch.autograd.Function):
    """Identity. A copy and not a view: torch refuses to change in place what a custom function has a view of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        return dx * ctx.factor, None
