"""A sketch by its definition: a matrix with one sign in each column."""

from collections.abc import Mapping

import torch
from torch import Tensor

from divebatch.estimators.sketch import SignSketch


def matrices(signs: SignSketch) -> dict[str, Tensor]:
    """Of each parameter: (numbers of the sketch, entries of the parameter), coordinate by coordinate."""
    found = {}
    for name, numel in signs.numels.items():
        matrix = torch.zeros(signs.size, numel, dtype=torch.float64)
        for entry in range(numel):
            line, place = divmod(entry, signs.size)
            rotation, begin, sign = signs.draws[signs.first_lines[name] + line].tolist()
            matrix[(place + rotation) % signs.size, entry] = sign * signs.table[begin + place]
        found[name] = matrix
    return found


def sketched(signs: SignSketch, gradients: Mapping[str, Tensor]) -> Tensor:
    """The sketch of whole gradients."""
    every = matrices(signs)
    return sum(
        (every[name] @ gradient.detach().to(every[name]).flatten() for name, gradient in gradients.items()),
        torch.zeros(signs.size, dtype=torch.float64),
    )
