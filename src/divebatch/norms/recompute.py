"""Layers that run again inside their rule, since their products with weights happen where no hook reaches.

The second run keeps the result of each such product; autograd leads from the layer's output back to those results, and
from there each product is a Linear layer like any other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a layer's result depends on besides its inputs, as found when it was called."""

    device: torch.device
    autocast_dtype: torch.dtype | None
    """None where autocast was off."""
    random_state: Tensor | None
    """None where the layer draws no random numbers."""

    @classmethod
    def of(cls, layer: nn.Module) -> "Surroundings":
        """The surroundings of a call that comes now."""
        device = next(layer.parameters()).device
        is_cast = torch.is_autocast_enabled(device.type)
        draws = layer.training and getattr(layer, "dropout", 0.0) > 0
        return cls(
            device, torch.get_autocast_dtype(device.type) if is_cast else None, _random_state(device) if draws else None
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the layer computes what it computed then, and autograd records it."""
        autocast = torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)
        with torch.enable_grad(), autocast, self._drawing_again():
            yield

    @contextmanager
    def _drawing_again(self) -> Iterator[None]:
        on_gpu = self.device.type == "cuda"
        with nullcontext() if self.random_state is None else torch.random.fork_rng([self.device] if on_gpu else []):
            if self.random_state is not None and on_gpu:
                torch.cuda.set_rng_state(self.random_state, self.device)
            elif self.random_state is not None:
                torch.set_rng_state(self.random_state)
            yield


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class Rerun(NamedTuple):
    """A call that is to run again: what a rule gets in the place of `x`."""

    arguments: dict[str, Any]
    """Arguments of `forward`, by name."""
    output: int
    """Which of the call's results (see `results`) `dy` is the gradient of."""
    surroundings: Surroundings


def results(output: Any) -> list[Tensor]:
    """The tensors in a layer's output that a loss may use, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    return [tensor for part in output for tensor in results(part)] if isinstance(output, tuple) else []


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias, as something to differentiate with respect to; the weights themselves are not."""
    y = functional.linear(x, weight.detach(), None if bias is None else bias.detach())
    return y if y.requires_grad else y.requires_grad_()


def gradients(result: Tensor, dy: Tensor, inner: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of the loss with respect to each of `inner`, given the gradient `dy` of one of the layer's results."""
    return torch.autograd.grad(result, inner, dy.to(result.dtype), allow_unused=True, materialize_grads=True)
