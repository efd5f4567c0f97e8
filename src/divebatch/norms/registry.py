"""Which rule states which layer's gradients, and the check that no trainable parameter is forgotten."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from divebatch.errors import ArgumentError, CoverageError
from divebatch.norms.forms import Explicit, Form

Rule = Callable[[Any, Any, Tensor], Mapping[str, Form | Tensor]]
"""`(layer, x, dy) -> {parameter name: its gradients}`, one gradient a sample.

`x` is the layer's input, `dy` the gradient of the (reduced) loss with respect to its output; both have the batch
dimension first. A gradient is a tensor (B, *parameter shape) or a `Form` that stands for one. What is stated of frozen
parameters is not counted. The rule knows nothing of the loss's reduction: the meter scales.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the registry."""

    rule: Rule
    parameters: frozenset[str] | None
    """Those the rule states; None for all there are."""
    all_inputs: bool
    never_for: tuple[type[nn.Module], ...] = ()

    def states(self, name: str) -> bool:
        """Whether the rule gives the gradients of a parameter of this name."""
        return self.parameters is None or name in self.parameters


RULES: dict[type[nn.Module], Entry] = {}


def rule_for(
    kind: type[nn.Module], *, parameters: tuple[str, ...] = ("weight", "bias"), all_inputs: bool = False
) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule for layers of exactly this type.

    `parameters` are those the rule states; any other trainable one of such a layer is an error. Subclasses do not
    inherit a rule: they may compute something else. With `all_inputs` the rule gets a dict of all arguments of
    `forward` by name in the place of `x`.
    """

    def register(rule: Rule) -> Rule:
        if kind in RULES:
            raise ArgumentError(f"{kind.__name__} already has a rule: {RULES[kind].rule}")
        RULES[kind] = Entry(rule, frozenset(parameters), all_inputs)
        return rule

    return register


def is_trainable(layer: nn.Module, name: str) -> bool:
    """Whether the layer owns a parameter of this name that is being trained."""
    parameter = layer._parameters.get(name)
    return parameter is not None and parameter.requires_grad


def require_batch(layer: nn.Module, x: Tensor, num_dims: int) -> None:
    """Raise unless the input has at least so many dimensions, the first of which is the batch."""
    if x.ndim < num_dims:
        raise CoverageError(
            f"{type(layer).__name__} was given an input of shape {tuple(x.shape)}: the batch dimension is missing"
        )


def original_type(module: nn.Module) -> type[nn.Module]:
    """The type a layer was made with; a compiled meter exchanges it for one of its own."""
    kind: type[nn.Module] = getattr(type(module), "divebatch_original", type(module))
    return kind


@dataclass(frozen=True, slots=True, eq=False)
class CoveredLayer:
    """A layer with trainable parameters of its own and the rule that states their gradients."""

    name: str
    module: nn.Module
    entry: Entry

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the rule wants to see of a call: the first argument, or all by name."""
        if not self.entry.all_inputs:
            return args[0] if args else next(iter(kwargs.values()))
        return dict(inspect.signature(self.module.forward).bind(*args, **kwargs).arguments)

    def observed_output(self, output: Any) -> Tensor:
        """The tensor whose gradient the rule wants: the output, or the first of several."""
        return output if isinstance(output, Tensor) else next(iter(output))

    def gradients(self, x: Any, dy: Tensor) -> Iterator[tuple[int, Form]]:
        """One call's gradients by the identity of the parameter, which layers may share."""
        for name, gradient in self.entry.rule(self.module, x, dy).items():
            if is_trainable(self.module, name):
                form = Explicit(gradient) if isinstance(gradient, Tensor) else gradient
                yield id(self.module._parameters[name]), form


def cover(model: nn.Module, *, fallback: Entry | None = None) -> list[CoveredLayer]:
    """Every layer that owns trainable parameters, with its rule; an error names each parameter without one."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CoverageError(f"{type(model).__name__} has no trainable parameter: nothing can be measured")
    covered, uncovered = [], []
    for name, module in model.named_modules():
        own = [key for key, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
        entry = RULES.get(original_type(module), fallback)
        if entry is not None and isinstance(module, entry.never_for):
            entry = None
        if own and entry is not None:
            covered.append(CoveredLayer(name or "(model)", module, entry))
        place = f"{name}." if name else ""
        missed = [key for key in own if entry is None or not entry.states(key)]
        uncovered += [f"'{place}{key}' of {type(module).__name__}" for key in missed]
    if uncovered:
        raise CoverageError(_message(uncovered, fallback))
    return covered


def _message(uncovered: list[str], fallback: Entry | None) -> str:
    known = ", ".join(sorted(kind.__name__ for kind in RULES))
    way = "pass fallback='vmap'" if fallback is None else "replace the layer (the fallback cannot run it)"
    return (
        f"no norm rule covers: {'; '.join(uncovered)}. Rules exist for: {known}. Register one with "
        f"@divebatch.rule_for(LayerType), {way}, or freeze the parameter (requires_grad_(False))."
    )
