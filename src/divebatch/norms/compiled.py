"""The observation of compiled backward passes, without graph breaks.

Each covered layer's output passes through an identity. In the backward pass this identity adds the layer's squared
norms to the gradient of an accumulator, and autograd adds up the layers inside the compiled graph.

While measuring is on, each covered layer has a subclass of its own class. The compiler checks the types of modules, but
not their hooks, so code compiled earlier is not used for these layers.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from divebatch.errors import CoverageError, UsageError
from divebatch.norms import triton
from divebatch.norms.coverage import COMPILED_WAY_OUT
from divebatch.norms.eager import EagerEngine, MeasuredPass, tied_layers
from divebatch.norms.forms import measured
from divebatch.norms.passes import BackwardPass, current_pass, passes_seen_by
from divebatch.norms.registry import CoveredLayer, original_type, require_batch
from divebatch.norms.rules.normalization import batch_statistics, cast
from divebatch.norms.sharded import is_sharded
from divebatch.norms.sketch import random_seeds, sum_dtype, summed


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside a `torch.compile` wrapper; any other model as it is."""
    wrapped = getattr(model, "_orig_mod", model)
    assert isinstance(wrapped, nn.Module)
    return wrapped


def is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` applies to the model or to a module in it."""
    return any(module._compiled_call_impl is not None or uncompiled(module) is not module for module in model.modules())


def warn_if_compiled(model: nn.Module) -> None:
    """Warn that hooks on a compiled model break its graph, and that code compiled before does not call them."""
    if is_compiled(model):
        told = (
            "the model is under torch.compile and this meter is not: its hooks break the compiler's graph, and code "
            f"that was compiled before measures nothing; {COMPILED_WAY_OUT}"
        )
        warnings.warn(told, stacklevel=3)


class CompiledEngine:
    """An observer that reports every backward pass to `on_end` while switched on.

    The first pass runs without compiled code and shows errors that compiled code would hide: gradients without a rule,
    different numbers of samples, layers called twice. Until this pass succeeds, nothing in the process runs compiled.
    """

    looks_first = True
    """Whether the first pass runs uncompiled."""

    def __init__(
        self, model: nn.Module, layers: Sequence[CoveredLayer], mode: str, on_end: Callable[[MeasuredPass], None]
    ) -> None:
        _require_simple(layers)
        triton.prepare_for_compiler()
        self._paused, self._is_switched = False, False
        self.counts = False
        """Whether compiled passes are counted now."""
        self._layers, self.mode, self._on_end = layers, mode, on_end
        self.is_checked = not self.looks_first
        """Whether the first pass was successful."""
        self._first: EagerEngine | None = None
        self._restore: Callable[[], None] = lambda: None
        device = next(layers[0].module.parameters()).device
        # In float64, as it sums squares over all layers and samples.
        self.accumulator = torch.zeros(4, dtype=torch.float64, device=device, requires_grad=True)
        self.accumulator.register_hook(self._receive)
        self.seeds = torch.zeros(len(layers), dtype=torch.int64, device=device)
        self._most_calls: Tensor | None = None
        self._sites = [TapSite(self, layer, number) for number, layer in enumerate(layers)]
        # torch does not allow in-place changes of a custom function's result.
        self._in_place: list[Any] = [module for module in model.modules() if getattr(module, "inplace", False)]

    @property
    def paused(self) -> bool:
        """Whether backward passes are temporarily not counted."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused
        if self._first is not None:
            self._first.paused = paused

    def switch_on(self) -> None:
        """Use the compiled variant with taps."""
        if any(hasattr(layer.module, "divebatch_site") for layer in self._layers):
            raise UsageError("another compiled meter is attached to this model: detach it first")
        self._switch(True)
        if not self.is_checked:
            self.counts = False
            self._first, self._restore = EagerEngine(self._layers, self.mode, self._finish_first), _no_compiled_code()
            self._first.switch_on()
            # Whatever happens to the meter, the process must get its compiled code back.
            weakref.finalize(self, self._restore)

    def switch_off(self) -> None:
        """Use the compiled variant without taps."""
        if self._first is not None:
            self._first.switch_off()
            self._first = None
        self._restore()
        if self._is_switched:
            self._switch(False)

    def _switch(self, on: bool) -> None:
        self.counts = self._is_switched = on
        for site in self._sites:
            site.switch(on)
        for module in self._in_place:
            module.inplace = not on

    def require_countable(self) -> None:
        """Raise if a layer was called more than once in a pass: its gradients were squared separately."""
        if self._most_calls is not None and int(self._most_calls) > len(self._layers):
            raise CoverageError("a layer was called several times in one forward pass: a compiled meter cannot add up")

    def forget(self) -> None:
        """Reset all sums, with new random signs."""
        self.accumulator.grad = None
        self._most_calls = None
        for each in passes_seen_by(self):
            each.notes.pop(self, None)
        if self._first is not None:
            self._first.forget()
        if self.mode == "sketch":  # in place, since recorded passes read this tensor
            self.seeds.data.copy_(random_seeds(len(self._layers), self.seeds.device))

    def take_gradient(self, name: str, gradient: Tensor) -> None:
        """Keep a parameter's gradient until the end of the pass."""
        if self._first is not None and (not self.counts or self._first in current_pass().notes):
            self._first.take_gradient(name, gradient)
        elif not self._paused:
            current_pass().notes.setdefault(self, {})[name] = gradient.detach()

    def _finish_first(self, done: MeasuredPass) -> None:
        """Count the first pass like a compiled one, with its numbers on the device."""
        assert self._first is not None
        twice = [layer.name for layer in done.layers if done.layers.count(layer) > 1]
        if twice:
            raise CoverageError(
                f"layer '{twice[0]}' was called several times in one forward pass: a compiled meter cannot add up",
                "measure without compiled=True",
            )
        if self._first.is_checked:  # a pass that is not finite checks nothing
            self._first.stop_watching()  # other forward passes may wait for their backward pass
            self._restore()
            self.is_checked, self.counts = True, True
        numbers = torch.tensor([float(done.num_samples), float(len(self._layers))], dtype=torch.float64)
        samples, layers = numbers.to(self.accumulator.device).unbind()
        self._note_calls(layers)
        variances = None if self.mode == "exact" else torch.zeros_like(samples)
        if done.variances is not None:
            variances = done.variances.sum(dtype=torch.float64)
        done.sq_norms, done.variances = done.sq_norms.sum(dtype=torch.float64), variances
        done.num_samples = samples
        self._on_end(done)

    def _receive(self, gradient: Tensor) -> None:
        current_pass().at_end(partial(self._finish, gradient.detach()))

    def _finish(self, gradient: Tensor, over: BackwardPass) -> None:
        self.accumulator.grad = None
        if self.mode == "sketch":
            # New signs for the next pass, even if this pass is recorded and replayed. Through `data`, since the
            # backward parts of other passes may still need these seeds.
            self.seeds.data.add_(1)
        sq_norms, variance, samples, layers = gradient.unbind()
        self._note_calls(layers)
        variances = variance if self.mode == "sketch" else None
        done = MeasuredPass(self.mode, sq_norms, variances, samples / layers, over.weight, list(self._layers))
        done.gradients = over.notes.get(self, {})
        self._on_end(done)

    def _note_calls(self, layers: Tensor) -> None:
        """Record the largest number of layer calls so far, in place, since recorded passes write to this tensor."""
        if self._most_calls is None:
            self._most_calls = layers.clone()
        torch.maximum(self._most_calls, layers, out=self._most_calls)


def _no_compiled_code() -> Callable[[], None]:
    """Make torch run functions uncompiled; return a function that ends this, once."""
    stance: list[Any] = [torch.compiler.set_stance("force_eager")]

    def restore() -> None:
        while stance:
            stance.pop().__exit__(None, None, None)

    return restore


@dataclass(slots=True, eq=False)
class TapSite:
    """The data of a tapped layer. The layer's class holds none of it, since compiled code keeps the class."""

    engine: CompiledEngine
    layer: CoveredLayer
    number: int
    _kind: type[nn.Module] | None = None
    """The class to restore; FSDP2 changes it too."""

    def switch(self, on: bool) -> None:
        """Exchange the layer's class. The new attribute makes certain torch versions look at the class again."""
        module: Any = self.layer.module
        if on:
            self._kind, module.divebatch_site = type(module), self
            # The compiler checks types but not hooks: code compiled for a bare layer must not be used for this one.
            module.__class__ = tapped(type(module))  # type: ignore[arg-type]
        else:
            module.__class__ = self._kind
            del module.divebatch_site

    def counts_for(self, module: nn.Module) -> bool:
        """Return whether `module` is the layer itself, not a copy, and passes are counted now."""
        return self.layer.module is module and self.engine.counts and not self.engine._paused


# One subclass for each type, or the compiler would compile each layer again.
@cache
def tapped(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `kind` that reports norms in compiled code."""

    class TappedLayer(kind):  # type: ignore[misc, valid-type]
        divebatch_original = kind

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            x = args[0] if args else next(iter(kwargs.values()))
            # From the instance: compiled code keeps the classes it has seen, and would keep meter and model with them.
            site: TapSite = self.divebatch_site
            engine = site.engine
            is_on = torch.is_grad_enabled() and site.counts_for(self)
            # If all parameters are frozen at the moment, there is nothing to count.
            is_on = is_on and any(p.requires_grad for p in self._parameters.values() if p is not None)
            tap = own_tap(self) if is_on else None
            if tap is not None:
                with torch.no_grad():
                    like = kind.forward(self, x)  # for running statistics; the compiler drops the rest
                return tap(self, x, like.dtype, engine.accumulator)
            output: Tensor = kind.forward(self, *args, **kwargs)
            if not is_on:
                return output
            both = (engine.accumulator, engine.seeds)
            counted: Tensor = _Tap.apply(output, x, *both, site.number, site.layer, engine.mode)  # type: ignore[no-untyped-call]
            return counted

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Turn a deep or pickled copy into a layer of the original class, without taps."""
            state = {key: value for key, value in vars(self).items() if key != "divebatch_site"}
            return object.__new__, (kind,), state

    TappedLayer.__name__, TappedLayer.__qualname__ = kind.__name__, kind.__qualname__
    return TappedLayer


def _require_simple(layers: Sequence[CoveredLayer]) -> None:
    for layer in layers:
        for holds, told in (
            (original_type(layer.module) is nn.SyncBatchNorm, "see the statistics of all ranks in"),
            (any(map(is_sharded, layer.parameters)), "measure parameters sharded by FSDP2, as in"),
            (layer.entry.by_rows, "measure parameters that samples share, as in"),
            (layer.entry.all_inputs, "see all inputs of"),
        ):
            if holds:
                raise CoverageError(f"a compiled meter cannot {told} {layer.place}")
    for tied in tied_layers(layers):
        if len(tied.layers) > 1:
            names = ", ".join(layer.name for layer in tied.layers)
            raise CoverageError(f"layers {names} share parameters: a compiled meter cannot add their gradients up")


class _Tap(torch.autograd.Function):
    """An identity whose backward adds a `message` to the gradient of the accumulator."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, accumulator: Tensor, seeds: Tensor, number: int, layer: CoveredLayer, mode: str
    ) -> Tensor:
        ctx.save_for_backward(x, seeds)
        ctx.number, ctx.layer, ctx.mode = number, layer, mode
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, seeds = ctx.saved_tensors
        forms = [form for _, form in ctx.layer.gradients(x, dy)]
        estimates = measured(forms, ctx.mode, seed=seeds[ctx.number : ctx.number + 1])
        sq_norms, variances = summed(estimates)
        return dy, None, message(sq_norms, variances, len(dy)), None, None, None, None


def message(sq_norms: Tensor, variances: Tensor | None, num_samples: int) -> Tensor:
    """Return a layer's addition to the accumulator: the sums of squared norms and of variances, samples, and 1.

    One sum gives all four numbers, so that a compiler needs one kernel per layer. No data comes from the host.
    """
    row = torch.arange(4, device=sq_norms.device).view(4, 1)
    is_first = torch.arange(len(sq_norms), device=sq_norms.device) == 0
    counts = torch.where(is_first & (row >= 2), torch.where(row == 2, num_samples, 1), 0)
    entries = torch.where(row == 0, sq_norms.double(), counts)
    return (entries if variances is None else torch.where(row == 1, variances.double(), entries)).sum(1)


# Normalisation layers count their samples' contributions by themselves: the gradients of weight and bias are formed for
# each sample first, and then added up. So the activations are read as often as without counting.

OwnTap = Callable[[Any, Tensor, torch.dtype, Tensor], Tensor]
"""A function of layer, input, output type and accumulator that returns the output."""


def own_tap(layer: nn.Module) -> OwnTap | None:
    """Return a function that runs a layer and counts its samples; None if the output needs a tap instead."""
    if isinstance(layer, nn.LayerNorm):
        return layer_norm
    is_batch_norm = isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    by_batch = is_batch_norm and (layer.training or layer.running_mean is None)
    return batch_norm if by_batch and layer.weight is not None else None


def batch_norm(layer: Any, x: Tensor, dtype: torch.dtype, accumulator: Tensor) -> Tensor:
    """Normalise `x` by the batch's own statistics, and count its samples."""
    output: Tensor = _BatchNorm.apply(x, layer.weight, layer.bias, accumulator, layer.eps, dtype)  # type: ignore[no-untyped-call]
    return output


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, accumulator: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        mean, inverse_std = batch_statistics(x, eps)
        ctx.save_for_backward(x, weight, mean, inverse_std)
        normal = (cast(x, mean.dtype) - _channels(mean, x)) * _channels(inverse_std, x)
        return cast(normal * _channels(weight, x) + _channels(bias, x), dtype)

    @staticmethod
    @once_differentiable  # statistics would be constants in a second derivative
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, inverse_std = ctx.saved_tensors
        # 16-bit sums over positions and samples would lose the small contributions.
        wide_x, wide_dy = x.to(sum_dtype(x.dtype)), dy.to(sum_dtype(x.dtype))
        dy_BC = wide_dy.flatten(2).sum(2) if x.ndim > 2 else wide_dy
        dyx_BC = (wide_dy * wide_x).flatten(2).sum(2) if x.ndim > 2 else wide_dy * wide_x
        dw_BC = (dyx_BC - mean * dy_BC) * inverse_std
        dw, db = dw_BC.sum(0), dy_BC.sum(0)
        normal = (wide_x - _channels(mean, x)) * _channels(inverse_std, x)
        count = x.numel() // x.shape[1]
        centred = wide_dy - _channels(db / count, x) - normal * _channels(dw / count, x)
        dx = (centred * _channels(weight * inverse_std, x)).to(x.dtype)
        counted = _counted(ctx, dw_BC, dy_BC)
        return dx, dw.to(weight.dtype), db.to(weight.dtype), counted, None, None


def layer_norm(layer: Any, x: Tensor, dtype: torch.dtype, accumulator: Tensor) -> Tensor:
    """Normalise each position of `x` separately, and count the samples."""
    num_dims = len(layer.normalized_shape)
    require_batch(layer, x, num_dims + 1)
    settings = (layer.eps, dtype, num_dims)
    output: Tensor = _LayerNorm.apply(x, layer.weight, layer.bias, accumulator, *settings)  # type: ignore[no-untyped-call]
    return output


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        accumulator: Tensor,
        eps: float,
        dtype: torch.dtype,
        num_dims: int,
    ) -> Tensor:
        wide = cast(x, sum_dtype(x.dtype))
        ctx.dims = list(range(x.ndim - num_dims, x.ndim))
        var, mean = torch.var_mean(wide, ctx.dims, correction=0, keepdim=True)
        inverse_std = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, inverse_std)
        output = (wide - mean) * inverse_std * weight
        return cast(output if bias is None else output + bias, dtype)

    @staticmethod
    @once_differentiable  # statistics would be constants in a second derivative
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, inverse_std = ctx.saved_tensors
        wide_dy, normal = dy.to(mean.dtype), (x.to(mean.dtype) - mean) * inverse_std
        between = list(range(1, ctx.dims[0]))
        dw_B, db_B = ((part.sum(between) if between else part) for part in (wide_dy * normal, wide_dy))
        dn = wide_dy * weight
        along = (dn * normal).mean(ctx.dims, keepdim=True)
        dx = (dn - dn.mean(ctx.dims, keepdim=True) - normal * along) * inverse_std
        dw, db = (part.sum(0).to(weight.dtype) for part in (dw_B, db_B))
        counted = _counted(ctx, dw_B, db_B)
        return dx.to(x.dtype), dw, db if ctx.needs_input_grad[2] else None, counted, None, None, None


def _counted(ctx: Any, dw_B: Tensor, db_B: Tensor) -> Tensor:
    """Return the message of a layer with these contributions to the gradients of weight and bias, if they train.

    The sum of squares over samples uses the same kernel as the sum of the contributions themselves.
    """
    wanted = zip((dw_B, db_B), ctx.needs_input_grad[1:3], strict=True)
    squares = [each.square() for each, is_wanted in wanted if is_wanted]
    return message(sum(squares[1:], squares[0]).sum(0).flatten(), None, len(dw_B))


def _channels(vector: Tensor, like: Tensor) -> Tensor:
    """Reshape (C,) to broadcast with (B, C, *positions)."""
    return vector.view(1, -1, *[1] * (like.ndim - 2))
