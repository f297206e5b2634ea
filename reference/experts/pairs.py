"""Token-expert pairs of a mixture of experts: pairs of a token and one of its experts, ``t * K + k``.

Sorted by expert, stably, the pairs of an expert are rows ``offsets[e]`` to ``offsets[e + 1]``;
those of no expert come last.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from liger_multi.reference.activations import clamped, gated
from liger_multi.reference.common.chunking import row_blocks, statistics_dtype


def sorted_pairs(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts in order, the pair of every row, and where experts begin; nothing is read back."""
    flat = index.reshape(-1)
    ids = torch.where((flat < 0) | (flat >= experts), experts, flat)
    ids = ids.to(torch.int16 if experts < 2**15 else torch.int32)  # two passes of a radix sort
    ids, order = torch.sort(ids, stable=True)
    every = torch.arange(experts + 1, device=index.device, dtype=ids.dtype)
    return ids, order.to(torch.int32), torch.searchsorted(ids, every, out_int32=True)


def bounds_of(offsets: Tensor, pairs: int) -> list[int]:
    """Where experts begin, on the host; of shapes alone, as if all had the same number of pairs."""
    if offsets.is_meta:
        experts = offsets.numel() - 1
        return [e * pairs // experts for e in range(experts + 1)]
    found: list[int] = offsets.tolist()
    return found


def product(gate_up: Tensor, how: Any) -> Tensor:
    """act(gate) * up of rows."""
    activation, *by, interleaved = how
    if activation == "swiglu_clamped":
        return clamped.packed_product(gate_up, tuple(by), interleaved)
    if interleaved:
        return gated.forward(gate_up[:, ::2], gate_up[:, 1::2], activation)
    return gated.packed_forward(gate_up, activation)


def gradients(dproduct: Tensor, gate_up: Tensor, how: Any) -> Tensor:
    """The gradient of gate and up of rows."""
    activation, *by, interleaved = how
    if activation == "swiglu_clamped":
        return clamped.packed_gradients(dproduct, gate_up, tuple(by), interleaved)
    if not interleaved:
        return gated.packed_backward(dproduct, gate_up, activation)
    parts = gated.gradients(dproduct, gate_up[:, ::2], gate_up[:, 1::2], activation, gated.ONE)
    return torch.stack(parts, -1).flatten(-2)


def sum_of_pairs(
    pairs: Tensor, tokens: int, routing: Optional[Tensor], dtype: torch.dtype
) -> Tensor:
    """The (weighted) sum over the pairs of every token, in fp32, rounded once."""
    kind = statistics_dtype(pairs.dtype)
    out = pairs.new_empty(tokens, pairs.shape[1], dtype=dtype)
    pairs = pairs.view(tokens, pairs.shape[0] // max(tokens, 1), -1) if tokens else pairs
    for block in row_blocks(tokens, max(1, pairs[0].numel() if tokens else 1) * kind.itemsize):
        rows = pairs[block].to(kind)
        rows = rows if routing is None else rows * routing[block].to(kind).unsqueeze(-1)
        out[block] = rows.sum(1).to(out.dtype)
    return out
