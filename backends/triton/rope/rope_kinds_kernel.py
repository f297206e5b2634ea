"""The kernel of the rotary kinds beside the plain one, whose maths and loop over heads it shares.

    a' = a cos_a - b sin_a,  b' = b cos_b + a sin_b

Backward is the transposed matrix. Here the pairs may come in interleaved and go out half-split, or
the other way round, and the angles of a token may be

    channel, pair   numbers for each channel, or for both of a pair
    complex         real and imaginary part side by side for each pair
    positions       cos and sin of position * frequency, computed here

With several grids, each pair has its own row of angles, or its own position.
"""

from __future__ import annotations

import triton
import triton.language as tl

from liger_multi.backends.triton.common.rows import assume_rows, round_to
from liger_multi.backends.triton.rope.rope_tiles import place, rotate_both, tokens_of

TWO_OVER_PI: tl.constexpr = tl.constexpr(0.6366197723675814)
# pi / 2 in parts of eight bits: their multiples by fewer than 2^16 quarter turns are exact
HALF_PI_1: tl.constexpr = tl.constexpr(1.5703125)
HALF_PI_2: tl.constexpr = tl.constexpr(0.0004825592041015625)
HALF_PI_3: tl.constexpr = tl.constexpr(1.2665987014770508e-06)
HALF_PI_4: tl.constexpr = tl.constexpr(9.920935796805404e-10)


@triton.jit
def cos_and_sin(turn):
    """Cosine and sine of an fp32 angle in radians, to an ulp or two of 1.

    The nearest multiple of pi / 2 is subtracted in four parts, whose multiples are exact. A series
    gives both in |x| <= pi / 4, and the quarter turn says which is which and its sign.
    """
    quarters = tl.floor(turn * TWO_OVER_PI + 0.5)
    x = tl.fma(-quarters, HALF_PI_1, turn)
    x = tl.fma(-quarters, HALF_PI_2, x)
    x = tl.fma(-quarters, HALF_PI_3, x)
    x = tl.fma(-quarters, HALF_PI_4, x)
    # the series, in |x| <= pi / 4
    s = x * x
    sine = x + x * s * (-1.0 / 6 + s * (1.0 / 120 + s * (-1.0 / 5040 + s * (1.0 / 362880))))
    tail = 1.0 / 24 + s * (-1.0 / 720 + s * (1.0 / 40320 - s * (1.0 / 3628800)))
    cosine = 1.0 - s * 0.5 + s * s * tail
    quarter = quarters.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    first = tl.where(odd, sine, cosine)
    second = tl.where(odd, cosine, sine)
    return (
        tl.where((quarter == 1) | (quarter == 2), -first, first),
        tl.where(quarter >= 2, -second, second),
    )


@triton.jit
def _grid(pair, GRIDS: tl.constexpr, CHUNKED: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr):
    """The grid that a pair belongs to; ONE and TWO are where sections 1 and 2 begin, or end."""
    if CHUNKED:
        return tl.where(pair >= ONE, 1, 0) + tl.where(pair >= TWO, 1, 0)
    else:
        grid = pair % GRIDS
        return tl.where(pair < tl.where(grid == 1, ONE, TWO), grid, 0)


