"""The norm rule of GPT-2's own linear layer."""

from torch import Tensor, nn

from divebatch.integrations.transformers.framework import Conv1D
from divebatch.norms import rule_for
from divebatch.norms.forms import Explicit, Form, Outer, positions


@rule_for(Conv1D)
def conv1d(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """GPT-2's linear layer: its weight is stored the other way round."""
    return {"weight": Outer(x, dy), "bias": Explicit(positions(dy).sum(1))}
