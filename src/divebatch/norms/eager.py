"""The observation of eager backward passes.

A forward hook on each covered layer puts a hook on the layer's output tensor. When the backward pass reaches that
tensor, the layer's input and output gradient are both known, and the rule computes the samples' gradients from them.
(Module backward hooks would fail before an in-place ReLU.)
"""

import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from divebatch.errors import CoverageError, UsageError
from divebatch.norms.coverage import CoverageCheck, Evidence
from divebatch.norms.forms import Form, forget_memory_caps, measured, total
from divebatch.norms.loss_scale import LossWeight
from divebatch.norms.passes import BackwardPass, ModuleHook, current_pass, passes_seen_by, will_receive
from divebatch.norms.registry import CoveredLayer
from divebatch.norms.rules.rerun import Rerun, Surroundings, results
from divebatch.norms.rules.shared import Rows
from divebatch.norms.sharded import is_sharded
from divebatch.norms.sketch import Estimate, summed


@dataclass(slots=True, eq=False)
class TiedLayers:
    """Layers that share parameters, usually only one. Their gradients add up before squaring."""

    layers: list[CoveredLayer]
    open_calls: "weakref.WeakSet[LayerCall]" = field(default_factory=weakref.WeakSet)
    """Forward calls that no backward pass has reached yet; a call whose graph is dropped disappears by itself."""


def tied_layers(layers: Sequence[CoveredLayer]) -> list[TiedLayers]:
    """Group the layers so that no parameter is in two groups."""
    groups: list[tuple[set[int], TiedLayers]] = []
    for layer in layers:
        parameters, tied = {id(p) for p in layer.parameters}, TiedLayers([layer])
        for known, group in [each for each in groups if each[0] & parameters]:
            groups.remove((known, group))
            # The new layer may connect groups that had nothing in common before.
            parameters |= known
            tied.layers[:0] = group.layers
        groups.append((parameters, tied))
    return [tied for _, tied in groups]


class LayerCall:
    """One forward call of a layer, with its inputs.

    The inputs are held until the backward pass, and only weakly afterwards, so that autograd can free activations.
    """

    __slots__ = ("__weakref__", "_inputs", "_is_held", "_was_training", "error", "frozen", "watch")

    def __init__(self, watch: "LayerWatch", inputs: Any) -> None:
        self.watch = watch
        module = watch.layer.module
        self._inputs, self._is_held, self._was_training = inputs, True, module.training
        self.frozen: Container[str] = ()
        """Names of parameters that were constants in the forward call, whatever they are in the backward pass."""
        for p in module.parameters() if watch.layer.entry.reruns else module._parameters.values():
            if p is not None and not p.requires_grad:
                self.frozen = watch.layer.frozen()
                break
        self.error: str | None = None
        """The error found by the rule's `input_check`."""
        watch.tied.open_calls.add(self)

    def arrive(self, dy: Tensor | None) -> None:
        """Measure the call when the backward pass reaches it; `dy` is None if only a sibling output has a gradient."""
        engine = self.watch.engine
        if engine.paused or not engine.is_on:
            return
        record = None if dy is None else engine.record_for(self.watch.layer)
        if dy is None or record is None:
            self._let_go()
            self.watch.tied.open_calls.discard(self)
            return
        engine.paused = True  # a fallback runs the layer again
        try:
            gradients = record.add(self, dy.detach() if dy.requires_grad else dy)
            if engine.coverage.is_on:
                engine.coverage.see(record.evidence, gradients, dy.dtype)
        finally:
            engine.paused = False

    def gradients(self, dy: Tensor) -> list[tuple[nn.Parameter, Form]]:
        """Return the call's gradients by the layer's rule; the rule's errors then name the layer."""
        layer = self.watch.layer
        try:
            if self.error is not None:
                raise CoverageError(self.error, "expand what is shared by all samples, positions.expand(batch, -1)")
            module = layer.module
            if module.training != self._was_training and isinstance(module, _MODE_MATTERS):
                raise UsageError(f"a {type(module).__name__} changed its mode between forward and backward pass")
            inputs = self._inputs if self._is_held else _mapped(_alive, self._inputs)
            self._let_go()
            return layer.gradients(_mapped(Tensor.detach, inputs), dy, self.frozen)
        except CoverageError as error:
            raise CoverageError(f"layer {layer.place}: {error.what}", error.way) from error

    def _let_go(self) -> None:
        if self._is_held:  # keeping the inputs cost a quarter of a ResNet-18 step's peak memory
            self._inputs, self._is_held = _mapped(weakref.ref, self._inputs), False


