"""Exact gradients of a batch that ranks share unequally, although DDP and FSDP average over ranks.

Rank r holds b_r of the m samples. The mean over W ranks of their mean losses is the mean over samples only if each loss
is multiplied by W * b_r / m. This happens at the model's outputs, where the backward pass enters. For any loss, all
gradients behind the outputs are then right, including those exchanged between ranks, as in SyncBatchNorm.

Gradients with respect to the model's inputs are not weighted: they are part of a loss, or of an attack. A loss that
differentiates them again (a gradient penalty, a physics-informed network) bypasses the outputs and cannot be weighted
here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from divebatch.checks import warn_user
from divebatch.errors import UsageError
from divebatch.norms.passes import ModuleHook, will_receive
from divebatch.norms.sharded import is_sharded

BY_HAND = "multiply the loss by loader.rank_shard.loss_weight and pass Controller(..., loss_reduction='weighted')"


def weigh_gradients(model: nn.Module, weight: Callable[[], float]) -> Callable[[], None]:
    """Multiply the gradients that enter `model` by `weight()`, evaluated in the forward pass; return an undo function.

    Only the outermost of nested calls counts, since a module may call itself. A weight of 1 costs next to nothing.
    """
    return RankWeighting(model, weight).close


class RankWeighting:
    """Two hooks that weight a model's outputs. The object is the second hook, so that `without_weighing` finds it."""

    def __init__(self, model: nn.Module, weight: Callable[[], float]) -> None:
        self._model, self._weight = model, weight
        self.is_paused = False
        self._depth, self._has_warned = 0, False
        self._handles = [
            model.register_forward_pre_hook(ModuleHook(model, self._enter), prepend=True),
            model.register_forward_hook(self, always_call=True),  # also if the forward pass fails
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._depth += 1

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Weight the output at the end of a forward pass."""
        if module is not self._model:
            return output
        self._depth -= 1
        # Here, not on the gradients: SyncBatchNorm's backward pass mixes ranks, so it must see weighted gradients.
        factor = 1.0 if self.is_paused or self._depth else self._weight()
        if output is None or not torch.is_grad_enabled():
            return output
        # Inputs from another model have a history; inputs that a loop differentiates have none.
        asks = any(isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf for leaf in tree_leaves(inputs))
        if factor == 1.0 and not asks:
            return output
        if factor != 1.0 and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
            raise UsageError(
                f"the model's output, a {type(output).__name__}, shows no tensor, and this rank's gradients must count "
                f"{factor:.4g}-fold: return tensors in tuples, lists or dicts, or {BY_HAND}"
            )

        def weighed(tensor: Tensor) -> Any:
            return _Weighed.apply(tensor, factor, self if asks else None) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]

        return tree_map_only(Tensor, weighed, output)

    def factor_of_pass(self, factor: float) -> float:
        """Return `factor`, or 1 if the current backward pass gives gradients only to inputs."""
        trained = (parameter for parameter in self._model.parameters() if parameter.requires_grad)
        if any(is_sharded(parameter) or will_receive(parameter)[0] for parameter in trained):
            return factor
        if torch.is_grad_enabled():
            self._refuse_second_derivatives(factor)
        return 1.0

    def _refuse_second_derivatives(self, factor: float) -> None:
        told = (
            "a loss that differentiates the gradients of the model's inputs (autograd.grad(..., create_graph=True)) "
            f"cannot be weighed where ranks hold unequally many samples of a batch: {BY_HAND}"
        )
        if factor != 1.0:
            raise UsageError(f"{told}. Here this rank's gradients must count {factor:.4g}-fold")
        if not self._has_warned:
            self._has_warned = True
            warn_user(f"{told}. The first such batch will be an error")

    def __deepcopy__(self, _: object) -> "RankWeighting":
        """Give a copy of the model a hook that does nothing there."""
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Give a pickled copy a hook that does nothing."""
        return ModuleHook, ()


@contextmanager
def without_weighing(model: nn.Module) -> Iterator[None]:
    """Suspend the weights of `model`, for passes that are not part of training."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    pausing = [hook for hook in hooks if isinstance(hook, RankWeighting) and not hook.is_paused]
    for weighting in pausing:
        weighting.is_paused = True
    try:
        yield
    finally:
        for weighting in pausing:
            weighting.is_paused = False


class _Weighed(torch.autograd.Function):
    """An identity that copies: torch does not allow in-place changes of a custom function's view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, asked: RankWeighting | None) -> Tensor:
        ctx.factor, ctx.asked = factor, asked
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        return dx * (ctx.factor if ctx.asked is None else ctx.asked.factor_of_pass(ctx.factor)), None, None
