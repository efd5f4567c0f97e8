"""Sketches of gradients: a few numbers each, whose products tell those of the gradients.

A sketch S is linear, with random signs: E<Sg, Sh> = <g, h>, with a variance of at most (|g|^2 |h|^2 + <g, h>^2) / m for
sketches of m numbers. The coordinates of each parameter are cut into lines of m. Each line is multiplied with m signs
from a table of 2 m, from a random place on, and with a sign of its own; it is rotated by a random distance and added to
the sketch. So a gradient is read once, in long runs. Two coordinates of one line never meet, two of different lines
meet with probability 1 / m whatever the shape of the parameters, and the signs of the lines make products unbiased.

What happens to a coordinate depends on its parameter and its place there alone: sketches of shards add up.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from divebatch.estimators.average import Norms
from divebatch.estimators.step_gradients import StepGradients
from divebatch.measurement import Spread
from divebatch.norms.sharded import Shards
from divebatch.norms.sketch import sum_dtype

LEAST_SIZE = 2**14
"""Numbers of a sketch below which gradients are rather kept whole: ||G||^2 is then off by 1.1 % (s.d.), while the
noise of the gradients leaves it uncertain by several percent over an epoch; see docs/estimators.md."""
MOST_SIZE = 2**20
SHARE = 0.01
"""What all sketches together may take, as a share of the parameters' bytes."""
TABLE_LENGTHS = 2
"""Lengths of a sketch that the table of signs has."""
BYTES_PER_LINE = 48
"""What is kept of each line: its draws, and on a GPU where to find it."""
LONGEST_NORM = 2**20
"""Entries: in float32 the norm of 10^8 came out 1.1 % too small on a CPU."""


def sketch_dtype(parameters: Collection[Tensor]) -> torch.dtype:
    """The type of a sketch of gradients of `parameters`: real, and at least float32."""
    dtype = functools.reduce(torch.promote_types, (sum_dtype(p.dtype) for p in parameters))
    return dtype.to_real()


def fitting_size(parameters: Collection[nn.Parameter], *, sketches: int) -> int:
    """The largest power of two for which so many sketches take at most 1 % of the parameters' memory; 0 for none."""
    budget = SHARE * sum(p.numel() * p.element_size() for p in parameters)
    per_number = sketches * sketch_dtype(parameters).itemsize + TABLE_LENGTHS
    size = MOST_SIZE
    while size:
        lines = sum(-(-p.numel() // size) for p in parameters)
        if size * per_number + lines * BYTES_PER_LINE <= budget:
            break
        size //= 2
    return size


class SignSketch:
    """A linear map of gradients to `size` numbers.

    Args:
        parameters: Those whose gradients are sketched, by name.
        size: Numbers of a sketch.
        seed: Determines all signs and rotations.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], size: int, *, seed: int) -> None:
        self.size, self.seed, self.shards = size, seed, Shards(parameters)
        self.shards.require_rows("a sketch")
        self.numels = {name: p.numel() * (2 if p.is_complex() else 1) for name, p in parameters.items()}
        self.device, self.dtype = next(iter(parameters.values())).device, sketch_dtype(parameters.values())
        self.first_lines: dict[str, int] = {}
        """The number of each parameter's first line."""
        lines = 0
        for name, numel in self.numels.items():
            self.first_lines[name] = lines
            lines += -(-numel // size)
        drawn = torch.Generator().manual_seed(seed)
        draw = functools.partial(torch.randint, generator=drawn, dtype=torch.int32, device="cpu")
        self.draws = torch.stack(
            [draw(0, size, (lines,)), draw(0, size + 1, (lines,)), draw(0, 2, (lines,)) * 2 - 1], 1
        )
        """(lines, 3): how far a line is rotated, where its signs begin in the table, its own sign."""
        self.table = (draw(0, 2, (TABLE_LENGTHS * size,)) * 2 - 1).to(self.device, torch.int8)

    @property
    def relative_variance(self) -> float:
        """Of |SG|^2 around ||G||^2, whatever G is, over draws of the signs; at most this."""
        return 2 / self.size

    @property
    def num_bytes(self) -> int:
        """What the signs and rotations take."""
        return sum(each.numel() * each.element_size() for each in (self.draws, self.table))

    def of(self, step: StepGradients) -> tuple[Tensor, Norms]:
        """The sketch of a step's gradients or shards, and what their squared norm is read from, which is exact."""
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        norms: list[Tensor] = []
        for name, gradient in step:
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            flat = real.to(self.device, self.dtype).reshape(-1)
            start = step.offsets.get(name, 0) * (2 if gradient.is_complex() else 1)
            self._add(total, flat, name, start=start, scale=step.scale)
            norms += torch._foreach_norm(flat.split(LONGEST_NORM))
        return total, torch.stack(norms) * abs(step.scale)

    def _add(self, total: Tensor, flat: Tensor, name: str, *, start: int, scale: float) -> None:
        """Add to `total` the sketch of `flat`, the entries of parameter `name` from the one numbered `start` on."""
        lines = range(start // self.size, -(-(start + len(flat)) // self.size)) if len(flat) else range(0)
        draws = self.draws[self.first_lines[name] + lines.start :][: len(lines)].tolist()
        for line, (rotation, place, sign) in zip(lines, draws, strict=True):
            begin, end = (min(max(at - start, 0), len(flat)) for at in (line * self.size, (line + 1) * self.size))
            first = start + begin - line * self.size  # where a shard begins within a line
            signs = self.table[place + first :][: end - begin].to(self.dtype)
            bucket = (rotation + first) % self.size
            turn = min(end - begin, self.size - bucket)
            total[bucket : bucket + turn].addcmul_(flat[begin : begin + turn], signs[:turn], value=sign * scale)
            if begin + turn < end:  # the rest begins anew
                total[: end - begin - turn].addcmul_(flat[begin + turn : end], signs[turn:], value=sign * scale)


def with_shared_error(spread: Spread, means: Sequence[float], relative_variance: float) -> Spread:
    """The spread with the error of ||G||^2 that does not change from step to step, so that scatter does not show it.

    `means` are tr(Sigma), ||G||^2, Var_i<g_i, g> and what of the first was taken off for the second: where ||G||^2 is
    too large by a fraction, tr(Sigma) is too small by that fraction of the last.
    """
    _, sq_norm, _, taken_off = means[:4] if relative_variance else (0.0, 0.0, 0.0, 0.0)
    return replace(
        spread,
        trace_variance=spread.trace_variance + relative_variance * taken_off**2,
        sq_norm_variance=spread.sq_norm_variance + relative_variance * sq_norm**2,
        covariance=spread.covariance - relative_variance * taken_off * sq_norm,
    )