_MODE_MATTERS = (_NormBase, nn.MultiheadAttention, nn.RNNBase)


def _mapped(function: Callable[[Any], Any], inputs: Any) -> Any:
    """Apply `function` to the tensors, or the references to tensors, among a rule's inputs."""
    if isinstance(inputs, Tensor | weakref.ref):
        return function(inputs)
    if isinstance(inputs, dict):
        return {name: _mapped(function, value) for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        mapped = (_mapped(function, value) for value in inputs)
        return inputs._make(mapped) if hasattr(inputs, "_make") else tuple(mapped)
    return inputs


def _alive(reference: "weakref.ref[Tensor]") -> Tensor:
    tensor = reference()
    if tensor is None:
        raise UsageError("a retained graph ran again, but a layer's input is gone: run the forward pass again instead")
    return tensor


_NONE = torch.zeros(0)


@dataclass(slots=True, weakref_slot=True)
class MeasuredPass:
    """One backward pass as an engine sees it, running or finished."""

    mode: str = "exact"
    sq_norms: Tensor = _NONE
    """Squared norms (B,) after the pass, in the scale of its loss; of a compiled pass their sum in float64."""
    variances: Tensor | None = None
    """Variances of `sq_norms`, if they are estimates."""
    num_samples: int | Tensor = 0
    """The number of samples; of a compiled pass a tensor on the device."""
    weight: LossWeight | None = None
    """The weight by which the loss was multiplied, known at the end of the pass."""
    layers: list[CoveredLayer] = field(default_factory=list)
    """Layers reached by the pass."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of parameters for a `DiversityMeter`. If a pass fails half-way, its gradients must be in no sum."""
    size: int | None = None
    """The number of samples, if known without asking the device."""
    is_ordinary: bool = False
    """Whether the pass is known to give every parameter on its way a gradient, as `backward()` does."""
    evidence: Evidence = field(default_factory=Evidence)
    _estimates: list[Estimate] = field(default_factory=list)
    """One estimate per parameter; all are added at the end, since on a GPU each addition is a launch."""
    _waiting: dict[TiedLayers, list[tuple[nn.Parameter, Form]]] = field(default_factory=dict)
    _counted: set[TiedLayers] = field(default_factory=set)

    def add(self, call: LayerCall, dy: Tensor) -> list[tuple[nn.Parameter, Form]]:
        """Add a call and return its gradients; count its tied layers when no other call of them can follow."""
        tied, layer = call.watch.tied, call.watch.layer
        gradients = call.gradients(dy)
        runs_again = call not in tied.open_calls  # in a retained graph, where siblings may run again too
        tied.open_calls.discard(call)
        if not gradients:
            return []
        num_samples = gradients[0][1].num_samples
        if self.num_samples not in (0, num_samples):
            raise UsageError(
                f"layer '{layer.name}' saw {num_samples} samples and a later one {self.num_samples} in one backward "
                f"pass: keep the batch dimension first and unmerged, (batch, time, features), and expand what all "
                f"samples share, positions.expand(batch, -1)"
            )
        self.num_samples = self.size = num_samples
        if tied in self._counted:
            raise _uncountable(layer)
        self.layers.append(layer)
        is_last = not tied.open_calls and not runs_again
        if is_last and tied not in self._waiting:  # the usual case: one layer, called once
            _, forms = zip(*gradients, strict=True)
            self._estimates += measured(forms, self.mode)
            self._counted.add(tied)
            return gradients
        self._waiting.setdefault(tied, []).extend(gradients)
        if is_last:
            self._count(tied)
        return gradients

    def end(self) -> None:
        """Count the layers that still wait for further calls."""
        for tied in list(self._waiting):
            self._count(tied)

    def add_up(self) -> None:
        """Set `sq_norms` and `variances` of a pass that is not part of another."""
        if self._estimates:
            self.sq_norms, self.variances = summed(self._estimates)

    def take_over(self, inner: "MeasuredPass") -> None:
        """Add a finished pass that ran within this one."""
        self.num_samples, self.size = inner.num_samples, inner.size
        self.weight = inner.weight  # the weight of a loss within a checkpoint
        self.layers += inner.layers
        self.gradients |= inner.gradients
        self.evidence.take_over(inner.evidence)
        self._estimates += inner._estimates
        for tied in inner._counted:
            if tied in self._counted:
                raise _uncountable(tied.layers[0])
        self._counted |= inner._counted

    def _count(self, tied: TiedLayers) -> None:
        by_parameter: dict[int, list[Form]] = {}
        for parameter, form in self._waiting.pop(tied):
            by_parameter.setdefault(id(parameter), []).append(form)
        for forms in by_parameter.values():
            # Calls and layers that share a weight add up before squaring, which separate sketches cannot do.
            self._estimates += measured(forms, self.mode) if len(forms) == 1 else [Estimate(total(forms), None)]
        self._counted.add(tied)


def _uncountable(layer: CoveredLayer) -> CoverageError:
    """Return an error for a layer in several checkpoints, noticed only after its gradients were squared."""
    return CoverageError(
        f"layer '{layer.name}' is used in several checkpoints, or in one and outside: its gradients cannot be added up",
        "pass use_reentrant=False to torch.utils.checkpoint",
    )


class LayerWatch(ModuleHook):
    """The forward hook of one covered layer."""

    def __init__(self, engine: "EagerEngine", tied: TiedLayers, layer: CoveredLayer) -> None:
        super().__init__(layer.module)
        self.engine, self.tied, self.layer = engine, tied, layer
        self._surroundings: Surroundings | None = None

    def hooks(self) -> list[RemovableHandle]:
        """Put hooks on the layer."""
        module = self.layer.module
        if self.layer.entry.by_rows:
            return self._hooks_for_rows(module)
        # Registered first: a user's hook may change the output, and that change is part of the loss.
        handles = [module.register_forward_hook(self, with_kwargs=True, prepend=True)]
        if self.layer.entry.reruns:
            handles.append(module.register_forward_pre_hook(ModuleHook(module, self._see_surroundings)))
        return handles

    def __call__(self, module: nn.Module, *seen: Any) -> None:
        """Put a hook on the output of a call."""
        engine, entry = self.engine, self.layer.entry
        if module is not self._module or engine.paused:
            return
        args, kwargs, output = seen
        if isinstance(output, Tensor):
            outputs = [(0, output)] if output.requires_grad else []
        else:
            wanted = results(output) if entry.reruns else [next(iter(output))]
            outputs = [(index, tensor) for index, tensor in enumerate(wanted) if tensor.requires_grad]
        if not outputs:
            return
        if torch._C._current_graph_task_id() != -1:  # a checkpoint's second forward pass, within the backward pass
            engine.record()
        elif engine.num_open:  # failed half-way
            engine.forget()
        if engine.coverage.is_on:
            engine.coverage.see_call(outputs[0][1].device)
        inputs = args[0] if args and not entry.all_inputs else self.layer.inputs(args, kwargs)
        if entry.capture is not None:
            inputs = entry.capture(module, inputs, output)
        for index, tensor in outputs:  # several outputs of a call count as several calls: their gradients add up
            rerun = None if self._surroundings is None else Rerun(inputs, index, self._surroundings)
            call = LayerCall(self, inputs if rerun is None else rerun)
            if engine.coverage.is_on and entry.input_check is not None:
                call.error = entry.input_check(module, inputs)
            if index == 0 and tensor._base is not None:
                _hook_view(tensor, (args, kwargs), call.arrive)
            else:  # further outputs may be in use within the layer
                tensor.register_hook(call.arrive)

    def _see_surroundings(self, module: nn.Module, args: Any) -> None:
        self._surroundings = Surroundings.of(module)

    def _hooks_for_rows(self, module: nn.Module) -> list[RemovableHandle]:
        """Measure a module's own parameters, whatever the module computes with them."""

        def on_rows(name: str, view: Tensor) -> None:
            view.register_hook(partial(arrive, name, LayerCall(self, name)))

        def arrive(name: str, call: LayerCall, dy: Tensor) -> None:
            if self.engine.coverage.is_on and not self.engine.paused:
                rows.require_own_rows(name, dy)
            call.arrive(dy)

        def put_in(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.engine.paused:
                rows.put_in(module, args, kwargs)

        rows = Rows(self.layer, on_rows)
        return [
            module.register_forward_pre_hook(ModuleHook(module, put_in), with_kwargs=True),
            module.register_forward_hook(ModuleHook(module, rows.take_out), always_call=True),
        ]


class EagerEngine:
    """An observer that reports every backward pass to `on_end` while switched on, and checks the first one."""

    def __init__(self, layers: Sequence[CoveredLayer], mode: str, on_end: Callable[[MeasuredPass], None]) -> None:
        self.is_on, self.paused = False, False
        self.on_start: Callable[[], None] | None = None
        """A function called when a backward pass has reached its first layer, before any parameter has its gradient."""
        self._mode, self._on_end = mode, on_end
        self._watches = [LayerWatch(self, tied, layer) for tied in tied_layers(layers) for layer in tied.layers]
        self._handles: list[RemovableHandle] = []
        self.num_open = 0
        """The number of unfinished passes, including those that failed."""
        self._latest: tuple[int, weakref.ref[MeasuredPass] | None] = (-1, None)
        """The number and record of the latest pass, needed for every layer and parameter."""
        # FSDP2 exchanges the parameters during the pass, and autograd does not know.
        self._is_sharded = any(is_sharded(parameter) for layer in layers for parameter in layer.parameters)
        self.coverage = CoverageCheck(layers, lambda: None if self.paused else self.record().evidence)

    def switch_on(self) -> None:
        """Put hooks on the layers."""
        self.is_on = True
        forget_memory_caps()
        for watch in self._watches:
            watch.tied.open_calls.clear()
            self._handles += watch.hooks()
        self.coverage.begin()

    def switch_off(self) -> None:
        """Remove all hooks."""
        self.is_on = False
        self.stop_watching()
        self.coverage.end()

    def stop_watching(self) -> None:
        """Count the backward passes of earlier forward passes only."""
        while self._handles:
            self._handles.pop().remove()

    @property
    def is_checked(self) -> bool:
        """Whether a pass has shown that no gradient is missed."""
        return not self.coverage.is_on

    def forget(self) -> None:
        """Discard unfinished passes."""
        self.num_open, self._latest = 0, (-1, None)
        for each in passes_seen_by(self):
            each.notes.pop(self, None)

    def take_gradient(self, name: str, gradient: Tensor) -> None:
        """Keep a parameter's gradient until the end of the pass."""
        if not self.paused:
            number, known = self._latest
            record = known() if known is not None and number == torch._C._current_graph_task_id() else None
            if record is None:
                record = self.record()
            record.gradients[name] = gradient.detach()

    def record_for(self, layer: CoveredLayer) -> MeasuredPass | None:
        """Return the record of the current pass; None if it gives the layer's parameters no gradients."""
        number, known = self._latest
        record = known() if known is not None and number == torch._C._current_graph_task_id() else None
        if record is None:
            record = self.record()
        if record.is_ordinary or self._is_sharded:
            return record
        counts = False
        for parameter in layer.parameters:
            if parameter.requires_grad:
                receives, record.is_ordinary = will_receive(parameter)
                counts |= receives
                if record.is_ordinary:
                    break
        if not counts and torch.is_grad_enabled():
            # Gradients of gradients may follow, which no rule sees: the next pass must show that there are none.
            self.coverage.begin()
        return record if counts else None

    def record(self) -> MeasuredPass:
        """Return the record of the current pass."""
        running = current_pass()
        record: MeasuredPass | None = running.notes.get(self)
        if record is None:
            if self.on_start is not None and not passes_seen_by(self):
                self.on_start()
            self.num_open += 1
            running.at_end(self._finish)
            record = running.notes[self] = MeasuredPass(self._mode)
        self._latest = running.number, weakref.ref(record)
        return record

    def _finish(self, over: BackwardPass) -> None:
        done: MeasuredPass | None = over.notes.get(self)
        if done is None:
            return
        self.num_open -= 1
        done.end()
        done.weight = over.weight if done.weight is None else done.weight
        if around := passes_seen_by(self):  # a reentrant checkpoint's pass is part of the pass around it
            around[-1].notes[self].take_over(done)
            return
        done.add_up()
        if self.coverage.is_on:
            self.coverage.conclude(done.evidence, done.sq_norms)
        if done.layers or done.gradients:
            self._on_end(done)


def _hook_view(tensor: Tensor, arguments: Any, arrive: Callable[[Tensor | None], None]) -> None:
    """Call `arrive` with the gradient of a layer's output that is a view.

    If the view shows all of its base, in-place operations bypass the view's gradient, and only the base gets one.
    """
    base = tensor._base
    assert base is not None
    stands_for = base.grad_fn is not None and base.numel() == tensor.numel() and base.is_contiguous()
    given = (each for each in tree_leaves(arguments) if isinstance(each, Tensor))
    if not stands_for or any(each is base or each._base is base for each in given):  # which others may use too
        tensor.register_hook(arrive)
        return
    shape, strides, is_plain = tensor.shape, tensor.stride(), tensor.is_contiguous()

    def arrive_as_output(gradient: Tensor | None) -> None:
        if gradient is not None:
            gradient = gradient.reshape(shape) if is_plain else gradient.contiguous().as_strided(shape, strides)
        arrive(gradient)

    base.register_hook(arrive_as_output)
