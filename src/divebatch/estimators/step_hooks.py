"""Hooks on optimizers, and the state of gradients when a step uses them."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from divebatch.checks import warn_user
from divebatch.estimators.estimator import Estimator, TrainingContext
from divebatch.measurement import StepEvent
from divebatch.norms.sharded import local

Call = tuple[tuple[Any, ...], dict[str, Any]]
LOOKS = 3
"""Batches whose gradients are compared between the steps of several optimizers; each look waits for the device."""


def before_step(optimizer: Optimizer, then: Callable[[], None]) -> RemovableHandle:
    """Call `then` once a step: before it or, if the step makes its gradients by a closure, after that first ran.

    A hook before `step(closure)` finds the gradients of the step before. Lightning always steps like that.
    """

    def hook(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            then()
            return None
        waiting = [then]

        def followed() -> Any:
            result = closure()
            if waiting:  # line searches call it again at other weights
                waiting.pop()()
            return result

        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    return optimizer.register_step_pre_hook(hook)


def is_recorded(tensor: Tensor) -> bool:
    """Say whether the pass under way is only written down for a CUDA graph: replays count, and no hook sees them."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def scale_of_gradients(optimizer: Optimizer) -> float:
    """Return what the gradients at hand are still multiplied with; infinite if the step about to come does nothing.

    A GradScaler leaves it to optimizers with fused=True to undo its scale and to skip what overflowed: it hands them
    both in two attributes for as long as the step takes. Others step on gradients that are as they should be.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and float(found_inf) > 0:
        return math.inf
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


class UnchangedGradients:
    """A warning if gradients change between the steps of several optimizers on one batch.

    The first of these steps counts for all, as later its own gradients may be gone. A GradScaler that unscales each
    optimizer's gradients right before its step makes the others wrong.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._looks = LOOKS if len(optimizers) > 1 else 0
        self._norms: dict[Optimizer, float] = {}
        """That of a gradient of each other optimizer, at the first one's step."""

    def first(self, optimizer: Optimizer) -> None:
        """Note the gradients when the first optimizer steps on a batch."""
        if self._looks > 0:
            self._norms = {each: _a_norm(each) for each in self._optimizers if each is not optimizer}
            self._looks -= 1

    def later(self, optimizer: Optimizer) -> None:
        """Compare with them when another one steps on the same batch."""
        norm = self._norms.pop(optimizer, None)
        if norm is not None and abs(norm - _a_norm(optimizer)) > 0:  # a NaN is no difference
            self._looks, self._norms = 0, {}
            warn_user(
                f"the gradients of {type(optimizer).__name__} changed after another optimizer had stepped on this "
                f"batch, when the noise scale was measured: unscale (scaler.unscale_) and clip the gradients of all "
                f"optimizers before the first one steps"
            )


def _a_norm(optimizer: Optimizer) -> float:
    """Compute the norm of one of the optimizer's gradients; NaN if it has none."""
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return math.nan if (found := next(gradients, None)) is None else float(local(found).to_dense().norm())


def tell_steps(
    estimator: Estimator, context: TrainingContext, *, accumulate: Callable[[], int] = lambda: 1
) -> Callable[[], None]:
    """Call the estimator's `on_step` before each step of the context's optimizers, for a loop without a controller.

    Args:
        estimator: An estimator that is bound to the context.
        context: The model, loader and optimizers of the loop.
        accumulate: Gives the loader's batches in one optimizer step.

    Returns:
        A function that ends it.
    """
    loader, optimizers = context.loader, [context.require_optimizer("an estimator"), *context.other_optimizers]

    def delivered() -> tuple[int, int, int]:
        return loader.batches_delivered, loader.samples_delivered, loader.local_samples_delivered

    step, before = 0, delivered()

    def tell(optimizer: Optimizer) -> None:
        nonlocal step, before
        now = delivered()
        batches, samples, local_samples = (new - old for new, old in zip(now, before, strict=True))
        size = loader.rank_shard.num_samples * accumulate()
        estimator.on_step(StepEvent(step, batches, samples, local_samples, size, accumulate()), optimizer)
        step, before = step + 1, now

    handles = [before_step(each, partial(tell, each)) for each in optimizers]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
