"""Which rule counts which layer, and the check that no trainable parameter is forgotten."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from divebatch.errors import ArgumentError, CoverageError

Rule = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""`(layer, x, dy) -> (B,)`: each sample's squared gradient norm over the layer's trainable parameters.

`x` is the layer's input, `dy` the gradient of the (reduced) loss with respect to its output; both have the batch
dimension first. The rule knows nothing of the loss's reduction: the meter scales.
"""

Join = Callable[[Sequence[tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]]
"""Turns the (x, dy) of several calls of one layer into one call with the same weight gradient."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the registry."""

    rule: Rule
    join: Join | None


RULES: dict[type[nn.Module], Entry] = {}


def rule_for(kind: type[nn.Module], *, join: Join | None = None) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule for layers of exactly this type.

    Subclasses do not inherit it: they may compute something else. `join` makes a layer that is called several times
    in one forward pass exact; without it such a layer gets an error.
    """

    def register(rule: Rule) -> Rule:
        if kind in RULES:
            raise ArgumentError(f"{kind.__name__} already has a rule: {RULES[kind].rule}")
        RULES[kind] = Entry(rule, join)
        return rule

    return register


@dataclass(frozen=True, slots=True)
class CoveredLayer:
    """A layer with trainable parameters of its own and the rule that counts them."""

    name: str
    module: nn.Module
    entry: Entry

    def sq_norms(self, calls: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Squared norms over all calls of one backward pass: the gradients add up before they are squared."""
        if len(calls) == 1:
            return self.entry.rule(self.module, *calls[0])
        if self.entry.join is None:
            raise CoverageError(
                f"layer '{self.name}' ({type(self.module).__name__}) was called {len(calls)} times in one forward "
                f"pass and its rule cannot join calls: pass join= to @rule_for, or use one layer per call"
            )
        return self.entry.rule(self.module, *self.entry.join(calls))


def cover(model: nn.Module) -> list[CoveredLayer]:
    """Every layer that owns trainable parameters, with its rule; an error names each parameter without one."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CoverageError(f"{type(model).__name__} has no trainable parameter: nothing can be measured")
    covered, problems = [], _shared_parameters(model)
    for name, module in model.named_modules():
        own = [key for key, parameter in module.named_parameters(name, recurse=False) if parameter.requires_grad]
        if own and type(module) in RULES:
            covered.append(CoveredLayer(name or "(model)", module, RULES[type(module)]))
        elif own:
            problems += [f"'{key}' of {type(module).__name__}" for key in own]
    if problems:
        raise CoverageError(_message(problems))
    return covered


def _shared_parameters(model: nn.Module) -> list[str]:
    """Parameters that two modules own: a rule per module would miss the cross term of their gradients."""
    owners: dict[int, list[str]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            owners.setdefault(id(parameter), []).append(key)
    return [f"'{keys[0]}' (one tensor with '{', '.join(keys[1:])}')" for keys in owners.values() if len(keys) > 1]


def _message(problems: Sequence[str]) -> str:
    known = ", ".join(sorted(kind.__name__ for kind in RULES))
    return (
        f"no norm rule covers: {'; '.join(problems)}. Rules exist for: {known}. "
        f"Register one with @divebatch.rule_for(LayerType), or freeze the parameter (requires_grad_(False))."
    )
