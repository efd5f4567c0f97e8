"""Linear layers on inputs of any rank."""

from torch import Tensor, nn

from divebatch.norms.forms import Explicit, Form, Outer, RowSums
from divebatch.norms.registry import require_batch, rule_for


@rule_for(nn.Linear)
def linear(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Weight: sum over positions of dy_t x_t^T. Bias: sum over positions of dy_t."""
    require_batch(layer, x, 2)
    if dy.ndim > 2:
        return {"bias": RowSums(dy), "weight": Outer(dy, x)}
    rows = Explicit(dy)
    return {"bias": rows, "weight": Outer(dy, x, rows)}
