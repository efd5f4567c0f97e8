"""Per-sample squared gradient norms inside the one normal backward pass.

Mechanism: a forward hook on each covered layer puts a hook on the layer's output tensor. When the backward pass
reaches that tensor, the layer's input and output gradient are both at hand, and the rule turns them into the gradients
of the samples. (Module backward hooks would fail before an in-place ReLU.)
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from divebatch.errors import ArgumentError, UsageError
from divebatch.norms.backward import Backward, Family, families
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
        self._families = families(self.layers)
        self.on_backward_end: Callable[[Backward], None] | None = None
        self.paused = False
        self._handles: list[RemovableHandle] = []
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

    def reset(self) -> None:
        """Forget all sums."""
        self._total: Tensor | None = None
        self._last: Tensor | None = None
        self._last_scale = 1.0
        self._num_samples = 0
        self._under_way: dict[int, Backward] = {}

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
        for family in self._families:
            family.open_calls.clear()
            for layer in family.layers:
                # First in line: a user's hook may change the output, and that change is part of the loss.
                watch = layer.module.register_forward_hook(self._watcher(family, layer), with_kwargs=True, prepend=True)
                self._handles.append(watch)
        NormMeter.attached.add(self)

    def detach(self) -> None:
        """Remove all hooks; the sums stay."""
        while self._handles:
            self._handles.pop().remove()
        NormMeter.attached.discard(self)

    # One backward pass

    def _watcher(self, family: Family, layer: CoveredLayer) -> Callable[..., None]:
        def watch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if self.paused or not output.requires_grad:
                return
            if torch._C._current_graph_task_id() == -1:  # not a checkpoint's second forward pass
                self._under_way.clear()  # whatever is left died half-way
            call = object()
            family.open_calls.add(call)
            output.register_hook(partial(self._arrive, family, layer, call, layer.inputs(args, kwargs)))

        return watch

    def _arrive(self, family: Family, layer: CoveredLayer, call: object, x: Any, dy: Tensor) -> None:
        """The backward pass has reached one call of one layer."""
        if self.paused or not self._handles:
            return
        task = torch._C._current_graph_task_id()
        if task not in self._under_way:
            self._under_way[task] = Backward()
            Variable._execution_engine.queue_callback(partial(self._finish, task))
        self._under_way[task].add(family, layer, call, x, dy.detach() if dy.requires_grad else dy)

    def backward_of(self, task: int) -> Backward:
        """The backward pass with this id, as far as it has come; an empty one if no layer was reached yet."""
        return self._under_way.get(task) or Backward()

    def _finish(self, task: int) -> None:
        """Runs when the engine has finished this backward pass."""
        done = self._under_way.pop(task)
        done.count_rest()
        if self._under_way:  # a reentrant checkpoint's pass within another one: it is counted as part of that
            next(reversed(self._under_way.values())).take_over(done)
            return
        scale = float(done.gradient_scale(self.loss_reduction)) ** 2
        self._last, self._last_scale = done.sq_norms, scale
        added = done.sq_norms.sum(dtype=torch.float64)
        self._total = added.mul_(scale) if self._total is None else self._total.add_(added, alpha=scale)
        self._num_samples += done.num_samples
        if self.on_backward_end is not None:
            self.on_backward_end(done)


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
