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
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from divebatch.norms.adding_up import SumCheck
from divebatch.norms.backward import Backward, Call, Family, families
from divebatch.norms.loss_scale import weight_of_pass
from divebatch.norms.module_hooks import ModuleHook, will_receive
from divebatch.norms.recompute import Rerun, Surroundings
from divebatch.norms.registry import CoveredLayer
from divebatch.norms.sample_gradients import forget_memory_caps
from divebatch.norms.sharded import is_sharded
from divebatch.norms.shared_parameters import Rows


class Hooks:
    """Tells `on_end` of every backward pass while it is switched on. The first one is checked to miss nothing."""

    def __init__(self, layers: Sequence[CoveredLayer], mode: str, on_end: Callable[[Backward], None]) -> None:
        self.paused = False
        self.on_start: Callable[[], None] | None = None
        """Called when a backward pass has reached its first layer, before any parameter has its gradient."""
        self._mode, self._on_end = mode, on_end
        self._families = families(layers)
        self._handles: list[RemovableHandle] = []
        self._is_on = False
        self._under_way: dict[int, Backward] = {}
        self._surroundings: dict[CoveredLayer, Surroundings] = {}
        self._is_sharded = any(is_sharded(parameter) for layer in layers for parameter in layer.parameters)
        """FSDP2 exchanges the parameters on the way, of which autograd then knows nothing."""
        self._check = SumCheck(layers, self._begin_alone)

    def switch_on(self) -> None:
        """Hook the layers."""
        if self._is_on:
            return
        self._is_on = True
        forget_memory_caps()
        for family in self._families:
            family.open_calls.clear()
            for layer in family.layers:
                if layer.entry.by_rows:
                    self._watch_rows(family, layer)
                    continue
                watch = ModuleHook(layer.module, partial(self._watch, family, layer))
                # First in line: a user's hook may change the output, and that change is part of the loss.
                self._handles.append(layer.module.register_forward_hook(watch, with_kwargs=True, prepend=True))
                if layer.entry.reruns:
                    look = ModuleHook(layer.module, partial(self._look, layer))
                    self._handles.append(layer.module.register_forward_pre_hook(look))
        self._check.begin()

    def _watch_rows(self, family: Family, layer: CoveredLayer) -> None:
        """Measure a module's own parameters, whatever it computes with them."""

        def on_rows(name: str, view: Tensor) -> None:
            call = Call(name, layer)
            family.open_calls.add(call)
            view.register_hook(partial(arrive, name, call))

        def arrive(name: str, call: Call, dy: Tensor) -> None:
            if self._check.is_on and not self.paused:
                rows.require_own_rows(name, dy)
            self._arrive(family, layer, call, dy)

        def put_in(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.paused:
                rows.put_in(module, args, kwargs)

        rows = Rows(layer, on_rows)
        before, after = ModuleHook(layer.module, put_in), ModuleHook(layer.module, rows.take_out)
        self._handles.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(layer.module.register_forward_hook(after, always_call=True))

    def switch_off(self) -> None:
        """Remove all hooks."""
        self._is_on = False
        self.stop_watching()
        self._check.end()

    def stop_watching(self) -> None:
        """Count the backward passes of forward passes that were, and no others."""
        while self._handles:
            self._handles.pop().remove()

    @property
    def is_checked(self) -> bool:
        """Whether a pass has shown that no gradient is missed."""
        return not self._check.is_on

    def check(self) -> None:
        """Whatever is wrong was said when it happened."""

    def forget(self) -> None:
        """Drop passes that are under way."""
        self._under_way = {}
        self._check.forget()

    def backward_of(self, task: int) -> Backward:
        """The backward pass with this id, as far as it has come; an empty one if no layer was reached yet."""
        return self._under_way.get(task) or Backward()

    def _watch(
        self,
        family: Family,
        layer: CoveredLayer,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """A layer has been called."""
        observed = layer.observed(output)
        if self.paused or not observed:
            return
        task = torch._C._current_graph_task_id()
        if task != -1:  # a checkpoint's second forward pass: what it leads to is part of the pass that runs now
            self._start(task)
        elif self._under_way:  # died half-way
            self.forget()
        if self._check.is_on:
            self._check.see_call(observed[0][1].device)
        inputs = layer.inputs(args, kwargs)
        if layer.entry.look is not None:
            inputs = layer.entry.look(module, inputs, output)
        for index, tensor in observed:  # several outputs of one call are as several calls: their gradients add up
            seen = Rerun(inputs, index, self._surroundings[layer]) if layer.entry.reruns else inputs
            call = Call(seen, layer)
            if self._check.is_on and layer.entry.doubt is not None:
                call.doubt = layer.entry.doubt(module, inputs)
            family.open_calls.add(call)
            arrive = partial(self._arrive, family, layer, call)
            if index == 0:
                _hook_gradient(tensor, (args, kwargs), arrive)
            else:  # further outputs may be in use within the layer
                tensor.register_hook(arrive)

    def _look(self, layer: CoveredLayer, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._surroundings[layer] = Surroundings.of(module)

    def _arrive(self, family: Family, layer: CoveredLayer, call: Call, dy: Tensor | None) -> None:
        """The backward pass has reached one call of one layer; without gradient if only a sibling output has one."""
        if self.paused or not self._is_on:
            return
        task = torch._C._current_graph_task_id()
        if dy is None or not self._counts(task, layer):
            call.let_go()
            family.open_calls.discard(call)
            return
        self._start(task)
        self.paused = True  # a fallback runs the layer again
        try:
            gradients = self._under_way[task].add(family, layer, call, dy.detach() if dy.requires_grad else dy)
            if self._check.is_on:
                self._check.see(task, gradients, dy.dtype)
        finally:
            self.paused = False

    def _counts(self, task: int, layer: CoveredLayer) -> bool:
        """Whether the pass brings the layer's parameters gradients; asked until it turns out to be an ordinary one."""
        if self._is_sharded or (task in self._under_way and self._under_way[task].is_ordinary):
            return True
        answers = [will_receive(parameter) for parameter in layer.parameters if parameter.requires_grad]
        if any(ordinary for _, ordinary in answers):
            self._start(task)
            self._under_way[task].is_ordinary = True
        counts = any(receives for receives, _ in answers)
        if not counts and torch.is_grad_enabled():
            # Gradients of gradients may follow, which no rule sees: the next pass must show that there are none.
            self._check.begin()
        return counts

    def _begin_alone(self, task: int) -> bool:
        """A parameter's gradient has come, maybe without its layer: whether the pass is one to look at."""
        if self.paused:
            return False
        self._start(task)
        return True

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
        if done is None:
            return
        done.count_rest()
        done.weight = weight_of_pass(task) if done.weight is None else done.weight
        if self._under_way:  # a reentrant checkpoint's pass within another one, of which it is counted as a part
            next(reversed(self._under_way.values())).take_over(done)
            return
        if self._check.is_on:
            self._check.conclude(done.sq_norms)
        if done.layers:
            self._on_end(done)


def _hook_gradient(tensor: Tensor, arguments: Any, arrive: Callable[[Tensor | None], None]) -> None:
    """Call `arrive` with the gradient of a layer's output as it is now.

    On the tensor: a module's backward hook would fail before an in-place ReLU. If it is a view of all of another
    tensor, an in-place operation on it bypasses its own gradient, and only the other's comes by.
    """
    base = tensor._base
    if base is None or not _stands_for(base, tensor) or any(_is_of(base, each) for each in tree_leaves(arguments)):
        tensor.register_hook(arrive)
        return
    shape, strides, is_plain = tensor.shape, tensor.stride(), tensor.is_contiguous()

    def arrive_as_output(gradient: Tensor | None) -> None:
        if gradient is not None:
            same = gradient.reshape(shape) if is_plain else gradient.contiguous().as_strided(shape, strides)
            gradient = same
        arrive(gradient)

    base.register_hook(arrive_as_output)


def _stands_for(base: Tensor, view: Tensor) -> bool:
    """Whether all of the one is in the other, so that gradients of both have the same entries."""
    return base.grad_fn is not None and base.numel() == view.numel() and base.is_contiguous()


def _is_of(base: Tensor, argument: Any) -> bool:
    """Whether an argument of the layer is this tensor or a view of it, which others may use too."""
    return isinstance(argument, Tensor) and (argument is base or argument._base is base)
