"""Gradient diversity: the norm meter and the sum of gradients side by side, over any number of backward passes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from divebatch.errors import ArgumentError, CheckpointError, CoverageError, UsageError
from divebatch.measurement import Diversity
from divebatch.norms.backward import Backward
from divebatch.norms.meter import NormMeter, pausing_meters
from divebatch.norms.sketch import sum_dtype
from divebatch.norms.sums import addend
from divebatch.norms.taps import Tapped

LossFn = Callable[[Any, Any], Tensor]


class DiversityMeter:
    """Sums ||g_i||^2 and g_i over backward passes; attach, run any loop, read `diversity()`.

    The gradient sum takes each backward pass's own gradient through parameter hooks, so gradient accumulation,
    clipping and `zero_grad` do not matter. It costs one copy of the trainable parameters, and a second one while a
    backward pass runs: a pass that dies half-way must be in neither sum. `settings` are NormMeter's.
    """

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        if settings.get("every", 1) != 1:
            raise ArgumentError(
                f"every must be 1 here, got every={settings['every']!r}: a pass that is not measured does not tell how "
                f"many samples its gradient is the mean of; mode='sketch' makes measuring cheap"
            )
        self._model, self._settings = model, settings
        self._cover()
        self._handles: list[RemovableHandle] = []
        self._sums: dict[str, Tensor] = {}
        self._pending: dict[int, dict[str, Tensor]] = {}

    def _cover(self) -> None:
        self.norms = NormMeter(self._model, **self._settings)
        self.norms.on_backward_end = self._take
        self._parameters = _trainable(self._model)

    def attach(self) -> None:
        """Start counting from zero, over what is trainable now: layers may have been frozen or set free."""
        if self._parameters.keys() != _trainable(self._model).keys():
            self._cover()
        self.norms.attach()
        self.reset()
        for name, parameter in self._parameters.items():
            self._handles.append(parameter.register_hook(partial(self._receive, name)))

    def detach(self) -> None:
        """Stop counting and free the sums."""
        self.norms.detach()
        while self._handles:
            self._handles.pop().remove()
        self._sums, self._pending = {}, {}

    @property
    def is_attached(self) -> bool:
        """Whether backward passes are being counted."""
        return bool(self._handles)

    def reset(self) -> None:
        """Back to zero without touching the hooks."""
        self.norms.reset()
        self._sums = {name: torch.zeros_like(p, dtype=sum_dtype(p.dtype)) for name, p in self._parameters.items()}
        self._pending = {}
        self._coverage_is_checked = False

    def diversity(self) -> Diversity:
        """The two sums since the last reset."""
        if not self._sums:
            raise UsageError("this DiversityMeter is not attached: read diversity() before detaching")
        sq_norms = [torch.linalg.vector_norm(total, dtype=torch.float64) ** 2 for total in self._sums.values()]
        return Diversity(self.norms.sum_of_sq_norms(), float(torch.stack(sq_norms).sum()), self.norms.num_samples)

    def state_dict(self) -> dict[str, Any]:
        """The sums, for a checkpoint in the middle of a measured epoch."""
        return {
            "sum_of_sq_norms": self.norms.sum_of_sq_norms(),
            "num_samples": self.norms.num_samples,
            "gradient_sums": {name: total.clone() for name, total in self._sums.items()},
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if the sums are another model's."""
        there = {name: tuple(total.shape) for name, total in state["gradient_sums"].items()}
        here = {name: tuple(p.shape) for name, p in self._parameters.items()}
        different = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
        if different:
            name = different[0]
            raise CheckpointError(
                f"the checkpoint's gradient sums are another model's: parameter '{name}' has shape "
                f"{there.get(name)} there and {here.get(name)} here"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved sums."""
        self.check_state(state)
        self.reset()
        for name, total in self._sums.items():
            total.copy_(state["gradient_sums"][name])
        self.norms.load_sums(state["sum_of_sq_norms"], state["num_samples"])

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _receive(self, name: str, gradient: Tensor) -> None:
        """A parameter's gradient of the backward pass under way."""
        if self.norms.paused:
            return
        task = torch._C._current_graph_task_id()
        if task not in self._pending:
            self._pending[task] = {}
            if not self.norms.backward_of(task).layers:  # the meter may never hear of this pass
                Variable._execution_engine.queue_callback(partial(self._check_coverage, task))
        self._pending[task][name] = gradient.detach()

    def _take(self, done: Backward | Tapped) -> None:
        """A backward pass has ended: its gradients go into the sum."""
        if not self._coverage_is_checked:
            self._coverage_is_checked = True
            self._require_called(done)
        received = {name: gradient for part in self._pending.values() for name, gradient in part.items()}
        self._pending = {}
        if not received:
            return
        sums = [self._sums[name] for name in received]
        gradients = [addend(g, s) for g, s in zip(received.values(), sums, strict=True)]
        counts = self.norms.last_counts
        if counts is not None:
            gradients = [torch.where(counts, gradient, 0.0) for gradient in gradients]
        scale = self.norms.gradient_scale(done)
        if isinstance(scale, Tensor):
            torch._foreach_add_(sums, torch._foreach_mul(gradients, scale.to(sums[0].dtype)))
        else:
            torch._foreach_add_(sums, gradients, alpha=scale)

    def _check_coverage(self, task: int) -> None:
        if task in self._pending:
            self._require_called(self.norms.backward_of(task))

    def _require_called(self, backward: Backward | Tapped) -> None:
        """A weight used past its layer's forward would be missing in the norms."""
        counted = {id(p) for layer in backward.layers for p in layer.parameters}
        received = {name for part in self._pending.values() for name in part}
        missed = [name for name, p in self._parameters.items() if name in received and id(p) not in counted]
        if missed:
            self._pending = {}
            raise CoverageError(
                f"parameters {missed} received gradients although their layer was not called: "
                f"call the layer itself, not a function on its weight"
            )


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


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
    found = [(m, key, b, b.clone()) for m in model.modules() for key, b in m._buffers.items() if b is not None]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, key, buffer, before in found:
                    module._buffers[key] = buffer.copy_(before)
