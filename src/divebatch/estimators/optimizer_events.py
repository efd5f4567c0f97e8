"""What happens to gradients on their way: they are made, used by a step, dropped, or only written down."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from divebatch.checks import warn_user
from divebatch.estimators.estimator import Scene
from divebatch.norms.accumulators import trainable
from divebatch.norms.loss_scale import LossWeight
from divebatch.norms.passes import BackwardPass, current_pass
from divebatch.norms.sharded import is_sharded, local

Call = tuple[tuple[Any, ...], dict[str, Any]]
OnPass = Callable[[dict[str, Tensor], LossWeight], None]
"""Is told a backward pass's own gradients by the parameters' names, and the weight of its loss."""


def is_recorded(tensor: Tensor) -> bool:
    """Whether the pass under way is only written down for a CUDA graph: its replays count, and no hook sees them."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def when_gradients_are_used(
    scene: Scene, name: str, then: Callable[[Optimizer], None], *, reads_gradients: bool
) -> Callable[[], None]:
    """Call `then` with the optimizer that is about to step; returns what ends that.

    Where several optimizers hold the model's parameters, the first step on what was delivered counts for all: the
    gradients of all are there, and later the first one's may be gone.

    Args:
        scene: Has the optimizers.
        name: The estimator that asks.
        then: What is called.
        reads_gradients: Whether it takes all gradients as they are then.
    """
    optimizers = (scene.require_optimizer(name), *scene.other_optimizers)
    tell = then if len(optimizers) == 1 else _OncePerDelivery(scene, then, reads_gradients=reads_gradients)
    handles = [when_used(optimizer, partial(tell, optimizer)) for optimizer in optimizers]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def when_used(optimizer: Optimizer, then: Callable[[], None]) -> RemovableHandle:
    """Call `then` once a step: before it, or where the step makes its gradients by a closure, after that first ran.

    A hook before `step(closure)` finds the gradients of the step before. Lightning always steps like that.
    """

    def hook(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            then()
            return None
        followed = _followed(closure, then)
        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    return optimizer.register_step_pre_hook(hook)


LOOKS = 3
"""Batches whose gradients are compared between the steps of several optimizers; each look waits for the device."""


class _OncePerDelivery:
    """Calls `then` for the first of the steps that are made before more samples are delivered."""

    def __init__(self, scene: Scene, then: Callable[[Optimizer], None], *, reads_gradients: bool) -> None:
        self._delivery, self._then = scene.delivery, then
        self._seen = scene.delivery.samples_delivered
        self._others = [scene.require_optimizer("an estimator"), *scene.other_optimizers]
        self._looks = LOOKS if reads_gradients else 0
        self._norms: dict[Optimizer, float] = {}
        """That of a gradient of each other optimizer, at the first one's step."""

    def __call__(self, optimizer: Optimizer) -> None:
        delivered = self._delivery.samples_delivered
        if delivered != self._seen:
            self._seen = delivered
            self._then(optimizer)
            self._norms = {each: _a_norm(each) for each in self._others if each is not optimizer and self._looks > 0}
            self._looks -= 1
        elif (norm := self._norms.pop(optimizer, None)) is not None and abs(norm - _a_norm(optimizer)) > 0:
            self._looks, self._norms = 0, {}
            warn_user(
                f"the gradients of {type(optimizer).__name__} changed after another optimizer had stepped on this "
                f"batch, when the noise scale was measured: unscale (scaler.unscale_) and clip the gradients of all "
                f"optimizers before the first one steps"
            )


def _a_norm(optimizer: Optimizer) -> float:
    """The norm of one of the optimizer's gradients; NaN where it has none."""
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return math.nan if (found := next(gradients, None)) is None else float(local(found).to_dense().norm())


def when_pass_begins(model: nn.Module, then: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `then` when a backward pass enters the model by an output, with the output's gradient; once for each."""

    def hook(_: nn.Module, inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(then)

    return model.register_forward_hook(hook)


def _followed(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    """`closure`, and after its first call `then`: line searches call it again at other weights."""
    waiting = [then]

    def run() -> Any:
        result = closure()
        if waiting:
            waiting.pop()()
        return result

    return run


class PassWatch:
    """Collects the gradients of each backward pass and hands them over when it has ended.

    `is_wanted` is asked whether the pass under way is looked at.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        on_pass: OnPass,
        *,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._on_pass, self._is_wanted = on_pass, is_wanted
        self._handles: list[RemovableHandle] = []
        for name, parameter in parameters.items():
            self._handles.append(parameter.register_hook(partial(self._receive, name)))
            # Fires for backward() and not for autograd.grad(): a look at gradients in between is no training.
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated))

    def close(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def _receive(self, name: str, gradient: Tensor) -> None:
        if not self._is_wanted() or is_recorded(gradient):
            return
        current_pass().notes(self)[name] = gradient.detach()

    def _accumulated(self, parameter: Tensor) -> None:
        if self._is_wanted() and not is_recorded(parameter):
            current_pass().at_end(self._end)

    def _end(self, over: BackwardPass) -> None:
        if self._handles:
            self._on_pass(over.notes(self), LossWeight(1.0) if over.weight is None else over.weight)


class DropWatch:
    """Calls `on_drop` where a backward pass finds that the gradient of the one before is gone without a step.

    An optimizer that does not step says nothing, so this looks at one parameter: its gradient was there after the last
    pass, and before the next it is None or zero. Accumulation leaves it alone. The first parameter that is trained must
    take part in every pass; a pass without it is not noticed.
    """

    def __init__(self, model: nn.Module, on_drop: Callable[[], None], on_pass: Callable[[], None]) -> None:
        self._parameter = next(iter(trainable(model).values()))
        self._on_drop, self._on_pass = on_drop, on_pass
        self._waits, self._is_gone = False, False
        self._version = 0
        # The first also runs for autograd.grad(), where nothing is accumulated: it only looks.
        self._handles: list[RemovableHandle] = [
            # FSDP2's gradients reach no hook of a parameter before they are accumulated.
            when_pass_begins(model, self._before)
            if is_sharded(self._parameter)
            else self._parameter.register_hook(self._before),
            self._parameter.register_post_accumulate_grad_hook(self._after),
        ]

    def stepped(self) -> None:
        """The optimizer used the gradient: whatever becomes of it now, it was not dropped."""
        self._waits = False

    def close(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, gradient: Tensor) -> None:
        if is_recorded(gradient):
            return
        self._is_gone = self._waits and self._was_cleared()

    def _after(self, parameter: Tensor) -> None:
        if is_recorded(parameter):
            return
        if self._is_gone:
            self._on_drop()
        assert parameter.grad is not None
        self._waits, self._is_gone, self._version = True, False, parameter.grad._version
        self._on_pass()

    def _was_cleared(self) -> bool:
        gradient = self._parameter.grad
        if gradient is None:
            return True
        if gradient._version == self._version:  # nobody wrote to it, so it holds what it held
            return False
        # All ranks must say the same, and a shard may be zero, or empty, on one of them: that somebody wrote must do.
        # Else its values are read, which waits for the device.
        return is_sharded(gradient) or not bool(gradient.to_dense().any())


def scale_of_gradients(optimizer: Optimizer) -> float:
    """What the gradients at hand are still multiplied with; infinite where the step about to come will do nothing.

    A GradScaler leaves it to optimizers with fused=True to undo its scale and to skip what overflowed: it hands them
    both in two attributes for as long as the step takes. Others step on gradients that are as they should be.
    """
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found_inf is not None and float(found_inf) > 0:
        return float("inf")
    return 1.0 if scale is None else float(scale)
