"""How compiled backward passes are observed, without a graph break.

Each covered layer's output passes through an identity whose backward hands the layer's squared norms to an
accumulator, as if they were its gradient; autograd adds the layers up inside the compiled graph. The hooks are there
from construction on, and a flag they look at gives two compiled variants: with taps and without.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from divebatch.errors import CoverageError
from divebatch.norms.backward import families, measured
from divebatch.norms.registry import CoveredLayer


@dataclass(slots=True)
class Tapped:
    """A compiled backward pass that has ended: sums over its samples, in the scale of the loss."""

    sq_norms: Tensor
    """A single number, in float64."""
    variances: Tensor | None
    num_samples: Tensor
    layers: Sequence[CoveredLayer]

    def gradient_scale(self, loss_reduction: str) -> Tensor | int:
        """What turns a gradient of this pass into a sum of unaveraged per-sample gradients."""
        return self.num_samples if loss_reduction == "mean" else 1


class Taps:
    """Tells `on_end` of every backward pass while it is switched on."""

    def __init__(
        self, layers: Sequence[CoveredLayer], mode: str, loss_reduction: str, on_end: Callable[[Tapped], None]
    ) -> None:
        shared = [family for family in families(layers) if len(family.layers) > 1]
        if shared:
            names = ", ".join(layer.name for layer in shared[0].layers)
            raise CoverageError(f"layers {names} share parameters: a compiled meter cannot add their gradients up")
        self.is_on, self.paused = False, False
        self._layers, self._mode, self._on_end = layers, mode, on_end
        self._in_place: list[nn.Module] = []
        device = next(layers[0].module.parameters()).device
        self._accumulator = torch.zeros(4, dtype=torch.float64, device=device, requires_grad=True)
        self._accumulator.register_hook(self._receive)
        for layer in layers:
            layer.module.register_forward_hook(self._tap(layer), with_kwargs=True)

    def switch_on(self) -> None:
        """Use the compiled variant with taps."""
        self.is_on = True

    def switch_off(self) -> None:
        """Use the compiled variant without."""
        self.is_on = False

    def forget(self) -> None:
        """Nothing is under way between backward passes."""
        self._accumulator.grad = None

    def backward_of(self, task: int) -> Tapped:
        """Compiled passes are seen as a whole."""
        zero = self._accumulator.detach()[0]
        return Tapped(zero, None, zero, self._layers)

    def _tap(self, layer: CoveredLayer) -> Callable[..., Any]:
        def tap(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            if not self.is_on or self.paused or not torch.is_grad_enabled():
                return None
            x = args[0] if args else next(iter(kwargs.values()))
            tapped: Tensor = _Tap.apply(output, x, self._accumulator, layer, self._mode)  # type: ignore[no-untyped-call]
            return tapped

        return tap

    def _receive(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(partial(self._finish, gradient.detach()))

    def _finish(self, gradient: Tensor) -> None:
        self._accumulator.grad = None
        sq_norms, variance, samples, layers = gradient.unbind()
        variances = variance if self._mode == "sketch" else None
        self._on_end(Tapped(sq_norms, variances, samples / layers, self._layers))


class _Tap(torch.autograd.Function):
    """Identity; its backward adds (squared norms, their variance, samples, 1) to the accumulator."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, accumulator: Tensor, layer: CoveredLayer, mode: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.mode = layer, mode
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        estimates = [measured(form, ctx.mode) for _, form in ctx.layer.gradients(x, dy)]
        sq_norms = torch.stack([e.sq_norms.sum(dtype=torch.float64) for e in estimates]).sum()
        variances = [e.variances.sum(dtype=torch.float64) for e in estimates if e.variances is not None]
        variance = torch.stack(variances).sum() if variances else torch.zeros_like(sq_norms)
        counts = sq_norms.new_tensor([dy.shape[0], 1.0])
        return dy, None, torch.cat([torch.stack([sq_norms, variance]), counts]), None, None
