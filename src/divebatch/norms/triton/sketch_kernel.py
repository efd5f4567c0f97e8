"""The sketch of all gradients of a step by one Triton kernel, which reads each gradient once."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""The number of sketch entries that a program computes."""
PROGRAMS = 1024
"""The number of programs that share the lines: several for each of a GPU's processors."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _sketch(
    gradients, moments, factors, layout, draws, table, sums, squares, num_lines, size, unscale, scale,
    GRADIENT: tl.constexpr, MOMENT: tl.constexpr, IS_DIVIDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute sums[part, bucket] over the lines of a part, and the sum of squares of this program's entries.

    Each program has its own buckets, so there are no atomic additions, and sketches are reproducible.
    """
    bucket = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    for line in range(tl.program_id(1), num_lines, tl.num_programs(1)):
        tensor = tl.load(layout + line * 3)
        place = bucket - tl.load(draws + line * 3)
        place = tl.where(place < 0, place + size, place)
        entry = tl.load(layout + line * 3 + 1) + place
        inside = (bucket < size) & (entry >= 0) & (entry < tl.load(layout + line * 3 + 2))
        at = tl.load(gradients + tensor).to(tl.pointer_type(GRADIENT)) + entry
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if IS_DIVIDED:
            value *= unscale
            at = tl.load(moments + tensor).to(tl.pointer_type(MOMENT)) + entry
            mean = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            decay = tl.load(factors + tensor * 3)
            mean = (mean * decay + value * value * (1 - decay)) / tl.load(factors + tensor * 3 + 1)
            value = tl.where(inside, value / (tl.sqrt(mean) + tl.load(factors + tensor * 3 + 2)), 0.0)
        value *= scale
        sign = tl.load(table + tl.load(draws + line * 3 + 1) + place, mask=inside, other=0).to(tl.float32)
        total += value * sign * tl.load(draws + line * 3 + 2)
        square += value * value
    tl.store(sums + tl.program_id(1) * size + bucket, total, mask=bucket < size)
    tl.store(squares + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(square))


def sketch(
    gradients: Tensor,
    moments: Tensor | None,
    factors: Tensor | None,
    layout: Tensor,
    draws: Tensor,
    table: Tensor,
    size: int,
    *,
    types: tuple[torch.dtype, torch.dtype | None],
    unscale: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return a sketch of `size` numbers, and the squared norm in float64.

    Args:
        gradients: The addresses of K gradients, contiguous and of one type.
        moments: The addresses of their second moments. None: there is no division.
        factors: (K, 3): the fraction of the moment that a step keeps, its correction, and eps. None: no division.
        layout: (L, 3), for each line: the number of its gradient, the number of the gradient's entry at the line's
            first place (negative if the gradient begins within the line), and the number of entries of the gradient.
        draws: (L, 3), for each line: rotation, place in the table of signs, own sign.
        types: The types of gradients and moments.
        unscale: The factor of gradients before the division; `scale` is the factor of the result.
    """
    blocks, num_lines = triton.cdiv(size, BLOCK), len(layout)
    parts = max(1, min(num_lines, PROGRAMS // blocks))
    sums = torch.empty(parts, size, dtype=torch.float32, device=table.device)
    squares = torch.empty(parts, blocks, dtype=torch.float32, device=table.device)
    gradient_type, moment_type = types
    nothing: Any = table  # an address that is not read
    _sketch[(blocks, parts)](
        gradients, nothing if moments is None else moments, nothing if factors is None else factors, layout, draws,
        table, sums, squares, num_lines, size, unscale, scale,
        TYPES[gradient_type], TYPES[moment_type or torch.float32], moments is not None, BLOCK,
    )  # fmt: skip
    return sums.sum(0), squares.sum(dtype=torch.float64)
