"""Which keys a query sees, as ranges: what windows, packing, padding and global tokens become."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from liger_multi.dispatch.primitive import LIBRARY

LIBRARY.define("looked_at_ranges(Tensor ranges, SymInt keys) -> Tensor")
LIBRARY.impl(
    "looked_at_ranges",
    importlib.import_module("liger_multi.reference.attention.attention").looked_at,
    "CompositeExplicitAutograd",
)
torch.library.register_fake(
    "liger_multi::looked_at_ranges", lambda ranges, keys: torch.empty_like(ranges), lib=LIBRARY
)


def runs(documents: Tensor) -> tuple[Tensor, Tensor]:
    """First and one past the last place of every token's run of equal ids; none below 0."""
    length = documents.shape[-1]
    place = torch.arange(length, device=documents.device)
    change = documents[:, 1:] != documents[:, :-1]
    edge = change.new_ones(documents.shape[0], 1)
    first = torch.where(torch.cat([edge, change], 1), place, 0).cummax(-1).values
    ends = torch.where(torch.cat([change, edge], 1), place + 1, length)
    last = ends.flip(-1).cummin(-1).values.flip(-1)
    padding = documents < 0
    return torch.where(padding, place, first), torch.where(padding, place, last)


def from_lengths(cu_seqlens: Tensor, length: int) -> Tensor:
    """Ids of documents from where each begins; what stands past the last end is padding."""
    place = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    ids = torch.searchsorted(cu_seqlens.contiguous(), place, right=True) - 1
    return torch.where(place < cu_seqlens[-1], ids, -1)[None]


def key_ranges(
    queries: int, keys: int, device: torch.device, *, causal: bool, left: int, right: int,
    global_tokens: int, documents: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """One or two ranges of keys for every query, ``(B or 1, queries, 2 or 4)`` int32.

    The queries are the last positions of the keys. None where all is said by ``causal`` alone.

    Args:
        queries: Number of queries.
        keys: Number of keys.
        device: Where the ranges are wanted.
        causal: Nobody sees later positions.
        left: Earlier positions that a query sees; all below 0.
        right: Later ones, where not causal.
        global_tokens: First tokens of every document that see all and that all see.
        documents: An id a key; only keys of the query's own run of ids are seen.
    """
    if documents is None and left < 0 and (right < 0 or causal):
        return None
    offset = keys - queries
    kind = torch.int32 if documents is None else torch.int64
    position = torch.arange(offset, keys, device=device, dtype=kind)[None]
    first: Any = 0
    last: Any = keys
    if documents is not None:
        first, last = (bound[:, offset:] for bound in runs(documents))
    start = (position - left).clamp(min=first) if left >= 0 else position * 0 + first
    stop = (position + 1).clamp(max=last) if causal else position * 0 + last
    end = stop if right < 0 or causal else (position + (right + 1)).clamp(max=last)
    if not global_tokens:
        return torch.stack([start, torch.maximum(start, end)], -1).to(torch.int32)
    everywhere = position < first + global_tokens
    start = torch.where(everywhere, first, start)
    end = torch.maximum(start, end)
    other = torch.where(everywhere, end, first)
    past = torch.where(everywhere, stop, start.clamp(max=first + global_tokens))
    return torch.stack([start, end, other, torch.maximum(other, past)], -1).to(torch.int32)


def in_graphs(ranges: Tensor | None, keys: int) -> Tensor | None:
    """The ranges; in a compiled graph, looked at when it runs, once for all layers of one mask."""
    if ranges is None or not torch.compiler.is_compiling():
        return ranges
    looked: Tensor = torch.ops.liger_multi.looked_at_ranges(ranges, keys)
    return looked
