"""From a batch to its loss, plain or compiled."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

LossFn = Callable[[Any, Any], Tensor]
"""The mean loss of a batch, from the model's outputs and the targets."""

MOST_VARIANTS = 256
"""Versions of one function that the compiler may make: batch sizes times measuring or not, for all runs together."""


def predict(model: nn.Module, inputs: Any, precision: str) -> Any:
    """The model's outputs; float32 where they were computed in less."""
    if precision != "bf16":
        return model(inputs)
    with torch.autocast(inputs.device.type, torch.bfloat16):
        outputs = model(inputs)
    return outputs.float()


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the samples of a pass change each other's outputs, so that none has a gradient of its own."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def loss_of(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, precision: str) -> Tensor:
    """The mean loss of a batch."""
    return loss_fn(predict(model, inputs, precision), targets)


@cache
def compiled_loss_of(*, fullgraph: bool = True) -> Callable[..., Tensor]:
    """One for all runs of a process: a second model of the same build takes the code compiled for the first.

    DDP's own part of the forward pass is not compiled, which breaks the graph: not `fullgraph`.
    """
    import torch._dynamo  # takes a second to import, and only compiled runs need it

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    # Code for one shape is faster than code for any, and a run has few shapes.
    return torch.compile(loss_of, dynamic=False, fullgraph=fullgraph)
