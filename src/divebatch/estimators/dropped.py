"""Gradients that were made and never used: a GradScaler skips the steps that overflowed, and so do many loops."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from divebatch.estimators.recorded import is_recorded


class DropWatch:
    """Calls `on_drop` where a backward pass finds that the gradient of the one before is gone without a step.

    An optimizer that does not step says nothing, so this looks at one parameter: its gradient was there after the last
    pass, and before the next it is None or zero. Accumulation leaves it alone. `parameter` must take part in every
    pass; a pass without it is not noticed.
    """

    def __init__(self, parameter: nn.Parameter, on_drop: Callable[[], None], on_pass: Callable[[], None]) -> None:
        self._parameter, self._on_drop, self._on_pass = parameter, on_drop, on_pass
        self._waits, self._is_gone = False, False
        self._version = 0
        # The first also runs for autograd.grad(), where nothing is accumulated: it only looks.
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(self._before),
            parameter.register_post_accumulate_grad_hook(self._after),
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
        # Nobody wrote to it, so it holds what it held. Else its values must be read, which waits for the device.
        return gradient._version != self._version and not bool(gradient.to_dense().any())


def loss_scale(optimizer: Optimizer) -> float:
    """What the gradients at hand are still multiplied with; infinite where the step about to come will do nothing.

    A GradScaler leaves it to optimizers with fused=True to undo its scale and to skip what overflowed: it hands them
    both in two attributes for as long as the step takes. Others step on gradients that are as they should be.
    """
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found_inf is not None and float(found_inf) > 0:
        return float("inf")
    return 1.0 if scale is None else float(scale)
