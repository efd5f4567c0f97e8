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
        self._graph = torch.cuda.CUDAGraph()
        waiting = {name: parameter.grad for name, parameter in parameters.items()}  # of the batch's earlier parts
        try:
            for parameter in parameters.values():
                parameter.grad = None  # made within the recording, they are written and not added to
            with torch.cuda.graph(self._graph):
                loss = run(self._inputs, self._targets)
                loss.backward()
            self._loss = loss.detach()
            self._parameters = {name: each for name, each in parameters.items() if each.grad is not None}
            self.gradients: dict[str, Tensor] = {name: each.grad for name, each in self._parameters.items()}  # type: ignore[misc]
            """Of the last replay alone, whatever was added up; valid until the next one."""
        finally:
            for name, parameter in parameters.items():
                parameter.grad = waiting[name]

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

    def add_up(self, share: float) -> None:
        """The last replay's gradients times `share` are added to the parameters'; costs one copy of them."""
        first: list[str] = []
        others: list[str] = []
        for name, parameter in self._parameters.items():
            (first if parameter.grad is None else others).append(name)
        if others:
            totals = [self._parameters[name].grad for name in others]
            torch._foreach_add_(totals, [self.gradients[name] for name in others], alpha=share)  # type: ignore[arg-type]
        if first:
            scaled = torch._foreach_mul([self.gradients[name] for name in first], share)
            for name, gradient in zip(first, scaled, strict=True):
                self._parameters[name].grad = gradient
