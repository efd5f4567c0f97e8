"""Which rule states which layer's gradients, and the check that no trainable parameter is forgotten."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from divebatch.errors import ArgumentError, CoverageError
from divebatch.norms.recompute import results
from divebatch.norms.sample_gradients import Explicit, Form
from divebatch.norms.sharded import unsharded_type

Rule = Callable[[Any, Any, Tensor], Mapping[str, Form | Tensor]]
"""`(layer, x, dy) -> {parameter name: its gradients}`, one gradient a sample.

`x` is the layer's input, `dy` the gradient of the (reduced) loss with respect to its output; both have the batch
dimension first. A gradient is a tensor (B, *parameter shape) or a `Form` that stands for one. What is stated of frozen
parameters is not counted. The rule knows nothing of the loss's reduction: the meter scales.
"""

Look = Callable[[Any, Any, Any], Any]
"""`(layer, x, output) -> x`: adds what a rule can use of an eager forward pass, beside the input."""

Doubt = Callable[[Any, Any], str | None]
"""`(layer, x) -> what is wrong`: asked of the first pass, for inputs that look like one a sample and are not."""

Names = Collection[str] | Callable[[Any], Collection[str]]
"""Names of parameters, or a function that gives them where they depend on the layer."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the registry."""

    rule: Rule
    parameters: Names | None
    """Names of the parameters that the rule states; None for all there are."""
    all_inputs: bool
    reruns: bool = False
    look: Look | None = None
    doubt: Doubt | None = None
    never_for: tuple[type[nn.Module], ...] = ()
    by_rows: bool = False
    """Whether the module's own parameters are measured, as views with one row a sample (`shared_parameters.py`)."""

    def states(self, layer: nn.Module, name: str) -> bool:
        """Whether the rule gives the gradients of the layer's parameter of this name."""
        names = self.parameters(layer) if callable(self.parameters) else self.parameters
        return names is None or name in names


RULES: dict[type[nn.Module], Entry] = {}

MODEL = "(model)"
"""The name of a layer that is the whole model."""


