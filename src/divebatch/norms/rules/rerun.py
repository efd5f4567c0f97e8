"""Layers that run again inside their rule, because no hook sees their products with weights.

The second run keeps the result of each such product. Autograd leads from the layer's output to these results, and each
product is then treated like a Linear layer.
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
    """The circumstances of a call that affect its result besides the inputs."""

    device: torch.device
    autocast_dtype: torch.dtype | None
    """The type of autocast; None if autocast was off."""
    random_state: Tensor | None
    """The random state; None if the layer draws no random numbers."""

    @classmethod
    def of(cls, layer: nn.Module) -> "Surroundings":
        """Record the current circumstances, before a call."""
        device, state = next(layer.parameters()).device, None
        is_cast = torch.is_autocast_enabled(device.type)
        if layer.training and getattr(layer, "dropout", 0.0) > 0:
            state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return cls(device, torch.get_autocast_dtype(device.type) if is_cast else None, state)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the recorded circumstances in this context, with autograd enabled."""
        on_gpu, state = self.device.type == "cuda", self.random_state
        autocast = torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)
        own_draws = nullcontext() if state is None else torch.random.fork_rng([self.device] if on_gpu else [])
        with torch.enable_grad(), autocast, own_draws:
            if state is not None and on_gpu:
                torch.cuda.set_rng_state(state, self.device)
            elif state is not None:
                torch.set_rng_state(state)
            yield


class Rerun(NamedTuple):
    """A call that is to run again, given to a rule instead of `x`."""

    arguments: dict[str, Any]
    """Arguments of `forward`, by name."""
    output: int
    """The index in `results` of the result that `dy` is the gradient of."""
    surroundings: Surroundings


def results(output: Any) -> list[Tensor]:
    """Return the tensors in a layer's output that a loss may use, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    return [tensor for part in output for tensor in results(part)] if isinstance(output, tuple) else []


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias, ready to be differentiated; the weights are constants."""
    y = functional.linear(x, weight.detach(), None if bias is None else bias.detach())
    return y if y.requires_grad else y.requires_grad_()


def gradients(result: Tensor, dy: Tensor, inner: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the loss's gradients with respect to each of `inner`, given the gradient `dy` of one result."""
    return torch.autograd.grad(result, inner, dy.to(result.dtype), allow_unused=True, materialize_grads=True)
