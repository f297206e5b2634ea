"""Tiles of keys at fixed tokens, for ``deterministic="rows"``.

A kernel sums over keys a tile at a time, and its tiles begin at multiples of their size. A cache of
a sliding window has dropped the first keys, and left padding stands before the first token: there a
token lies in another column than in the whole sequence, its tiles are other ones, and with them the
order of the sum. Columns that nobody sees, put before the keys, give it its own tiles back.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 128
"""A multiple of every kernel's tile of keys."""


def shifts(attention_mask: Tensor | None, offset: int) -> tuple[int, ...]:
    """Columns to put before the keys, for each element of the batch or for all; none where empty.

    Args:
        attention_mask: ``(B, T)``, true at tokens; None where every column is one.
        offset: Column of the first key in that mask, or in the sequence. Waits for the device where
            there is a mask.
    """
    first = [0] if attention_mask is None else attention_mask.bool().int().argmax(-1).tolist()
    columns = tuple((offset - token) % TILE for token in first)
    return columns if any(columns) else ()


def shifted(x: Tensor, columns: tuple[int, ...]) -> Tensor:
    """Keys or values ``(B, H, S, D)`` behind zeros; all elements of the batch become as long."""
    if len(set(columns)) == 1:
        return F.pad(x, (0, 0, columns[0], 0))
    most = max(columns)
    pads = [(0, 0, before, most - before) for before in columns]
    return torch.stack([F.pad(row, pad) for row, pad in zip(x, pads, strict=True)])


def shifted_ranges(
    ranges: Tensor | None,
    causal: bool,
    columns: tuple[int, ...],
    sizes: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """The ranges ``(B or 1, L, 2 n)`` of queries behind the same columns.

    Args:
        ranges: Those of the keys as they were; None for a causal mask or none.
        causal: Which of the two it is: the queries are the last keys.
        columns: As :func:`shifts` returns them.
        sizes: Queries and keys.
        device: Of the result.
    """
    queries, keys = sizes
    if ranges is None:
        last = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=device)
        last = last if causal else torch.full_like(last, keys)
        ranges = torch.stack([torch.zeros_like(last), last], -1)[None]
    before = torch.tensor(columns, dtype=torch.int32, device=device)
    return ranges.to(device) + before[:, None, None]
