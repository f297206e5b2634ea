"""Blocks of queries and keys, and what a block of queries sees."""

from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import BLOCK_BYTES

Seen = tuple[slice, Optional[Tensor]]


def blocks(length: int, step: int) -> Iterator[slice]:
    """Slices of ``step`` places over a length."""
    for start in range(0, length, step):
        yield slice(start, min(length, start + step))


def block_size(heads: int, itemsize: int) -> int:
    """Rows and columns of a block, of which four arrays keep to the limit."""
    area = BLOCK_BYTES // max(1, 4 * heads * itemsize)
    return max(16, min(1024, 1 << (int(area**0.5).bit_length() - 1)))


def seen_keys(
    q: Tensor, k: Tensor, ranges: Tensor | None, causal: bool, rows: slice, step: int
) -> Iterator[Seen]:
    """Blocks of keys, and which of them the rows see, (B or 1, 1, 1, rows, cols); None for all.

    On a CPU blocks that no row sees are left out; elsewhere that would wait for the device.
    """
    keys, offset = k.shape[2], k.shape[2] - q.shape[2]
    last = max(0, min(keys, rows.stop + offset)) if causal else keys
    place = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + offset
    bounds = [] if ranges is None else [b[:, None, None] for b in ranges[:, rows].split(2, -1)]
    extents = []
    if q.device.type == "cpu":
        extents = [(int(b[..., 0].min()), int(b[..., 1].max())) for b in bounds]
    for cols in blocks(last, step):
        if extents and not any(a < cols.stop and cols.start < b for a, b in extents):
            continue
        column = torch.arange(cols.start, cols.stop, device=q.device)
        if ranges is None:
            whole = not causal or cols.stop <= rows.start + offset + 1
            yield cols, None if whole else (column <= place)[None, None, None]
            continue
        inside = [(column >= b[..., :1]) & (column < b[..., 1:]) for b in bounds]
        yield cols, torch.stack(inside).any(0)


def grouped(x: Tensor, groups: int, rows: slice, kind: torch.dtype) -> Tensor:
    """Some rows of ``(B, H, L, D)`` as (B, groups, H / groups * rows, D)."""
    part = x[:, :, rows].to(kind)
    return part.reshape(part.shape[0], groups, -1, part.shape[3])


def scores(q: Tensor, k: Tensor, scale: float, softcap: float, heads: int) -> Tensor:
    """Scores of grouped rows, (B, G, H / G, rows, cols)."""
    s = (q @ k.mT).mul_(scale).unflatten(2, (heads, -1))
    return s if softcap == 0.0 else torch.tanh(s / softcap) * softcap


def ordered(like: Tensor, dtype: torch.dtype, heads: int, length: int, size: int) -> Tensor:
    """Zeros ``(B, heads, length, size)`` whose memory has the order (B, length, heads, size)."""
    return like.new_zeros(like.shape[0], length, heads, size, dtype=dtype).transpose(1, 2)
