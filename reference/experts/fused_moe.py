"""A mixture of experts, one expert after the other over its sorted pairs.

A pair is a token and one of its experts, number ``t * K + k``. Sorted by expert, stably, the pairs
of an expert are rows ``offsets[e]`` to ``offsets[e + 1]``; those of no expert come last.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from liger_multi.reference.activations import gated
from liger_multi.reference.common.chunking import row_blocks, statistics_dtype

# --- pairs ---


def sorted_pairs(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts in order, the pair of every row, and where experts begin; nothing is read back."""
    flat = index.reshape(-1)
    ids = torch.where((flat < 0) | (flat >= experts), experts, flat)
    ids = ids.to(torch.int16 if experts < 2**15 else torch.int32)  # two passes of a radix sort
    ids, order = torch.sort(ids, stable=True)
    expert_ids = torch.arange(experts + 1, device=index.device, dtype=ids.dtype)
    return ids, order.to(torch.int32), torch.searchsorted(ids, expert_ids, out_int32=True)


def bounds_of(offsets: Tensor, pairs: int) -> list[int]:
    """Where experts begin, on the host; of shapes alone, as if all had the same number of pairs."""
    if offsets.is_meta:
        experts = offsets.numel() - 1
        return [e * pairs // experts for e in range(experts + 1)]
    bounds: list[int] = offsets.tolist()
    return bounds


def used_experts(order: Tensor, offsets: Tensor, pairs: int) -> Iterator[tuple[int, slice, Tensor]]:
    """Of every expert that has pairs: its number, their span in the sorted order, and the pairs."""
    for e, (start, stop) in enumerate(pairwise(bounds_of(offsets, pairs))):
        if start != stop:
            yield e, slice(start, stop), order[start:stop].long()


def product(gate_up: Tensor, activation_options: Any) -> Tensor:
    """act(gate) * up of rows, or act(up) where there is no gate."""
    activation, *clamps, interleaved = activation_options
    if activation == "relu_squared":
        return gate_up.relu().square()
    if activation == "swiglu_clamped":
        return gated.packed_clamped_product(gate_up, tuple(clamps), interleaved)
    if interleaved:
        return gated.forward(gate_up[:, ::2], gate_up[:, 1::2], activation)
    return gated.packed_forward(gate_up, activation)


def gradients(dproduct: Tensor, gate_up: Tensor, activation_options: Any) -> Tensor:
    """The gradient of gate and up of some rows."""
    activation, *clamps, interleaved = activation_options
    if activation == "relu_squared":
        return 2 * dproduct * gate_up.relu()
    if activation == "swiglu_clamped":
        return gated.packed_clamped_gradients(dproduct, gate_up, tuple(clamps), interleaved)
    if not interleaved:
        return gated.packed_backward(dproduct, gate_up, activation)
    parts = gated.gradients(dproduct, gate_up[:, ::2], gate_up[:, 1::2], activation, gated.ONE)
    return torch.stack(parts, -1).flatten(-2)


def sum_of_pairs(pairs: Tensor, tokens: int, routing: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The (weighted) sum over the pairs of every token, in fp32, rounded once."""
    acc_dtype = statistics_dtype(pairs.dtype)
    out = pairs.new_empty(tokens, pairs.shape[1], dtype=dtype)
    pairs = pairs.view(tokens, pairs.shape[0] // max(tokens, 1), -1) if tokens else pairs
    for block in row_blocks(tokens, max(1, pairs[0].numel() if tokens else 1) * acc_dtype.itemsize):
        rows = pairs[block].to(acc_dtype)
        rows = rows if routing is None else rows * routing[block].to(acc_dtype).unsqueeze(-1)
        out[block] = rows.sum(1).to(out.dtype)
    return out


# --- the operator ---


def forward(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    limit: float,
    alpha: float,
    up_offset: float,
    interleaved: bool,
    transposed: bool,
    y_dtype: torch.dtype,
    needs_x: bool,
    needs_gate_up_weight: bool,
    needs_down_weight: bool,
    needs_routing: bool,
    needs_gate_up_bias: bool,
    needs_down_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two products for every expert that has tokens."""
    first, second = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    keeps_gate_up = needs_x or needs_gate_up_weight or needs_down_weight or needs_routing
    keeps_gate_up = keeps_gate_up or needs_gate_up_bias or needs_down_bias
    activation_options, experts = (activation, limit, alpha, up_offset, interleaved), first.shape[0]
    _, order, offsets = sorted_pairs(index, experts)
    gate_up = x.new_zeros(index.numel() if keeps_gate_up else 0, first.shape[1])
    pairs = x.new_zeros(index.numel(), x.shape[1])
    for e, span, pair in used_experts(order, offsets, index.numel()):
        bias, down_bias_of = (None if b is None else b[e] for b in (gate_up_bias, down_bias))
        inner = F.linear(x[pair // index.shape[1]], first[e], bias)
        if keeps_gate_up:
            gate_up[span] = inner
        pairs[pair] = F.linear(product(inner, activation_options), second[e], down_bias_of)
    return sum_of_pairs(pairs, x.shape[0], routing, y_dtype), gate_up, order, offsets


def backward(
    dy: Tensor,
    x: Tensor | None,
    gate_up_weight: Tensor | None,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    down_bias: Tensor | None,
    gate_up: Tensor,
    order: Tensor,
    offsets: Tensor,
    activation: str,
    limit: float,
    alpha: float,
    up_offset: float,
    interleaved: bool,
    transposed: bool,
    needs_x: bool,
    needs_gate_up_weight: bool,
    needs_down_weight: bool,
    needs_routing: bool,
    needs_gate_up_bias: bool,
    needs_down_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Four products for every expert; the activation's product is computed again."""
    dy = dy.to(gate_up.dtype)
    activation_options, acc_dtype = (
        (activation, limit, alpha, up_offset, interleaved),
        statistics_dtype(dy.dtype),
    )
    experts, top_k = down_weight.shape[0], index.shape[1]
    first, inner_size = (experts, gate_up.shape[1], dy.shape[1]), down_weight.shape[2 - transposed]
    dfirst = dy.new_zeros(first if needs_gate_up_weight else 0)
    dsecond = dy.new_zeros((experts, dy.shape[1], inner_size) if needs_down_weight else 0)
    drouting = routing.new_zeros(routing.shape if needs_routing else 0)
    dbias = dy.new_zeros(first[:2] if needs_gate_up_bias else 0)
    dother = dy.new_zeros((experts, dy.shape[1]) if needs_down_bias else 0)
    pairs = dy.new_zeros(index.numel() if needs_x else 0, dy.shape[1])
    for e, span, pair in used_experts(order, offsets, index.numel()):
        upstream, inner = dy[pair // top_k], gate_up[span]
        weight = routing.reshape(-1)[pair].to(acc_dtype).unsqueeze(1)
        second = down_weight[e].mT if transposed else down_weight[e]
        dproduct, activated = (
            (upstream @ second).to(acc_dtype),
            product(inner.to(acc_dtype), activation_options),
        )
        if needs_routing:
            share = (dproduct * activated).sum(1)
            if down_bias is not None:
                share = share + (upstream.to(acc_dtype) * down_bias[e].to(acc_dtype)).sum(1)
            drouting.view(-1)[pair] = share.to(drouting.dtype)
        if needs_down_weight:
            dsecond[e] = upstream.mT @ (activated * weight).to(dy.dtype)
        if needs_down_bias:
            dother[e] = (upstream.to(acc_dtype) * weight).sum(0).to(dy.dtype)
        dinner = gradients((dproduct * weight).to(dy.dtype), inner, activation_options)
        if needs_gate_up_weight and x is not None:
            dfirst[e] = dinner.mT @ x[pair // top_k]
        if needs_gate_up_bias:
            dbias[e] = dinner.sum(0, dtype=acc_dtype).to(dy.dtype)
        if needs_x and gate_up_weight is not None:
            pairs[pair] = dinner @ (gate_up_weight[e].mT if transposed else gate_up_weight[e])
    dx = sum_of_pairs(pairs, dy.shape[0], None, dy.dtype) if needs_x else pairs.view(-1)
    if transposed:
        transposed_weight = (d.mT.contiguous() if d.ndim == 3 else d for d in (dfirst, dsecond))
        dfirst, dsecond = transposed_weight
    return dx, dfirst, dsecond, drouting, dbias, dother
