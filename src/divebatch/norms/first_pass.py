"""A compiled model's first measured pass, which runs without its compiled code and is looked at layer by layer."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from divebatch.errors import CoverageError
from divebatch.norms.backward import Backward
from divebatch.norms.eager_engine import Hooks
from divebatch.norms.registry import CoveredLayer


class FirstPass:
    """Shows what compiled code would not: gradients that no rule sees, samples that differ, layers called twice.

    Nothing is compiled for it: until it has gone well, torch runs all compiled functions as they were written.

    Args:
        layers: all that have a rule.
        mode: how norms are measured, "exact" or "sketch".
        on_end: is told of the pass, after which everything runs compiled.
    """

    def __init__(self, layers: Sequence[CoveredLayer], mode: str, on_end: Callable[[Backward], None]) -> None:
        self._on_end, self._restore = on_end, _no_compiled_code()
        self._hooks = Hooks(layers, mode, self._finish)
        self._hooks.switch_on()
        # Whatever becomes of the meter, the process must not go on without its compiled code.
        weakref.finalize(self, self._restore)

    def end(self) -> None:
        """Look no longer; compiled code runs again."""
        self._hooks.switch_off()
        self._restore()

    @property
    def is_under_way(self) -> bool:
        """Whether passes are still looked at: one that is not finite says nothing."""
        return not self._hooks.is_checked

    def pause(self, paused: bool) -> None:
        """Let backward passes go by, or no longer."""
        self._hooks.paused = paused

    def forget(self) -> None:
        """Drop a pass that is under way."""
        self._hooks.forget()

    def _finish(self, done: Backward) -> None:
        twice = [layer.name for layer in done.layers if done.layers.count(layer) > 1]
        if twice:
            raise CoverageError(
                f"layer '{twice[0]}' was called several times in one forward pass: a compiled meter cannot "
                f"add its gradients up before it squares them",
                "measure without compiled=True",
            )
        if self._hooks.is_checked:
            self._hooks.stop_watching()  # other forward passes may wait for their backward pass
            self._restore()
        self._on_end(done)


def _no_compiled_code() -> Callable[[], None]:
    """Let torch run what is compiled as it was written; returns what undoes it, once."""
    stance: list[Any] = [torch.compiler.set_stance("force_eager")]

    def restore() -> None:
        while stance:
            stance.pop().__exit__(None, None, None)

    return restore
