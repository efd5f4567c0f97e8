"""Squared norms from random signs: unbiased, and far cheaper than exact norms.

For a gradient matrix G with rows g_o and random signs r_o, u = sum_o r_o g_o has E ||u||^2 = sum_o ||g_o||^2. Each row
is randomly put into one of two halves, each with its own sketch, u_a and u_b. The estimate is ||u_a||^2 + ||u_b||^2, so
pairs of rows in different halves add no noise. The products of the sketches show the size of the noise. The variance is
4 times the sum of <g_o, g_p>^2 over the pairs within the halves, and (u_a . u_b)^2 is unbiased for the same sum over
the pairs across them, which is as large on average.

Shapes: N matrices (samples, or samples x groups), P rows, T positions, H = 2 halves (1 if there is only one row).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type for sums of numbers of type `dtype`."""
    return torch.promote_types(dtype, torch.float32)


class Estimate(NamedTuple):
    """Squared norms of N matrices and their variances, both (N,)."""

    sq_norms: Tensor
    variances: Tensor | None
    """The variances; None if the squared norms are exact."""

    def of_groups(self, groups: int) -> "Estimate":
        """Add up each sample's `groups` matrices."""
        if groups == 1:
            return self
        variances = None if self.variances is None else self.variances.view(-1, groups).sum(1)
        return Estimate(self.sq_norms.view(-1, groups).sum(1), variances)


def summed(estimates: Sequence[Estimate]) -> Estimate:
    """Add up estimates with independent signs, with one kernel for all instead of one addition each."""
    sq_norms, variances = [], []
    for exact_or_not, variance in estimates:
        sq_norms.append(exact_or_not)
        if variance is not None:
            variances.append(variance)
    # Two need one addition, and no copy.
    total = sq_norms[0] + sq_norms[1] if len(sq_norms) == 2 else torch.stack(sq_norms).sum(0)
    return Estimate(total, torch.stack(variances).sum(0) if variances else None)


def project(left_NPT: Tensor) -> Tensor:
    """Add up the rows of each half with new random signs: (N, H, T). A single row needs none: its square is exact."""
    num_matrices, num_rows, _ = left_NPT.shape
    return left_NPT if num_rows == 1 else torch.bmm(_random_signs(num_matrices, num_rows, left_NPT), left_NPT)


def estimate(u_NHD: Tensor) -> Estimate:
    """Estimate squared norms from the sketches of both halves."""
    u = u_NHD.to(sum_dtype(u_NHD.dtype))
    sq_norms = u.square().sum((1, 2))
    if u.shape[1] == 1:
        return Estimate(sq_norms, None)
    return Estimate(sq_norms, (u[:, 0] * u[:, 1]).sum(1).square() * 4)


def _random_signs(num_matrices: int, num_rows: int, like: Tensor) -> Tensor:
    """Return (N, 2, P): in each column a random sign in a random half, and a zero in the other half."""
    if torch.compiler.is_compiling():
        return _signs(torch.randint(0, 4, (num_matrices, 1, num_rows), device=like.device)).to(like.dtype)
    draws = torch.randint(0, 4, (num_matrices, num_rows), device=like.device, generator=_generator(like.device))
    return _table(like.device, like.dtype)[draws].mT


def _signs(draws: Tensor) -> Tensor:
    """Turn draws (..., 1, P) into signs (..., 2, P): the low bit of a draw is its sign, the high bit its half."""
    halves = torch.arange(2, device=draws.device).view(2, 1)
    return ((draws & 1) * 2 - 1) * (draws >> 1 == halves)


@cache
def _table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return both halves of each draw, (4, 2). A lookup is one small kernel; computing the signs needs seven."""
    return _signs(torch.arange(4, device=device).view(1, 4)).to(dtype).T


def random_seeds(number: int, device: torch.device) -> Tensor:
    """Draw seeds, (number,), from each of which a kernel draws its own signs."""
    generator = None if torch.compiler.is_compiling() else _generator(device)
    return torch.randint(0, 2**31 - 1, (number,), device=device, generator=generator)


# Of the process, like torch's own generators: a resumed run must find the signs where it left them, whichever meter
# drew them.
_generators: dict[torch.device, torch.Generator] = {}


def seed_signs(device: torch.device, seed: int) -> None:
    """Seed the signs of later sketches on `device`, so that a run draws the same signs, whatever ran before."""
    _generator(device).manual_seed(seed)


def signs_state(device: torch.device) -> Tensor:
    """Return the state of the signs on `device`, for a checkpoint."""
    return _generator(device).get_state()


def load_signs_state(device: torch.device, state: Tensor) -> None:
    """Restore the state of the signs on `device` that `signs_state` returned."""
    _generator(device).set_state(state.cpu())


def _generator(device: torch.device) -> torch.Generator:
    """Return a separate generator, so that sketches do not change the numbers of a user's dropout."""
    if device.type == "cuda" and device.index is None:
        device = torch.empty(0, device=device).device  # the current GPU with its number, as tensors name it
    if device not in _generators:
        _generators[device] = torch.Generator(device).manual_seed(torch.initial_seed() ^ 0x5CE7C4)
    return _generators[device]
