"""Parameters that were frozen when measuring began: nobody counts them if they are trained after all."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from divebatch.errors import CoverageError
from divebatch.norms.module_hooks import ModuleHook


class FrozenParameters:
    """Raises as soon as one of them is used while it is trained."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._frozen: dict[str, nn.Parameter] = {}
        self._handles: list[RemovableHandle] = []

    def begin(self, *, hooks: bool) -> None:
        """Measuring begins; `hooks` puts some on the frozen layers, which a compiler would have to know."""
        self._frozen = {name: p for name, p in self._model.named_parameters() if not p.requires_grad}
        for name, module in self._model.named_modules() if hooks else ():
            own = {key: p for key, p in module.named_parameters(name, recurse=False) if not p.requires_grad}
            if own:
                look = ModuleHook(module, partial(self._look, own))
                self._handles.append(module.register_forward_pre_hook(look))

    def end(self) -> None:
        """Measuring has ended."""
        self._frozen = {}
        while self._handles:
            self._handles.pop().remove()

    def check(self) -> None:
        """Raise if one of them is trained now."""
        _require_frozen(self._frozen)

    def _look(self, own: Mapping[str, nn.Parameter], module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            _require_frozen(own)


def _require_frozen(parameters: Mapping[str, nn.Parameter]) -> None:
    free = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if free:
        raise CoverageError(
            f"parameter '{free[0]}'{f' (and {len(free) - 1} more)' if len(free) > 1 else ''} was frozen when measuring "
            f"began and is trained now, so that its gradients would be missing",
            "set it free before the epoch begins (a loop that freezes and frees it by turns must begin with it free)",
        )
