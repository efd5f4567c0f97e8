"""Whether gradients are kept whole or as sketches, and which ones: chosen once, and the same again at a resume."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from divebatch.checks import require_choice, require_count
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.estimators.gradient_sketch import LEAST_SIZE, SignSketch, fitting_size
from divebatch.estimators.kept_gradients import Copies, Kept, Sketches
from divebatch.norms.accumulators import tensor_like, tensors_like
from divebatch.state_checks import Check, optional, table, table_of, text, whole

Chosen = Mapping[str, Any] | None
"""What sketches are drawn from, as plain values for a checkpoint; None where gradients are kept whole."""


@dataclass(frozen=True, slots=True)
class SketchChoice:
    """The settings `sketch` and `sketch_size` of estimators: see `Moments`."""

    sketch: bool | None = None
    sketch_size: int | None = None

    def __post_init__(self) -> None:
        require_choice("sketch", self.sketch, (None, True, False))
        if self.sketch_size is not None:
            require_count("sketch_size", self.sketch_size)
            if self.sketch is False:
                raise ArgumentError(f"sketch=False keeps whole gradients: leave sketch_size={self.sketch_size} out")

    def choose(self, parameters: Mapping[str, nn.Parameter], *, sketches: int, seed: int) -> Chosen:
        """Choose for so many sketches of gradients; of several ranks all must have the same seed."""
        size = self._size(parameters, sketches)
        return {"size": size, "seed": seed, "entries": _entries(parameters)} if size else None

    def _size(self, parameters: Mapping[str, nn.Parameter], sketches: int) -> int:
        """Numbers of a sketch; 0 where gradients are kept whole."""
        if self.sketch is False or self.sketch_size is not None:
            return self.sketch_size or 0
        fitting = fitting_size(list(parameters.values()), sketches=sketches)
        if fitting >= LEAST_SIZE:
            return fitting
        return LEAST_SIZE if self.sketch else 0


def signs_of(chosen: Chosen, parameters: Mapping[str, nn.Parameter]) -> SignSketch | None:
    """The map to sketches; None where gradients are kept whole."""
    return None if chosen is None else SignSketch(parameters, chosen["size"], seed=chosen["seed"])


def kept(chosen: Chosen, parameters: Mapping[str, nn.Parameter], slots: int) -> Kept:
    """Places for so many gradients."""
    signs = signs_of(chosen, parameters)
    return Copies(parameters, slots) if signs is None else Sketches(signs, slots)


def chosen_check(parameters: Mapping[str, nn.Parameter]) -> Check:
    """Accept what `SketchChoice.choose` says for these parameters."""
    return optional(table({"size": whole(1), "seed": whole(), "entries": _same_entries(_entries(parameters))}))


def kept_check(chosen: Chosen, parameters: Mapping[str, nn.Parameter]) -> Check:
    """Accept one gradient as `kept` holds it."""
    if chosen is None:
        return tensors_like(parameters)
    return tensor_like(torch.empty(chosen["size"], device="meta"))


def _entries(parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    return {name: p.numel() for name, p in parameters.items()}


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
