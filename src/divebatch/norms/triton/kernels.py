"""Triton kernels for norms, which keep in registers what the plain path (`Patches`, `Outer`) writes and reads again.

A sketch takes two kernels: output gradient and input are each read once, without copies. An exact norm takes one
kernel: each tile of a sample's weight gradient, or of its Gram form, is squared where it was summed. Shapes: B samples,
P output channels, T output positions, C input channels, L input positions, K kernel entries, D = K * C. A linear layer
is a convolution of one column with one kernel entry.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from divebatch.norms.triton import MOST_KERNEL_ENTRIES

ROWS_PER_DOT = 16
"""The fewest rows of a product on tensor cores; kernel entries are rounded up to a power of two, at least this one."""

SHARED_BYTES = 96 * 1024
"""The shared memory of a program on GPUs that have little, in bytes."""

ENOUGH_PROGRAMS = 128
"""The number of programs below which work is cut finer: about one for each of a GPU's processors."""

ENTRIES_PER_PROGRAM = 8192
"""The number of entries that a program holds in registers at a time, of tensors that it reads once."""


@triton.jit
def _project(left, z, seed, P, T, stride_n, stride_p, stride_t, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr):
    """Compute z[n, half, t], the sum of sign[n, p] * left[n, p, t] over the channels p of that half."""
    n = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.zeros([BLOCK_T], tl.float32)
    second = tl.zeros([BLOCK_T], tl.float32)
    key = tl.load(seed)
    for start in range(0, P, BLOCK_P):
        words = n * tl.cdiv(P, 16) + start // 16 + tl.arange(0, BLOCK_P // 16)  # one draw has two bits for 16 channels
        draws = tl.randint(key, words, n_rounds=7)[:, None] >> (2 * tl.arange(0, 16))[None, :]
        bits = tl.reshape(draws, [BLOCK_P])
        p = start + tl.arange(0, BLOCK_P)
        inside = (t < T)[:, None] & (p < P)[None, :]
        places = left + n * stride_n + t[:, None] * stride_t + p[None, :] * stride_p
        sign = tl.where((bits & 1) == 0, 1.0, -1.0)[None, :]
        values = tl.load(places, mask=inside, other=0.0).to(tl.float32) * sign
        of_first = tl.sum(tl.where(((bits & 2) == 0)[None, :], values, 0.0), 1)
        first += of_first
        second += tl.sum(values, 1) - of_first
    tl.store(z + n * 2 * T + t, first, mask=t < T)
    tl.store(z + n * 2 * T + T + t, second, mask=t < T)