@triton.jit
def _load_angles(
    cos_ptr, sin_ptr, token, mask, scaling, ANGLES: tl.constexpr,
    BESIDE: tl.constexpr, ROUND: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Cos and sin of both channels of every pair; ``token`` has the offsets of rows.

    "positions": ``cos_ptr`` holds positions and ``sin_ptr`` frequencies; the result is rounded to
    the dtype (ROUND) that stored angles would have. "complex": ``cos_ptr`` holds both parts.
    """
    pair = tl.arange(0, HALF)[None, None, :]
    mask = mask & (pair < ROTARY // 2)
    if ANGLES == "positions":
        position = tl.load(cos_ptr + token, mask=mask, other=0).to(tl.float32)
        frequency = tl.load(sin_ptr + pair, mask=pair < ROTARY // 2, other=0.0).to(tl.float32)
        cos_a, sin_a = cos_and_sin(position * frequency)
        cos_a *= scaling
        sin_a *= scaling
        if ROUND == "bf16":
            cos_a = round_to(cos_a, tl.bfloat16).to(tl.float32)
            sin_a = round_to(sin_a, tl.bfloat16).to(tl.float32)
        elif ROUND == "fp16":
            cos_a = round_to(cos_a, tl.float16).to(tl.float32)
            sin_a = round_to(sin_a, tl.float16).to(tl.float32)
        return cos_a, cos_a, sin_a, sin_a
    elif ANGLES == "complex":
        real = tl.load(place(cos_ptr, token, 2 * pair), mask=mask, other=0.0)
        imaginary = tl.load(place(cos_ptr, token, 2 * pair + 1), mask=mask, other=0.0)
        real, imaginary = real.to(tl.float32), imaginary.to(tl.float32)
        return real, real, imaginary, imaginary
    elif ANGLES == "pair":
        cos_a = tl.load(place(cos_ptr, token, pair), mask=mask, other=0.0).to(tl.float32)
        sin_a = tl.load(place(sin_ptr, token, pair), mask=mask, other=0.0).to(tl.float32)
        return cos_a, cos_a, sin_a, sin_a
    else:
        at = 2 * pair if BESIDE else pair
        gap = 1 if BESIDE else ROTARY // 2
        cos_a = tl.load(place(cos_ptr, token, at), mask=mask, other=0.0).to(tl.float32)
        cos_b = tl.load(place(cos_ptr, token, at + gap), mask=mask, other=0.0).to(tl.float32)
        sin_a = tl.load(place(sin_ptr, token, at), mask=mask, other=0.0).to(tl.float32)
        sin_b = tl.load(place(sin_ptr, token, at + gap), mask=mask, other=0.0).to(tl.float32)
        return cos_a, cos_b, sin_a, sin_b


@triton.jit(do_not_specialize=["seq", "tiles", "groups", "share"])
def _rope_kinds_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, q_batch_stride, q_head_stride,
    q_token_stride, q_stride, k_batch_stride, k_head_stride, k_token_stride, k_stride,
    q_out_batch_stride, q_out_head_stride, q_out_token_stride, k_out_batch_stride,
    k_out_head_stride, k_out_token_stride, grid_stride, angle_batch_stride, angle_token_stride,
    q_heads, k_heads, seq, tiles, groups, share, scaling, WIDTH: tl.constexpr,
    ROTARY: tl.constexpr, ANGLES: tl.constexpr, BESIDE: tl.constexpr,
    BESIDE_IN: tl.constexpr, BESIDE_OUT: tl.constexpr, ROUND: tl.constexpr, GRIDS: tl.constexpr,
    CHUNKED: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr, INVERSE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of q and k of some tokens, with angles of any kind.

    Program: TOKENS tokens of one sequence, and ``share`` blocks of HEADS heads, q's before k's, as
    in the plain kernel.
    Reads or computes the angles of its tokens once; with GRIDS > 1, a pair's angles come from its
    grid, whose tensors are ``grid_stride`` apart. BESIDE_IN and BESIDE_OUT: pairs are interleaved
    where they are read, and where they are written.
    """
    batch, start, token, mask = tokens_of(tiles, groups, seq, TOKENS)
    assume_rows(cos_ptr, angle_token_stride, 4 * TOKENS)
    angle = batch * angle_batch_stride + start.to(tl.int64) * angle_token_stride
    row, cos_ptr = token * angle_token_stride, cos_ptr + angle
    if ANGLES != "positions":  # else it has frequencies, the same for all
        sin_ptr += angle
    if GRIDS > 1:  # whole tensors apart
        pair = tl.arange(0, HALF)[None, None, :]
        grid = _grid(pair, GRIDS, CHUNKED, ONE, TWO).to(tl.int64) * grid_stride
        cos_ptr += grid
        if ANGLES != "positions":
            sin_ptr += grid
    cos_a, cos_b, sin_a, sin_b = _load_angles(
        cos_ptr, sin_ptr, row, mask, scaling, ANGLES, BESIDE, ROUND, ROTARY, HALF
    )
    if INVERSE:
        sin_a, sin_b = -sin_b, -sin_a
    rotate_both(
        q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_batch_stride, q_head_stride, q_token_stride, q_stride,
        k_batch_stride, k_head_stride, k_token_stride, k_stride, q_out_batch_stride,
        q_out_head_stride, q_out_token_stride, k_out_batch_stride, k_out_head_stride,
        k_out_token_stride, q_heads, k_heads, groups, share, batch, start, mask, cos_a, cos_b,
        sin_a, sin_b, WIDTH, ROTARY, HALF, TOKENS, HEADS, PASS, BESIDE_IN, BESIDE_OUT,
    )  # fmt: skip
