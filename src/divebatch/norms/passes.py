"""The backward passes that run now, each with one record for all who observe it."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

if TYPE_CHECKING:
    from divebatch.norms.loss_scale import LossWeight

# Of the process, by autograd's number of the pass, which no other pass gets. Only autograd's engine holds a record, by
# the callback that ends it: a pass that dies half-way vanishes from here with all that was noted of it.
_under_way: "weakref.WeakValueDictionary[int, BackwardPass]" = weakref.WeakValueDictionary()


class BackwardPass:
    """One backward pass under way."""

    __slots__ = ("__weakref__", "_at_end", "notes", "number", "weight")

    def __init__(self, number: int) -> None:
        self.number = number
        self.weight: LossWeight | None = None
        """The weight that its loss was multiplied by."""
        self.notes: dict[object, Any] = {}
        """What each observer keeps of this pass."""
        self._at_end: list[Callable[[BackwardPass], None]] = []

    def at_end(self, function: "Callable[[BackwardPass], None]") -> None:
        """Call `function` once with this pass when it is over, after those that were registered before."""
        if function not in self._at_end:
            self._at_end.append(function)

    def _end(self) -> None:
        _under_way.pop(self.number, None)
        for function in self._at_end:
            function(self)


def current_pass() -> BackwardPass:
    """Return the record of the backward pass that runs now."""
    number = torch._C._current_graph_task_id()
    found = _under_way.get(number)
    if found is None:
        found = _under_way[number] = BackwardPass(number)
        # No hook is the last one of a pass for sure, but autograd's engine calls this when the pass is over.
        Variable._execution_engine.queue_callback(found._end)
    return found


def passes_seen_by(owner: object) -> list[BackwardPass]:
    """Return the passes under way of which `owner` keeps notes, the outermost first."""
    return [each for each in _under_way.values() if owner in each.notes] if _under_way else []


def will_receive(parameter: Tensor) -> tuple[bool, bool]:
    """Tell whether the pass under way brings this parameter a gradient, and whether it is an ordinary `backward()`.

    `torch.autograd.grad` asks for the gradients of chosen tensors, such as an attack's inputs, and leaves others out.
    """
    with torch.enable_grad():
        node: Any = parameter.view_as(parameter).grad_fn
    try:
        executes = torch._C._will_engine_execute_node(node.next_functions[0][0])
    except RuntimeError:  # torch does not say it of a leaf whose gradient autograd.grad was asked for
        return True, False
    return executes, executes


class ModuleHook:
    """A hook for one module. Copies of the module, deep or pickled, have it too, and for them it does nothing."""

    def __init__(self, module: nn.Module | None = None, function: Callable[..., Any] | None = None) -> None:
        self._module, self._function = module, function

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Run the hook, called by torch."""
        return self._function(module, *args) if module is self._module and self._function is not None else None

    def __deepcopy__(self, _: object) -> "ModuleHook":
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ModuleHook, ()
