"""Products of gradients one and two steps apart, from which that of gradients no step apart is extrapolated."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.estimators.average import Norms, inner_variance, read
from divebatch.estimators.chunk_gradients import Preconditioner, rescaled
from divebatch.norms.accumulators import addend, check_shapes, trainable
from divebatch.norms.sketch import sum_dtype

FARTHEST = 2.5
"""The largest factor of the extrapolation below: it multiplies the noise of the products, too."""
KEPT = 3
LONGEST_DOT = 2**24
"""Entries: in float32 a product of 10^8 came out 0.3 to 0.8 % too small on a CPU, one of 2^24 by 0.02 %."""


def extrapolation(optimizer: Optimizer) -> float:
    """f in ||G||^2 = L1 + f * (L1 - L2), L1 and L2 the products of gradients one and two steps apart.

    A gradient's noise moves the weights, and they move the gradients that follow against it: by c after one step and,
    with momentum m, by (1 + m) c after two; Nesterov's (1 + m) c and (1 + m + m^2) c. So f is 1 / m, or
    (1 + m) / m^2. It is 0 where that would be above 2.5: momentum below 0.4, Nesterov's below 0.87, and NAdam, whose
    momentum rises over thousands of steps. Without momentum both steps show the same, and nothing can be told. Of
    parameter groups the largest one's counts.
    """
    return _factor(optimizer.param_groups[_largest_group(optimizer)])


def _largest_group(optimizer: Optimizer) -> int:
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    return sizes.index(max(sizes))


def _factor(group: Mapping[str, Any]) -> float:
    momentum = float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
    # Without momentum both lags show the same; NAdam's momentum rises over thousands of steps.
    if momentum <= 0 or "momentum_decay" in group:
        return 0.0
    factor = (1 + momentum) / momentum**2 if group.get("nesterov") else 1 / momentum
    # The extrapolation multiplies the noise of the products too.
    return factor if factor <= FARTHEST else 0.0


@dataclass(frozen=True, slots=True)
class LaggedRow:
    """What a step and the two before it showed."""

    sizes: tuple[int, int]
    """Samples of the step before and of this one."""
    factor: float
    parts: Sequence[Norms]
    """||g||^2 of the step before and of this one; the products of this one with the last and with the one before."""

    @property
    def num_samples(self) -> int:
        """Samples of this step."""
        return self.sizes[1]

    def numbers(self, values: Sequence[float]) -> tuple[float, float, float]:
        """tr(Sigma), ||G||^2 and Var_i<g_i, g>, from what `parts` were read as."""
        (size, own_size), (before, own, one, two) = self.sizes, values
        sq_norm = one + self.factor * (one - two)
        mean = (size**2 * before + 2 * size * own_size * one + own_size**2 * own) / (size + own_size) ** 2
        return own_size * (own - sq_norm), sq_norm, inner_variance((before, own), self.sizes, mean)


class Lagged:
    """The mean gradients of the last three steps: costs three copies of the trainable parameters.

    With `preconditioned` each is first divided by the root of the optimizer's second moment, as it stands at its step;
    before the first step there is none, and that gradient is left out.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, preconditioned: bool = False) -> None:
        self.parameters = trainable(model)
        self._optimizer, self._group = optimizer, _largest_group(optimizer)
        self._preconditioner = Preconditioner(optimizer, self.parameters) if preconditioned else None
        self._vectors, self._views = zip(*(_flat(self.parameters) for _ in range(KEPT)), strict=True)
        self.forget()

    def forget(self) -> None:
        """Drop all steps."""
        self._count = 0
        self._sizes: list[int] = []
        """Samples of the last steps, the newest first, as in the following."""
        self._sq_norms: list[Norms] = []

    @property
    def num_chunks(self) -> int:
        """Steps whose gradients are kept."""
        return min(self._count, KEPT)

    def add(self, gradients: Mapping[str, Tensor], num_samples: int, *, scale: float = 1.0) -> None:
        """A step on `num_samples` samples whose mean gradient is `scale` times `gradients`."""
        if self._preconditioner is not None:
            scales = self._preconditioner.scales()
            if scales is None:
                return
            gradients = rescaled(gradients, scales)
        vector, views = self._vectors[self._count % KEPT], self._views[self._count % KEPT]
        if len(gradients) < len(views):
            vector.zero_()
        places = [views[name] for name in gradients]
        torch._foreach_copy_(places, [addend(g, place) for g, place in zip(gradients.values(), places, strict=True)])
        if scale != 1.0:
            vector.mul_(scale)
        self._count += 1
        self._sizes = [num_samples, *self._sizes[: KEPT - 1]]
        self._sq_norms = [_dot(vector, vector), *self._sq_norms[: KEPT - 1]]

    def row(self) -> LaggedRow:
        """The row of the last three steps."""
        newest, last, before = (self._vectors[(self._count - lag) % KEPT] for lag in (1, 2, 3))
        parts = [self._sq_norms[1], self._sq_norms[0], _dot(newest, last), _dot(newest, before)]
        factor = _factor(self._optimizer.param_groups[self._group])  # it may change, and groups are replaced by a load
        return LaggedRow((self._sizes[1], self._sizes[0]), factor, parts)

    def state_dict(self) -> dict[str, Any]:
        """The gradients that the next steps will be multiplied with."""
        # The oldest of the three is written over by the next step, so two are enough.
        held = [self._views[(self._count - lag) % KEPT] for lag in range(1, min(self._count, KEPT - 1) + 1)]
        gradients = [{name: view.clone() for name, view in views.items()} for views in held]
        kept = len(held)
        return {"sizes": self._sizes[:kept], "sq_norms": read(self._sq_norms[:kept]), "gradients": gradients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved gradients."""
        check_gradients(state, self.parameters)
        self.forget()
        for gradients in reversed(state["gradients"]):
            for name, gradient in gradients.items():
                self._views[self._count][name].copy_(gradient)
            self._count += 1
        self._sizes, self._sq_norms = list(state["sizes"]), list(state["sq_norms"])


def check_gradients(state: dict[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """Raise if the gradients of a `Lagged`'s state are not those of the parameters here."""
    for gradients in state["gradients"]:
        check_shapes("gradients", gradients, parameters)


def _flat(parameters: Mapping[str, nn.Parameter]) -> tuple[Tensor, dict[str, Tensor]]:
    """A vector with room for all, and each parameter's place in it, strided as it is: all are copied at once."""
    first = next(iter(parameters.values()))
    dtype = functools.reduce(torch.promote_types, (sum_dtype(p.dtype) for p in parameters.values()))
    vector = torch.zeros(sum(p.numel() for p in parameters.values()), dtype=dtype, device=first.device)
    parts = vector.split([p.numel() for p in parameters.values()])
    strides = {name: torch.empty_like(p, device="meta").stride() for name, p in parameters.items()}
    places = zip(parameters.items(), parts, strict=True)
    return vector, {name: part.as_strided(p.shape, strides[name]) for (name, p), part in places}


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """The real part, where parameters are complex."""
    # In parts: a long float32 product on a CPU comes out too small (see LONGEST_DOT).
    parts = zip(one.split(LONGEST_DOT), other.split(LONGEST_DOT), strict=True)
    first, *rest = (torch.vdot(*each).real for each in parts)
    return sum(rest, first)