def rule_for(
    kind: type[nn.Module],
    *,
    parameters: Names = ("weight", "bias"),
    all_inputs: bool = False,
    reruns: bool = False,
    look: Look | None = None,
    doubt: Doubt | None = None,
) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule for layers of exactly this type.

    The function is called as `rule(layer, x, dy)` with the layer's input and the gradient of the loss with respect to
    its output, both with the batch dimension first. It returns the gradients of each sample by the parameters' names:
    tensors (batch, *parameter shape), or a `Form` that stands for one. What it states of frozen or missing parameters
    is not counted. Subclasses of the layer do not inherit the rule: they may compute something else.

    Args:
        kind: the type of the layers.
        parameters: names of the parameters that the rule states, or a function that gives them for a layer; any other
            trainable parameter of such a layer is an error.
        all_inputs: gives the rule a dict of all arguments of `forward` by name in the place of `x`.
        reruns: for a layer that must run again in its rule. The rule answers for the parameters of the layer's children
            too (named `child.weight`), gets a `Rerun` in the place of `x`, and is called once for each of the layer's
            outputs that the loss uses: input and gradient are as the layer has them, wherever its batch dimension is.
        look: what `look(layer, x, output)` gives in the forward pass takes the place of `x`; not in compiled models.
        doubt: `doubt(layer, x)` says what is wrong with an input that seems to have the batch dimension first and does
            not, or None; it is asked in the first pass, and may look at values.
    """

    def register(rule: Rule) -> Rule:
        add_rule(kind, Entry(rule, parameters, all_inputs or reruns, reruns, look, doubt))
        return rule

    return register


def add_rule(kind: type[nn.Module], entry: Entry) -> None:
    """Register `entry` for layers of exactly this type."""
    if kind in RULES:
        raise ArgumentError(
            f"{kind.__name__} already has a rule: {RULES[kind].rule}. To put another in its place, take it out "
            f"first: divebatch.norms.registry.RULES.pop({kind.__name__})"
        )
    RULES[kind] = entry


def parameter_of(layer: nn.Module, name: str) -> nn.Parameter | None:
    """The layer's own parameter of this name, or a child's where the name is `child.weight`."""
    if "." not in name:  # nearly always
        return layer._parameters.get(name)
    owner, _, key = name.rpartition(".")
    return layer.get_submodule(owner)._parameters.get(key)


def is_trainable(layer: nn.Module, name: str) -> bool:
    """Whether the layer owns a parameter of this name that is being trained."""
    parameter = parameter_of(layer, name)
    return parameter is not None and parameter.requires_grad


def require_batch(layer: nn.Module, x: Tensor, num_dims: int) -> None:
    """Raise unless the input has at least so many dimensions, the first of which is the batch."""
    if x.ndim < num_dims:
        raise CoverageError(
            f"{type(layer).__name__} was given an input of shape {tuple(x.shape)}: the batch dimension is missing"
        )


def original_type(module: nn.Module) -> type[nn.Module]:
    """The type a layer was made with; a compiled meter and `fully_shard` exchange it for one of their own."""
    kind: type[nn.Module] = getattr(type(module), "divebatch_original", type(module))
    return unsharded_type(kind)


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

    def observed(self, output: Any) -> list[tuple[int, Tensor]]:
        """The tensors whose gradients the rule wants, numbered: the output, the first of several, or all."""
        if isinstance(output, Tensor):
            return [(0, output)] if output.requires_grad else []
        wanted = results(output) if self.entry.reruns else [next(iter(output))]
        return [(i, tensor) for i, tensor in enumerate(wanted) if tensor.requires_grad]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the rule answers for."""
        return list(self.module.parameters(recurse=self.entry.reruns))

    @property
    def frozen(self) -> frozenset[int]:
        """Ids of those that are not trained now; quick, as it is asked with every call."""
        own = self.module.parameters() if self.entry.reruns else self.module._parameters.values()
        return frozenset(id(p) for p in own if p is not None and not p.requires_grad)

    def gradients(self, x: Any, dy: Tensor) -> list[tuple[nn.Parameter, Form]]:
        """One call's gradients with the parameter of each, which several layers may have in common."""
        stated = self.entry.rule(self.module, x, dy)
        self._require_all(stated)
        found: list[tuple[nn.Parameter, Form]] = []
        for name, gradient in stated.items():
            parameter = parameter_of(self.module, name)
            if parameter is not None and parameter.requires_grad:
                if isinstance(gradient, Tensor):
                    gradient = self._explicit(name, gradient, parameter)
                found.append((parameter, gradient))
        return found

    def _require_all(self, stated: Mapping[str, Form | Tensor]) -> None:
        if self.entry.reruns or self.entry.by_rows:  # one after the other, and not every parameter is behind each
            return
        own = self.module._parameters.items()
        missing = [name for name, p in own if name not in stated and p is not None and p.requires_grad]
        if missing:
            raise CoverageError(f"the rule of {self._place} gave no gradients of {missing}, which it should state")

    def _explicit(self, name: str, gradient: Tensor, parameter: nn.Parameter) -> Explicit:
        if gradient.shape[1:] != parameter.shape:
            raise CoverageError(
                f"the rule of {self._place} gave gradients of shape {tuple(gradient.shape)} for '{name}'; they must be "
                f"(batch, *parameter shape), here (batch, {', '.join(map(str, parameter.shape))}): sum over positions"
            )
        return Explicit(gradient)

    def name_of(self, parameter: str) -> str:
        """The model's name of the layer's parameter."""
        return parameter if self.name == MODEL else f"{self.name}.{parameter}"

    @property
    def _place(self) -> str:
        return f"'{self.name}' ({type(self.module).__name__})"


