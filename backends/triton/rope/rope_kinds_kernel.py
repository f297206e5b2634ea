"""The kernel of the rotary kinds beside the plain one, whose maths and pass over heads it shares.

    a' = a cos_a - b sin_a,  b' = b cos_b + a sin_b

Backward is the transposed matrix. Here the pairs may come in side by side and go out as halves, or
the other way round, and the angles of a token may be

    channel, pair   numbers for each channel, or for both of a pair
    complex         real and imaginary part side by side for each pair
    positions       cos and sin of position * frequency, made here

With several grids, each pair has its own row of angles, or its own position.
"""

from __future__ import annotations

import triton
import triton.language as tl

from liger_multi.backends.triton.common.rows import assume_rows, round_to
from liger_multi.backends.triton.rope.rope_tiles import assume_tile, place

TWO_OVER_PI: tl.constexpr = tl.constexpr(0.6366197723675814)
# pi / 2 in parts of eight bits, whose products with fewer than 2^16 quarter turns are exact
HALF_PI_1: tl.constexpr = tl.constexpr(1.5703125)
HALF_PI_2: tl.constexpr = tl.constexpr(0.0004825592041015625)
HALF_PI_3: tl.constexpr = tl.constexpr(1.2665987014770508e-06)
HALF_PI_4: tl.constexpr = tl.constexpr(9.920935796805404e-10)


@triton.jit
def cos_and_sin(turn):
    """Both of an fp32 angle in radians, to an ulp or two of 1."""
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
def _load_pairs(
    ptr, at, stride, mask, ROTARY: tl.constexpr, HALF: tl.constexpr, BESIDE: tl.constexpr
):
    """Both channels of every pair in fp32; places and mask are [heads, tokens, 1]."""
    if BESIDE:
        channel = tl.arange(0, 2 * HALF)[None, None, :]
        x = tl.load(place(ptr, at, channel * stride), mask=mask & (channel < ROTARY), other=0.0)
        return tl.split(tl.reshape(x.to(tl.float32), [x.shape[0], x.shape[1], HALF, 2]))
    else:
        pair = tl.arange(0, HALF)[None, None, :]
        mask = mask & (pair < ROTARY // 2)
        a = tl.load(place(ptr, at, pair * stride), mask=mask, other=0.0)
        b = tl.load(place(ptr, at, (pair + ROTARY // 2) * stride), mask=mask, other=0.0)
        return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pairs(
    ptr, at, a, b, mask, ROTARY: tl.constexpr, HALF: tl.constexpr, BESIDE: tl.constexpr
):
    a = round_to(a, ptr.dtype.element_ty)
    b = round_to(b, ptr.dtype.element_ty)
    if BESIDE:
        channel = tl.arange(0, 2 * HALF)[None, None, :]
        x = tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1], 2 * HALF])
        tl.store(place(ptr, at, channel), x, mask=mask & (channel < ROTARY))
    else:
        pair = tl.arange(0, HALF)[None, None, :]
        mask = mask & (pair < ROTARY // 2)
        tl.store(place(ptr, at, pair), a, mask=mask)
        tl.store(place(ptr, at, pair + ROTARY // 2), b, mask=mask)


@triton.jit
def _grid(pair, GRIDS: tl.constexpr, CHUNKED: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr):
    """Which grid a pair belongs to; ONE and TWO are where sections 1 and 2 begin, or end."""
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
    """Cos and sin of both channels of every pair; ``token`` has the offsets of rows."""
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


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, batch_stride, head_stride, token_stride, stride, out_batch_stride,
    out_head_stride, out_token_stride, first, last, heads, batch, start, mask, cos_a, cos_b, sin_a,
    sin_b, WIDTH: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, PASS: tl.constexpr, BESIDE_IN: tl.constexpr, BESIDE_OUT: tl.constexpr,
):  # fmt: skip
    """Rotate the blocks of heads from first to last, of the tokens from ``start``."""
    assume_tile(x_ptr, head_stride, token_stride, stride, HEADS, TOKENS, WIDTH)
    assume_tile(out_ptr, out_head_stride, out_token_stride, 1, HEADS, TOKENS, WIDTH)
    x_ptr += batch * batch_stride + start.to(tl.int64) * token_stride
    out_ptr += batch * out_batch_stride + start.to(tl.int64) * out_token_stride
    head = tl.arange(0, HEADS)[:, None, None]
    token = tl.arange(0, TOKENS)[None, :, None]
    at, out_at = head * head_stride + token * token_stride, head * out_head_stride
    out_at += token * out_token_stride
    for step in tl.range(0, last - first):
        block = first + step
        here = (block * HEADS + head < heads) & mask
        x = x_ptr + (block * HEADS).to(tl.int64) * head_stride
        out = out_ptr + (block * HEADS).to(tl.int64) * out_head_stride
        a, b = _load_pairs(x, at, stride, here, ROTARY, HALF, BESIDE_IN)
        turned_a = a * cos_a - b * sin_a
        turned_b = b * cos_b + a * sin_b
        _store_pairs(out, out_at, turned_a, turned_b, here, ROTARY, HALF, BESIDE_OUT)
        if PASS:
            channel = ROTARY + tl.arange(0, PASS)[None, None, :]
            here = here & (channel < WIDTH)
            value = tl.load(place(x, at, channel * stride), mask=here, other=0.0).to(tl.float32)
            value = round_to(value, out_ptr.dtype.element_ty)
            tl.store(place(out, out_at, channel), value, mask=here)


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
    tile = tl.program_id(0) // groups
    batch, start = (tile // tiles).to(tl.int64), (tile % tiles) * TOKENS
    token = tl.arange(0, TOKENS)[None, :, None]
    mask = start + token < seq
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
    blocks = tl.cdiv(q_heads, HEADS)
    first = (tl.program_id(0) % groups) * share
    last = tl.minimum(first + share, blocks + tl.cdiv(k_heads, HEADS))
    _rotate_heads(
        q_ptr, q_out_ptr, q_batch_stride, q_head_stride, q_token_stride, q_stride,
        q_out_batch_stride, q_out_head_stride, q_out_token_stride, first, tl.minimum(last, blocks),
        q_heads, batch, start, mask, cos_a, cos_b, sin_a, sin_b, WIDTH, ROTARY, HALF, TOKENS,
        HEADS, PASS, BESIDE_IN, BESIDE_OUT,
    )  # fmt: skip
    _rotate_heads(
        k_ptr, k_out_ptr, k_batch_stride, k_head_stride, k_token_stride, k_stride,
        k_out_batch_stride, k_out_head_stride, k_out_token_stride,
        tl.maximum(first, blocks) - blocks, last - blocks, k_heads, batch, start, mask, cos_a,
        cos_b, sin_a, sin_b, WIDTH, ROTARY, HALF, TOKENS, HEADS, PASS, BESIDE_IN, BESIDE_OUT,
    )  # fmt: skip
