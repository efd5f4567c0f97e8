"""When an optimizer is about to use its gradients."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Call = tuple[tuple[Any, ...], dict[str, Any]]


def when_gradients_are_used(optimizer: Optimizer, then: Callable[[], None]) -> RemovableHandle:
    """Call `then` once a step: before it, or where the step makes its gradients by a closure, after that first ran.

    A hook before `step(closure)` finds the gradients of the step before. Lightning always steps like that.
    """

    def hook(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            then()
            return None
        followed = _followed(closure, then)
        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    return optimizer.register_step_pre_hook(hook)


def _followed(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    """`closure`, and after its first call `then`: line searches call it again at other weights."""
    waiting = [then]

    def run() -> Any:
        result = closure()
        if waiting:
            waiting.pop()()
        return result

    return run
