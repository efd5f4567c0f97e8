"""The gradients of a few steps, kept to be multiplied with each other: whole, or as sketches."""

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from divebatch.estimators.average import Norms
from divebatch.estimators.fused_sketch import ByKernel, sketch_of
from divebatch.estimators.gradient_sketch import SignSketch
from divebatch.estimators.step_gradients import StepGradients
from divebatch.norms.accumulators import addend
from divebatch.norms.sharded import Shards
from divebatch.norms.sketch import sum_dtype

LONGEST_DOT = 2**24
"""Entries: in float32 a product of 10^8 came out 0.3 to 0.8 % too small on a CPU, one of 2^24 by 0.02 %."""


class Kept(Protocol):
    """Numbered places for gradients. Where ranks hold shards, numbers are those of a rank's own, and add up."""

    @property
    def shards(self) -> Shards:
        """What this rank holds of the parameters."""
        ...

    @property
    def relative_variance(self) -> float:
        """Of ||G||^2 as products tell it, from what all products have in common; 0 where they are exact."""
        ...

    def put(self, slot: int, step: StepGradients) -> Norms:
        """Keep a step's gradients; returns what their squared norm is read from."""
        ...

    def dot(self, slot: int, other: int) -> Tensor:
        """The product of two, on the device."""
        ...

    def state_of(self, slot: int) -> Any:
        """What one place holds, for a checkpoint."""
        ...

    def load(self, slot: int, state: Any) -> None:
        """Fill a place with what one held."""
        ...


class Copies:
    """Whole gradients, or this rank's shards of them: costs `slots` copies of the parameters, or of the shards."""

    relative_variance = 0.0

    def __init__(self, parameters: Mapping[str, nn.Parameter], slots: int) -> None:
        self.shards = Shards(parameters)
        self._vectors, self.views = zip(*(_flat(self.shards.held) for _ in range(slots)), strict=True)

    def put(self, slot: int, step: StepGradients) -> Norms:
        """See `Kept`."""
        vector, views, gradients = self._vectors[slot], self.views[slot], dict(step)
        if len(gradients) < len(views):
            vector.zero_()
        places = [views[name] for name in gradients]
        torch._foreach_copy_(places, [addend(g, place) for g, place in zip(gradients.values(), places, strict=True)])
        if step.scale != 1.0:
            vector.mul_(step.scale)
        return _dot(vector, vector)

    def dot(self, slot: int, other: int) -> Tensor:
        """See `Kept`."""
        return _dot(self._vectors[slot], self._vectors[other])

    def state_of(self, slot: int) -> dict[str, Tensor]:
        """See `Kept`."""
        return self.shards.save(self.views[slot])

    def load(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """See `Kept`."""
        for name, gradient in self.shards.load(state).items():
            self.views[slot][name].copy_(gradient)


class Sketches:
    """Sketches: together with the signs they take what `gradient_sketch.fitting_size` allows.

    Squared norms are exact. Products are off at random. Where the gradients differ from step to step, so do their
    products' errors, and they are part of the scatter; that of ||G||^2 itself stays as long as the signs do.

    Where ranks hold shards, `sketch_of` adds their sketches up: every rank keeps that of the whole gradient.
    """

    def __init__(self, signs: SignSketch, slots: int) -> None:
        self._signs, self._by_kernel, self.shards = signs, ByKernel(signs), signs.shards
        self.held = [torch.zeros(signs.size, dtype=signs.dtype, device=signs.device) for _ in range(slots)]

    @property
    def relative_variance(self) -> float:
        """See `Kept`."""
        return self._signs.relative_variance

    @property
    def num_bytes(self) -> int:
        """What is kept from step to step."""
        return self._signs.num_bytes + sum(each.numel() * each.element_size() for each in self.held)

    def put(self, slot: int, step: StepGradients) -> Norms:
        """See `Kept`."""
        self.held[slot], sq_norm = sketch_of(self._signs, step, self._by_kernel)
        return sq_norm

    def dot(self, slot: int, other: int) -> Tensor:
        """See `Kept`."""
        return self.shards.part(torch.dot(self.held[slot], self.held[other]))

    def state_of(self, slot: int) -> Tensor:
        """See `Kept`."""
        return self.held[slot].clone()

    def load(self, slot: int, state: Tensor) -> None:
        """See `Kept`."""
        self.held[slot].copy_(state)


def _flat(parameters: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
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