def cover(model: nn.Module, *, fallback: Entry | None = None) -> list[CoveredLayer]:
    """Every layer that owns trainable parameters, with its rule; an error names each parameter without one."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CoverageError(f"{type(model).__name__} has no trainable parameter: nothing can be measured")
    _require_batch_first(model)
    covered: list[CoveredLayer] = []
    uncovered: list[_Missed] = []
    for name, module, entry in _with_entries(model, fallback):
        trained = {key: p for key, p in module.named_parameters(recurse=_reruns(entry)) if p.requires_grad}
        _require_real(name, trained)
        own = list(trained)
        if own and entry is not None:
            covered.append(CoveredLayer(name or MODEL, module, entry))
        uncovered += [_Missed(name, module, key) for key in own if entry is None or not entry.states(module, key)]
    if uncovered:
        raise _uncovered(uncovered, fallback)
    return covered


def _with_entries(model: nn.Module, fallback: Entry | None) -> Iterator[tuple[str, nn.Module, Entry | None]]:
    """Each module with its name and its row of the registry, but for those within one whose rule runs it again."""
    within: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in within:
            continue
        # Exact types: a subclass may compute something else.
        entry = RULES.get(original_type(module), fallback)
        if entry is not None and isinstance(module, entry.never_for):
            entry = None
        within.update(module.modules() if _reruns(entry) else ())
        yield name, module, entry


def _reruns(entry: Entry | None) -> bool:
    return entry is not None and entry.reruns


def _require_batch_first(model: nn.Module) -> None:
    """The Linear layers in here would take steps for samples, unnoticed where there are as many of both."""
    for name, module in model.named_modules():
        kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        if isinstance(module, kinds) and not module.self_attn.batch_first:
            raise CoverageError(
                f"'{name or MODEL}' ({type(module).__name__}) has the time first, where steps look like samples",
                "make it with batch_first=True",
            )


def _require_real(layer: str, parameters: Mapping[str, nn.Parameter]) -> None:
    for key, parameter in parameters.items():
        if parameter.is_complex():
            name = f"{layer}.{key}" if layer else key
            raise CoverageError(f"parameter '{name}' is complex, and norm rules are for real ones")


@dataclass(frozen=True, slots=True)
class _Missed:
    """A parameter without a rule."""

    layer: str
    module: nn.Module
    key: str

    def __str__(self) -> str:
        why = " (which its rule does not state)" if original_type(self.module) in RULES else ""
        place = f"{self.layer}.{self.key}" if self.layer else self.key
        return f"'{place}' of {type(self.module).__name__}{why}"


def is_shareable(parameter: Tensor) -> bool:
    """Whether it has a first dimension that can stand for the batch, as class tokens and learned positions have."""
    return parameter.ndim > 1 and parameter.shape[0] == 1


def _uncovered(missed: Sequence[_Missed], fallback: Entry | None) -> CoverageError:
    known = ", ".join(sorted(kind.__name__ for kind in RULES))
    way = "replace the layer (the fallback cannot run it)"
    if fallback is None:
        way = "pass fallback='vmap' (in a controller: estimator=Trajectory(fallback='vmap') or PerSample(...))"
    return CoverageError(
        f"no norm rule covers: {'; '.join(map(str, missed))}. Rules exist for: {known}",
        f"{', '.join((*_lines_for_rules(missed), way))}, or freeze the parameter (requires_grad_(False))",
    )


def _lines_for_rules(missed: Sequence[_Missed]) -> Iterator[str]:
    """What to write for each kind of module: those parameters that samples may share come first."""
    shared: dict[str, dict[str, None]] = {}
    others: dict[str, dict[str, None]] = {}
    for each in missed:
        parameter = parameter_of(each.module, each.key)
        kinds = shared if parameter is not None and is_shareable(parameter) else others
        kinds.setdefault(type(each.module).__name__, {})[each.key] = None
    for kind, keys in shared.items():
        names = ", ".join(map(repr, keys))
        yield f"write divebatch.norms.shared_by_samples({kind}, {names}) if samples share them by broadcasting"
    for kind, keys in others.items():
        yield f"register a rule with @divebatch.rule_for({kind}, parameters={tuple(keys)})"
