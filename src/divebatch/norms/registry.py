"""The rules for each kind of layer, and the error for a model with trainable parameters that no rule covers."""

import inspect
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from divebatch.errors import ArgumentError, CoverageError
from divebatch.norms.forms import Explicit, Form
from divebatch.norms.sharded import unsharded_type

Rule = Callable[[Any, Any, Tensor], Mapping[str, Form | Tensor]]
"""`(layer, x, dy) -> {parameter name: its gradients}`; see `rule_for`."""

Names = Collection[str] | Callable[[Any], Collection[str]]
"""Names of parameters, or a function that returns them for a layer."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A rule with its settings; see `rule_for`."""

    rule: Rule
    parameters: Names | None
    """Names of the parameters that the rule covers; None: all parameters."""
    all_inputs: bool = False
    reruns: bool = False
    capture: Callable[[Any, Any, Any], Any] | None = None
    input_check: Callable[[Any, Any], str | None] | None = None
    never_for: tuple[type[nn.Module], ...] = ()
    by_rows: bool = False
    """Whether the module's own parameters are measured, as views with one row per sample (`rules/shared.py`)."""

    def states(self, layer: nn.Module, name: str) -> bool:
        """Return whether the rule covers the layer's parameter of this name."""
        names = self.parameters(layer) if callable(self.parameters) else self.parameters
        return names is None or name in names


RULES: dict[type[nn.Module], Entry] = {}

MODEL = "(model)"
"""The name for a layer that is the whole model."""


def rule_for(
    kind: type[nn.Module],
    *,
    parameters: Names = ("weight", "bias"),
    all_inputs: bool = False,
    reruns: bool = False,
    capture: Callable[[Any, Any, Any], Any] | None = None,
    input_check: Callable[[Any, Any], str | None] | None = None,
) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule for layers of exactly this type.

    The function is called as `rule(layer, x, dy)` with the layer's input and the gradient of the loss with respect to
    its output, both with the batch dimension first. The function returns each sample's gradients by parameter name:
    tensors (batch, *parameter shape), or a `Form` of such a tensor. Gradients of frozen or missing parameters are
    ignored. Subclasses of the layer do not inherit the rule, since they may compute something else.

    Args:
        kind: The type of the layers.
        parameters: Names of the parameters that the rule covers, or a function that returns them for a layer; any other
            trainable parameter of such a layer is an error.
        all_inputs: Whether the rule receives a dict of all arguments of `forward` by name instead of `x`.
        reruns: Whether the layer must run again in its rule. The rule then also covers the parameters of the layer's
            children (named `child.weight`), and receives a `Rerun` instead of `x`, once for each output that the
            loss uses, in the layer's own layout.
        capture: `capture(layer, x, output)` runs in the forward pass, and its result replaces `x`; not if compiled.
        input_check: `input_check(layer, x)` returns a description of the error if an input only seems to have the batch
            dimension first, else None. The check runs in the first measured pass, and may read values.
    """

    def register(rule: Rule) -> Rule:
        add_rule(kind, Entry(rule, parameters, all_inputs or reruns, reruns, capture, input_check))
        return rule

    return register


def add_rule(kind: type[nn.Module], entry: Entry) -> None:
    """Register `entry` for layers of exactly this type."""
    if kind in RULES:
        raise ArgumentError(
            f"{kind.__name__} already has a rule: {RULES[kind].rule}. To replace it, first call "
            f"divebatch.norms.registry.RULES.pop({kind.__name__})"
        )
    RULES[kind] = entry


def parameter_of(layer: nn.Module, name: str) -> nn.Parameter | None:
    """Return the layer's own parameter of this name, or a child's if the name is `child.weight`."""
    owner, _, key = name.rpartition(".")
    return (layer.get_submodule(owner) if owner else layer)._parameters.get(key)


def is_trainable(layer: nn.Module, name: str) -> bool:
    """Return whether the layer has a trainable parameter of this name."""
    parameter = layer._parameters.get(name)
    return parameter is not None and parameter.requires_grad


def require_batch(layer: nn.Module, x: Tensor, num_dims: int) -> None:
    """Raise unless the input has at least this many dimensions, including the batch."""
    if x.ndim < num_dims:
        raise CoverageError(
            f"{type(layer).__name__} was given an input of shape {tuple(x.shape)}: the batch dimension is missing"
        )


def original_type(module: nn.Module) -> type[nn.Module]:
    """Return the type with which a layer was made, before a compiled meter or `fully_shard` replaced it."""
    kind: type[nn.Module] = getattr(type(module), "divebatch_original", type(module))
    return unsharded_type(kind)


@dataclass(frozen=True, slots=True, eq=False)
class CoveredLayer:
    """A layer with its own trainable parameters, and the rule for their gradients."""

    name: str
    module: nn.Module
    entry: Entry

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the inputs of a call that the rule needs: the first argument, or all by name."""
        if not self.entry.all_inputs:
            return args[0] if args else next(iter(kwargs.values()))
        return dict(inspect.signature(self.module.forward).bind(*args, **kwargs).arguments)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the rule covers."""
        if self.entry.reruns:
            return list(self.module.parameters())
        return [p for p in self.module._parameters.values() if p is not None]  # asked for in every pass

    def frozen(self) -> Container[str]:
        """Return the names of the parameters that are currently frozen."""
        return {name for name, p in self.module.named_parameters(recurse=self.entry.reruns) if not p.requires_grad}

    def gradients(self, x: Any, dy: Tensor, frozen: Container[str] = ()) -> list[tuple[nn.Parameter, Form]]:
        """Return one call's gradients, each with its parameter, which several layers may share.

        `frozen` names parameters that were constants in the forward pass, whatever they are now.
        """
        entry, own = self.entry, self.module._parameters
        stated = entry.rule(self.module, x, dy)
        found: list[tuple[nn.Parameter, Form]] = []
        for name, gradient in stated.items():
            parameter = own.get(name) if "." not in name else parameter_of(self.module, name)
            if parameter is not None and parameter.requires_grad and name not in frozen:
                form = self._explicit(name, gradient, parameter) if isinstance(gradient, Tensor) else gradient
                found.append((parameter, form))
        if not entry.reruns and not entry.by_rows:  # their parameters come one by one
            for name, parameter in own.items():
                if parameter is not None and parameter.requires_grad and name not in stated:
                    raise CoverageError(f"the rule of {self.place} gave no gradients of '{name}'")
        return found

    def _explicit(self, name: str, gradient: Tensor, parameter: nn.Parameter) -> Explicit:
        if gradient.shape[1:] != parameter.shape:
            shape = ", ".join(map(str, ("batch", *parameter.shape)))
            raise CoverageError(
                f"the rule of {self.place} gave gradients of shape {tuple(gradient.shape)} for '{name}', not ({shape})"
            )
        return Explicit(gradient)

    def name_of(self, parameter: str) -> str:
        """Return the model's name of the layer's parameter."""
        return parameter if self.name == MODEL else f"{self.name}.{parameter}"

    @property
    def place(self) -> str:
        """The layer's name and type, for messages."""
        return f"'{self.name}' ({type(self.module).__name__})"


