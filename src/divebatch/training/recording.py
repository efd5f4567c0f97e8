"""A forward and backward pass as one CUDA graph."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Recording:
    """Launches a whole pass at once: at small batches a GPU otherwise waits for hundreds of single launches.

    Inputs are copied into fixed places and gradients come out at fixed places, which the parameters are given after
    each replay. `run(inputs, targets)` gives the loss and must have run before with the same shapes, so that nothing
    is left to compile or to choose.
    """

    def __init__(
        self, parameters: Sequence[Tensor], run: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor
    ) -> None:
        self._inputs, self._targets = inputs.clone(), targets.clone()
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in self._parameters:
            parameter.grad = None  # made within the recording, they are written and not added to
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            loss = run(self._inputs, self._targets)
            loss.backward()
        self._loss = loss.detach()
        self._gradients = [parameter.grad for parameter in self._parameters]

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run the pass on new data; its loss, valid until the next one."""
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss
