"""What a rank's own backward passes show of a model that FSDP2 has sharded, before gradients are averaged."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from divebatch.errors import UsageError
from divebatch.estimators.optimizer_events import OnPass, PassWatch
from divebatch.norms.sharded import is_sharded
from divebatch.norms.sketch import sum_dtype


class OwnNorms:
    """Tells the norms of this rank's own gradients, one for each parameter, after each backward pass.

    For its forward pass FSDP2 puts a whole parameter into the place of the sharded one, always the same object. Its
    gradient is this rank's own. Only its norm is kept: all gradients together are never held.

    Args:
        model: The sharded model.
        parameters: Its sharded parameters whose gradients are looked at, by name.
        on_pass: Is told of each pass.
        is_wanted: Says whether the pass under way is looked at.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        on_pass: OnPass,
        *,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._model, self._parameters, self._missing = model, parameters, set(parameters)
        self._passes = PassWatch({}, on_pass, is_wanted=is_wanted, keep=_norm)
        # FSDP2's own hook, which comes first, has brought the parameters of this module together.
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._look)
            for module in model.modules()
            if hasattr(module, "set_requires_gradient_sync")  # what `fully_shard` adds
        ]

    def close(self) -> None:
        """Take the hooks off."""
        self._stop_looking()
        self._passes.close()

    def require_all(self) -> None:
        """Raise if a parameter has a gradient and was never seen as a whole."""
        missed = [name for name in self._missing if self._parameters[name].grad is not None]
        if missed:
            raise UsageError(
                f"'{min(missed)}' has a gradient, but FSDP2 did not show it as a whole before a forward pass: call the "
                f"modules that fully_shard was given, and not other methods of theirs"
            )

    def _look(self, _: nn.Module, inputs: Any) -> None:
        for name, parameter in self._model.named_parameters():
            if name in self._missing and not is_sharded(parameter):
                self._missing.remove(name)
                self._passes.watch(name, parameter)
        if not self._missing:
            self._stop_looking()

    def _stop_looking(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def _norm(gradient: Tensor) -> Tensor:
    """Added up in at least float32."""
    norm: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=sum_dtype(gradient.dtype))
    return norm
