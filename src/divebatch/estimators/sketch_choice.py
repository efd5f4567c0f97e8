"""Whether gradients are kept whole or as sketches, and which ones: chosen once, and the same again at a resume."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from divebatch.checks import require_choice, require_count
from divebatch.errors import ArgumentError
from divebatch.estimators.gradient_sketch import LEAST_SIZE, SignSketch, fitting_size
from divebatch.estimators.kept_gradients import Copies, Kept, Sketches

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


def _entries(parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    return {name: p.numel() for name, p in parameters.items()}
