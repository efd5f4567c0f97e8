"""How compiled backward passes are observed, without a graph break.

Each covered layer's output passes through an identity whose backward hands the layer's squared norms to an
accumulator, as if they were its gradient; autograd adds the layers up inside the compiled graph.

While switched on, each covered layer is of a subclass of its own kind. The compiler checks the types of modules but not
their hooks, so this, unlike a hook, cannot be overlooked by code that was compiled before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from divebatch.errors import CoverageError, UsageError
from divebatch.norms import triton
from divebatch.norms.backward import Backward, families, measured
from divebatch.norms.compiled_normalization import message, own_tap
from divebatch.norms.first_pass import FirstPass
from divebatch.norms.loss_scale import LossWeight, weight_of_pass
from divebatch.norms.registry import CoveredLayer, original_type
from divebatch.norms.sharded import is_sharded
from divebatch.norms.sketch import random_seeds


@dataclass(slots=True)
class Tapped:
    """A compiled backward pass that has ended: sums over its samples, in the scale of the loss."""

    sq_norms: Tensor
    """A single number, in float64."""
    variances: Tensor | None
    num_samples: Tensor
    layers: Sequence[CoveredLayer]
    weight: LossWeight | None = None
    """The weight its loss was multiplied by."""


class Taps:
    """Tells `on_end` of every backward pass while it is switched on. The very first runs uncompiled (`FirstPass`)."""

    looks_first = True
    """Whether there is such a pass."""

    def __init__(
        self, model: nn.Module, layers: Sequence[CoveredLayer], mode: str, on_end: Callable[[Tapped], None]
    ) -> None:
        _require_simple(layers)
        triton.prepare_for_compiler()
        self._paused = False
        self._layers, self._mode, self._on_end = layers, mode, on_end
        self.is_checked = not self.looks_first
        """Whether the first pass went well."""
        self._first: FirstPass | None = None
        device = next(layers[0].module.parameters()).device
        # In float64: it adds up squares over all layers and samples.
        self._accumulator = torch.zeros(4, dtype=torch.float64, device=device, requires_grad=True)
        self._accumulator.register_hook(self._receive)
        self._seeds = torch.zeros(len(layers), dtype=torch.int64, device=device)
        self._most_calls: Tensor | None = None
        self._is_on, self._is_switched = False, False
        self._places = [Place(self, layer, number) for number, layer in enumerate(layers)]
        # torch refuses to change in place what a custom function returned.
        self._in_place: list[Any] = [module for module in model.modules() if getattr(module, "inplace", False)]

    @property
    def paused(self) -> bool:
        """Whether backward passes go by uncounted for the moment."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused
        if self._first is not None:
            self._first.pause(paused)

    def switch_on(self) -> None:
        """Use the compiled variant with taps."""
        if self._is_switched:
            return
        if any(hasattr(layer.module, "divebatch_place") for layer in self._layers):
            raise UsageError("another compiled meter is attached to this model: detach it first")
        self._switch(True)
        if not self.is_checked:
            self._is_on = False
            self._first = FirstPass(self._layers, self._mode, self._finish_first)

    def switch_off(self) -> None:
        """Use the compiled variant without."""
        if self._first is not None:
            self._first.end()
            self._first = None
        if self._is_switched:
            self._switch(False)

    def _switch(self, on: bool) -> None:
        self._is_on = self._is_switched = on
        for place in self._places:
            place.switch(on)
        for module in self._in_place:
            module.inplace = not on

    def check(self) -> None:
        """Raise if a layer was called more often than once in a pass: its gradients were squared apart."""
        if self._most_calls is not None and int(self._most_calls) > len(self._layers):
            raise CoverageError("a layer was called several times in one forward pass: a compiled meter cannot add up")

    def forget(self) -> None:
        """Start again, with other random signs."""
        self._accumulator.grad = None
        self._most_calls = None
        if self._first is not None:
            self._first.forget()
        if self._mode == "sketch":  # in place, where recorded passes read them
            self._seeds.data.copy_(random_seeds(len(self._layers), self._seeds.device))

    def backward_of(self, task: int) -> Tapped:
        """Compiled passes are seen as a whole."""
        zero = self._accumulator.detach()[0]
        return Tapped(zero, None, zero, self._layers)

    def _finish_first(self, done: Backward) -> None:
        """Count the first pass as a compiled one, whose numbers are on the device."""
        assert self._first is not None
        if not self._first.is_under_way:
            self.is_checked, self._is_on = True, True
        numbers = torch.tensor([float(done.num_samples), float(len(self._layers))], dtype=torch.float64)
        samples, layers = numbers.to(self._accumulator.device).unbind()
        self._note_calls(layers)
        variances = None if self._mode == "exact" else torch.zeros_like(samples)
        if done.variances is not None:
            variances = done.variances.sum(dtype=torch.float64)
        self._on_end(Tapped(done.sq_norms.sum(dtype=torch.float64), variances, samples, done.layers, done.weight))

    def _receive(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(partial(self._finish, gradient.detach()))

    def _finish(self, gradient: Tensor) -> None:
        self._accumulator.grad = None
        if self._mode == "sketch":
            # Other signs next time, also where this pass is recorded and replayed. By `data`, as other passes may wait
            # for their backward part: whether they find these seeds or the next ones does not matter.
            self._seeds.data.add_(1)
        sq_norms, variance, samples, layers = gradient.unbind()
        self._note_calls(layers)
        variances = variance if self._mode == "sketch" else None
        weight = weight_of_pass(torch._C._current_graph_task_id())
        self._on_end(Tapped(sq_norms, variances, samples / layers, self._layers, weight))

    def _note_calls(self, layers: Tensor) -> None:
        """Note the most calls so far, in place, where recorded passes find it."""
        if self._most_calls is None:
            self._most_calls = layers.clone()
        torch.maximum(self._most_calls, layers, out=self._most_calls)


@dataclass(slots=True, eq=False)
class Place:
    """What a tapped layer carries with it: its taps. Its class refers to none, since compiled code keeps the class."""

    taps: Taps
    layer: CoveredLayer
    number: int
    _kind: type[nn.Module] | None = None
    """The class to put back: FSDP2 exchanges it too."""

    def switch(self, on: bool) -> None:
        """Exchange the layer's class. The attribute tells torch versions that look at a class again only after that."""
        module: Any = self.layer.module
        if on:
            self._kind, module.divebatch_place = type(module), self
            # The compiler checks types but not hooks: code compiled for a bare layer must not be used for this one.
            module.__class__ = tapped(type(module))  # type: ignore[arg-type]
        else:
            module.__class__ = self._kind
            del module.divebatch_place

    def is_for(self, module: nn.Module) -> bool:
        """Whether this is the layer, and no copy of it, and passes count now."""
        return self.layer.module is module and self.taps._is_on and not self.taps._paused


# One subclass for each type, or the compiler would compile again for every layer.
@cache
def tapped(kind: type[nn.Module]) -> type[nn.Module]:
    """Layers of this kind, tapped."""

    class TappedLayer(kind):  # type: ignore[misc, valid-type]
        divebatch_original = kind

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            x = args[0] if args else next(iter(kwargs.values()))
            # From the instance: compiled code keeps the classes it has seen, and with them would keep meter and model.
            place: Place = self.divebatch_place
            taps = place.taps
            is_on = torch.is_grad_enabled() and place.is_for(self)
            # Where all are frozen for the moment, there is nothing to count.
            is_on = is_on and any(p.requires_grad for p in self._parameters.values() if p is not None)
            tap = own_tap(self) if is_on else None
            if tap is not None:
                with torch.no_grad():
                    like = kind.forward(self, x)  # for running statistics; the compiler drops what is not used
                return tap(self, x, like.dtype, taps._accumulator)
            output: Tensor = kind.forward(self, *args, **kwargs)
            if not is_on:
                return output
            both = (taps._accumulator, taps._seeds)
            counted: Tensor = _Tap.apply(output, x, *both, place.number, place.layer, taps._mode)  # type: ignore[no-untyped-call]
            return counted

        def __reduce_ex__(self, protocol: Any) -> Any:
            """A copy, deep or pickled, is a layer of the kind that it was, without taps."""
            state = {key: value for key, value in vars(self).items() if key != "divebatch_place"}
            return object.__new__, (kind,), state

    TappedLayer.__name__, TappedLayer.__qualname__ = kind.__name__, kind.__qualname__
    return TappedLayer


def _require_simple(layers: Sequence[CoveredLayer]) -> None:
    synced = [layer.name for layer in layers if original_type(layer.module) is nn.SyncBatchNorm]
    if synced:
        raise CoverageError(f"a compiled meter cannot see the statistics of all ranks in SyncBatchNorm '{synced[0]}'")
    sharded = [layer.name for layer in layers if any(map(is_sharded, layer.parameters))]
    if sharded:
        raise CoverageError(
            f"parameters sharded by FSDP2, like those of '{sharded[0]}', cannot be measured with: compiled"
        )
    by_rows = [f"'{layer.name}' ({type(layer.module).__name__})" for layer in layers if layer.entry.by_rows]
    if by_rows:
        raise CoverageError(f"a compiled meter cannot measure parameters that samples share, as in {by_rows[0]}")
    shared = [family for family in families(layers) if len(family.layers) > 1]
    if shared:
        names = ", ".join(layer.name for layer in shared[0].layers)
        raise CoverageError(f"layers {names} share parameters: a compiled meter cannot add their gradients up")
    many_inputs = [f"'{layer.name}' ({type(layer.module).__name__})" for layer in layers if layer.entry.all_inputs]
    if many_inputs:
        raise CoverageError(f"a compiled meter cannot see all inputs of: {', '.join(many_inputs)}")


class _Tap(torch.autograd.Function):
    """Identity; its backward adds a `message` to the gradient of the accumulator."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, accumulator: Tensor, seeds: Tensor, place: int, layer: CoveredLayer, mode: str
    ) -> Tensor:
        ctx.save_for_backward(x, seeds)
        ctx.place, ctx.layer, ctx.mode = place, layer, mode
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, seeds = ctx.saved_tensors
        forms = [form for _, form in ctx.layer.gradients(x, dy)]
        estimates = measured(forms, ctx.mode, seed=seeds[ctx.place : ctx.place + 1])
        sq_norms = torch.stack([each.sq_norms for each in estimates]).sum(0)
        variances = [each.variances for each in estimates if each.variances is not None]
        counted = message(sq_norms, torch.stack(variances).sum(0) if variances else None, len(dy))
        return dy, None, counted, None, None, None, None
