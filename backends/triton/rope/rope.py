"""Rotary position embedding (arXiv:2104.09864) of queries and keys in one launch.

For a pair of channels (a, b) of a token, which the values of cos and sin need not share:

    a' = a cos_a - b sin_a,  b' = b cos_b + a sin_b

Backward is the transposed matrix: the same with sin_a and sin_b exchanged and negated.

A program owns some tokens and loops over blocks of heads, those of q first; cos and sin of its
tokens stay in registers. Strides say where everything is, so that no layout is copied. The two
channels of a pair are loaded as two tiles or, where they are neighbors, as one that is split in
registers. Sizes of batch and sequence are plain arguments: a new length compiles nothing.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    assume_rows,
    cdiv,
    power_of_2,
    round_to,
    short_offsets,
    warps,
)
from liger_multi.dispatch.launch import DeviceInfo, cached_config, launch_config
from liger_multi.reference.rope.rope import dense, output_dtype

# --- tiles: each in one sequence, its elements near a scalar base ---


# bytes that a tile's heads, tokens and channels may be apart: together less than 2 GiB
HEADS_APART, APART = 2**30, 2**29


@triton.jit
def assume_tile(
    ptr,
    head_stride,
    token_stride,
    stride,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Tell the compiler what :func:`near_tile` makes true: a tile of heads spans under 2 GiB."""
    assume_rows(ptr, head_stride, 2 * HEADS if HEADS > 1 else 1)
    assume_rows(ptr, token_stride, 4 * TOKENS if TOKENS > 1 else 1)
    assume_rows(ptr, stride, 4 * WIDTH)


@triton.jit
def place(ptr, at, channel):
    """Pointers of the elements at ``at + channel`` from a scalar base.

    Targets with 32-bit offsets add both offsets first. Elsewhere, ``at`` is added to the base and
    gives pointers of rows, to which the channel is added.
    """
    if short_offsets():
        return ptr + (at + channel)
    else:
        return ptr + at + channel


