"""The check that no gradient is missed: gradients seen by rules must add up to each parameter's gradient.

A weight may be used outside its layer: by a function on the weight, a penalty, a second derivative. The parameter's
gradient then includes this part, but the rule's sum over samples does not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from divebatch.errors import CoverageError
from divebatch.norms.forms import Form
from divebatch.norms.registry import CoveredLayer
from divebatch.norms.sharded import is_sharded
from divebatch.norms.sketch import sum_dtype

IN_DOUBLE, IN_SINGLE, ON_GPU, IN_HALF = 1e-6, 1e-4, 1e-2, 5e-2
"""The tolerances relative to the batch's gradients: in float64, in float32, in float32 on a GPU (where products may be
rounded to TF32), and in 16-bit types."""

COMPILED_WAY_OUT = (
    "make the meter with compiled=True, in a controller estimator=Trajectory(compiled=True), or take an estimator "
    "without norms ('split', 'moments')"
)


@dataclass(slots=True)
class Evidence:
    """Both sides of the check in one backward pass: gradients from rules, and gradients of parameters."""

    sums: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """Sums of gradients from rules, for parameters whose own gradient has not arrived yet."""
    tolerances: dict[nn.Parameter, float] = field(default_factory=dict)
    """Tolerances of the parameters seen by a rule."""
    remainders: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    """Norms of the differences between a parameter's gradient and its rule's sum."""
    received: list[Tensor] = field(default_factory=list)
    """Norms of the parameters' gradients."""

    def take_over(self, inner: "Evidence") -> None:
        """Add the evidence of a finished pass that ran within this one."""
        self.remainders += inner.remainders + [(p, _norm(alone)) for p, alone in inner.sums.items()]
        self.received += inner.received
        for parameter, tolerance in inner.tolerances.items():
            self.tolerances[parameter] = max(tolerance, self.tolerances.get(parameter, 0.0))


class CoverageCheck:
    """A comparison of both sides in the first backward pass whose gradients are finite.

    Args:
        layers: All layers with a rule.
        evidence: A function that returns the current pass's evidence, or None for a pass to ignore.
    """

    def __init__(self, layers: Sequence[CoveredLayer], evidence: Callable[[], Evidence | None]) -> None:
        self._layers, self._evidence = layers, evidence
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        self.is_on = False
        """Whether the next pass is checked."""
        self._is_cast = False
        """Whether layers ran under autocast, and so in 16 bits inside, whatever types they show."""

    def begin(self) -> None:
        """Wait for the gradients of all parameters. FSDP2's gradients reach no hook and are not checked."""
        if self.is_on:
            return
        self._is_cast = False
        for parameter in {p for layer in self._layers for p in layer.parameters}:
            if parameter.requires_grad and not is_sharded(parameter):
                self._handles[parameter] = parameter.register_hook(partial(self._receive, parameter))
        self.is_on = bool(self._handles)

    def end(self) -> None:
        """Remove the hooks."""
        self.is_on = False
        while self._handles:
            self._handles.popitem()[1].remove()

    def see_call(self, device: torch.device) -> None:
        """Note that a layer is called."""
        self._is_cast = self._is_cast or torch.is_autocast_enabled(device.type)

    def see(self, evidence: Evidence, gradients: Sequence[tuple[nn.Parameter, Form]], dtype: torch.dtype) -> None:
        """Add a rule's statement about one call, for an output gradient of type `dtype`."""
        for parameter, form in gradients:
            if parameter not in self._handles:
                continue
            part = form.summed().to(sum_dtype(parameter.dtype)).view(parameter.shape)
            before = evidence.sums.get(parameter)
            evidence.sums[parameter] = part if before is None else before + part
            here = max(_tolerance(dtype, part.device), _tolerance(parameter.dtype, part.device))
            evidence.tolerances[parameter] = max(here, evidence.tolerances.get(parameter, 0.0))

    def conclude(self, evidence: Evidence, sq_norms: Tensor) -> None:
        """Raise unless both sides agree at the end of a pass.

        `sq_norms` are those of the samples' gradients in the pass, in the scale of its loss.
        """
        left = evidence.remainders + [(parameter, _norm(alone)) for parameter, alone in evidence.sums.items()]
        # While a CUDA graph records a pass, numbers cannot be read.
        if not left or (sq_norms.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        # One read from the device for the size of the batch's gradients and all differences.
        own = [sq_norms.sum(dtype=torch.float64).sqrt(), *evidence.received]
        numbers: list[float] = torch.stack([each.double() for each in (*own, *(norm for _, norm in left))]).tolist()
        norms = numbers[len(own) :]
        scale = max(numbers[0], math.hypot(*numbers[1 : len(own)]))
        if not math.isfinite(scale + sum(norms)):
            return
        unseen, shares = [], {}
        for (parameter, _), norm in zip(left, norms, strict=True):
            if norm and parameter not in evidence.tolerances:
                unseen.append(self._name_of(parameter))
            # Rounding may remove a fraction of the whole, and in float16 set small gradients to zero.
            tolerance = IN_HALF if self._is_cast else evidence.tolerances.get(parameter, 0.0)
            if norm > tolerance * scale + torch.finfo(parameter.dtype).smallest_normal * math.sqrt(parameter.numel()):
                shares[self._name_of(parameter)] = norm / scale
        self.end()
        if unseen:
            raise not_called(unseen)
        if shares:
            raise _does_not_add_up(shares)

    def _receive(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        evidence = self._evidence()
        if evidence is None:
            return
        gradient = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        evidence.received.append(_norm(gradient))
        # In one pass, all calls of a layer come before its parameters' gradients, so the sum is complete.
        seen = evidence.sums.pop(parameter, None)
        evidence.remainders.append((parameter, _norm(gradient if seen is None else seen - gradient)))

    def _name_of(self, parameter: nn.Parameter) -> str:
        layer = next(layer for layer in self._layers if any(parameter is p for p in layer.parameters))
        return layer.name_of(next(name for name, p in layer.module.named_parameters() if p is parameter))


def not_called(names: Sequence[str]) -> CoverageError:
    """Return the error for parameters whose layers no pass has reached."""
    return CoverageError(
        f"parameters {sorted(names)} received gradients although their layer was not called",
        f"call layer(x), and neither layer.forward(x) nor a function on its weight. Under torch.compile, "
        f"{COMPILED_WAY_OUT}",
    )


def _does_not_add_up(shares: dict[str, float]) -> CoverageError:
    worst = max(shares, key=shares.__getitem__)
    others = f" (and that of {len(shares) - 1} more)" if len(shares) > 1 else ""
    return CoverageError(
        f"the gradients of the samples do not add up to the gradient that parameter '{worst}'{others} received: they "
        f"differ by {shares[worst]:.2g} of the batch's gradient. Likely causes: the weight is used by a function, "
        f"F.linear(x, layer.weight); the loss has a penalty on weights or on gradients; layer.forward(x) is called; a "
        f"hook changes the gradient; under fallback='vmap' samples are mixed, or share an argument with a row for each",
        "call the layer itself, tie weights by head.weight = embedding.weight, and let the optimizer decay weights",
    )


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=sum_dtype(tensor.dtype))
    return norm


def _tolerance(dtype: torch.dtype, device: torch.device) -> float:
    if dtype.itemsize < 4:
        return IN_HALF
    return ON_GPU if device.type != "cpu" else IN_SINGLE if dtype.itemsize == 4 else IN_DOUBLE
