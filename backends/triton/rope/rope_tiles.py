"""Tiles of rotary kernels: each in one sequence, its elements near a scalar base."""

from __future__ import annotations

import dataclasses
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.rows import assume_rows, round_to, short_offsets

# bytes that a tile's heads, tokens and channels may be apart: together less than 2 GiB
HEADS_APART, APART = 2**30, 2**29


@triton.jit
def assume_tile(ptr, head_stride, token_stride, stride, HEADS: tl.constexpr, TOKENS: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
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
    ptr, at, stride, mask, ROTARY: tl.constexpr, HALF: tl.constexpr, BESIDE: tl.constexpr
):
    """Both channels of every pair in fp32; places and mask are [heads, tokens, 1].

    BESIDE: the channels of a pair are neighbors, so that one contiguous load is split in registers.
    Otherwise the second channels begin ROTARY / 2 after the first.
    """
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
def store_pairs(
    ptr, at, a, b, mask, ROTARY: tl.constexpr, HALF: tl.constexpr, BESIDE: tl.constexpr
):
    """Store both channels of every pair, neighbors (BESIDE) or ROTARY / 2 apart."""
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
def _rotate_heads(
    x_ptr, out_ptr, batch_stride, head_stride, token_stride, stride, out_batch_stride,
    out_head_stride, out_token_stride, first, last, heads, batch, start, mask, cos_a, cos_b, sin_a,
    sin_b, WIDTH: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, PASS: tl.constexpr, BESIDE_IN: tl.constexpr, BESIDE_OUT: tl.constexpr,
):  # fmt: skip
    """Rotate the blocks of heads from ``first`` to ``last``, of the tokens from ``start``.

    One step loads HEADS heads of TOKENS tokens, rotates the pairs by angles that stay in registers,
    and stores them. PASS: channels past ROTARY are copied. The range is empty or negative for a
    program that has heads of the other tensor only.
    """
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
        a, b = load_pairs(x, at, stride, here, ROTARY, HALF, BESIDE_IN)
        turned_a = a * cos_a - b * sin_a
        turned_b = b * cos_b + a * sin_b
        store_pairs(out, out_at, turned_a, turned_b, here, ROTARY, HALF, BESIDE_OUT)
        if PASS:
            channel = ROTARY + tl.arange(0, PASS)[None, None, :]
            here = here & (channel < WIDTH)
            value = tl.load(place(x, at, channel * stride), mask=here, other=0.0).to(tl.float32)
            value = round_to(value, out_ptr.dtype.element_ty)
            tl.store(place(out, out_at, channel), value, mask=here)


@triton.jit
def rotate_both(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_batch_stride, q_head_stride, q_token_stride, q_stride,
    k_batch_stride, k_head_stride, k_token_stride, k_stride, q_out_batch_stride,
    q_out_head_stride, q_out_token_stride, k_out_batch_stride, k_out_head_stride,
    k_out_token_stride, q_heads, k_heads, groups, share, batch, start, mask, cos_a, cos_b, sin_a,
    sin_b, WIDTH: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, PASS: tl.constexpr, BESIDE_IN: tl.constexpr, BESIDE_OUT: tl.constexpr,
):  # fmt: skip
    """Rotate this program's ``share`` of the blocks of heads: those of q, then those of k.

    Blocks are numbered through both tensors; the first number follows from the program's place
    among the ``groups`` programs of its tokens. Mask and angles are those of its tokens.
    """
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


def strides(x: Tensor, head_axis: int) -> tuple[int, int, int, int]:
    """Steps from one sequence, head, token and channel to the next."""
    steps = x.stride()
    if len(steps) == 3:
        return 0, steps[1], steps[0], steps[2]
    return steps[0], steps[head_axis], steps[3 - head_axis], steps[3]


def _fits(count: int, stride: int, item: int, most: int) -> bool:
    return count == 1 or count * stride * item < most


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
    """Heads whose channels keep near, by a copy where they do not."""
    return x if _fits(x.shape[-1], x.stride(-1), x.element_size(), APART) else x.contiguous()


def near_angles(x: Tensor) -> Tensor:
    """The same of the angles of a tile of tokens, (..., tokens, channels)."""
    return x if _fits(32, x.stride(-2), x.element_size(), APART) else x.contiguous()
