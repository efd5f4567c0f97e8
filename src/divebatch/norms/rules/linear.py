"""Linear layers on inputs with any number of dimensions."""

from torch import Tensor, nn

from divebatch.norms.forms import Explicit, Form, Outer, RowSums
from divebatch.norms.registry import require_batch, rule_for


@rule_for(nn.Linear)
def linear(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Form]:
    """Sum dy_t x_t^T over positions for the weight, and dy_t for the bias."""
    require_batch(layer, x, 2)
    if dy.ndim > 2:
        return {"bias": RowSums(dy), "weight": Outer(dy, x)}
    rows = Explicit(dy)
    return {"bias": rows, "weight": Outer(dy, x, rows)}
