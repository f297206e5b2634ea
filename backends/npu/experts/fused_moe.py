"""A mixture of experts by torch_npu's permutation of tokens and grouped GEMM, within limits.

Rows of no expert (the sentinels) come last. The grouped GEMM gives them numbers all the same, which
may not be finite: they are overwritten before they are used.

Of grouped GEMMs, only gradients of fp32 weights read the groups' sizes back. torch_npu's grouped
GEMMs give no gradient, and no error either. So they are called inside forward and backward of our
own.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from liger_multi.backends.npu.activations import swiglu_packed
from liger_multi.backends.npu.common import limits
from liger_multi.dispatch.launch import device_info
from liger_multi.reference.common.chunking import row_blocks
from liger_multi.reference.experts import fused_moe as reference

# --- grouped GEMMs ---


def grouped_product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The rows of group e times ``weight[e]``, (K, N) in either order of memory.

    npu_grouped_matmul requires that its groups hold all rows: those of no group get some numbers.
    """
    ends = offsets[1:].long()
    ends[-1:].fill_(rows.shape[0])
    products: list[Tensor] = torch.ops.npu.npu_grouped_matmul(
        [rows], [weight], group_list=ends, split_item=3, group_type=0
    )
    return products[0]


def grouped_weight_gradient(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """``left.T @ right`` of the rows of every group.

    npu_grouped_matmul is not documented to sum over a group's rows. npu_grouped_matmul_add_ does,
    in fp32 and for fp16 and bf16. For fp32 there is one GEMM per group, whose bounds the host must
    know.
    """
    out = left.new_zeros(offsets.shape[0] - 1, left.shape[1], right.shape[1], dtype=torch.float32)
    if left.dtype == torch.float32:
        for e, (start, stop) in enumerate(pairwise(reference.bounds_of(offsets, left.shape[0]))):
            if start < stop:
                out[e] = left[start:stop].mT @ right[start:stop]
        return out
    torch.ops.npu.npu_grouped_matmul_add_(out, left, right, offsets[1:].long())
    return out.to(left.dtype)


def add_bias_(rows: Tensor, bias: Tensor, ids: Tensor) -> None:
    """Add to every row the bias of its group; to those of no group, zeros."""
    bias = torch.nn.functional.pad(bias, (0, 0, 0, 1))
    for block in row_blocks(rows.shape[0], rows.shape[1] * rows.element_size()):
        rows[block] += bias.index_select(0, ids[block])


def dot_with_bias(rows: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
    """The dot product of every row and the bias of its group, in fp32."""
    bias, parts = torch.nn.functional.pad(bias, (0, 0, 0, 1)), []
    for block in row_blocks(rows.shape[0], 12 * rows.shape[1]):
        parts.append((rows[block].float() * bias.index_select(0, ids[block]).float()).sum(1))
    return torch.cat(parts)


def sums(rows: Tensor, ids: Tensor, groups: int, weight: Tensor | None = None) -> Tensor:
    """The (weighted) sum of the rows of every group: a GEMM with zeros and ones in fp32."""
    group_ids = torch.arange(groups, device=ids.device).unsqueeze(1)
    total = rows.new_zeros(groups, rows.shape[1], dtype=torch.float32)
    for block in row_blocks(rows.shape[0], 4 * (rows.shape[1] + 2 * groups)):
        selected = (ids[block] == group_ids).float()
        selected = selected if weight is None else selected * weight[block]
        total.addmm_(selected, rows[block].float())
    return total.to(rows.dtype)


# --- the operator ---


def _refusal(
    x: Tensor, index: Tensor, gate_up: Tensor | None, down: Tensor, wide: int
) -> str | None:
    return limits.experts(x, index, gate_up, down, wide, device_info(x.device).table)


def _inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation: the place of every entry."""
    rows = torch.arange(order.shape[0], device=order.device, dtype=torch.int32)
    return torch.empty_like(rows).scatter_(0, order.long(), rows)


def _combined(rows: Tensor, positions: Tensor, routing: Tensor, dtype: torch.dtype) -> Tensor:
    """The weighted sum over every token's pairs with experts, in fp32 where dtypes differ."""
    acc_dtype = rows.dtype if rows.dtype == routing.dtype == dtype else torch.float32
    y: Tensor = torch.ops.npu.npu_moe_token_unpermute(
        rows.to(acc_dtype), positions, routing.to(acc_dtype).contiguous()
    )
    return y.to(dtype)


def _is_plain(activation_options: Any) -> bool:
    activation, *_, interleaved = activation_options
    return bool(activation == "silu" and not interleaved)


def _activated(gate_up: Tensor, activation_options: Any) -> Tensor:
    """act(gate) * up."""
    if _is_plain(activation_options):
        return swiglu_packed.forward(gate_up, 1.0, 1.0)
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    for block in row_blocks(out.shape[0], 6 * out.shape[1] * out.element_size()):
        out[block] = reference.product(gate_up[block], activation_options)
    return out


def supports(activation: str) -> str | None:
    """Experts with a gate: the passes around the GEMMs split their rows in two."""
    return "has experts with a gate only" if activation == "relu_squared" else None


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
    """Permute, two grouped GEMMs, permute back with weights."""
    first, second = (w if transposed else w.mT for w in (gate_up_weight, down_weight))
    experts, _, wide = first.shape
    activation_options = (activation, limit, alpha, up_offset, interleaved)
    needs = (
        needs_x,
        needs_gate_up_weight,
        needs_down_weight,
        needs_routing,
        needs_gate_up_bias,
        needs_down_bias,
    )
    if _refusal(x, index, gate_up_weight, down_weight, wide) is not None:
        return reference.forward(
            x,
            gate_up_weight,
            down_weight,
            index,
            routing,
            gate_up_bias,
            down_bias,
            *activation_options,
            transposed,
            y_dtype,
            *needs,
        )
    ids = torch.where((index < 0) | (index >= experts), experts, index)
    rows, positions = torch.ops.npu.npu_moe_token_permute(x.contiguous(), ids.contiguous())
    order = _inverse(positions)
    ids = ids.reshape(-1).index_select(0, order.long())
    expert_ids = torch.arange(experts + 1, device=ids.device)
    offsets = torch.searchsorted(ids, expert_ids, out_int32=True)
    gate_up = grouped_product(rows, first, offsets)
    del rows
    if gate_up_bias is not None:
        add_bias_(gate_up, gate_up_bias, ids)
    gate_up.masked_fill_((ids == experts).unsqueeze(1), 0)
    products = grouped_product(_activated(gate_up, activation_options), second, offsets)
    if down_bias is not None:
        add_bias_(products, down_bias, ids)
    y = _combined(products, positions, routing, y_dtype)
    return y, gate_up if any(needs) else gate_up.new_empty(0, wide), order, offsets


def _through_activation(
    dproduct: Tensor, gate_up: Tensor, weight: Tensor, activation_options: Any
) -> tuple[Tensor, Tensor]:
    """The gradient of gate and up, and every row's part in that of its routing weight.

    act(gate) * up, weighted, takes the place of ``dproduct``.
    """
    dgate_up, shares = torch.empty_like(gate_up), []
    for block in row_blocks(dproduct.shape[0], 32 * dproduct.shape[1]):
        rows, d, row_weight = gate_up[block], dproduct[block].float(), weight[block].unsqueeze(1)
        weighted = (d * row_weight).to(dproduct.dtype)
        if _is_plain(activation_options):
            dgate_up[block] = swiglu_packed.backward(weighted, rows, 1.0, 1.0)
        else:
            dgate_up[block] = reference.gradients(weighted, rows, activation_options)
        activated = _activated(rows.float(), activation_options)
        shares.append((d * activated).sum(1))
        dproduct[block] = (activated * row_weight).to(dproduct.dtype)
    return dgate_up, torch.cat(shares)


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
    """Four grouped GEMMs; rows are read in the order that forward saved."""
    dy = dy.to(gate_up.dtype)
    activation_options, wide = (activation, limit, alpha, up_offset, interleaved), gate_up.shape[1]
    if _refusal(dy, index, gate_up_weight, down_weight, wide) is not None:
        return reference.backward(
            dy,
            x,
            gate_up_weight,
            down_weight,
            index,
            routing,
            down_bias,
            gate_up,
            order,
            offsets,
            *activation_options,
            transposed,
            needs_x,
            needs_gate_up_weight,
            needs_down_weight,
            needs_routing,
            needs_gate_up_bias,
            needs_down_bias,
        )
    experts, pair = down_weight.shape[0], order.long()
    token, ids = pair // index.shape[1], index.reshape(-1).index_select(0, pair)
    ids = torch.where((ids < 0) | (ids >= experts), experts, ids)
    upstream, weight = dy.index_select(0, token), routing.reshape(-1).index_select(0, pair).float()
    dproduct = grouped_product(upstream, down_weight.mT if transposed else down_weight, offsets)
    dproduct.masked_fill_((ids == experts).unsqueeze(1), 0)
    dgate_up, share = _through_activation(dproduct, gate_up, weight, activation_options)
    gradients = [dy.new_empty(0) for _ in range(6)]
    if needs_down_weight:
        gradients[2] = _weight_gradient(upstream, dproduct, offsets, transposed)
    if needs_routing and down_bias is not None:
        share = share + dot_with_bias(upstream, down_bias, ids)
    if needs_down_bias:
        gradients[5] = sums(upstream, ids, experts, weight)
    del upstream, dproduct
    positions = _inverse(order)
    gradients[3] = routing.new_empty(0)
    if needs_routing:
        share = share.index_select(0, positions.long())
        gradients[3] = share.to(routing.dtype).view(routing.shape)
    if needs_gate_up_bias:
        gradients[4] = sums(dgate_up, ids, experts)
    if needs_gate_up_weight and x is not None:
        gradients[1] = _weight_gradient(dgate_up, x.index_select(0, token), offsets, transposed)
    if needs_x and gate_up_weight is not None:
        first = gate_up_weight.mT if transposed else gate_up_weight
        rows = grouped_product(dgate_up, first, offsets)
        gradients[0] = _combined(rows, positions, rows.new_ones(index.shape), dy.dtype)
    dx, dfirst, dsecond, drouting, dbias, dother = gradients
    return dx, dfirst, dsecond, drouting, dbias, dother


def _weight_gradient(out: Tensor, rows: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """Gradient of a weight, from its inputs and the gradient of its outputs, in its own layout."""
    sides = (rows, out) if transposed else (out, rows)
    return grouped_weight_gradient(*sides, offsets)
