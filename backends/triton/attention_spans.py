"""Which queries a tile of keys has to walk over, of any ranges of keys."""

from __future__ import annotations

import torch
from torch import Tensor


def spans(ranges: Tensor, keys: int) -> Tensor:
    """For every key, between which queries all stand that see it: (B, ranges, 2, keys).

    Of one monotone range, as windows and documents have, exactly those; of two always.
    """
    low, high = ranges.unflatten(-1, (-1, 2)).movedim(1, -1).unbind(2)
    if low.shape[1] > 1:
        return _painted(low, high, keys)
    reach = high.cummax(-1).values.contiguous()
    start = low.flip(-1).cummin(-1).values.flip(-1).contiguous()
    place = torch.arange(keys, device=ranges.device, dtype=ranges.dtype)
    place = place.expand(*low.shape[:2], keys).contiguous()
    first, last = (
        torch.searchsorted(bound, place, right=True, out_int32=True) for bound in (reach, start)
    )
    return torch.stack([first, last], 2)


def _painted(low: Tensor, high: Tensor, keys: int) -> Tensor:
    """Spans of any ranges: each is painted as two blocks of a power of two, which hand down."""
    low = low.clamp_min(0)
    queries, length = low.shape[-1], (high.clamp_max(keys) - low).clamp_min_(0)
    low = low.clamp_max_(keys - 1)  # where there is nothing to paint
    powers = 2 ** torch.arange(keys.bit_length(), device=low.device, dtype=low.dtype)
    level = ((length[..., None] >= powers).sum(-1) - 1).clamp_min_(0)
    query = torch.arange(queries, device=low.device, dtype=low.dtype)
    value = torch.stack([queries - query, query + 1])[:, None, None] * (length > 0)
    blocks = torch.stack([low, (low + length - powers[level]).clamp_min_(0)]) + level * keys
    table = low.new_zeros(2, *low.shape[:2], len(powers) * keys)
    for places in blocks.long():
        table.scatter_reduce_(-1, places.expand(2, -1, -1, -1), value, "amax")
    table = table.unflatten(-1, (len(powers), keys))
    for upper in range(len(powers) - 1, 0, -1):
        half, above, below = 1 << (upper - 1), table[..., upper, :], table[..., upper - 1, :]
        torch.maximum(below, above, out=below)
        torch.maximum(below[..., half:], above[..., :-half], out=below[..., half:])
    first, last = table[..., 0, :]
    return torch.stack([queries - first, last], 2)
