"""A mixture of experts: token-expert pairs sorted by expert, grouped GEMMs, sums in one order.

Forward has two GEMMs; the first gathers tokens while it reads them and ends in the activation.
Backward computes the gradient of act(gate) * up first without the routing weight, so that the
gradient of that weight is a dot product of two rows that one pass has loaded. Three more GEMMs
follow. Where PyTorch's grouped GEMM is taken (see grouped.py), rows are gathered before it, and the
activation runs after it.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import cdiv, checked_cols, power_of_2
from liger_multi.backends.triton.experts.fused_moe_kernels import (
    _moe_activation_backward_kernel,
    _moe_activation_kernel,
    _moe_bias_gradient_kernel,
    _moe_bias_share_kernel,
    _moe_combine_kernel,
    _moe_up_kernel,
)
from liger_multi.backends.triton.experts.grouped import (
    ProductConfig,
    choice,
    library_gemm,
    product,
    product_config,
)
from liger_multi.backends.triton.experts.grouped_weight import weight_gradient
from liger_multi.backends.triton.experts.groups import Groups, RowOperand
from liger_multi.backends.triton.experts.pairs import piece, sorted_pairs
from liger_multi.dispatch.launch import DeviceInfo

Numbers = tuple[float, float, float]  # limit, alpha, offset


def up_config(
    info: DeviceInfo, rows: int, groups: int, cols: int, inner: int, element_bytes: int
) -> ProductConfig:
    """As for other GEMMs; ``block_n`` columns of gate and as many of up are one tile."""
    return product_config(info, rows, groups, cols, inner, element_bytes, factors=2)


def supports(x: Optional[Tensor], gate_up: Optional[Tensor] = None) -> str | None:
    """No fp64: GEMMs accumulate in fp32."""
    some = x if x is not None else gate_up
    double = some is not None and some.dtype == torch.float64
    return "its products accumulate in float32, got float64" if double else None


def _columns(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def activated(
    x: RowOperand,
    weight: Tensor,
    bias: Optional[Tensor],
    index: Tensor,
    groups: Groups,
    keep: bool,
    how: tuple[str, Numbers, bool],
) -> tuple[Tensor, Tensor]:
    """act(gate) * up of every row, and gate and up where they are kept."""
    activation, numbers, interleaved = how
    source, (_, wide, inner) = x.source, weight.shape
    cols = wide // 2
    k = choice("fused_moe.up", up_config, source, groups, cols, inner)
    made = source.new_empty(groups.rows, cols)
    if interleaved:
        gate_up: Optional[Tensor] = product("fused_moe.up_interleaved", x, weight, groups)
    else:
        gate_up = library_gemm(k, x, weight, groups)
    if gate_up is not None:
        step = piece("activation", source, cols)
        pieces = cdiv(cols, step.block)
        launch(
            _moe_activation_kernel, groups.rows * pieces,
            (gate_up, bias, made, index, groups.order, groups.offsets, groups.count, cols, pieces,
             *numbers),
            (activation, interleaved, step.block), step.num_warps,
        )  # fmt: skip
        return made, gate_up if keep else gate_up[:0]
    gate_up = source.new_empty(groups.rows if keep else 0, wide)
    tiles, steps = groups.tiles(k.block_m), cdiv(cols, k.block_n)
    launch(
        _moe_up_kernel, tiles.shape[0] * steps,
        (source, weight, bias, gate_up if keep else None, made, tiles, groups.offsets,
         groups.order if x.gather else None, source.stride(0), *weight.stride(), cols, inner,
         groups.per, steps, *numbers),
        (activation, k.block_m, k.block_n, k.block_k, cols % k.block_n == 0,
         inner % k.block_k == 0, k.stages), k.num_warps,
    )  # fmt: skip
    return made, gate_up


def combined(
    rows: Tensor, groups: Groups, routing: Optional[Tensor], bias: Optional[Tensor], index: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The sum over the pairs of every token."""
    cols = rows.shape[1]
    y = rows.new_empty(groups.rows // groups.per, cols, dtype=dtype)
    k = piece("combine", rows, cols)
    tiles = cdiv(cols, k.block)
    launch(
        _moe_combine_kernel, y.shape[0] * tiles,
        (rows, groups.inverse, routing, bias, index, groups.offsets, y, groups.count, cols,
         tiles),
        (groups.per, k.block), k.num_warps,
    )  # fmt: skip
    return y


def _bias_gradient(rows: Tensor, groups: Groups, routing: Optional[Tensor]) -> Tensor:
    cols = rows.shape[1]
    out, tall = rows.new_empty(groups.count, cols), 32
    checked_cols(2 * tall * cols)
    block = max(16, min(128, power_of_2(cols)))
    tiles = cdiv(cols, block)
    launch(
        _moe_bias_gradient_kernel, groups.count * tiles,
        (rows, routing, groups.order, groups.offsets, out, rows.stride(0), groups.per, cols,
         tiles),
        (tall, block), 8,
    )  # fmt: skip
    return out


def _dense(x: Optional[Tensor]) -> Optional[Tensor]:
    return None if x is None else x.contiguous()


def forward(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, index: Tensor, routing: Tensor,
    gate_up_bias: Optional[Tensor], down_bias: Optional[Tensor], activation: str, limit: float,
    alpha: float, up_offset: float, interleaved: bool, transposed: bool, y_dtype: torch.dtype,
    needs_x: bool, needs_gate_up_weight: bool, needs_down_weight: bool, needs_routing: bool,
    needs_gate_up_bias: bool, needs_down_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Sort, two GEMMs, a weighted sum."""
    first, second = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    keep = needs_x or needs_gate_up_weight or needs_down_weight or needs_routing
    keep = keep or needs_gate_up_bias or needs_down_bias
    index = index.contiguous()
    order, inverse, offsets = sorted_pairs(index, first.shape[0])
    if not order.numel() or not x.numel():
        gate_up = x.new_zeros(order.numel() if keep else 0, first.shape[1])
        return x.new_zeros(x.shape, dtype=y_dtype), gate_up, order, offsets
    groups, how = Groups(offsets, order, index.shape[1], inverse), (limit, alpha, up_offset)
    rows = RowOperand(_columns(x), gather=True)
    made, gate_up = activated(
        rows, first, _dense(gate_up_bias), index, groups, keep, (activation, how, interleaved)
    )
    del rows
    pairs = product("fused_moe.down", RowOperand(made), second, groups)
    y = combined(pairs, groups, routing.contiguous(), _dense(down_bias), index, y_dtype)
    return y, gate_up, order, offsets


def _inner_gradients(
    dproduct: Tensor, gate_up: Tensor, routing: Tensor, groups: Groups, how: Any,
    needs_routing: bool, needs_inner: bool,
) -> tuple[Optional[Tensor], Tensor]:  # fmt: skip
    """Gradients of gate and up, and of routing; act(gate) * up, weighted, overwrites dproduct."""
    activation, numbers, interleaved = how
    cols = dproduct.shape[1]
    made = torch.empty_like(gate_up) if needs_inner else None
    drouting = routing.new_empty(routing.shape if needs_routing else 0)
    k = piece("activation_backward", dproduct, cols)
    launch(
        _moe_activation_backward_kernel, groups.rows,
        (dproduct, gate_up, made, routing, drouting if needs_routing else None, groups.order,
         groups.offsets, groups.count, cols, *numbers),
        (activation, interleaved, k.block, k.stages), k.num_warps,
    )  # fmt: skip
    return made, drouting


def backward(
    dy: Tensor, x: Optional[Tensor], gate_up_weight: Optional[Tensor], down_weight: Tensor,
    index: Tensor, routing: Tensor, down_bias: Optional[Tensor], gate_up: Tensor, order: Tensor,
    offsets: Tensor, activation: str, limit: float, alpha: float, up_offset: float,
    interleaved: bool, transposed: bool, needs_x: bool, needs_gate_up_weight: bool,
    needs_down_weight: bool, needs_routing: bool, needs_gate_up_bias: bool, needs_down_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Four GEMMs, and one pass over the activation."""
    dy = dy.to(gate_up.dtype)
    if not order.numel() or not dy.numel():
        needs = (needs_x, needs_gate_up_weight, needs_down_weight, needs_routing)
        needs_biases = (needs_gate_up_bias, needs_down_bias)
        return _zeros(dy, routing, down_weight, gate_up, transposed, (*needs, *needs_biases))
    groups = Groups(offsets, order, index.shape[1])
    dx, dfirst, ddown, dbias, dother = (dy.new_empty(0) for _ in range(5))  # none is another
    index, routing = index.contiguous(), routing.contiguous()
    inner = needs_x or needs_gate_up_weight or needs_gate_up_bias
    upstream = RowOperand(_columns(dy), gather=True)
    dgate_up, drouting = None, routing.new_empty(0)
    if inner or needs_routing or needs_down_weight:
        second = down_weight if transposed else down_weight.mT
        dproduct = product("fused_moe.dproduct", upstream, second, groups)
        how = (activation, (limit, alpha, up_offset), interleaved)
        dgate_up, drouting = _inner_gradients(
            dproduct, gate_up, routing, groups, how, needs_routing, inner
        )
        if needs_down_weight:
            sides = (upstream, RowOperand(dproduct))
            ddown = weight_gradient("fused_moe.ddown_weight", *sides, groups, transposed)
        del dproduct
    if needs_routing and down_bias is not None:
        _add_bias_share(drouting, upstream.source, down_bias.contiguous(), index, groups)
    if needs_down_bias:
        dother = _bias_gradient(upstream.source, groups, routing)
    del upstream
    if needs_gate_up_bias and dgate_up is not None:
        dbias = _bias_gradient(dgate_up, groups, None)
    if needs_gate_up_weight and dgate_up is not None and x is not None:
        sides = (RowOperand(dgate_up), RowOperand(_columns(x), gather=True))
        dfirst = weight_gradient("fused_moe.dgate_up_weight", *sides, groups, transposed)
        del sides
    if needs_x and dgate_up is not None and gate_up_weight is not None:
        turned = gate_up_weight if transposed else gate_up_weight.mT
        pairs = product("fused_moe.dx", RowOperand(dgate_up), turned, groups)
        dx = combined(pairs, groups, None, None, index, dy.dtype)
    return dx, dfirst, ddown, drouting, dbias, dother


def _zeros(
    dy: Tensor, routing: Tensor, down_weight: Tensor, gate_up: Tensor, transposed: bool,
    needs: tuple[bool, ...],
) -> Any:  # fmt: skip
    """Gradients where there are no rows."""
    wide, hidden = (down_weight.shape[0], gate_up.shape[1]), dy.shape[1]
    first = (wide[0], hidden, wide[1]) if transposed else (*wide, hidden)
    shapes = (dy.shape, first, down_weight.shape, routing.shape, wide, (wide[0], hidden))
    return tuple(
        (routing if i == 3 else dy).new_zeros(shape if needed else (0,))
        for i, (shape, needed) in enumerate(zip(shapes, needs, strict=True))
    )


def _add_bias_share(
    drouting: Tensor, dy: Tensor, bias: Tensor, index: Tensor, groups: Groups
) -> None:
    cols = dy.shape[1]
    k = piece("bias_share", dy, cols)
    args = (dy, bias, index, drouting, dy.stride(0), groups.count, cols, groups.per)
    launch(_moe_bias_share_kernel, groups.rows, args, (k.block,), k.num_warps)
