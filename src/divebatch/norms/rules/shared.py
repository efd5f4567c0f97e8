"""Parameters that samples share by broadcasting, outside any layer of their own: class tokens, learned positions.

While these parameters are measured, a view with one row per sample replaces each of them in its module. The module
computes the same, and each row of the view's gradient is one sample's own gradient.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from divebatch.errors import ArgumentError, CoverageError
from divebatch.norms.registry import CoveredLayer, Entry, add_rule, is_shareable
from divebatch.norms.sharded import is_sharded


def shared_by_samples(kind: type[nn.Module], *names: str) -> None:
    """Register a rule for a module's parameters that all samples share: a class token, learned positions.

    The first dimension of such a parameter is 1 and represents the batch, as in `self.cls_token.expand(len(x), -1, -1)`
    or `x + self.pos_embed`. During measurement that dimension is as long as the batch. Any other use than broadcasting
    raises an error in the first measured pass, such as a sum over the parameter, or a row taken out of it.

    Args:
        kind: The type of the module that holds the parameters; subclasses do not inherit the rule.
        names: The parameters' names in that module: `shared_by_samples(ViT, "cls_token", "pos_embed")`.
    """
    if not names:
        raise ArgumentError(f"which parameters of {kind.__name__}? Pass their names: 'cls_token', 'pos_embed'")
    add_rule(kind, Entry(_rows, names, by_rows=True))


def _rows(_: nn.Module, name: str, dy: Tensor) -> Mapping[str, Tensor]:
    """Return the gradient of the view, with the parameter's own first dimension restored."""
    return {name: dy.unsqueeze(1)}


class Rows:
    """A hook that replaces a module's parameters by views with one row per sample while its forward runs.

    Args:
        layer: The module, whose rule is `shared_by_samples`.
        on_rows: A function that receives each parameter's name and its view.
    """

    def __init__(self, layer: CoveredLayer, on_rows: Callable[[str, Tensor], None]) -> None:
        self._layer, self._on_rows = layer, on_rows
        for name, parameter in layer.module._parameters.items():
            if parameter is not None and parameter.requires_grad and not is_shareable(parameter):
                raise CoverageError(
                    f"'{layer.name_of(name)}' has the shape {tuple(parameter.shape)}: shared_by_samples is for "
                    f"parameters whose first dimension is 1 and stands for the batch"
                )
            if is_sharded(parameter):
                raise CoverageError(f"FSDP2 has sharded '{layer.name_of(name)}', which shared_by_samples needs whole")

    def put_in(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim), None)
        if first is None:
            raise CoverageError("a module with parameters that its samples share has no tensor among its inputs")
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
                rows = parameter.expand(len(first), *parameter.shape[1:])
                self._on_rows(name, rows)
                # A module looks here before its parameters, and saves only its parameters.
                module.__dict__[name] = rows

    def take_out(self, module: nn.Module, *_: Any) -> None:
        for name in module._parameters:
            module.__dict__.pop(name, None)

    def require_own_rows(self, name: str, dy: Tensor | None) -> None:
        """Raise if the view was not used row by row, since its rows are then not the samples'."""
        if dy is None or len(dy) < 2 or not dy.any():
            return
        used = dy.flatten(1).any(1)
        if (dy == dy[0]).all() or (used[0] and not used[1:].any()):
            raise CoverageError(
                f"'{self._layer.name_of(name)}' is not used by broadcasting over the samples: all of them have the "
                f"same gradient of it, or only the first has one",
                f"write self.{name}.expand(batch, ...) or x + self.{name}, without a sum over it or a row taken out",
            )
