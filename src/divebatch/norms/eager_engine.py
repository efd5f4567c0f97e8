"""How eager backward passes are observed.

A forward hook on each covered layer puts a hook on the layer's output tensor. When the backward pass reaches that
tensor, the layer's input and output gradient are both at hand, and the rule turns them into the gradients of the
samples. (Module backward hooks would fail before an in-place ReLU.)
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from divebatch.norms.backward import Backward, Call, Family, families
from divebatch.norms.loss_scale import weight_of_pass
from divebatch.norms.recompute import Rerun, Surroundings
from divebatch.norms.registry import CoveredLayer
from divebatch.norms.sample_gradients import forget_memory_caps


class Hooks:
    """Tells `on_end` of every backward pass while it is switched on."""

    def __init__(self, layers: Sequence[CoveredLayer], mode: str, on_end: Callable[[Backward], None]) -> None:
        self.paused = False
        self.on_start: Callable[[], None] | None = None
        """Called when a backward pass has reached its first layer, before any parameter has its gradient."""
        self._mode, self._on_end = mode, on_end
        self._families = families(layers)
        self._handles: list[RemovableHandle] = []
        self._under_way: dict[int, Backward] = {}
        self._surroundings: dict[CoveredLayer, Surroundings] = {}

    def switch_on(self) -> None:
        """Hook the layers."""
        if self._handles:
            return
        forget_memory_caps()
        for family in self._families:
            family.open_calls.clear()
            for layer in family.layers:
                # First in line: a user's hook may change the output, and that change is part of the loss.
                watch = layer.module.register_forward_hook(self._watcher(family, layer), with_kwargs=True, prepend=True)
                self._handles.append(watch)
                if layer.entry.reruns:
                    self._handles.append(layer.module.register_forward_pre_hook(self._looker(layer)))

    def switch_off(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()

    def check(self) -> None:
        """Whatever is wrong was said when it happened."""

    def forget(self) -> None:
        """Drop passes that are under way."""
        self._under_way = {}

    def backward_of(self, task: int) -> Backward:
        """The backward pass with this id, as far as it has come; an empty one if no layer was reached yet."""
        return self._under_way.get(task) or Backward()

    def _watcher(self, family: Family, layer: CoveredLayer) -> Callable[..., None]:
        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            observed = layer.observed(output)
            if self.paused or not observed or module is not layer.module:  # a deep copy has our hooks too
                return
            task = torch._C._current_graph_task_id()
            if task == -1:
                self._under_way.clear()  # whatever is left died half-way
            else:  # a checkpoint's second forward pass: what it leads to is part of the pass that runs now
                self._start(task)
            inputs = layer.inputs(args, kwargs)
            if layer.entry.look is not None:
                inputs = layer.entry.look(module, inputs, output)
            for index, tensor in observed:  # several outputs of one call are as several calls: their gradients add up
                seen = Rerun(inputs, index, self._surroundings[layer]) if layer.entry.reruns else inputs
                call = Call(seen, layer.module)
                family.open_calls.add(call)
                # On the tensor: a module's backward hook would fail before an in-place ReLU.
                tensor.register_hook(partial(self._arrive, family, layer, call))

        return watch

    def _looker(self, layer: CoveredLayer) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._surroundings[layer] = Surroundings.of(module)

        return look

    def _arrive(self, family: Family, layer: CoveredLayer, call: Call, dy: Tensor | None) -> None:
        """The backward pass has reached one call of one layer; without gradient if only a sibling output has one."""
        if self.paused or not self._handles:
            return
        if dy is None:
            call.let_go()
            family.open_calls.discard(call)
            return
        task = torch._C._current_graph_task_id()
        self._start(task)
        self.paused = True  # a fallback runs the layer again
        try:
            self._under_way[task].add(family, layer, call, dy.detach() if dy.requires_grad else dy)
        finally:
            self.paused = False

    def _start(self, task: int) -> None:
        if task not in self._under_way:
            if self.on_start is not None and not self._under_way:
                self.on_start()
            self._under_way[task] = Backward(self._mode)
            # No hook is the last one of a pass for sure, but autograd's engine calls this when the pass is over.
            Variable._execution_engine.queue_callback(partial(self._finish, task))

    def _finish(self, task: int) -> None:
        """Runs when the engine has finished this backward pass."""
        done = self._under_way.pop(task, None)
        if done is None or not done.layers:
            return
        done.count_rest()
        done.weight = weight_of_pass(task) if done.weight is None else done.weight
        if self._under_way:  # a reentrant checkpoint's pass within another one, of which it is counted as a part
            next(reversed(self._under_way.values())).take_over(done)
        else:
            self._on_end(done)
