"""The check that norms miss no gradient: what the rules see must add up to what each parameter receives.

A rule states the gradients of the samples, and their sum over samples is the gradient of the batch. Whatever reaches a
weight past its layer (a function on the weight, a penalty, a second derivative) is in the gradient that the parameter
receives and not in the sum.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from divebatch.errors import CoverageError
from divebatch.norms.compilation import WAY_OUT
from divebatch.norms.registry import CoveredLayer
from divebatch.norms.sample_gradients import Form
from divebatch.norms.sharded import is_sharded
from divebatch.norms.sketch import sum_dtype

IN_DOUBLE, IN_SINGLE, ON_GPU, IN_HALF = 1e-6, 1e-4, 1e-2, 5e-2
"""How much may be missing, relative to the batch's gradients, in float64, in float32, there on a GPU (whose products
may be rounded to TF32), and in types of 16 bits."""


@dataclass(slots=True)
class Remainder:
    """What a parameter received in a pass without its rule, or its rule saw without the parameter."""

    parameter: nn.Parameter
    norm: Tensor


@dataclass(slots=True)
class SumCheck:
    """Looks at one backward pass: `begin` before it, `see` for each layer's call, `conclude` at the end.

    Args:
        layers: all that have a rule.
        counts: is told the number of a pass that brings a parameter its gradient; whether that is a pass to look at.
    """

    layers: Sequence[CoveredLayer]
    counts: Callable[[int], bool]
    _handles: dict[nn.Parameter, RemovableHandle] = field(default_factory=dict)
    _sums: dict[tuple[int, nn.Parameter], Tensor] = field(default_factory=dict)
    """Of what rules saw of a parameter so far, by the number of the pass: checkpoints run passes within the pass."""
    _tolerances: dict[nn.Parameter, float] = field(default_factory=dict)
    _is_cast: bool = False
    """Whether layers ran under autocast, and so in 16 bits inside, whatever types they show."""
    _remainders: list[Remainder] = field(default_factory=list)
    _received: list[Tensor] = field(default_factory=list)
    """Norms of the gradients that came."""

    @property
    def is_on(self) -> bool:
        """Whether the next pass is looked at."""
        return bool(self._handles)

    def begin(self) -> None:
        """Wait for the gradients of all parameters. FSDP2's come to no hook, and are not checked."""
        if self.is_on:
            return
        self._is_cast = False
        for parameter in {p for layer in self.layers for p in layer.parameters}:
            if parameter.requires_grad and not is_sharded(parameter):
                self._handles[parameter] = parameter.register_hook(partial(self._receive, parameter))

    def end(self) -> None:
        """Look no longer."""
        while self._handles:
            self._handles.popitem()[1].remove()
        self.forget()

    def forget(self) -> None:
        """Drop what was seen of a pass."""
        for seen in (self._sums, self._tolerances, self._remainders, self._received):
            seen.clear()

    def see_call(self, device: torch.device) -> None:
        """A layer is called."""
        self._is_cast = self._is_cast or torch.is_autocast_enabled(device.type)

    def see(self, task: int, gradients: Sequence[tuple[nn.Parameter, Form]], dtype: torch.dtype) -> None:
        """A rule has stated the gradients of one call, from an output gradient of type `dtype`."""
        for parameter, form in gradients:
            if parameter not in self._handles:
                continue
            part = form.summed().to(sum_dtype(parameter.dtype)).view(parameter.shape)
            before = self._sums.get((task, parameter))
            self._sums[task, parameter] = part if before is None else before + part
            here = max(_tolerance(dtype, part.device), _tolerance(parameter.dtype, part.device))
            self._tolerances[parameter] = max(here, self._tolerances.get(parameter, 0.0))

    def conclude(self, sq_norms: Tensor) -> None:
        """The pass is over: raise unless all adds up. If nothing can be said of it, the next one is looked at too.

        `sq_norms` are those of the samples' gradients in the pass, in the scale of its loss.
        """
        for (_, parameter), alone in list(self._sums.items()):
            self._note(parameter, alone)
        if not self._remainders or _is_being_recorded(sq_norms):
            self.forget()
            return
        scale, left = self._read(sq_norms)
        if not math.isfinite(scale + sum(norm for _, norm in left)):
            self.forget()
            return
        unseen = [self._name_of(parameter) for parameter, norm in left if norm and parameter not in self._tolerances]
        shares = {self._name_of(p): norm / scale for p, norm in left if norm > self._allowed(p, scale)}
        self.end()
        if unseen:
            raise not_called(unseen)
        if shares:
            raise _does_not_add_up(shares)

    def _read(self, sq_norms: Tensor) -> tuple[float, list[tuple[nn.Parameter, float]]]:
        """The size of the batch's gradients and of what is left over, from one look at the device."""
        own = [sq_norms.sum(dtype=torch.float64).sqrt(), *self._received]
        both = [each.double() for each in (*own, *(each.norm for each in self._remainders))]
        numbers: list[float] = torch.stack(both).tolist()
        norms = numbers[len(own) :]
        left = [(each.parameter, norm) for each, norm in zip(self._remainders, norms, strict=True)]
        return max(numbers[0], math.hypot(*numbers[1 : len(own)])), left

    def _receive(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if not self.counts(task):
            return
        gradient = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        self._received.append(torch.linalg.vector_norm(gradient, dtype=sum_dtype(gradient.dtype)))
        # In one pass all calls of a layer come before its parameters' gradients: nothing more is to be waited for.
        seen = self._sums.pop((task, parameter), None)
        self._note(parameter, gradient if seen is None else seen - gradient)

    def _note(self, parameter: nn.Parameter, difference: Tensor) -> None:
        norm = torch.linalg.vector_norm(difference, dtype=sum_dtype(difference.dtype))
        self._remainders.append(Remainder(parameter, norm))

    def _allowed(self, parameter: nn.Parameter, scale: float) -> float:
        """What rounding may take away: a share of the whole, and in float16 small gradients down to nothing."""
        floor = torch.finfo(parameter.dtype).smallest_normal * math.sqrt(parameter.numel())
        tolerance = IN_HALF if self._is_cast else self._tolerances.get(parameter, 0.0)
        return tolerance * scale + floor

    def _name_of(self, parameter: nn.Parameter) -> str:
        layer = next(layer for layer in self.layers if any(parameter is p for p in layer.parameters))
        return layer.name_of(next(name for name, p in layer.module.named_parameters() if p is parameter))


def not_called(names: Sequence[str]) -> CoverageError:
    """The error for parameters whose layers no pass came by."""
    return CoverageError(
        f"parameters {sorted(names)} received gradients although their layer was not called",
        f"call the layer itself, layer(x), and neither layer.forward(x) nor a function on its weight. If the model is "
        f"under torch.compile, {WAY_OUT}",
    )


def _does_not_add_up(shares: dict[str, float]) -> CoverageError:
    worst = max(shares, key=shares.__getitem__)
    others = f" (and that of {len(shares) - 1} more)" if len(shares) > 1 else ""
    return CoverageError(
        f"the gradients of the samples do not add up to the gradient that parameter '{worst}'{others} received: they "
        f"differ by {shares[worst]:.2g} of the batch's gradient, and norms of them would be wrong. Likely causes: the "
        f"weight is used by a function, F.linear(x, layer.weight), beside its layer; the loss has a penalty on weights "
        f"or on gradients; layer.forward(x) is called beside layer(x); a hook changes the parameter's gradient",
        "call the layer itself, tie weights by head.weight = embedding.weight, and let the optimizer decay weights",
    )


def _tolerance(dtype: torch.dtype, device: torch.device) -> float:
    if dtype.itemsize < 4:
        return IN_HALF
    return ON_GPU if device.type != "cpu" else IN_SINGLE if dtype.itemsize == 4 else IN_DOUBLE


def _is_being_recorded(tensor: Tensor) -> bool:
    """Whether a CUDA graph records the pass, in which nobody may look at numbers."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
