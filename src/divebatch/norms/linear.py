"""Linear layers on inputs of any rank."""

from torch import Tensor, nn

from divebatch.norms.forms import Explicit, Form, Outer, positions
from divebatch.norms.registry import is_trainable, require_batch, rule_for


@rule_for(nn.Linear)
def linear(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Weight: sum over positions of dy_t x_t^T. Bias: sum over positions of dy_t."""
    require_batch(layer, x, 2)
    gradients: dict[str, Form] = {}
    bias = None
    if is_trainable(layer, "bias"):
        gradients["bias"] = bias = Explicit(dy if dy.ndim == 2 else positions(dy).sum(1))
    if is_trainable(layer, "weight"):
        gradients["weight"] = Outer(dy, x, bias if dy.ndim == 2 else None)
    return gradients
