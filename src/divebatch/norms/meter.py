"""Per-sample squared gradient norms inside the one normal backward pass.

Mechanism: a forward hook on each covered layer puts a hook on the layer's output tensor. When the backward pass
reaches that tensor, the layer's input and output gradient are both at hand, and the rule turns them into one number
a sample. (Module backward hooks would fail before an in-place ReLU.)
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from divebatch.errors import ArgumentError, UsageError
from divebatch.norms.registry import CoveredLayer, cover

LOSS_REDUCTIONS = ("mean", "sum")


class NormMeter:
    """Counts sum_i ||g_i||^2 over ordinary backward passes, g_i the gradient of sample i's own, unaveraged loss.

    A sample is one entry of the batch dimension (a sequence, not a token). With `loss_reduction="mean"` every
    backward pass must be of the mean over its own batch of b samples, and the norms are multiplied by b^2; with
    `"sum"` they are taken as they come. Getting this wrong is off by b^2, silently: it is the classic error here.

    Every trainable parameter must belong to a layer with a rule; the error comes at construction and names them.

    >>> model = nn.Linear(3, 1)
    >>> with NormMeter(model) as meter:
    ...     model(torch.ones(4, 3)).mean().backward()
    >>> meter.per_sample(), meter.sum_of_sq_norms()  # each sample: three weights and a bias, all with gradient 1
    (tensor([4., 4., 4., 4.]), 16.0)
    """

    attached: ClassVar["weakref.WeakSet[NormMeter]"] = weakref.WeakSet()

    def __init__(self, model: nn.Module, *, loss_reduction: str = "mean") -> None:
        if loss_reduction not in LOSS_REDUCTIONS:
            known = ", ".join(LOSS_REDUCTIONS)
            raise ArgumentError(f"unknown loss_reduction {loss_reduction!r}; known: {known}")
        self.loss_reduction = loss_reduction
        self.layers = cover(model)
        self.on_backward_end: Callable[[list[CoveredLayer]], None] | None = None
        self.paused = False
        self._handles: list[RemovableHandle] = []
        self._open_calls: dict[str, int] = {}
        self.reset()

    # Results

    def sum_of_sq_norms(self) -> float:
        """The sum since the last `reset()`, over all samples of all backward passes; synchronises with the device."""
        return 0.0 if self._total is None else float(self._total)

    def per_sample(self) -> Tensor | None:
        """The last backward pass's squared norms, one per sample; None before the first."""
        return None if self._last is None else self._last * self._last_scale

    @property
    def num_samples(self) -> int:
        """Samples counted since the last `reset()`."""
        return self._num_samples

    @property
    def gradient_scale(self) -> int:
        """What turns a gradient of the backward pass under way into a sum of unaveraged per-sample gradients."""
        return self._backward.num_samples if self.loss_reduction == "mean" else 1

    def reset(self) -> None:
        """Forget all sums."""
        self._total: Tensor | None = None
        self._last: Tensor | None = None
        self._last_scale = 1.0
        self._num_samples = 0
        self._backward = _Backward()

    def load_sums(self, total: float, num_samples: int, device: torch.device) -> None:
        """Continue from saved sums."""
        self.reset()
        self._total = torch.tensor(total, dtype=torch.float64, device=device)
        self._num_samples = num_samples

    # Attaching

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Hook the layers; afterwards every backward pass is counted."""
        if self._handles:
            raise UsageError("this NormMeter is attached already")
        self._open_calls = {}
        for layer in self.layers:
            self._handles.append(layer.module.register_forward_hook(self._watcher(layer), with_kwargs=True))
        NormMeter.attached.add(self)

    def detach(self) -> None:
        """Remove all hooks; the sums stay."""
        while self._handles:
            self._handles.pop().remove()
        NormMeter.attached.discard(self)

    # One backward pass

    def _watcher(self, layer: CoveredLayer) -> Callable[..., None]:
        def watch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if self.paused or not output.requires_grad:
                return
            x = (args[0] if args else kwargs["input"]).detach()
            self._open_calls[layer.name] = self._open_calls.get(layer.name, 0) + 1
            output.register_hook(partial(self._arrive, layer, x))

        return watch

    def _arrive(self, layer: CoveredLayer, x: Tensor, dy: Tensor) -> None:
        """The backward pass has reached one call of one layer."""
        if self.paused:
            return
        # The id and not a flag: a backward pass that died half-way must not swallow the next one's start.
        task = torch._C._current_graph_task_id()
        if task != self._backward.task:
            self._backward = _Backward(task)
            Variable._execution_engine.queue_callback(self._finish_backward)
        self._backward.check_batch(layer, x)
        calls = self._backward.calls.setdefault(layer.name, (layer, []))[1]
        calls.append((x, dy.detach()))
        if len(calls) == self._open_calls.get(layer.name):  # counted at once, so that dy can be freed
            self._count(layer)

    def _count(self, layer: CoveredLayer) -> None:
        now = self._backward
        _, calls = now.calls.pop(layer.name)
        self._open_calls[layer.name] = max(0, self._open_calls.get(layer.name, 0) - len(calls))
        now.layers.append(layer)
        sq_norms = layer.sq_norms(calls)
        now.sq_norms = sq_norms if now.sq_norms is None else now.sq_norms + sq_norms

    def _finish_backward(self) -> None:
        """Runs when the engine has finished this backward pass."""
        now = self._backward
        for layer, _ in list(now.calls.values()):  # some call's forward was not (yet) followed by a backward
            self._count(layer)
        assert now.sq_norms is not None
        self._last, self._last_scale = now.sq_norms, float(self.gradient_scale) ** 2
        added = now.sq_norms.sum(dtype=torch.float64)
        self._total = (
            added.mul_(self._last_scale) if self._total is None else self._total.add_(added, alpha=self._last_scale)
        )
        self._num_samples += now.num_samples
        if self.on_backward_end is not None:
            self.on_backward_end(now.layers)
        self._backward = _Backward()


@dataclass(slots=True)
class _Backward:
    """What is known of the backward pass under way."""

    task: int = -1
    num_samples: int = 0
    sq_norms: Tensor | None = None
    layers: list[CoveredLayer] = field(default_factory=list)
    """Those already counted."""
    calls: dict[str, tuple[CoveredLayer, list[tuple[Tensor, Tensor]]]] = field(default_factory=dict)
    """Those that wait for further calls of the same layer."""

    def check_batch(self, layer: CoveredLayer, x: Tensor) -> None:
        if self.num_samples not in (0, x.shape[0]):
            raise UsageError(
                f"layer '{layer.name}' saw {x.shape[0]} samples and a later one {self.num_samples} in the same "
                f"backward pass: keep the batch dimension first and unmerged, e.g. (batch, time, features)"
            )
        self.num_samples = x.shape[0]


@contextmanager
def pausing_meters() -> Iterator[None]:
    """Inside, backward passes are not counted by the meters that are attached now."""
    pausing = [meter for meter in NormMeter.attached if not meter.paused]
    for meter in pausing:
        meter.paused = True
    try:
        yield
    finally:
        for meter in pausing:
            meter.paused = False
