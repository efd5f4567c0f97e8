"""Convolution norms by Triton kernels that keep in registers what the plain path (`Patches`) writes and reads again.

A sketch takes two of them: output gradient and input are read once each, nothing is copied. The exact norm takes one:
each tile of a sample's weight gradient is squared where it was added up. Shapes: B samples, P output channels, T output
positions, C input channels, L input positions, K kernel entries.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_PER_DOT = 16
"""The least rows of a product on tensor cores; kernel entries are rounded up to a power of two of at least it."""


@triton.jit
def _project(left, z, seed, P, T, stride_n, stride_p, stride_t, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr):
    """z[n, half, t] = sum of sign[n, p] * left[n, p, t] over the channels p of that half."""
    n = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.zeros([BLOCK_T], tl.float32)
    second = tl.zeros([BLOCK_T], tl.float32)
    key = tl.load(seed)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        bits = tl.randint(key, n * P + p)
        sign = tl.where((bits & 1) == 0, 1.0, -1.0)
        in_first = (bits & 2) == 0
        inside = (t < T)[:, None] & (p < P)[None, :]
        places = left + n * stride_n + t[:, None] * stride_t + p[None, :] * stride_p
        values = tl.load(places, mask=inside, other=0.0).to(tl.float32) * sign[None, :]
        first += tl.sum(tl.where(in_first[None, :], values, 0.0), 1)
        second += tl.sum(tl.where(in_first[None, :], 0.0, values), 1)
    tl.store(z + n * 2 * T + t, first, mask=t < T)
    tl.store(z + n * 2 * T + T + t, second, mask=t < T)


@triton.jit
def _square(
    z, right, sums, C, L, W, OH, OW, K, KW, SH, SW, PH, PW, DH, DW,
    stride_n, stride_c, stride_h, stride_w,
    ROWS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """u[half, k, c] = sum over l of z[half, l shifted by k] * right[c, l]; of it ||u||^2 and u[0] . u[1]."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, ROWS)
    down, across = (k // KW) * DH - PH, (k % KW) * DW - PW
    z_first = z + n * 2 * OH * OW
    u_first = tl.zeros([ROWS, BLOCK_C], tl.float32)
    u_second = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for start in range(0, L, BLOCK_L):
        pos = start + tl.arange(0, BLOCK_L)
        row, column = pos // W, pos % W
        i = row[None, :] - down[:, None]
        j = column[None, :] - across[:, None]
        meets = (k < K)[:, None] & (pos < L)[None, :] & (i >= 0) & (j >= 0) & (i % SH == 0) & (j % SW == 0)
        i, j = i // SH, j // SW
        meets = meets & (i < OH) & (j < OW)
        at = i * OW + j
        inside = (pos < L)[:, None] & (c < C)[None, :]
        places = right + n * stride_n + (row * stride_h + column * stride_w)[:, None] + c[None, :] * stride_c
        x = tl.load(places, mask=inside, other=0.0)
        u_first = tl.dot(tl.load(z_first + at, mask=meets, other=0.0).to(x.dtype), x, u_first)
        u_second = tl.dot(tl.load(z_first + OH * OW + at, mask=meets, other=0.0).to(x.dtype), x, u_second)
    out = sums + (n * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(out, tl.sum(u_first * u_first) + tl.sum(u_second * u_second))
    tl.store(out + 1, tl.sum(u_first * u_second))


@triton.jit
def _square_gradient(
    left, right, sums, P, T, C, H, W, OW, KW, SH, SW, PH, PW, DH, DW,
    left_n, left_p, left_t, stride_n, stride_c, stride_h, stride_w,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The squares of one tile of one sample's gradient at one kernel entry, added up."""
    n, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    blocks_c = tl.cdiv(C, BLOCK_C)
    p = (tl.program_id(2) // blocks_c) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = (tl.program_id(2) % blocks_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    down, across = (k // KW) * DH - PH, (k % KW) * DW - PW
    gradient = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        dy = tl.load(
            left + n * left_n + p[:, None] * left_p + t[None, :] * left_t,
            mask=(p < P)[:, None] & (t < T)[None, :],
            other=0.0,
        )
        row, column = (t // OW) * SH + down, (t % OW) * SW + across
        inside = (t < T) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        places = right + n * stride_n + (row * stride_h + column * stride_w)[:, None] + c[None, :] * stride_c
        x = tl.load(places, mask=inside[:, None] & (c < C)[None, :], other=0.0)
        gradient = tl.dot(dy, x, gradient)
    at = (n * tl.num_programs(1) + k) * tl.num_programs(2) + tl.program_id(2)
    tl.store(sums + at, tl.sum(gradient * gradient))


def conv2d_sq_norms(
    left: Tensor, right: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """(B,): each sample's squared norm of the weight gradient, added up in float32."""
    num_samples, num_rows, height, width = left.shape
    _, channels, in_height, in_width = right.shape
    flat, entries = left.flatten(2), kernel[0] * kernel[1]
    block_p, block_c = _block(num_rows, 128), _block(channels, 128)
    tiles = triton.cdiv(num_rows, block_p) * triton.cdiv(channels, block_c)
    sums = torch.empty(num_samples, entries * tiles, dtype=torch.float32, device=left.device)
    _square_gradient[(num_samples, entries, tiles)](
        flat, right, sums, num_rows, height * width, channels, in_height, in_width, width, kernel[1],
        *stride, *padding, *dilation, *flat.stride(),
        right.stride(0), right.stride(1), right.stride(2), right.stride(3),
        BLOCK_P=block_p, BLOCK_C=block_c, BLOCK_T=_block(height * width, 64),
    )  # fmt: skip
    return sums.sum(1)


def conv2d_sketch(
    left: Tensor,
    right: Tensor,
    seed: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    """(B, 2): ||u||^2 over both halves, and u_first . u_second. `seed`: one int64 on the device; zeros as padding."""
    num_samples, num_rows, height, width = left.shape
    z = torch.empty(num_samples, 2, height, width, dtype=torch.float32, device=left.device)
    flat = left.flatten(2)
    block_t, block_p = _block(height * width, 64), _block(num_rows, 64)
    grid: Any = (num_samples, triton.cdiv(height * width, block_t))
    _project[grid](flat, z, seed, num_rows, height * width, *flat.stride(), BLOCK_T=block_t, BLOCK_P=block_p)

    _, channels, in_height, in_width = right.shape
    block_c, block_l = _block(channels, 64), _block(in_height * in_width, 64)
    blocks = triton.cdiv(channels, block_c)
    sums = torch.empty(num_samples, blocks, 2, dtype=torch.float32, device=left.device)
    entries = kernel[0] * kernel[1]
    _square[(num_samples, blocks)](
        z, right, sums, channels, in_height * in_width, in_width, height, width, entries, kernel[1],
        *stride, *padding, *dilation, right.stride(0), right.stride(1), right.stride(2), right.stride(3),
        ROWS=max(ROWS_PER_DOT, triton.next_power_of_2(entries)), BLOCK_L=block_l, BLOCK_C=block_c,
    )  # fmt: skip
    return sums.sum(1)


def _block(size: int, most: int) -> int:
    return min(most, max(ROWS_PER_DOT, int(triton.next_power_of_2(size))))