@triton.jit
def tokens_of(tiles, groups, seq, TOKENS: tl.constexpr):
    """The sequence of this program, its first token, its tokens [1, TOKENS, 1], and their mask.

    ``groups`` programs share a tile of tokens, and a sequence has ``tiles`` of those.
    """
    tile = tl.program_id(0) // groups
    batch, start = (tile // tiles).to(tl.int64), (tile % tiles) * TOKENS
    token = tl.arange(0, TOKENS)[None, :, None]
    return batch, start, token, start + token < seq


@triton.jit
def load_pairs(
    ptr, at, stride, mask, ROTARY: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Both channels of every pair in fp32; places and mask are [heads, tokens, 1].

    INTERLEAVED: the channels of a pair are neighbors, so that one contiguous load is split in
    registers. Otherwise the second channels begin ROTARY / 2 after the first.
    """
    if INTERLEAVED:
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
def store_pairs(
    ptr, at, a, b, mask, ROTARY: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Store both channels of every pair, neighbors (INTERLEAVED) or ROTARY / 2 apart."""
    a = round_to(a, ptr.dtype.element_ty)
    b = round_to(b, ptr.dtype.element_ty)
    if INTERLEAVED:
        channel = tl.arange(0, 2 * HALF)[None, None, :]
        x = tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1], 2 * HALF])
        tl.store(place(ptr, at, channel), x, mask=mask & (channel < ROTARY))
    else:
        pair = tl.arange(0, HALF)[None, None, :]
        mask = mask & (pair < ROTARY // 2)
        tl.store(place(ptr, at, pair), a, mask=mask)
        tl.store(place(ptr, at, pair + ROTARY // 2), b, mask=mask)


@triton.jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    strides,
    out_strides,
    first,
    last,
    heads,
    batch,
    start,
    mask,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PASS: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr,
    INTERLEAVED_OUT: tl.constexpr,
):
    """Rotate the blocks of heads from ``first`` to ``last``, of the tokens from ``start``.

    One step loads HEADS heads of TOKENS tokens, rotates the pairs by angles that stay in registers,
    and stores them. PASS: channels past ROTARY are copied. The range is empty or negative for a
    program that has heads of the other tensor only. Strides are those of :func:`strides`.
    """
    batch_stride, head_stride, token_stride, stride = strides
    out_batch_stride, out_head_stride, out_token_stride = out_strides
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
        a, b = load_pairs(x, at, stride, here, ROTARY, HALF, INTERLEAVED_IN)
        rotated_a = a * cos_a - b * sin_a
        rotated_b = b * cos_b + a * sin_b
        store_pairs(out, out_at, rotated_a, rotated_b, here, ROTARY, HALF, INTERLEAVED_OUT)
        if PASS:
            channel = ROTARY + tl.arange(0, PASS)[None, None, :]
            here = here & (channel < WIDTH)
            value = tl.load(place(x, at, channel * stride), mask=here, other=0.0).to(tl.float32)
            value = round_to(value, out_ptr.dtype.element_ty)
            tl.store(place(out, out_at, channel), value, mask=here)


@triton.jit
def rotate_both(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    strides,
    q_heads,
    k_heads,
    groups,
    share,
    batch,
    start,
    mask,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PASS: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr,
    INTERLEAVED_OUT: tl.constexpr,
):
    """Rotate this program's ``share`` of the blocks of heads: those of q, then those of k.

    Blocks are numbered through both tensors; the first number follows from the program's place
    among the ``groups`` programs of its tokens. Mask and angles are those of its tokens.
    """
    q_strides = strides[0:4]
    k_strides = strides[4:8]
    q_out_strides = strides[8:11]
    k_out_strides = strides[11:14]
    blocks = tl.cdiv(q_heads, HEADS)
    first = (tl.program_id(0) % groups) * share
    last = tl.minimum(first + share, blocks + tl.cdiv(k_heads, HEADS))
    _rotate_heads(
        q_ptr,
        q_out_ptr,
        q_strides,
        q_out_strides,
        first,
        tl.minimum(last, blocks),
        q_heads,
        batch,
        start=start,
        mask=mask,
        cos_a=cos_a,
        cos_b=cos_b,
        sin_a=sin_a,
        sin_b=sin_b,
        WIDTH=WIDTH,
        ROTARY=ROTARY,
        HALF=HALF,
        TOKENS=TOKENS,
        HEADS=HEADS,
        PASS=PASS,
        INTERLEAVED_IN=INTERLEAVED_IN,
        INTERLEAVED_OUT=INTERLEAVED_OUT,
    )
    _rotate_heads(
        k_ptr,
        k_out_ptr,
        k_strides,
        k_out_strides,
        tl.maximum(first, blocks) - blocks,
        last - blocks,
        k_heads,
        batch,
        start=start,
        mask=mask,
        cos_a=cos_a,
        cos_b=cos_b,
        sin_a=sin_a,
        sin_b=sin_b,
        WIDTH=WIDTH,
        ROTARY=ROTARY,
        HALF=HALF,
        TOKENS=TOKENS,
        HEADS=HEADS,
        PASS=PASS,
        INTERLEAVED_IN=INTERLEAVED_IN,
        INTERLEAVED_OUT=INTERLEAVED_OUT,
    )


def strides(x: Tensor, head_axis: int) -> tuple[int, int, int, int]:
    """Strides of sequences, heads, tokens and channels."""
    steps = x.stride()
    if len(steps) == 3:
        return 0, steps[1], steps[0], steps[2]
    return steps[0], steps[head_axis], steps[3 - head_axis], steps[3]


def _fits(count: int, stride: int, item: int, limit: int) -> bool:
    return count == 1 or count * stride * item < limit


def near_tile(
    config: Any, steps: list[tuple[int, int, int, int]], tensors: tuple[Tensor, ...]
) -> Any:
    """A launch configuration whose tiles span under 2 GiB: one head or token where they are apart.

    A tile of tokens replaces one of heads, so that it stays as large. ``steps`` are the
    :func:`strides` of the tensors.
    """
    sizes = [x.element_size() for x in tensors]
    head = max([step[1] * size for step, size in zip(steps, sizes, strict=True)])
    token = max([step[2] * size for step, size in zip(steps, sizes, strict=True)])
    if not _fits(config.heads, head, 1, HEADS_APART):
        tokens = min(config.heads * config.tokens, 32)
        config = dataclasses.replace(config, heads=1, tokens=tokens)
    if not _fits(config.tokens, token, 1, APART):
        config = dataclasses.replace(config, tokens=1)
    return config


def near_channels(x: Tensor) -> Tensor:
    """``x`` with channels near each other in memory, by a copy where needed."""
    return x if _fits(x.shape[-1], x.stride(-1), x.element_size(), APART) else x.contiguous()


def near_angles(x: Tensor) -> Tensor:
    """Angles (..., tokens, channels) whose tile spans under 2 GiB, by a copy where needed."""
    return x if _fits(32, x.stride(-2), x.element_size(), APART) else x.contiguous()


# --- the plain rotation ---


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
    ptr,
    at,
    mask,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Angles (cos or sin) of both channels of every pair; PAIRS: one number is stored for both."""
    if PAIRS:
        pair = tl.arange(0, HALF)[None, None, :]
        angle = tl.load(place(ptr, at, pair), mask=mask & (pair < ROTARY // 2), other=0.0)
        return angle.to(tl.float32), angle.to(tl.float32)
    else:
        return load_pairs(ptr, at, 1, mask, ROTARY, HALF, INTERLEAVED)


@triton.jit(do_not_specialize=["seq", "tiles", "groups", "share"])
def _rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    strides,
    q_heads,
    k_heads,
    seq,
    tiles,
    groups,
    share,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PASS: tl.constexpr,
):
    """Rotate the heads of q and k of some tokens.

    Program: TOKENS tokens of one sequence, and ``share`` blocks of HEADS heads, q's before k's;
    ``groups`` programs share the heads of a tile of tokens.
    Reads cos and sin of its tokens once, then a tile of heads by tokens a step; writes it rotated,
    with the channels past ROTARY copied. INVERSE: the transposed rotation, for backward.
    Strides go from one sequence, head, token and channel to the next; what is written has its
    channels beside one another. Angles: from one sequence and token to the next.
    """
    angle_batch_stride, angle_token_stride = strides[14:16]
    batch, start, token, mask = tokens_of(tiles, groups, seq, TOKENS)
    assume_rows(cos_ptr, angle_token_stride, 4 * TOKENS)
    angle = batch * angle_batch_stride + start.to(tl.int64) * angle_token_stride
    at = token * angle_token_stride
    cos_a, cos_b = _load_angles(cos_ptr + angle, at, mask, ROTARY, HALF, INTERLEAVED, PAIRS)
    sin_a, sin_b = _load_angles(sin_ptr + angle, at, mask, ROTARY, HALF, INTERLEAVED, PAIRS)
    if INVERSE:
        sin_a, sin_b = -sin_b, -sin_a
    rotate_both(
        q_ptr,
        k_ptr,
        q_out_ptr,
        k_out_ptr,
        strides,
        q_heads,
        k_heads,
        groups,
        share=share,
        batch=batch,
        start=start,
        mask=mask,
        cos_a=cos_a,
        cos_b=cos_b,
        sin_a=sin_a,
        sin_b=sin_b,
        WIDTH=WIDTH,
        ROTARY=ROTARY,
        HALF=HALF,
        TOKENS=TOKENS,
        HEADS=HEADS,
        PASS=PASS,
        INTERLEAVED_IN=INTERLEAVED,
        INTERLEAVED_OUT=INTERLEAVED,
    )


class Geometry(NamedTuple):
    """A launch but for its tensors, which follows from their sizes, strides and dtypes.

    Attributes:
        copied: Which of q, k, cos and sin are copied first, to bring what a tile reads together.
        programs: Size of the grid.
        numbers: The arguments behind the tensors.
        constants: Values of the ``constexpr`` parameters.
        num_warps: Warps a program.
    """

    copied: tuple[bool, ...]
    programs: int
    numbers: tuple[Any, ...]
    constants: tuple[Any, ...]
    num_warps: int


def _geometry(
    tensors: tuple[Tensor, ...],
    heads: tuple[int, int],
    style: str,
    head_axis: int,
    rotary_dim: int,
    inverse: bool,
) -> Geometry:
    """How to rotate q and k by cos and sin; q, k, cos, sin, and the results of q and k."""
    inputs = [*map(near_channels, tensors[:2]), *map(near_angles, tensors[2:4])]
    copied = tuple(a is not b for a, b in zip(inputs, tensors, strict=False))
    q, k, cos, _ = inputs
    q_out, k_out = (
        x if output else input_like for x, output, input_like in zip(tensors[4:], heads, inputs)
    )
    width, angle, seq = q.shape[-1], cos.stride(), cos.shape[-2]
    tokens = q.numel() // max(q.shape[head_axis] * width, 1)
    if sum(heads) == 0 or tokens == 0:
        return Geometry(copied, 0, (), (), 1)
    n = launch_config(
        "rope.backward" if inverse else "rope.forward",
        rope_config,
        q.device,
        rows=tokens,
        cols=width,
        q_heads=heads[0],
        k_heads=heads[1],
        plain=style == "half" and cos.shape[-1] == width,
    )
    steps = [strides(x, head_axis) for x in (q, k, q_out, k_out)]
    n = near_tile(n, steps, (q, k, q_out, k_out))
    groups = cdiv(cdiv(heads[0], n.heads) + cdiv(heads[1], n.heads), n.share)
    passed_channels = power_of_2(width - rotary_dim) if width > rotary_dim else 0
    return Geometry(
        copied,
        tokens // seq * cdiv(seq, n.tokens) * groups,
        (
            (
                *steps[0],
                *steps[1],
                *steps[2][:3],
                *steps[3][:3],
                angle[0] if len(angle) == 3 and cos.shape[0] > 1 else 0,
                angle[-2],
            ),
            *heads,
            seq,
            cdiv(seq, n.tokens),
            groups,
            n.share,
        ),
        (
            width,
            rotary_dim,
            cos.shape[-1] != rotary_dim,
            style == "interleaved",
            inverse,
            n.tokens,
            n.heads,
            power_of_2(rotary_dim // 2),
            passed_channels,
        ),
        n.num_warps,
    )


def _launch(
    sources: tuple[Tensor | None, Tensor | None],
    outputs: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    style: str,
    head_axis: int,
    rotary_dim: int,
    inverse: bool,
) -> None:
    """Rotate q and k into ``outputs``; one of them may be absent."""
    tensor = sources[1] if sources[0] is None else sources[0]
    assert tensor is not None
    q, q_out = (tensor, tensor) if sources[0] is None else (sources[0], outputs[0])
    k, k_out = (tensor, tensor) if sources[1] is None else (sources[1], outputs[1])
    angle = cos.stride()
    if angle[-1] != 1 or sin.stride() != angle:
        cos, sin = cos.contiguous(), sin.contiguous()
    heads = (
        0 if sources[0] is None else q.shape[head_axis],
        0 if sources[1] is None else k.shape[head_axis],
    )
    tensors = (q, k, cos, sin, q_out, k_out)
    key = (heads, style, head_axis, rotary_dim, inverse)
    layouts = [(x.shape, x.stride(), x.dtype) for x in tensors]
    n = cached_config(("rope", q.device, *key, *layouts), lambda: _geometry(tensors, *key))
    if not n.programs:
        return
    if True in n.copied:
        inputs = (
            x.contiguous() if is_copied else x
            for x, is_copied in zip(tensors, n.copied, strict=False)
        )
        q, k, cos, sin = inputs
        q_out, k_out = q_out if heads[0] else q, k_out if heads[1] else k
    args = (q, k, cos, sin, q_out, k_out, *n.numbers)
    launch(_rope_kernel, n.programs, args, n.constants, n.num_warps)


def forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: str,
    head_axis: int,
    rotary_dim: int,
    casting: str,
    q_order: str,
    k_order: str,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k in fp32, rounded once."""
    outputs = (
        dense(q, q_order, output_dtype(q, cos, sin, casting)),
        dense(k, k_order, output_dtype(k, cos, sin, casting)),
    )
    _launch((q, k), outputs, cos, sin, style, head_axis, rotary_dim, False)
    return outputs


def backward(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    style: str,
    head_axis: int,
    rotary_dim: int,
    casting: str,
    q_order: str,
    k_order: str,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    needs_q: bool,
    needs_k: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k; empty where not needed, or where nothing upstream has one."""
    dq_out, dk_out = dq_out if needs_q else None, dk_out if needs_k else None
    outputs = (
        cos.new_empty(0, dtype=q_dtype) if dq_out is None else dense(dq_out, q_order, q_dtype),
        cos.new_empty(0, dtype=k_dtype) if dk_out is None else dense(dk_out, k_order, k_dtype),
    )
    if dq_out is not None or dk_out is not None:
        _launch((dq_out, dk_out), outputs, cos, sin, style, head_axis, rotary_dim, True)
    return outputs
