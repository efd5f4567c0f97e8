"""A forward and backward pass as one CUDA graph."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Recording:
    """Launches a whole pass at once: at small batches a GPU otherwise waits for hundreds of single launches.

    Inputs are copied into fixed places and gradients come out at fixed places. `run(inputs, targets)` gives the loss
    and must have run before with the same shapes, so that nothing is left to compile or to choose.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        run: Callable[[Tensor, Tensor], Tensor],
        inputs: Tensor,
        targets: Tensor,
    ) -> None:
        self._inputs, self._targets = inputs.clone(), targets.clone()
        waiting = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None  # made within the recording, they are written and not added to
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            loss = run(self._inputs, self._targets)
            loss.backward()
        self._loss = loss.detach()
        self._parameters = {name: each for name, each in parameters.items() if each.grad is not None}
        self.gradients: dict[str, Tensor] = {name: each.grad for name, each in self._parameters.items()}  # type: ignore[misc]
        """Of the last replay alone, whatever was added up; valid until the next one."""
        self._totals: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            parameter.grad = waiting[name]  # of earlier parts of the batch

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the pass on new data; its loss, valid until the next one. The parameters' gradients stay as they are."""
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._graph.replay()
        return self._loss

    def hand_over(self) -> None:
        """The last replay's gradients become the parameters'."""
        for name, parameter in self._parameters.items():
            parameter.grad = self.gradients[name]

    def add_up(self) -> None:
        """The last replay's gradients are added to the parameters'; costs one copy of the trainable parameters."""
        self._totals = self._totals or {name: torch.empty_like(each) for name, each in self.gradients.items()}
        first = [name for name, parameter in self._parameters.items() if parameter.grad is None]
        others = [name for name in self._parameters if name not in first]
        for name in first:
            self._parameters[name].grad = self._totals[name]
        _each(torch._foreach_copy_, self._parameters, first, self.gradients)
        _each(torch._foreach_add_, self._parameters, others, self.gradients)


def _each(
    change: Callable[[list[Tensor], list[Tensor]], object],
    parameters: Mapping[str, Tensor],
    names: list[str],
    by: Mapping[str, Tensor],
) -> None:
    """All at once: each by itself would be a launch."""
    if names:
        change([parameters[name].grad for name in names], [by[name] for name in names])  # type: ignore[misc]
