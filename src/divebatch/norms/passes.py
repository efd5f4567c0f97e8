"""Current backward passes, each with one record for all observers."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

if TYPE_CHECKING:
    from divebatch.norms.loss_scale import LossWeight

# Of the process, by autograd's unique number of the pass. Only autograd's engine holds a record, in the callback that
# ends the pass: the record of a pass that fails half-way disappears from here.
_under_way: "weakref.WeakValueDictionary[int, BackwardPass]" = weakref.WeakValueDictionary()


class BackwardPass:
    """One running backward pass."""

    __slots__ = ("__weakref__", "_at_end", "notes", "number", "weight")

    def __init__(self, number: int) -> None:
        self.number = number
        self.weight: LossWeight | None = None
        """The weight by which the loss was multiplied."""
        self.notes: dict[object, Any] = {}
        """The observers' own data about this pass."""
        self._at_end: list[Callable[[BackwardPass], None]] = []

    def at_end(self, function: "Callable[[BackwardPass], None]") -> None:
        """Call `function` once with this pass at its end, after functions registered before."""
        if function not in self._at_end:
            self._at_end.append(function)

    def _end(self) -> None:
        _under_way.pop(self.number, None)
        for function in self._at_end:
            function(self)


def current_pass() -> BackwardPass:
    """Return the record of the current backward pass."""
    number = torch._C._current_graph_task_id()
    found = _under_way.get(number)
    if found is None:
        found = _under_way[number] = BackwardPass(number)
        # No hook is surely the last one of a pass, but autograd's engine runs this callback at its end.
        Variable._execution_engine.queue_callback(found._end)
    return found


def passes_seen_by(owner: object) -> list[BackwardPass]:
    """Return the running passes in which `owner` keeps notes, outermost first."""
    return [each for each in _under_way.values() if owner in each.notes] if _under_way else []


def will_receive(parameter: Tensor) -> tuple[bool, bool]:
    """Return whether the current pass gives this parameter a gradient, and whether it was started by `backward()`.

    `torch.autograd.grad` returns the gradients of chosen tensors, such as an attack's inputs, and leaves others out.
    """
    with torch.enable_grad():
        node: Any = parameter.view_as(parameter).grad_fn
    try:
        executes = torch._C._will_engine_execute_node(node.next_functions[0][0])
    except RuntimeError:  # torch cannot answer for a leaf passed to autograd.grad
        return True, False
    return executes, executes


class ModuleHook:
    """A hook for one module. Deep or pickled copies of the module also have the hook, but there it does nothing."""

    def __init__(self, module: nn.Module | None = None, function: Callable[..., Any] | None = None) -> None:
        self._module, self._function = module, function

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """Run the hook; torch calls this method."""
        return self._function(module, *args) if module is self._module and self._function is not None else None

    def __deepcopy__(self, _: object) -> "ModuleHook":
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ModuleHook, ()
