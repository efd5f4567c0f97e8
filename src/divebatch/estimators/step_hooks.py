"""Hooks on optimizers, and the state of gradients at a step."""

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
"""Batches whose gradients are compared between several optimizers' steps; each comparison waits for the device."""


def before_step(optimizer: Optimizer, then: Callable[[], None]) -> RemovableHandle:
    """Call `then` once a step: before the step or, if a closure makes the gradients, after its first run.

    A hook before `step(closure)` would find the previous step's gradients. Lightning always steps with a closure.
    """

    def hook(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            then()
            return None
        waiting = [then]

        def followed() -> Any:
            result = closure()
            if waiting:  # line searches call the closure again at other weights
                waiting.pop()()
            return result

        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    return optimizer.register_step_pre_hook(hook)


def is_recorded(tensor: Tensor) -> bool:
    """Return whether a CUDA graph records the current pass: only replays count, and no hook sees them."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def scale_of_gradients(optimizer: Optimizer) -> float:
    """Return the remaining scale of the current gradients; infinite if the coming step will be skipped.

    A GradScaler leaves unscaling and skipping to optimizers with fused=True, through two attributes that exist during
    the step. Other optimizers step on gradients without a scale.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and float(found_inf) > 0:
        return math.inf
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


class UnchangedGradients:
    """A warning if gradients change between the steps of several optimizers on one batch.

    The first of these steps counts for all, since its gradients may be gone later. The other gradients are wrong if a
    GradScaler unscales each optimizer's gradients right before its step.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._looks = LOOKS if len(optimizers) > 1 else 0
        self._norms: dict[Optimizer, float] = {}
        """The norm of one gradient of each other optimizer, at the first optimizer's step."""

    def first(self, optimizer: Optimizer) -> None:
        """Record the gradients when the first optimizer steps on a batch."""
        if self._looks > 0:
            self._norms = {each: _a_norm(each) for each in self._optimizers if each is not optimizer}
            self._looks -= 1

    def later(self, optimizer: Optimizer) -> None:
        """Compare the gradients when another optimizer steps on the same batch."""
        norm = self._norms.pop(optimizer, None)
        if norm is not None and abs(norm - _a_norm(optimizer)) > 0:  # NaN does not count as a difference
            self._looks, self._norms = 0, {}
            warn_user(
                f"the gradients of {type(optimizer).__name__} changed after another optimizer had stepped on this "
                f"batch, when the noise scale was measured: unscale (scaler.unscale_) and clip the gradients of all "
                f"optimizers before the first one steps"
            )


def _a_norm(optimizer: Optimizer) -> float:
    """Return the norm of one of the optimizer's gradients; NaN if there is none."""
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return math.nan if (found := next(gradients, None)) is None else float(local(found).to_dense().norm())


def tell_steps(
    estimator: Estimator, context: TrainingContext, *, accumulate: Callable[[], int] = lambda: 1
) -> Callable[[], None]:
    """Call the estimator's `on_step` before each step of the context's optimizers, for a loop without a controller.

    Args:
        estimator: An estimator that is bound to the context.
        context: The model, loader and optimizers of the loop.
        accumulate: A function that returns the loader's batches in one optimizer step.

    Returns:
        A function that stops the calls.
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
