"""Hooks on modules that leave copies of a model alone, and the question whom a backward pass brings gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ModuleHook:
    """A hook for one module. Copies of the module, deep or pickled, have it too, and for them it does nothing.

    Args:
        module: the module; None for the hook of a pickled copy.
        function: called as torch calls a module's hooks.
    """

    def __init__(self, module: nn.Module | None = None, function: Callable[..., Any] | None = None) -> None:
        self._module, self._function = module, function

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Called by torch."""
        return self._function(module, *args) if module is self._module and self._function is not None else None

    def __deepcopy__(self, _: object) -> "ModuleHook":
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ModuleHook, ()


def will_receive(parameter: Tensor) -> tuple[bool, bool]:
    """Whether the backward pass under way brings this parameter a gradient, and whether it is an ordinary one.

    `torch.autograd.grad` asks for the gradients of chosen tensors, such as an attack's inputs, and leaves others out.
    """
    with torch.enable_grad():
        node: Any = parameter.view_as(parameter).grad_fn
    try:
        executes = torch._C._will_engine_execute_node(node.next_functions[0][0])
    except RuntimeError:  # torch does not say it of a leaf whose gradient autograd.grad was asked for
        return True, False
    return executes, executes