def cover(model: nn.Module, *, fallback: Entry | None = None) -> list[CoveredLayer]:
    """Return every layer with trainable parameters and its rule; raise an error that names uncovered parameters."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CoverageError(f"{type(model).__name__} has no trainable parameter: nothing can be measured")
    covered: list[CoveredLayer] = []
    missed: list[tuple[str, nn.Module, str]] = []
    within: set[nn.Module] = set()
    for name, module in model.named_modules():
        _require_batch_first(name, module)
        if module in within:  # part of a layer that runs again in its own rule
            continue
        entry = RULES.get(original_type(module), fallback)  # exact types: a subclass may compute something else
        if entry is not None and isinstance(module, entry.never_for):
            entry = None
        reruns = entry is not None and entry.reruns
        if reruns:
            within.update(module.modules())
        own = {key: p for key, p in module.named_parameters(recurse=reruns) if p.requires_grad}
        if own and entry is not None:
            covered.append(CoveredLayer(name or MODEL, module, entry))
        for key, parameter in own.items():
            if parameter.is_complex():
                place = f"{name}.{key}" if name else key
                raise CoverageError(f"parameter '{place}' is complex, and norm rules are for real ones")
            if entry is None or not entry.states(module, key):
                missed.append((name, module, key))
    if missed:
        raise _uncovered(missed, fallback)
    return covered


def _require_batch_first(name: str, module: nn.Module) -> None:
    """Refuse layers whose Linear layers would confuse steps with samples, undetected if their numbers are equal."""
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    if isinstance(module, kinds) and not module.self_attn.batch_first:
        raise CoverageError(
            f"'{name or MODEL}' ({type(module).__name__}) has the time first", "make it with batch_first=True"
        )


def is_shareable(parameter: Tensor) -> bool:
    """Return whether the first dimension can be the batch's, as in class tokens and learned positions."""
    return parameter.ndim > 1 and parameter.shape[0] == 1


def _uncovered(missed: Sequence[tuple[str, nn.Module, str]], fallback: Entry | None) -> CoverageError:
    told = []
    for layer, module, key in missed:
        why = " (which its rule does not state)" if original_type(module) in RULES else ""
        place = f"{layer}.{key}" if layer else key
        told.append(f"'{place}' of {type(module).__name__}{why}")
    known = ", ".join(sorted(kind.__name__ for kind in RULES))
    way = "replace the layer (the fallback cannot run it)"
    if fallback is None:
        way = "pass fallback='vmap' (in a controller: estimator=Trajectory(fallback='vmap') or PerSample(...))"
    return CoverageError(
        f"no norm rule covers: {'; '.join(told)}. Rules exist for: {known}",
        f"{', '.join((*_rules_to_write(missed), way))}, or freeze the parameter (requires_grad_(False))",
    )


def _rules_to_write(missed: Sequence[tuple[str, nn.Module, str]]) -> Iterator[str]:
    """Yield the rule to write for each kind of module; parameters that samples may share come first."""

    def needs_rule(module: nn.Module, key: str) -> bool:
        parameter = parameter_of(module, key)
        return parameter is None or not is_shareable(parameter)

    # One rule covers a layer of its own: a weight of one row looks as if samples could share it.
    whole = {module for _, module, key in missed if needs_rule(module, key) and not any(module.children())}
    kinds: dict[tuple[bool, str], dict[str, None]] = {}
    for _, module, key in missed:
        kinds.setdefault((module in whole or needs_rule(module, key), type(module).__name__), {})[key] = None
    for (is_ruled, kind), keys in sorted(kinds.items()):
        if is_ruled:
            yield f"register a rule with @divebatch.rule_for({kind}, parameters={tuple(keys)})"
        else:
            names = ", ".join(map(repr, keys))
            yield f"write divebatch.norms.shared_by_samples({kind}, {names}) if samples share them by broadcasting"
