"""Gradients of successive steps compared in a norm other than the Euclidean one.

With |.| a norm and dual(a) what reaches it (<dual(a), a> = |a|: signs for L1, the polar factor for the nuclear norm), g
the gradient of a step and a that of one before:

    x = <dual(a), g>    at most |G| in expectation, and zero on pure noise, as g's noise is not in a
    y = |a|             at least |G| in expectation
    d = |g - a|         noise alone

The noise of a moves the weights, and g points against it: products one and two steps apart are extrapolated to none
apart, as in `lagged_products`, which holds for them too. The signal is |G|^2 = x y. That is right where the noise of a
leaves dual(a) alone, since then x = y; and for L1 also where G_j / s_j is normal over the coordinates, s_j the noise of
coordinate j, however small it is. In any case x <= |G| <= y, and |G|^2 <= pi / 2 x y, as that holds for each coordinate
with normal noise and (sum sqrt(x_j y_j))^2 <= x y. So B is at most pi / 2 smaller than it comes out and at most y / x
larger, and the ends of the interval are moved by that. Where no signal can be told from zero, nothing is said.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from divebatch.errors import ArgumentError
from divebatch.estimators.average import Norms, read
from divebatch.estimators.estimator import NoiseSeen, Scene
from divebatch.estimators.kept_gradients import Kept
from divebatch.estimators.lagged_products import KEPT, extrapolation
from divebatch.estimators.sketch_choice import SketchChoice, chosen_check, kept, kept_check
from divebatch.estimators.step_gradients import StepGradients
from divebatch.measurement import Spread
from divebatch.norms.accumulators import tensor_like
from divebatch.norms.sharded import whole
from divebatch.state_checks import Check, anything, list_of, number, optional, same, table
from divebatch.state_checks import whole as whole_number

Pairs = Sequence[tuple[Tensor, Tensor]]
"""For each parameter, what is kept of two gradients."""
MOST_TOO_LARGE = math.pi / 2
"""By how much |G|^2 may exceed x y: that much for a coordinate deep in the noise, and less for others."""
NEWEST = KEPT - 1
"""The place of a step's gradient; the two before are for what reaches the norms of the steps before."""
SKETCH_VARIANCES = 5
"""How many times as large as that of ||G||^2 the shared variance of sketched x is taken to be: a cosine of 1/3 between
dual(a) and G."""


class DualNorm(Protocol):
    """A norm of a parameter's gradient, added up over parameters."""

    @property
    def noise_factor(self) -> float:
        """The noise, as B has it, over E|d| for d with noise of variance one."""
        ...

    def takes(self, parameter: Tensor) -> bool:
        """Whether a parameter has such a norm."""
        ...

    @property
    def dual(self) -> Callable[[Tensor], Tensor]:
        """Tells what reaches the norm."""
        ...

    def size(self, gradient: Tensor) -> Tensor:
        """The norm."""
        ...

    def sample(self, gradient: Tensor, place: int) -> Tensor:
        """What is kept of a gradient to tell the noise; `place` is the number of its first entry among all."""
        ...

    def distance(self, pairs: Pairs, entries_per_sample: float) -> Tensor:
        """The norm of the difference of two gradients, from samples; each stands for so many entries."""
        ...


@dataclass(frozen=True, slots=True)
class DualRow:
    """What a step and the two before it showed."""

    num_samples: int
    factor: float
    """Of the extrapolation."""
    noise: float
    """What |d| is to be multiplied by."""
    parts: Sequence[Norms]
    """The products one and two steps apart, the norms of the last step and of the one before, and of the difference."""

    def numbers(self, values: Sequence[float]) -> tuple[float, ...]:
        """The squared noise, the squared signal, nothing, and the square of what the signal is at most."""
        one, two, last, before, distance = values
        most = (last + before) / 2
        return (self.noise * distance) ** 2, (one + self.factor * (one - two)) * most, 0.0, most * most


