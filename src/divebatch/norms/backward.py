"""The book-keeping of one backward pass: which calls have arrived, and what they add up to."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from divebatch.errors import CoverageError, UsageError
from divebatch.norms.loss_scale import LossWeight
from divebatch.norms.registry import CoveredLayer
from divebatch.norms.sample_gradients import Form, joined, total
from divebatch.norms.sketch import Estimate

Gradient = tuple[nn.Parameter, Form]
"""A parameter with the gradients that one call brings it."""


class Call:
    """One forward call of a layer, with its inputs.

    They are held until the backward pass comes by, and only weakly afterwards: holding on would keep activations that
    autograd frees. In a retained graph autograd holds them itself, for another pass.
    """

    __slots__ = ("__weakref__", "_inputs", "_is_held", "_module", "_was_training", "doubt", "frozen")

    def __init__(self, inputs: Any, layer: CoveredLayer) -> None:
        self._inputs, self._is_held = inputs, True
        self._module, self._was_training = layer.module, layer.module.training
        self.doubt: str | None = None
        """What may be wrong with the inputs."""
        self.frozen = layer.frozen
        """Ids of the parameters that the call took for constants, whatever they are in the backward pass."""

    def take(self) -> Any:
        """The inputs, cut off from the graph."""
        if self._module.training != self._was_training and isinstance(self._module, _MODE_MATTERS):
            raise UsageError(f"a {type(self._module).__name__} changed its mode between forward and backward pass")
        inputs = self._inputs if self._is_held else _mapped(_alive, self._inputs)
        self.let_go()
        return _mapped(Tensor.detach, inputs)

    def let_go(self) -> None:
        """Hold the inputs no longer than autograd does."""
        if self._is_held:
            # Keeping the inputs cost a quarter of the peak memory of a ResNet-18 step.
            self._inputs, self._is_held = _mapped(weakref.ref, self._inputs), False


_MODE_MATTERS = (_NormBase, nn.MultiheadAttention, nn.RNNBase)
_TENSOR_LIKE = (Tensor, weakref.ref)


def _mapped(function: Callable[[Any], Any], inputs: Any) -> Any:
    """Applied to the tensors (or what stands for them) among a rule's inputs."""
    if isinstance(inputs, _TENSOR_LIKE):  # first: it is nearly always one tensor
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


@dataclass(slots=True, eq=False)
class Family:
    """Layers that share parameters, usually just one. Their gradients add up before they are squared."""

    layers: list[CoveredLayer]
    open_calls: "weakref.WeakSet[Call]" = field(default_factory=weakref.WeakSet)
    """Forward calls that no backward pass has reached yet; one whose graph is dropped leaves by itself."""


def families(layers: Sequence[CoveredLayer]) -> list[Family]:
    """Layers grouped so that no parameter is in two groups."""
    groups: list[tuple[set[int], Family]] = []
    for layer in layers:
        parameters = {id(p) for p in layer.parameters}
        joined = Family([layer])
        for known, family in [group for group in groups if group[0] & parameters]:
            groups.remove((known, family))
            # The new layer may link groups that had nothing in common before.
            parameters |= known
            joined.layers[:0] = family.layers
        groups.append((parameters, joined))
    return [family for _, family in groups]


