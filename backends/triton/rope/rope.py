"""Rotary position embedding (arXiv:2104.09864) of queries and keys in one launch.

For a pair of channels (a, b) of a token, which the values of cos and sin need not share:

    a' = a cos_a - b sin_a,  b' = b cos_b + a sin_b

Backward is the transposed matrix: the same with sin_a and sin_b exchanged and negated.

A program owns some tokens and loops over blocks of heads, those of q first; cos and sin of its
tokens stay in registers. Strides say where everything is, so that no layout is copied. The two
channels of a pair are loaded as two tiles or, where they are neighbors, as one that is split in
registers. Sizes of batch and sequence are plain arguments: a new length compiles nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import assume_rows, cdiv, power_of_2, warps
from liger_multi.backends.triton.rope.rope_tiles import (
    load_pairs,
    near_angles,
    near_channels,
    near_tile,
    place,
    rotate_both,
    strides,
    tokens_of,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.rope.rope import dense, output_dtype


@dataclass(frozen=True)
class RopeConfig:
    """Tiles of ``heads`` x ``tokens``; a program loops over ``share`` of them with its tokens."""

    tokens: int
    heads: int
    share: int
    num_warps: int


def rope_config(
    info: DeviceInfo, rows: int, cols: int, q_heads: int, k_heads: int, plain: bool
) -> RopeConfig:
    """Tiles of 4096 elements; many programs per core rather than long loops.

    32 elements a thread keep more loads on their way than 16. Where a call is not plain (pairs
    side by side, one angle for both channels, channels that pass), the compiler then trades a few
    spilled registers for another program a core on some targets of ci.static (triton 3.9).
    """
    common = math.gcd(q_heads, k_heads) or 1
    block = min(common & -common, 16)  # no head is masked
    width = power_of_2(cols)
    per_tile = max(1, min(4096 // (block * width), 32))
    threads = block * per_tile * width // (32 if plain and block > 1 else 16)
    blocks = max(1, (q_heads + k_heads) // block)
    groups = min(blocks, cdiv(8 * info.cores, cdiv(rows, per_tile)))
    return RopeConfig(
        per_tile, block, cdiv(blocks, groups), warps(max(threads, 32), info.warp_size)
    )


@triton.jit
def _load_angles(
    ptr, at, mask, ROTARY: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Angles (cos or sin) of both channels of every pair; PAIRS: one number is stored for both."""
    if PAIRS:
        pair = tl.arange(0, HALF)[None, None, :]
        angle = tl.load(place(ptr, at, pair), mask=mask & (pair < ROTARY // 2), other=0.0)
        return angle.to(tl.float32), angle.to(tl.float32)
    else:
        return load_pairs(ptr, at, 1, mask, ROTARY, HALF, INTERLEAVED)


@triton.jit(do_not_specialize=["seq", "tiles", "groups", "share"])
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_batch_stride, q_head_stride, q_token_stride, q_stride,
    k_batch_stride, k_head_stride, k_token_stride, k_stride,
    q_out_batch_stride, q_out_head_stride, q_out_token_stride,
    k_out_batch_stride, k_out_head_stride, k_out_token_stride,
    angle_batch_stride, angle_token_stride, q_heads, k_heads, seq, tiles, groups, share,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    PASS: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of q and k of some tokens.

    Program: TOKENS tokens of one sequence, and ``share`` blocks of HEADS heads, q's before k's;
    ``groups`` programs share the heads of a tile of tokens.
    Reads cos and sin of its tokens once, then a tile of heads by tokens a step; writes it rotated,
    with the channels past ROTARY copied. INVERSE: the transposed rotation, for backward.
    """
    batch, start, token, mask = tokens_of(tiles, groups, seq, TOKENS)
    assume_rows(cos_ptr, angle_token_stride, 4 * TOKENS)
    angle = batch * angle_batch_stride + start.to(tl.int64) * angle_token_stride
    at = token * angle_token_stride
    cos_a, cos_b = _load_angles(cos_ptr + angle, at, mask, ROTARY, HALF, INTERLEAVED, PAIRS)
    sin_a, sin_b = _load_angles(sin_ptr + angle, at, mask, ROTARY, HALF, INTERLEAVED, PAIRS)
    if INVERSE:
        sin_a, sin_b = -sin_b, -sin_a
    rotate_both(
        q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_batch_stride, q_head_stride, q_token_stride, q_stride,
        k_batch_stride, k_head_stride, k_token_stride, k_stride, q_out_batch_stride,
        q_out_head_stride, q_out_token_stride, k_out_batch_stride, k_out_head_stride,
        k_out_token_stride, q_heads, k_heads, groups, share, batch, start, mask, cos_a, cos_b,
        sin_a, sin_b, WIDTH, ROTARY, HALF, TOKENS, HEADS, PASS, INTERLEAVED, INTERLEAVED,
    )  # fmt: skip


def _launch(
    given: tuple[Tensor | None, Tensor | None], made: tuple[Tensor, Tensor], cos: Tensor,
    sin: Tensor, style: str, head_axis: int, rotary_dim: int, inverse: bool,
) -> None:  # fmt: skip
    """Rotate q and k into ``made``; one of them may be absent."""
    heads = [0 if x is None else x.shape[head_axis] for x in given]
    near = [None if x is None else near_channels(x) for x in given]
    some = near[1] if near[0] is None else near[0]
    assert some is not None
    q, q_out = (some, some) if near[0] is None else (near[0], made[0])
    k, k_out = (some, some) if near[1] is None else (near[1], made[1])
    angle = cos.stride()
    if angle[-1] != 1 or sin.stride() != angle:
        cos, sin = cos.contiguous(), sin.contiguous()
    cos, sin = near_angles(cos), near_angles(sin)
    angle = cos.stride()
    width = some.shape[-1]
    tokens = some.numel() // max(some.shape[head_axis] * width, 1)
    if sum(heads) == 0 or tokens == 0:
        return
    plain = style == "half" and cos.shape[-1] == width
    key = "rope.backward" if inverse else "rope.forward"
    n = launch_config(
        key, rope_config, q.device, rows=tokens, cols=width, q_heads=heads[0], k_heads=heads[1],
        plain=plain,
    )  # fmt: skip
    steps = [strides(x, head_axis) for x in (q, k, q_out, k_out)]
    n, seq = near_tile(n, steps, (q, k, q_out, k_out)), cos.shape[-2]
    groups = cdiv(cdiv(heads[0], n.heads) + cdiv(heads[1], n.heads), n.share)
    passed = power_of_2(width - rotary_dim) if width > rotary_dim else 0
    launch(
        _rope_kernel, tokens // seq * cdiv(seq, n.tokens) * groups,
        (q, k, cos, sin, q_out, k_out, *steps[0], *steps[1], *steps[2][:3], *steps[3][:3],
         angle[0] if len(angle) == 3 and cos.shape[0] > 1 else 0, angle[-2], *heads, seq,
         cdiv(seq, n.tokens), groups, n.share),
        (width, rotary_dim, cos.shape[-1] != rotary_dim, style == "interleaved", inverse,
         n.tokens, n.heads, power_of_2(rotary_dim // 2), passed), n.num_warps,
    )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, style: str, head_axis: int, rotary_dim: int,
    casting: str, q_order: str, k_order: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate q and k in fp32, rounded once."""
    made = (
        dense(q, q_order, output_dtype(q, cos, sin, casting)),
        dense(k, k_order, output_dtype(k, cos, sin, casting)),
    )
    _launch((q, k), made, cos, sin, style, head_axis, rotary_dim, False)
    return made


def backward(
    dq_out: Optional[Tensor], dk_out: Optional[Tensor], cos: Tensor, sin: Tensor, style: str,
    head_axis: int, rotary_dim: int, casting: str, q_order: str, k_order: str,
    q_dtype: torch.dtype, k_dtype: torch.dtype, needs_q: bool, needs_k: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of q and k; empty where not needed, or where nothing upstream has one."""
    dq_out, dk_out = dq_out if needs_q else None, dk_out if needs_k else None
    made = (
        cos.new_empty(0, dtype=q_dtype) if dq_out is None else dense(dq_out, q_order, q_dtype),
        cos.new_empty(0, dtype=k_dtype) if dk_out is None else dense(dk_out, k_order, k_dtype),
    )
    if dq_out is not None or dk_out is not None:
        _launch((dq_out, dk_out), made, cos, sin, style, head_axis, rotary_dim, True)
    return made