class LaggedDuals:
    """Compares the gradients of three steps."""

    needed, reach = KEPT, KEPT - 1
    bounds_below, has_inner_variance = True, False

    def __init__(
        self, norm: DualNorm, parameters: Mapping[str, nn.Parameter], kept: Kept, optimizer: Optimizer
    ) -> None:
        self._norm, self._kept, self._optimizer, self._shards = norm, kept, optimizer, kept.shards
        self._shards.require_rows("a sample of a gradient's entries")
        self._entries = {name: parameter.numel() for name, parameter in parameters.items()}
        self._places = _places(parameters)
        self._counts = {name: _num_sampled(norm, p.shape, self._places[name]) for name, p in parameters.items()}
        """What is kept of each whole gradient."""
        self.forget()

    def forget(self) -> None:
        """Drop all steps."""
        self.num_chunks = 0
        self._last_size = 0
        self._norms: list[Norms] = []
        """Of the last two steps, the newest first."""
        self._samples: dict[str, Tensor] = {}
        self._row: DualRow | None = None

    def add_step(self, step: StepGradients, num_samples: int) -> None:
        """A step on `num_samples` samples."""
        step = step.only(self._places)
        if step.is_empty:
            return
        sizes, samples = [], {}
        for name, gradient in step:
            sizes.append(self._norm.size(gradient))
            first = self._places[name] + self._shards.offsets.get(name, 0)
            samples[name] = self._norm.sample(gradient, first) * step.scale
        if self.num_chunks and not samples.keys() & self._samples.keys():
            self.forget()  # nothing in common with the step before, so nothing to compare
        own = torch.stack(sizes).sum(dtype=torch.float64) * abs(step.scale)
        if self.num_chunks >= KEPT - 1:
            self._row = self._compared(step, samples, num_samples)
        self._kept.put(self.num_chunks % NEWEST, step.under(self._norm.dual))
        self.num_chunks, self._last_size = self.num_chunks + 1, num_samples
        self._norms, self._samples = [own, *self._norms[:1]], samples

    def _compared(self, step: StepGradients, samples: Mapping[str, Tensor], num_samples: int) -> DualRow:
        self._kept.put(NEWEST, step)
        last, before = ((self.num_chunks - lag) % NEWEST for lag in (1, 2))
        both = [name for name in samples if name in self._samples]
        pairs = [(samples[name], self._samples[name]) for name in both]
        entries, sampled = (sum(each[name] for name in both) for each in (self._entries, self._counts))
        distance = self._norm.distance(pairs, entries / sampled)
        parts = [self._kept.dot(NEWEST, last), self._kept.dot(NEWEST, before), *self._norms, distance]
        noise = self._norm.noise_factor / math.sqrt(1 / num_samples + 1 / self._last_size)
        return DualRow(num_samples, extrapolation(self._optimizer), noise, parts)

    def row(self) -> DualRow:
        """The row of the last three steps."""
        assert self._row is not None
        return self._row

    def widened(self, spread: Spread, means: Sequence[float]) -> Spread:
        """The spread with what dual(a) leaves open. Without a sure signal, that is everything."""
        _, signal, _, most = means[:4]
        shared = SKETCH_VARIANCES * self._kept.relative_variance * signal**2
        variance = spread.sq_norm_variance + shared
        sure = signal - spread.quantile(0.95) * math.sqrt(variance)
        above = max(1.0, most / sure) if sure > 0 else math.inf
        below = min(MOST_TOO_LARGE, above) if sure > 0 else math.inf
        return replace(spread, sq_norm_variance=variance, factor_below=below, factor_above=above)

    def state_dict(self) -> dict[str, Any]:
        """The steps that the next ones will be compared with."""
        held = [(self.num_chunks - lag) % NEWEST for lag in range(1, min(self.num_chunks, NEWEST) + 1)]
        return {
            "duals": [self._kept.state_of(slot) for slot in held],
            "norms": self._shards.summed(read(self._norms)),
            "samples": {name: self._of_all(name, self._samples.get(name)) for name in self._entries},
            "last_size": self._last_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with them."""
        self.forget()
        for dual in reversed(state["duals"]):
            self._kept.load(self.num_chunks, dual)
            self.num_chunks += 1
        self._norms, self._last_size = [*self._shards.share(state["norms"])], state["last_size"]
        samples = {name: whole(each) for name, each in state["samples"].items() if each is not None}
        self._samples = {name: self._own(name, each).clone() for name, each in samples.items()}

    def _of_all(self, name: str, sample: Tensor | None) -> Tensor | None:
        """A copy of all ranks' samples of one gradient together; a collective where they hold shards."""
        if sample is None or self._shards.ranks.is_alone:
            return None if sample is None else sample.clone()
        everything = sample.new_zeros(self._counts[name])
        self._own(name, everything).copy_(sample)
        self._shards.ranks.sum_([everything])
        return everything

    def _own(self, name: str, everything: Tensor) -> Tensor:
        """This rank's part of a whole gradient's sample."""
        if self._shards.ranks.is_alone:
            return everything
        place, offset = self._places[name], self._shards.offsets[name]
        first = _num_sampled(self._norm, (offset,), place)
        return everything[first:][: _num_sampled(self._norm, (self._shards.held[name].numel(),), place + offset)]


def _num_sampled(norm: DualNorm, shape: Sequence[int], place: int) -> int:
    return norm.sample(torch.empty(shape, device="meta"), place).numel()


@dataclass(frozen=True, slots=True)
class DualWay:
    """Compares gradients in a norm: see `successive_steps.Way`."""

    name: str
    norm: DualNorm
    sampled_norm: DualNorm
    """The same, for models that are sketched."""
    choice: SketchChoice

    added_noise: ClassVar[NoiseSeen] = "mixed"

    def prepare(self, scene: Scene) -> None:
        """Raise for an optimizer whose momentum does not let products be extrapolated."""
        optimizer = scene.require_optimizer(self.name)
        if not extrapolation(optimizer):
            raise ArgumentError(
                f"{self.name!r} needs a momentum of at least 0.4 (Nesterov's 0.87; not NAdam's) to tell noise from "
                f"the motion of the weights: {type(optimizer).__name__} has none, or too little"
            )

    def caveat(self, optimizer: Optimizer) -> str:
        """None."""
        return ""

    def preconditioner(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """None: gradients are compared as they are."""

    def start(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, *, seed: int
    ) -> tuple[LaggedDuals, dict[str, Any]]:
        """A comparison with nothing in it."""
        made_with = {"sketch": self.choice.choose(self._of(parameters, optimizer), sketches=KEPT, seed=seed)}
        return self.resume(made_with, parameters, optimizer), made_with

    def resume(
        self, made_with: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
    ) -> LaggedDuals:
        """A comparison made as another was."""
        own, sketch = self._of(parameters, optimizer), made_with["sketch"]
        norm = self.norm if sketch is None else self.sampled_norm
        return LaggedDuals(norm, own, kept(sketch, own, KEPT), optimizer)

    def made_with_check(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> Check:
        """Accept what `start` gives here."""
        return table({"sketch": chosen_check(self._of(parameters, optimizer))})

    def comparison_check(
        self, made_with: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
    ) -> Check:
        """Accept the state of a comparison that was made so."""
        own, sketch = self._of(parameters, optimizer), made_with["sketch"]
        norm = self.norm if sketch is None else self.sampled_norm
        return duals_state(norm, own, kept_check(sketch, own))

    def _of(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """The optimizer's own parameters that have such a norm."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = {name: p for name, p in parameters.items() if id(p) in held and self.norm.takes(p)}
        if not found:
            raise ArgumentError(f"{self.name!r} has no parameter of {type(optimizer).__name__} to measure")
        return found


def duals_state(norm: DualNorm, parameters: Mapping[str, nn.Parameter], gradient: Check) -> Check:
    """Accept the state of a `LaggedDuals`: of up to two steps, each kept as `gradient` accepts."""
    places = _places(parameters)
    samples = {
        name: optional(tensor_like(norm.sample(torch.empty(p.shape, dtype=p.dtype, device="meta"), places[name])))
        for name, p in parameters.items()
    }

    def check(place: str, state: Any) -> None:
        fields = {"duals": list_of(gradient, at_most=NEWEST), "samples": table(samples)}
        table({**fields, "norms": anything, "last_size": anything})(place, state)
        steps = len(state["duals"])
        list_of(number(finite=False), length=steps)(f"{place}.norms", state["norms"])
        (whole_number(1) if steps else same(0))(f"{place}.last_size", state["last_size"])

    return check


def _places(parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """The number of each parameter's first entry among all."""
    ends = itertools.accumulate(parameter.numel() for parameter in parameters.values())
    return {name: end - parameters[name].numel() for name, end in zip(parameters, ends, strict=True)}