@dataclass(slots=True)
class Backward:
    """One backward pass under way."""

    mode: str = "exact"
    num_samples: int = 0
    is_ordinary: bool = False
    """Whether it is known to bring every parameter on its way a gradient, as `backward()` does."""
    layers: list[CoveredLayer] = field(default_factory=list)
    """Layers that the pass has reached."""
    weight: LossWeight | None = None
    """The weight its loss was multiplied by, known when it has ended."""
    _estimates: list[Estimate] = field(default_factory=list)
    """One a parameter, added up at the end and at once: on a GPU each addition by itself would be a launch."""
    _waiting: dict[Family, list[Gradient]] = field(default_factory=dict)
    _counted: set[Family] = field(default_factory=set)

    def add(self, family: Family, layer: CoveredLayer, call: Call, dy: Tensor) -> list[Gradient]:
        """One call was reached; its family is counted as soon as no other call of it can follow.

        Returns the gradients that the call brings, one a parameter: none if all were frozen.
        """
        gradients = self._stated(layer, call, dy)
        if call.frozen:
            gradients = [(parameter, form) for parameter, form in gradients if id(parameter) not in call.frozen]
        runs_again = call not in family.open_calls  # in a retained graph, where siblings may run again too
        family.open_calls.discard(call)
        if not gradients:
            return []
        self._check_batch(layer, gradients[0][1].num_samples)
        self._check_order(family, layer)
        self.layers.append(layer)
        is_last = not family.open_calls and not runs_again
        if is_last and family not in self._waiting:  # the usual case: one layer, called once
            self._estimates += measured([form for _, form in gradients], self.mode)
            self._counted.add(family)
            return gradients
        self._waiting.setdefault(family, []).extend(gradients)
        if is_last:
            self._count(family)
        return gradients

    def _stated(self, layer: CoveredLayer, call: Call, dy: Tensor) -> list[Gradient]:
        """What the layer's rule says; its errors name the layer."""
        try:
            if call.doubt is not None:
                raise CoverageError(call.doubt, "expand what is shared by all samples, positions.expand(batch, -1)")
            return layer.gradients(call.take(), dy)
        except CoverageError as error:
            place = f"layer '{layer.name}' ({type(layer.module).__name__})"
            raise CoverageError(f"{place}: {error.what}", error.way) from error

    def count_rest(self) -> None:
        """Count the families that still wait for calls: none will come."""
        for family in list(self._waiting):
            self._count(family)

    def take_over(self, inner: "Backward") -> None:
        """A pass within this one is over."""
        self.num_samples = inner.num_samples
        self.weight = inner.weight  # a loss within a checkpoint has its weight there
        self.layers += inner.layers
        self._estimates += inner._estimates
        for family in inner._counted:
            self._check_order(family, family.layers[0])
        self._counted |= inner._counted

    @property
    def sq_norms(self) -> Tensor:
        """(B,): squared norms so far, in the scale of the loss that was differentiated."""
        if not self._estimates:
            return torch.zeros(0)
        # One kernel for all layers instead of one addition each.
        return torch.stack([each.sq_norms for each in self._estimates]).sum(0)

    @property
    def variances(self) -> Tensor | None:
        """(B,): of `sq_norms`, where they are estimates."""
        variances = [each.variances for each in self._estimates if each.variances is not None]
        return torch.stack(variances).sum(0) if variances else None

    def _count(self, family: Family) -> None:
        by_parameter: dict[int, list[Form]] = {}
        for parameter, form in self._waiting.pop(family):
            by_parameter.setdefault(id(parameter), []).append(form)
        for forms in by_parameter.values():
            is_one = len(forms) == 1
            # Calls and layers that share a weight add up before they are squared, which a sketch of each cannot do.
            self._estimates += measured(forms, self.mode) if is_one else [Estimate(total(forms), None)]
        self._counted.add(family)

    def _check_order(self, family: Family, layer: CoveredLayer) -> None:
        """A checkpoint that runs a pass within the pass shows its calls only then: too late for what was squared."""
        if family in self._counted:
            raise CoverageError(
                f"layer '{layer.name}' is used in several checkpoints, or in one and outside of it: with "
                f"use_reentrant=True its gradients cannot be added before they are squared",
                "pass use_reentrant=False to torch.utils.checkpoint",
            )

    def _check_batch(self, layer: CoveredLayer, num_samples: int) -> None:
        if self.num_samples not in (0, num_samples):
            raise UsageError(
                f"layer '{layer.name}' saw {num_samples} samples and a later one {self.num_samples} in the same "
                f"backward pass: keep the batch dimension first and unmerged, e.g. (batch, time, features), and expand "
                f"what is shared by all samples, e.g. positions.expand(batch, -1)"
            )
        self.num_samples = num_samples


def measured(forms: Sequence[Form], mode: str, *, seed: Tensor | None = None) -> list[Estimate]:
    """Squared norms of one call's parameters, as the mode wants them; `seed` is what signs may be drawn from."""
    if mode == "sketch":
        return [form.sketch(seed=_moved(seed, number)) for number, form in enumerate(joined(forms, mode))]
    return [Estimate(form.sq_norms(), None) for form in joined(forms, mode)]


def _moved(seed: Tensor | None, number: int) -> Tensor | None:
    """Another seed for each form of a call; the first one's is as it was, at no cost."""
    return seed if seed is None or number == 0 else seed + number
