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
    """The circumstances of a call that decide its result beside the inputs."""

    device: torch.device
    autocast_dtype: torch.dtype | None
    """None where autocast was off."""
    random_state: Tensor | None
    """None where the layer draws no random numbers."""

    @classmethod
    def of(cls, layer: nn.Module) -> "Surroundings":
        """Record those of a call that comes now."""
        device, state = next(layer.parameters()).device, None
        is_cast = torch.is_autocast_enabled(device.type)
        if layer.training and getattr(layer, "dropout", 0.0) > 0:
            state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return cls(device, torch.get_autocast_dtype(device.type) if is_cast else None, state)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Make the layer compute inside as it did then, recorded by autograd."""
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
    """A call that is to run again, given to a rule in the place of `x`."""

    arguments: dict[str, Any]
    """Arguments of `forward`, by name."""
    output: int
    """The number of the result, among `results`, that `dy` is the gradient of."""
    surroundings: Surroundings


def results(output: Any) -> list[Tensor]:
    """Return the tensors in a layer's output that a loss may use, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    return [tensor for part in output for tensor in results(part)] if isinstance(output, tuple) else []


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias, to differentiate with respect to it; the weights themselves are constants."""
    y = functional.linear(x, weight.detach(), None if bias is None else bias.detach())
    return y if y.requires_grad else y.requires_grad_()


def gradients(result: Tensor, dy: Tensor, inner: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the loss's gradients with respect to each of `inner`, given the gradient `dy` of one of the results."""
    return torch.autograd.grad(result, inner, dy.to(result.dtype), allow_unused=True, materialize_grads=True)
