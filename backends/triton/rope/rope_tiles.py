"""Tiles of rotary kernels: each in one sequence, its elements near a scalar base."""

from __future__ import annotations

import dataclasses
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.rows import assume_rows, short_offsets

# bytes that a tile's heads, tokens and channels may be apart: together less than 2 GiB
HEADS_APART, APART = 2**30, 2**29


@triton.jit
def assume_tile(ptr, head_stride, token_stride, stride, HEADS: tl.constexpr, TOKENS: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    """Say what :func:`near_tile` makes true of a tensor of heads."""
    assume_rows(ptr, head_stride, 2 * HEADS if HEADS > 1 else 1)
    assume_rows(ptr, token_stride, 4 * TOKENS if TOKENS > 1 else 1)
    assume_rows(ptr, stride, 4 * WIDTH)


@triton.jit
def place(ptr, at, channel):
    """Where elements stand: by one 32-bit number from a scalar base, or from pointers of rows."""
    if short_offsets():
        return ptr + (at + channel)
    else:
        return ptr + at + channel


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
    """A configuration whose tiles keep elements near: one head or one token where they stand apart.

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
