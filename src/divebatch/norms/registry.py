"""Which rule states which layer's gradients, and the check that no trainable parameter is forgotten."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from divebatch.errors import ArgumentError, CoverageError
from divebatch.norms.forms import Explicit, Form

Rule = Callable[[nn.Module, Tensor, Tensor], Mapping[str, Form | Tensor]]
"""`(layer, x, dy) -> {parameter name: its gradients}`, one gradient a sample.

`x` is the layer's input, `dy` the gradient of the (reduced) loss with respect to its output; both have the batch
dimension first. A gradient is a tensor (B, *parameter shape) or a `Form` that stands for one. What is stated of frozen
parameters is not counted. The rule knows nothing of the loss's reduction: the meter scales.
"""

RULES: dict[type[nn.Module], tuple[Rule, frozenset[str]]] = {}
"""Layer type -> rule and the names of the parameters it states."""


def rule_for(kind: type[nn.Module], *, parameters: tuple[str, ...] = ("weight", "bias")) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule for layers of exactly this type.

    `parameters` are those the rule states; any other trainable one of such a layer is an error. Subclasses do not
    inherit a rule: they may compute something else.
    """

    def register(rule: Rule) -> Rule:
        if kind in RULES:
            raise ArgumentError(f"{kind.__name__} already has a rule: {RULES[kind][0]}")
        RULES[kind] = (rule, frozenset(parameters))
        return rule

    return register


def is_trainable(layer: nn.Module, name: str) -> bool:
    """Whether the layer owns a parameter of this name that is being trained."""
    parameter = layer._parameters.get(name)
    return parameter is not None and parameter.requires_grad


@dataclass(frozen=True, slots=True, eq=False)
class CoveredLayer:
    """A layer with trainable parameters of its own and the rule that states their gradients."""

    name: str
    module: nn.Module
    rule: Rule

    def gradients(self, x: Tensor, dy: Tensor) -> Iterator[tuple[int, Form]]:
        """One call's gradients by the identity of the parameter, which layers may share."""
        for name, gradient in self.rule(self.module, x, dy).items():
            if is_trainable(self.module, name):
                form = Explicit(gradient) if isinstance(gradient, Tensor) else gradient
                yield id(self.module._parameters[name]), form


def cover(model: nn.Module) -> list[CoveredLayer]:
    """Every layer that owns trainable parameters, with its rule; an error names each parameter without one."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CoverageError(f"{type(model).__name__} has no trainable parameter: nothing can be measured")
    covered, uncovered = [], []
    for name, module in model.named_modules():
        own = [key for key, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
        rule, stated = RULES.get(type(module), (None, frozenset()))
        if own and rule is not None:
            covered.append(CoveredLayer(name or "(model)", module, rule))
        place = f"{name}." if name else ""
        uncovered += [f"'{place}{key}' of {type(module).__name__}" for key in own if key not in stated]
    if uncovered:
        raise CoverageError(_message(uncovered))
    return covered


def _message(uncovered: list[str]) -> str:
    known = ", ".join(sorted(kind.__name__ for kind in RULES))
    return (
        f"no norm rule covers: {'; '.join(uncovered)}. Rules exist for: {known}. "
        f"Register one with @divebatch.rule_for(LayerType), or freeze the parameter (requires_grad_(False))."
    )
