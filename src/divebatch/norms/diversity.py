"""Gradient diversity: the norm meter and the sum of gradients side by side, over any number of backward passes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from divebatch.errors import ArgumentError, CoverageError
from divebatch.measurement import Diversity
from divebatch.norms.meter import NormMeter, pausing_meters
from divebatch.norms.registry import CoveredLayer

LossFn = Callable[[Any, Any], Tensor]


class DiversityMeter:
    """Sums ||g_i||^2 and g_i over backward passes; attach, run any loop, read `diversity()`.

    The gradient sum takes each backward pass's own gradient through parameter hooks, so gradient accumulation,
    clipping and `zero_grad` do not matter. It costs one copy of the trainable parameters.
    """

    def __init__(self, model: nn.Module, *, loss_reduction: str = "mean") -> None:
        self.norms = NormMeter(model, loss_reduction=loss_reduction)
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._handles: list[RemovableHandle] = []
        self._sums: list[Tensor] = []

    def attach(self) -> None:
        """Start counting from zero."""
        self.norms.attach()
        self.reset()
        for index, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_hook(partial(self._add, index)))

    def detach(self) -> None:
        """Stop counting and free the sums."""
        self.norms.detach()
        while self._handles:
            self._handles.pop().remove()
        self._sums = []

    @property
    def is_attached(self) -> bool:
        """Whether backward passes are being counted."""
        return bool(self._handles)

    def reset(self) -> None:
        """Back to zero without touching the hooks."""
        self.norms.reset()
        self._sums = [torch.zeros_like(p, dtype=_sum_dtype(p)) for p in self._parameters]
        self._seen: set[int] = set()
        self.norms.on_backward_end = self._check_layers_were_called

    def diversity(self) -> Diversity:
        """The two sums since the last reset."""
        sq_norms = [torch.linalg.vector_norm(total, dtype=torch.float64) ** 2 for total in self._sums]
        sq_norm_of_sum = float(torch.stack(sq_norms).sum()) if sq_norms else 0.0
        return Diversity(self.norms.sum_of_sq_norms(), sq_norm_of_sum, self.norms.num_samples)

    def state_dict(self) -> dict[str, Any]:
        """The sums, for a checkpoint in the middle of a measured epoch."""
        return {
            "sum_of_sq_norms": self.norms.sum_of_sq_norms(),
            "num_samples": self.norms.num_samples,
            "gradient_sums": {name: total.clone() for name, total in zip(self.names, self._sums, strict=True)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved sums."""
        self.reset()
        for name, total in zip(self.names, self._sums, strict=True):
            total.copy_(state["gradient_sums"][name])
        device = self._parameters[0].device
        self.norms.load_sums(state["sum_of_sq_norms"], state["num_samples"], device)

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _add(self, index: int, gradient: Tensor) -> None:
        if self.norms.paused:
            return
        if self.norms.on_backward_end is not None:
            self._seen.add(index)
        self._sums[index].add_(gradient, alpha=self.norms.gradient_scale)

    def _check_layers_were_called(self, called: list[CoveredLayer]) -> None:
        """After the first backward pass: a weight used past its layer's forward would be missing in the norms."""
        self.norms.on_backward_end = None
        counted = {id(p) for layer in called for p in layer.module.parameters(recurse=False)}
        missed = [self.names[i] for i in sorted(self._seen) if id(self._parameters[i]) not in counted]
        if missed:
            raise CoverageError(
                f"parameters {missed} received gradients although their layer was not called: "
                f"call the layer itself, not a function on its weight"
            )


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def gradient_diversity(
    model: nn.Module, loss_fn: LossFn, batches: Iterable[Any], *, loss_reduction: str = "mean"
) -> Diversity:
    """Exact gradient diversity of the samples in `batches`, at the model's present weights.

    `batches` yields `(inputs, targets)`; the loss is `loss_fn(model(inputs), targets)`, reduced as `loss_reduction`
    says. The model runs in the mode it is in, and is left as found: weights, gradients, buffers, mode, random state.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> data = [(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))]
    >>> gradient_diversity(model, lambda out, _: out.mean(), data)  # gradients 1 and 3: (1 + 9) / (1 + 3)^2
    Diversity(sum_of_sq_norms=10.0, sq_norm_of_sum=16.0, num_samples=2)
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    meter = DiversityMeter(model, loss_reduction=loss_reduction)
    with pausing_meters(), _left_as_found(model), torch.enable_grad(), meter:
        for inputs, targets in batches:
            # grad() and not backward(): the parameters' own .grad stays untouched.
            torch.autograd.grad(loss_fn(model(inputs), targets), parameters, allow_unused=True)
        if meter.norms.num_samples == 0:
            raise ArgumentError("gradient_diversity was given no batches")
        return meter.diversity()


@contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Restore buffers (BatchNorm statistics) and the random state (dropout) afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