@triton.jit
def _square(
    z, right, sums, C, stride_n, stride_c, stride_h, stride_w,
    H, OH, W: tl.constexpr, OW: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    K: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute u[half, k, c], the sum over l of z[half, l shifted by k] * right[c, l], and ||u||^2 and u[0] . u[1].

    A bias is the weight of an additional channel of ones: its u is the sum of z.
    """
    n = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, ROWS)
    down, across = (k // KW) * DH - PH, (k % KW) * DW - PW
    z_first = z + n * 2 * OH * OW
    u_first = tl.zeros([ROWS, BLOCK_C], tl.float32)
    u_second = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for start in range(0, H * W, BLOCK_L):
        pos = start + tl.arange(0, BLOCK_L)
        row, column = pos // W, pos % W
        i = row[None, :] - down[:, None]
        j = column[None, :] - across[:, None]
        meets = (k < K)[:, None] & (pos < H * W)[None, :] & (i >= 0) & (j >= 0) & (i % SH == 0) & (j % SW == 0)
        i, j = i // SH, j // SW
        meets = meets & (i < OH) & (j < OW)
        at = i * OW + j
        inside = (pos < H * W)[:, None] & (c < C)[None, :]
        places = right + n * stride_n + (row * stride_h + column * stride_w)[:, None] + c[None, :] * stride_c
        x = tl.load(places, mask=inside, other=0.0)
        u_first = tl.dot(tl.load(z_first + at, mask=meets, other=0.0).to(x.dtype), x, u_first)
        u_second = tl.dot(tl.load(z_first + OH * OW + at, mask=meets, other=0.0).to(x.dtype), x, u_second)
    squares, products = tl.sum(u_first * u_first) + tl.sum(u_second * u_second), tl.sum(u_first * u_second)
    if BIAS and tl.program_id(0) == 0:
        first, second = tl.zeros([BLOCK_L], tl.float32), tl.zeros([BLOCK_L], tl.float32)
        for start in range(0, OH * OW, BLOCK_L):
            at = start + tl.arange(0, BLOCK_L)
            first += tl.load(z_first + at, mask=at < OH * OW, other=0.0)
            second += tl.load(z_first + OH * OW + at, mask=at < OH * OW, other=0.0)
        b_first, b_second = tl.sum(first), tl.sum(second)
        squares += b_first * b_first + b_second * b_second
        products += b_first * b_second
    out = sums + (n * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(out, squares)
    tl.store(out + 1, products)


@triton.jit
def _square_gradient(
    left, right, sums, P, left_n, left_p, left_t, stride_n, stride_c, stride_h, stride_w,
    H, OH, W: tl.constexpr, OW: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Add up the squares of one tile of one sample's gradient. One sample's tiles run together, so they share reads."""
    n = tl.program_id(1).to(tl.int64)
    blocks_p = tl.cdiv(P, BLOCK_P)
    d = (tl.program_id(0) // blocks_p) * BLOCK_D + tl.arange(0, BLOCK_D)
    p = (tl.program_id(0) % blocks_p) * BLOCK_P + tl.arange(0, BLOCK_P)
    k, c = d // C, d % C
    down, across = (k // KW) * DH - PH, (k % KW) * DW - PW
    first = right + n * stride_n + (down * stride_h + across * stride_w + c * stride_c)[None, :]
    gradient = tl.zeros([BLOCK_D, BLOCK_P], tl.float32)
    bias = tl.zeros([BLOCK_P], tl.float32)
    for start in range(0, OH * OW, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        inside = (t < OH * OW)[:, None] & (p < P)[None, :]
        dy = tl.load(left + n * left_n + t[:, None] * left_t + p[None, :] * left_p, mask=inside, other=0.0)
        row, column = (t // OW) * SH, (t % OW) * SW
        i, j = row[:, None] + down[None, :], column[:, None] + across[None, :]
        meets = (t < OH * OW)[:, None] & (k < K)[None, :] & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        x = tl.load(first + (row * stride_h + column * stride_w)[:, None], mask=meets, other=0.0)
        gradient = tl.dot(tl.trans(x), dy, gradient)
        if BIAS:
            bias += tl.sum(dy.to(tl.float32), 0)
    squares = tl.sum(gradient * gradient)
    if BIAS and tl.program_id(0) < blocks_p:
        squares += tl.sum(bias * bias)
    tl.store(sums + n * tl.num_programs(0) + tl.program_id(0), squares)


@triton.jit
def _square_gram(
    left, right, sums, P, left_n, left_p, left_t, stride_n, stride_c, stride_h, stride_w,
    H, OH, W: tl.constexpr, OW: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr,
    IS_ONE_TILE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum (left_t . left_s) (patch_t . patch_s) over one tile of positions t and s, doubled off the diagonal."""
    n = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(OH * OW, BLOCK_T)
    across, down = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    out = sums + n * blocks * blocks + tl.program_id(0)
    if across < down:  # the other triangle has the same
        tl.store(out, 0.0)
        return
    t, s = down * BLOCK_T + tl.arange(0, BLOCK_T), across * BLOCK_T + tl.arange(0, BLOCK_T)
    t_inside, s_inside = t < OH * OW, s < OH * OW
    at_t, at_s = left + n * left_n + t * left_t, left + n * left_n + s * left_t
    lefts = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        of_t = tl.load(at_t[:, None] + p[None, :] * left_p, mask=t_inside[:, None] & (p < P)[None, :], other=0.0)
        if IS_ONE_TILE:
            of_s = of_t
        else:
            of_s = tl.load(at_s[:, None] + p[None, :] * left_p, mask=s_inside[:, None] & (p < P)[None, :], other=0.0)
        lefts = tl.dot(of_t, tl.trans(of_s), lefts)
    blocks_c: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    t_row, t_column, s_row, s_column = (t // OW) * SH, (t % OW) * SW, (s // OW) * SH, (s % OW) * SW
    rights = tl.full([BLOCK_T, BLOCK_T], 1.0 if BIAS else 0.0, tl.float32)
    for step in range(0, K * blocks_c):
        k, c = step // blocks_c, (step % blocks_c) * BLOCK_C + tl.arange(0, BLOCK_C)
        i, j = t_row + (k // KW) * DH - PH, t_column + (k % KW) * DW - PW
        meets = t_inside & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        places = right + n * stride_n + (i * stride_h + j * stride_w)[:, None] + c[None, :] * stride_c
        of_t = tl.load(places, mask=meets[:, None] & (c < C)[None, :], other=0.0)
        if IS_ONE_TILE:
            of_s = of_t
        else:
            i, j = s_row + (k // KW) * DH - PH, s_column + (k % KW) * DW - PW
            meets = s_inside & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            places = right + n * stride_n + (i * stride_h + j * stride_w)[:, None] + c[None, :] * stride_c
            of_s = tl.load(places, mask=meets[:, None] & (c < C)[None, :], other=0.0)
        rights = tl.dot(of_t, tl.trans(of_s), rights)
    tl.store(out, tl.sum(lefts * rights) * tl.where(across == down, 1.0, 2.0))


@triton.jit
def _channel_sums(
    x, dy, mean, inverse_std, sums, T, C, x_n, x_c, x_t, dy_n, dy_c, dy_t, mean_n, mean_c,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum dy * (x - mean) * inverse_std over t into sums[n, 0, c], and dy into sums[n, 1, c]."""
    n = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    products = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    singles = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        inside = (t < T)[:, None] & (c < C)[None, :]
        at = tl.load(x + n * x_n + t[:, None] * x_t + c[None, :] * x_c, mask=inside, other=0.0).to(tl.float32)
        dy_at = tl.load(dy + n * dy_n + t[:, None] * dy_t + c[None, :] * dy_c, mask=inside, other=0.0).to(tl.float32)
        products += at * dy_at
        singles += dy_at
    bias = tl.sum(singles, 0)
    places = n * mean_n + c * mean_c
    weight = tl.sum(products, 0) - tl.load(mean + places, mask=c < C, other=0.0) * bias
    weight *= tl.load(inverse_std + places, mask=c < C, other=0.0)
    tl.store(sums + n * 2 * C + c, weight, mask=c < C)
    tl.store(sums + n * 2 * C + C + c, bias, mask=c < C)


Launch = Callable[[Any], Any]
"""A wrapper of kernels: `wrap_triton` inside a compiler, which then sees the kernel; otherwise the identity."""


@triton_op("divebatch::sq_norms", mutates_args={})
def traced_sq_norms(left: Tensor, right: Tensor, geometry: list[int], with_bias: bool) -> Tensor:
    """Compute `sq_norms` inside a compiler."""
    return sq_norms(left, right, geometry, with_bias, launch=wrap_triton)


def sq_norms(
    left: Tensor, right: Tensor, geometry: list[int], with_bias: bool, *, launch: Launch = lambda jitted: jitted
) -> Tensor:
    """Return each sample's squared norm of the weight gradient, (B,), in float32, by the faster of two ways.

    With a bias, the result includes the squared norm of its gradient. `geometry`: kernel size, stride, zeros before
    each dimension and dilation, two numbers each.
    """
    flat, channels, entries = left.flatten(2), right.shape[1], geometry[0] * geometry[1]
    num_samples, rows, positions = flat.shape
    by_gram = _is_quicker_by_gram(rows, entries * channels, positions)
    blocks = (_gram_blocks if by_gram else _gradient_blocks)(rows, channels, entries, positions, flat.element_size())
    tiles = blocks.pop("TILES")
    sums = torch.empty(num_samples, tiles, dtype=torch.float32, device=flat.device)
    launch(_square_gram if by_gram else _square_gradient)[(tiles, num_samples)](
        flat, right, sums, rows, *flat.stride(), *right.stride(),
        *_constants(left, right, geometry), entries, channels, with_bias, **blocks,
    )  # fmt: skip
    return sums.sum(1)


def _is_quicker_by_gram(rows: int, columns: int, positions: int) -> bool:
    """Return whether the Gram form is faster than the gradient.

    Half of its tiles are needed, but all of each diagonal tile; the gradient then counts as 2 * rows * columns. At
    equal counts the Gram form is faster, since only one program reads each tile: on an H200 up to a ratio of about 2.5.
    """
    return (positions + _block(positions, 64)) * (rows + columns) < 2.5 * rows * columns


def _gram_blocks(rows: int, channels: int, entries: int, positions: int, entry_bytes: int) -> dict[str, int]:
    block, most = _block(positions, 64), 256 // entry_bytes
    sizes = {"BLOCK_T": block, "BLOCK_P": _block(rows, most), "BLOCK_C": _block(channels, most)}
    tiles = triton.cdiv(positions, block) ** 2
    return {"TILES": tiles, "IS_ONE_TILE": tiles == 1, **sizes, "num_warps": block // 16, "num_stages": 3}


def _gradient_blocks(rows: int, channels: int, entries: int, positions: int, entry_bytes: int) -> dict[str, int]:
    columns, block_p = entries * channels, _block(rows, 128)
    block_d = 64 if rows <= 32 or columns <= 64 else 128
    sizes = {"BLOCK_D": block_d, "BLOCK_P": block_p, "BLOCK_T": _block(positions, 64 // entry_bytes)}
    tiles = triton.cdiv(columns, block_d) * triton.cdiv(rows, block_p)
    return {"TILES": tiles, **sizes, "num_warps": 4, "num_stages": 3}


@triton_op("divebatch::sketch", mutates_args={})
def traced_sketch(left: Tensor, right: Tensor, seed: Tensor, geometry: list[int], with_bias: bool) -> Tensor:
    """Compute `sketch` inside a compiler."""
    return sketch(left, right, seed, geometry, with_bias, launch=wrap_triton)


def sketch(
    left: Tensor,
    right: Tensor,
    seed: Tensor,
    geometry: list[int],
    with_bias: bool,
    *,
    launch: Launch = lambda jitted: jitted,
) -> Tensor:
    """Return ||u||^2 over both halves, and u_first . u_second, (B, 2). `seed`: one int64 on the device."""
    z, (num_samples, channels) = projected(left.flatten(2), seed, launch=launch), right.shape[:2]
    entries, block_c = geometry[0] * geometry[1], _block(channels, 128)
    while block_c > 32 and num_samples * triton.cdiv(channels, block_c) < ENOUGH_PROGRAMS:
        block_c //= 2
    blocks, block_l = triton.cdiv(channels, block_c), _block(right.shape[2] * right.shape[3], 64)
    rows = _block(entries, MOST_KERNEL_ENTRIES)
    sums = torch.empty(num_samples, blocks, 2, dtype=torch.float32, device=left.device)
    launch(_square)[(blocks, num_samples)](
        z, right, sums, channels, *right.stride(),
        *_constants(left, right, geometry), entries, with_bias,
        ROWS=rows, BLOCK_L=block_l, BLOCK_C=block_c, num_warps=rows // ROWS_PER_DOT * (1 if block_c <= 32 else 2),
        num_stages=_stages(block_l * (2 * rows * z.element_size() + block_c * right.element_size())),
    )  # fmt: skip
    return sums.sum(1)


def projected(flat: Tensor, seed: Tensor, *, launch: Launch = lambda jitted: jitted) -> Tensor:
    """Add up the rows of (B, P, T) with random signs, each row in one of two halves: (B, 2, T), float32."""
    num_samples, rows, positions = flat.shape
    block_p = _block(rows, 256)
    block_t = _block(positions, ENTRIES_PER_PROGRAM // block_p)
    while block_t > ROWS_PER_DOT and num_samples * triton.cdiv(positions, block_t) < ENOUGH_PROGRAMS:
        block_t //= 2
    z = torch.empty(num_samples, 2, positions, dtype=torch.float32, device=flat.device)
    grid = (num_samples, triton.cdiv(positions, block_t))
    launch(_project)[grid](flat, z, seed, rows, positions, *flat.stride(), BLOCK_T=block_t, BLOCK_P=block_p)
    return z


def channel_sums(x: Tensor, dy: Tensor, mean: Tensor, inverse_std: Tensor) -> Tensor:
    """Sum dy * (x - mean) * inverse_std, and dy, over positions: (B, 2, C), float32.

    x and dy are (B, C, *positions); mean and inverse_std are (C,), or (B, C) if samples have their own. This function
    is not for compilers, which do not need it.
    """
    flat_x, flat_dy = x.flatten(2), dy.flatten(2)
    num_samples, channels, positions = flat_x.shape
    strides = mean.stride() if mean.ndim == 2 else (0, mean.stride(0))
    block_c = _block(channels, 64)
    block_t = _block(positions, ENTRIES_PER_PROGRAM // 2 // block_c)
    sums = torch.empty(num_samples, 2, channels, dtype=torch.float32, device=x.device)
    _channel_sums[(triton.cdiv(channels, block_c), num_samples)](
        flat_x, flat_dy, mean, inverse_std, sums, positions, channels,
        *flat_x.stride(), *flat_dy.stride(), *strides, BLOCK_T=block_t, BLOCK_C=block_c,
    )  # fmt: skip
    return sums


def _constants(left: Tensor, right: Tensor, geometry: list[int]) -> tuple[int, ...]:
    """Return sizes and geometry in the kernels' order: all but the heights are constants, which divide at no cost.

    The height of a linear layer's input is the length of a sequence, which varies.
    """
    (height, width), (out_height, out_width) = right.shape[2:], left.shape[2:]
    return height, out_height, width, out_width, *geometry[1:]


def _stages(num_bytes: int) -> int:
    """Return the number of pipeline stages whose bytes fit into shared memory on any GPU."""
    return max(1, min(3, SHARED_BYTES // num_bytes))


def _block(size: int, most: int) -> int:
    return min(most, max(ROWS_PER_DOT, int(triton.next_power_of_2(size))))
