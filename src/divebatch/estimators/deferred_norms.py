"""What the chunks of a batch showed: norms that stay on the device until somebody reads them.

On a GPU each operation on a single number is a launch as any other. So nothing is computed with the norms of a step
before they are read, many steps at once, and then on the host.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from divebatch.estimators.average import inner_variance, unbiased

Norms = Tensor | float
"""Of several tensors, one norm each, where they were computed; or, once read, the sum of their squares. Also a number
by itself, such as a product of two gradients: as it is, before and after."""


def norms_of(tensors: Sequence[Tensor]) -> Norms:
    """Two operators on the device."""
    return torch.stack(torch._foreach_norm(list(tensors))) if tensors else 0.0


def read(many: Sequence[Norms]) -> list[float]:
    """The sums of squares, and numbers by themselves, in float64. Waits for the device, once for all of one kind."""
    found = [0.0 if isinstance(each, Tensor) else each for each in many]
    alike: dict[object, list[tuple[int, Tensor]]] = {}
    for place, each in enumerate(many):
        if isinstance(each, Tensor):
            alike.setdefault((each.device, each.dtype), []).append((place, each))
    for group in alike.values():
        numbers = iter(torch.cat([each.reshape(-1) for _, each in group]).cpu().double().tolist())
        for place, each in group:
            own = itertools.islice(numbers, each.numel())
            found[place] = sum(norm * norm for norm in own) if each.ndim else next(own)
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """The mean gradients of two or more chunks of samples at the same weights."""

    sizes: Sequence[int]
    """Samples of each chunk."""
    factors: Sequence[float]
    """What the squared norm of each chunk is to be multiplied with."""
    norms: Sequence[Norms]
    """Of each chunk."""
    of_sum: Norms
    """Of the sum over all samples."""
    before_last: Norms | None
    """Of the sum that the last chunk was added to; None where that was the first chunk."""

    @property
    def num_samples(self) -> int:
        """In all chunks."""
        return sum(self.sizes)

    @property
    def parts(self) -> list[Norms]:
        """All that is to be read."""
        return [*self.norms, self.of_sum, *([] if self.before_last is None else [self.before_last])]

    def numbers(self, values: Sequence[float]) -> tuple[float, float, float]:
        """tr(Sigma), ||G||^2 and Var_i<g_i, g>, from what `parts` were read as."""
        count, total = len(self.sizes), self.num_samples
        of_chunks = [factor * square for factor, square in zip(self.factors, values[:count], strict=True)]
        mean, last = values[count] / total**2, self.sizes[-1]
        weighted = sum(size * square for size, square in zip(self.sizes, of_chunks, strict=True))
        before = self.sizes[0] ** 2 * of_chunks[0] if self.before_last is None else values[count + 1]
        rest = total - last
        inner = inner_variance((before / rest**2, of_chunks[-1]), (rest, last), mean)
        return (*unbiased(weighted, mean, count, total), inner)


class Readable(Protocol):
    """What one step showed, or a few."""

    @property
    def num_samples(self) -> int:
        """By which it is weighed."""
        ...

    @property
    def parts(self) -> Sequence[Norms]:
        """All that is to be read."""
        ...

    def numbers(self, values: Sequence[float]) -> tuple[float, float, float]:
        """tr(Sigma), ||G||^2 and Var_i<g_i, g>, from what `parts` were read as."""
        ...


def numbers_of(rows: Sequence[Readable]) -> Iterator[tuple[float, float, float]]:
    """Of each row, in order; one look at the device for all."""
    values = iter(read([part for row in rows for part in row.parts]))
    for row in rows:
        yield row.numbers(list(itertools.islice(values, len(row.parts))))
