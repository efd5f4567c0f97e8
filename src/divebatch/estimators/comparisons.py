"""How gradients of successive steps are compared: extrapolated or in windows, kept whole or as sketches."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from divebatch.checks import require_choice, require_count
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.estimators.average import Readable
from divebatch.estimators.chunk_gradients import Chunks, chunks_state
from divebatch.estimators.chunk_products import SketchedChunks, products_state
from divebatch.estimators.gradient_sketch import LEAST_SIZE, SignSketch, fitting_size
from divebatch.estimators.kept_gradients import Copies, Sketches
from divebatch.estimators.lagged_products import KEPT, Lagged, extrapolation, lagged_state
from divebatch.estimators.step_gradients import StepGradients
from divebatch.measurement import Spread
from divebatch.norms.accumulators import tensor_like, tensors_like
from divebatch.state_checks import Check, optional, table, table_of, text, truth, whole

PAIR = 2


class Comparison(Protocol):
    """Takes the gradients of steps and makes estimates of them."""

    @property
    def needed(self) -> int:
        """Steps that an estimate is made of."""
        ...

    @property
    def reach(self) -> int:
        """With how many of the estimates before it one has gradients in common, where there is one a step."""
        ...

    @property
    def bounds_below(self) -> bool:
        """Whether a noise scale may be told from below: not where an unknown bias makes it too large."""
        ...

    @property
    def num_chunks(self) -> int:
        """Steps that are kept now."""
        ...

    def add_step(self, step: StepGradients, num_samples: int) -> None:
        """Take in a step on so many samples."""
        ...

    def row(self) -> Readable:
        """What the last `needed` steps show."""
        ...

    def widened(self, spread: Spread, means: Sequence[float]) -> Spread:
        """Add what the scatter between estimates does not show."""
        ...

    def forget(self) -> None:
        """Drop all steps."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What is kept, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was kept."""
        ...


class WholeChunks(Chunks):
    """The steps of a window, as the sum of their gradients: costs one copy of the parameters."""

    reach = 0
    bounds_below = False

    def __init__(self, parameters: Mapping[str, nn.Parameter], window: int) -> None:
        super().__init__(parameters)
        self.needed = window

    def add_step(self, step: StepGradients, num_samples: int) -> None:
        """Take in a step on so many samples."""
        self.add(dict(step), num_samples, scale=step.scale)

    def widened(self, spread: Spread, means: Sequence[float]) -> Spread:
        """As it is: nothing is left to add."""
        return spread


@dataclass(frozen=True, slots=True)
class Comparing:
    """The settings of a comparison: see `Moments`."""

    window: int | None = None
    sketch: bool | None = None
    sketch_size: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            require_count("window", self.window, at_least=PAIR)
        require_choice("sketch", self.sketch, (None, True, False))
        if self.sketch_size is not None:
            require_count("sketch_size", self.sketch_size)
            if self.sketch is False:
                raise ArgumentError(f"sketch=False keeps whole gradients: leave sketch_size={self.sketch_size} out")

    def is_extrapolated(self, optimizer: Optimizer) -> bool:
        """Whether gradients one and two steps apart are compared, and not windows of them."""
        return self.window is None and extrapolation(optimizer) > 0

    def start(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, *, seed: int
    ) -> tuple[Comparison, dict[str, Any]]:
        """A comparison with nothing in it, and what it must be made with to go on: see `resume`.

        `seed` is for the signs of sketches; of several ranks all must have the same.
        """
        is_lagged = self.is_extrapolated(optimizer)
        size = self._size(parameters, sketches=KEPT if is_lagged else PAIR)
        made_with: dict[str, Any] = {"is_lagged": is_lagged, "sketch": None}
        if size:
            made_with["sketch"] = {"size": size, "seed": seed, "entries": _entries(parameters)}
        return self.resume(made_with, parameters, optimizer), made_with

    def resume(
        self, made_with: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
    ) -> Comparison:
        """A comparison made as another was, whatever the settings are here: what was begun goes on as it was."""
        sketch = made_with["sketch"]
        signs = None if sketch is None else SignSketch(parameters, sketch["size"], seed=sketch["seed"])
        if made_with["is_lagged"]:
            return Lagged(Copies(parameters, KEPT) if signs is None else Sketches(signs, KEPT), optimizer)
        window = self.window or PAIR
        return WholeChunks(parameters, window) if signs is None else SketchedChunks(signs, window)

    def made_with_check(self, parameters: Mapping[str, nn.Parameter]) -> Check:
        """Accept what `start` gives for these parameters and settings, whatever the optimizer's momentum."""
        sketch = {"size": whole(1), "seed": whole(), "entries": _same_entries(_entries(parameters))}

        def check(place: str, state: Any) -> None:
            table({"is_lagged": truth, "sketch": optional(table(sketch))})(place, state)
            if state["is_lagged"] and self.window is not None:
                raise CheckpointError(
                    f"{place}.is_lagged: the checkpoint's estimate by moments is extrapolated, and here it is made "
                    f"from {self.window} steps at a time: go on with Moments(), without a window"
                )

        return check

    def _size(self, parameters: Mapping[str, nn.Parameter], *, sketches: int) -> int:
        """Numbers of a sketch; 0 where gradients are kept whole."""
        if self.sketch is False or self.sketch_size is not None:
            return self.sketch_size or 0
        fitting = fitting_size(list(parameters.values()), sketches=sketches)
        if fitting >= LEAST_SIZE:
            return fitting
        return LEAST_SIZE if self.sketch else 0


def _entries(parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    return {name: p.numel() for name, p in parameters.items()}


def chunks_check(made_with: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> Check:
    """Accept the state of a comparison that was made so."""
    sketch = made_with["sketch"]
    if made_with["is_lagged"]:
        kept = tensors_like(parameters) if sketch is None else tensor_like(torch.empty(sketch["size"], device="meta"))
        return lagged_state(kept)
    return chunks_state(parameters) if sketch is None else products_state(sketch["size"])


def _same_entries(here: Mapping[str, int]) -> Check:
    """Accept the same parameters in the same order: another order has other signs."""

    def check(place: str, there: Any) -> None:
        table_of(text, whole())(place, there)
        for was, now in itertools.zip_longest(there.items(), here.items()):
            if was != now:
                raise CheckpointError(
                    f"{place}: the checkpoint's sketches are another model's: among its parameters and their entries "
                    f"is {was} there where {now} is here"
                )

    return check
