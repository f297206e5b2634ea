"""The kernel of the rotary kinds beside the plain one, whose maths and walk over heads it shares.

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

from liger_multi.backends.triton.common import round_to

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
def _load_pairs(ptr, stride, mask, ROTARY: tl.constexpr, HALF: tl.constexpr, BESIDE: tl.constexpr):
    """Both channels of every pair in fp32; ptr and mask are [heads, tokens, 1]."""
    if BESIDE:
        channel = tl.arange(0, 2 * HALF)[None, None, :]
        ptr += channel.to(tl.int64) * stride
        x = tl.load(ptr, mask=mask & (channel < ROTARY), other=0.0)
        return tl.split(tl.reshape(x.to(tl.float32), [x.shape[0], x.shape[1], HALF, 2]))
    else:
        pair = tl.arange(0, HALF)[None, None, :]
        mask = mask & (pair < ROTARY // 2)
        pair = pair.to(tl.int64)
        a = tl.load(ptr + pair * stride, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(ptr + (pair + ROTARY // 2) * stride, mask=mask, other=0.0).to(tl.float32)
        return a, b


@triton.jit
def _store_pairs(ptr, a, b, mask, ROTARY: tl.constexpr, HALF: tl.constexpr, BESIDE: tl.constexpr):
    a = round_to(a, ptr.dtype.element_ty)
    b = round_to(b, ptr.dtype.element_ty)
    if BESIDE:
        channel = tl.arange(0, 2 * HALF)[None, None, :]
        x = tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1], 2 * HALF])
        tl.store(ptr + channel, x, mask=mask & (channel < ROTARY))
    else:
        pair = tl.arange(0, HALF)[None, None, :]
        mask = mask & (pair < ROTARY // 2)
        tl.store(ptr + pair, a, mask=mask)
        tl.store(ptr + pair + ROTARY // 2, b, mask=mask)


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
    cos_ptr, sin_ptr, grid, token, mask, scaling, ANGLES: tl.constexpr,
    BESIDE: tl.constexpr, ROUND: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Cos and sin of both channels of every pair; ``grid`` and ``token`` are offsets of rows."""
    pair = tl.arange(0, HALF)[None, None, :]
    mask = mask & (pair < ROTARY // 2)
    if ANGLES == "positions":
        position = tl.load(cos_ptr + grid + token, mask=mask, other=0).to(tl.float32)
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
        at = grid + token + 2 * pair
        real = tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32)
        imaginary = tl.load(cos_ptr + at + 1, mask=mask, other=0.0).to(tl.float32)
        return real, real, imaginary, imaginary
    elif ANGLES == "pair":
        cos_a = tl.load(cos_ptr + grid + token + pair, mask=mask, other=0.0).to(tl.float32)
        sin_a = tl.load(sin_ptr + grid + token + pair, mask=mask, other=0.0).to(tl.float32)
        return cos_a, cos_a, sin_a, sin_a
    else:
        at = grid + token + (2 * pair if BESIDE else pair)
        gap = 1 if BESIDE else ROTARY // 2
        cos_a = tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32)
        cos_b = tl.load(cos_ptr + at + gap, mask=mask, other=0.0).to(tl.float32)
        sin_a = tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32)
        sin_b = tl.load(sin_ptr + at + gap, mask=mask, other=0.0).to(tl.float32)
        return cos_a, cos_b, sin_a, sin_b


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, batch_stride, head_stride, token_stride, stride, out_batch_stride,
    out_head_stride, out_token_stride, first, last, heads, batch, token, mask, cos_a, cos_b, sin_a,
    sin_b, WIDTH: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    PASS: tl.constexpr, BESIDE_IN: tl.constexpr, BESIDE_OUT: tl.constexpr,
):  # fmt: skip
    """Rotate the blocks of heads from first to last; batch, token and mask are [1, tokens, 1]."""
    x_ptr += batch * batch_stride + token * token_stride
    out_ptr += batch * out_batch_stride + token * out_token_stride
    for block in tl.range(first, last):
        head = (block * HEADS + tl.arange(0, HEADS))[:, None, None]
        here = (head < heads) & mask
        head = head.to(tl.int64)
        x = x_ptr + head * head_stride
        out = out_ptr + head * out_head_stride
        a, b = _load_pairs(x, stride, here, ROTARY, HALF, BESIDE_IN)
        turned_a = a * cos_a - b * sin_a
        turned_b = b * cos_b + a * sin_b
        _store_pairs(out, turned_a, turned_b, here, ROTARY, HALF, BESIDE_OUT)
        if PASS:
            channel = ROTARY + tl.arange(0, PASS)[None, None, :]
            here = here & (channel < WIDTH)
            x += channel.to(tl.int64) * stride
            value = tl.load(x, mask=here, other=0.0).to(tl.float32)
            tl.store(out + channel, round_to(value, out_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["seq", "tokens", "groups", "share"])
def _rope_kinds_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, q_batch_stride, q_head_stride,
    q_token_stride, q_stride, k_batch_stride, k_head_stride, k_token_stride, k_stride,
    q_out_batch_stride, q_out_head_stride, q_out_token_stride, k_out_batch_stride,
    k_out_head_stride, k_out_token_stride, grid_stride, angle_batch_stride, angle_token_stride,
    q_heads, k_heads, seq, tokens, groups, share, scaling, WIDTH: tl.constexpr,
    ROTARY: tl.constexpr, ANGLES: tl.constexpr, BESIDE: tl.constexpr,
    BESIDE_IN: tl.constexpr, BESIDE_OUT: tl.constexpr, ROUND: tl.constexpr, GRIDS: tl.constexpr,
    CHUNKED: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr, INVERSE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // groups) * TOKENS + tl.arange(0, TOKENS)[None, :, None]
    mask = token < tokens
    batch = (token // seq).to(tl.int64)
    token = (token % seq).to(tl.int64)
    row = batch * angle_batch_stride + token * angle_token_stride
    grid = tl.zeros([1, 1, HALF], tl.int64)
    if GRIDS > 1:
        pair = tl.arange(0, HALF)[None, None, :]
        grid = _grid(pair, GRIDS, CHUNKED, ONE, TWO).to(tl.int64) * grid_stride
    cos_a, cos_b, sin_a, sin_b = _load_angles(
        cos_ptr, sin_ptr, grid, row, mask, scaling, ANGLES, BESIDE, ROUND, ROTARY, HALF
    )
    if INVERSE:
        sin_a, sin_b = -sin_b, -sin_a
    blocks = tl.cdiv(q_heads, HEADS)
    first = (tl.program_id(0) % groups) * share
    last = tl.minimum(first + share, blocks + tl.cdiv(k_heads, HEADS))
    _rotate_heads(
        q_ptr, q_out_ptr, q_batch_stride, q_head_stride, q_token_stride, q_stride,
        q_out_batch_stride, q_out_head_stride, q_out_token_stride, first, tl.minimum(last, blocks),
        q_heads, batch, token, mask, cos_a, cos_b, sin_a, sin_b, WIDTH, ROTARY, HALF, HEADS, PASS,
        BESIDE_IN, BESIDE_OUT,
    )  # fmt: skip
    _rotate_heads(
        k_ptr, k_out_ptr, k_batch_stride, k_head_stride, k_token_stride, k_stride,
        k_out_batch_stride, k_out_head_stride, k_out_token_stride,
        tl.maximum(first, blocks) - blocks, last - blocks, k_heads, batch, token, mask, cos_a,
        cos_b, sin_a, sin_b, WIDTH, ROTARY, HALF, HEADS, PASS, BESIDE_IN, BESIDE_OUT,
    )  # fmt: skip
