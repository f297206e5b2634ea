"""A mixture of experts: token-expert pairs sorted by expert, grouped GEMMs, sums in one order.

Forward has two GEMMs; the first gathers tokens while it reads them and ends in the activation.
Backward computes the gradient of act(gate) * up first without the routing weight, so that the
gradient of that weight is a dot product of two rows that one pass has loaded. Three more GEMMs
follow. Where PyTorch's grouped GEMM is taken (see grouped.py), rows are gathered before it, and the
activation runs after it.

Kernels beside the GEMMs are the activation, and sums over a token's pairs. A pair is a token and
one of its experts. The first GEMM ends in the activation: a tile has the columns of gate and those
of up, in two accumulators. Where the two alternate in the weight, a pass of its own follows the
GEMM. Backward gets the gradient of act(gate) * up before the routing weight, d, and computes in one
pass

    drouting = sum of d act(gate) up,  the gradient of gate and up of (routing d),

and routing act(gate) up, which the gradient of the second weight needs, in the place of d. The sum
over the pairs of a token reads each from its sorted row: every sum has one order.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi._torch_private import may_overwrite
from liger_multi.backends.triton.activations.gated import _share, _slope
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LONGEST_ROW,
    above,
    assume_cols,
    assume_rows,
    cdiv,
    checked_cols,
    power_of_2,
    round_to,
    sigmoid,
)
from liger_multi.backends.triton.experts.grouped import (
    ProductConfig,
    choice,
    dot,
    library_gemm,
    load_factor,
    product,
    product_config,
    source_rows,
    weight_gradient,
)
from liger_multi.backends.triton.experts.pairs import Groups, RowOperand, piece, sorted_pairs
from liger_multi.dispatch.launch import DeviceInfo
from liger_multi.reference.common.stored import opened, pieces
from liger_multi.reference.common.strict import by_rows

# --- kernels ---


@triton.jit
def _activated(gate, up, limit, alpha, offset, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Activation times up, in fp32; the activation is rounded first, as in Hugging Face.

    Without a gate, both are up, and the product is relu(up)^2.
    """
    if ACTIVATION == "relu_squared":
        act = tl.where(gate < 0, 0.0, gate)  # a NaN stays
        up = act
    elif ACTIVATION == "swiglu_clamped":
        # comparisons, since a minimum would lose a NaN
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + offset
        act = gate * sigmoid(gate * alpha)
    else:
        act = gate * _share(gate, ACTIVATION)
    return round_to(act, DTYPE).to(tl.float32) * up


@triton.jit
def _differentiated(
    d, gate, up, limit, alpha, offset, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr
):
    """Gradients of gate and up for the gradient d of act(gate) * up.

    Without a gate, both are that of up.
    """
    if ACTIVATION == "relu_squared":
        dup = 2.0 * d * tl.where(gate < 0, 0.0, gate)
        return dup, dup
    elif ACTIVATION == "swiglu_clamped":
        g = tl.where(gate > limit, limit, gate)
        u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + offset
        p = sigmoid(g * alpha)
        act = round_to(g * p, DTYPE).to(tl.float32)
        dgate = tl.where(above(gate, limit), 0.0, d * u * (p + alpha * g * p * (1.0 - p)))
        return dgate, tl.where(above(up, limit) | above(-up, limit), 0.0, d * act)
    else:
        p = _share(gate, ACTIVATION)
        act = round_to(gate * p, DTYPE).to(tl.float32)
        return d * up * (p + gate * _slope(gate, p, ACTIVATION)), d * act


@triton.jit
def _load_pair(ptr, start, cols, LAYOUT: tl.constexpr, BLOCK: tl.constexpr):
    """Gate and up of BLOCK columns of one row, in fp32.

    LAYOUT: they alternate in memory, follow each other, or are one.
    """
    if LAYOUT == "single":
        col = start + tl.arange(0, BLOCK)
        up = tl.load(ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        return up, up
    elif LAYOUT == "interleaved":
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(ptr + at, mask=at < 2 * cols, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, [BLOCK, 2]))
    else:
        col = start + tl.arange(0, BLOCK)
        gate = tl.load(ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        return gate, tl.load(ptr + cols + col, mask=col < cols, other=0.0).to(tl.float32)


@triton.jit
def _store_pair(ptr, gate, up, start, cols, LAYOUT: tl.constexpr, BLOCK: tl.constexpr):
    """Store two rows of BLOCK columns where :func:`_load_pair` reads gate and up."""
    if LAYOUT == "single":
        col = start + tl.arange(0, BLOCK)
        tl.store(ptr + col, round_to(up, ptr.dtype.element_ty), mask=col < cols)
    elif LAYOUT == "interleaved":
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        both = round_to(tl.reshape(tl.join(gate, up), [2 * BLOCK]), ptr.dtype.element_ty)
        tl.store(ptr + at, both, mask=at < 2 * cols)
    else:
        col = start + tl.arange(0, BLOCK)
        tl.store(ptr + col, round_to(gate, ptr.dtype.element_ty), mask=col < cols)
        tl.store(ptr + cols + col, round_to(up, ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def _moe_up_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    kept_ptr,
    out_ptr,
    tiles_ptr,
    offsets_ptr,
    order_ptr,
    strides,
    cols,
    inner,
    per,
    steps,
    limit,
    alpha,
    offset,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """First grouped GEMM with the activation in its epilogue: act(gate) * up of gathered rows.

    Program: BLOCK_M sorted rows of one expert by BLOCK_N columns. The table of tiles names the
    expert and the first row; programs past its last tile return.
    Reads the rows of x, by ``order_ptr``, and both column blocks of the expert's weight, BLOCK_K at
    a time. Gate and up have an accumulator each, so that a tile of x is loaded once for both.
    Writes act(gate) * up and, with ``kept_ptr``, gate and up for backward. Both are rounded to the
    dtype of the output before the activation, as the result of a GEMM of its own would be.
    """
    x_stride, w_stride, n_stride, k_stride = strides
    group = tl.load(tiles_ptr + 2 * (tl.program_id(0) // steps))
    if group < 0:
        return
    stop = tl.load(offsets_ptr + group + 1)
    first = tl.load(tiles_ptr + 2 * (tl.program_id(0) // steps) + 1)
    # a tile's rows of kept, which are 2 cols wide, span less than 2 GiB
    assume_cols(cols, LONGEST_ROW // (2 * BLOCK_M))
    m = tl.arange(0, BLOCK_M)
    row, first_col = first + m, (tl.program_id(0) % steps) * BLOCK_N
    assume_cols(first_col, LONGEST_ROW // (2 * BLOCK_M))
    col = first_col + tl.arange(0, BLOCK_N)
    inside = (col < cols)[None, :]
    k = tl.arange(0, BLOCK_K)
    source = source_rows(order_ptr, row, stop, per)
    x_ptrs = x_ptr + source[:, None] * x_stride + k[None, :]
    w_ptr += group.to(tl.int64) * w_stride
    gate_ptrs = w_ptr + col[None, :] * n_stride + k[:, None] * k_stride
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, inner, BLOCK_K, num_stages=STAGES):
        mask = start + k < inner
        if EVEN_K:
            x = tl.load(x_ptrs)
        else:
            x = tl.load(x_ptrs, mask=mask[None, :], other=0.0)
        g = load_factor(gate_ptrs, mask[:, None], inside, EVEN_K, EVEN_N)
        u = load_factor(gate_ptrs + cols * n_stride, mask[:, None], inside, EVEN_K, EVEN_N)
        gate, up = dot(x, g, gate), dot(x, u, up)
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K * k_stride
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        bias_ptr += group.to(tl.int64) * 2 * cols + col
        gate += tl.load(bias_ptr, mask=col < cols, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + cols, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    gate, up = round_to(gate, DTYPE), round_to(up, DTYPE)
    mask = (row < stop)[:, None] & inside
    if kept_ptr is not None:
        kept_ptr += first.to(tl.int64) * (2 * cols)
        place = m[:, None] * (2 * cols) + col[None, :]
        tl.store(kept_ptr + place, gate, mask=mask)
        tl.store(kept_ptr + cols + place, up, mask=mask)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    y = round_to(_activated(gate, up, limit, alpha, offset, ACTIVATION, DTYPE), DTYPE)
    out_ptr += first.to(tl.int64) * cols
    tl.store(out_ptr + (m[:, None] * cols + col[None, :]), y, mask=mask)


@triton.jit
def _moe_activation_kernel(
    gate_up_ptr,
    bias_ptr,
    out_ptr,
    index_ptr,
    order_ptr,
    offsets_ptr,
    groups,
    cols,
    tiles,
    limit,
    alpha,
    offset,
    ACTIVATION: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Activation after a library's GEMM; the bias is added to gate and up in place.

    Program: BLOCK columns of one sorted row. Rows past the last expert's are not touched.
    """
    row, piece = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    assume_cols(piece, LONGEST_ROW // (2 * BLOCK))
    start = piece * BLOCK
    if row >= tl.load(offsets_ptr + groups):
        return
    WIDE: tl.constexpr = 1 if LAYOUT == "single" else 2
    gate_up_ptr += row.to(tl.int64) * (WIDE * cols)
    gate, up = _load_pair(gate_up_ptr, start, cols, LAYOUT, BLOCK)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        bias_ptr += tl.load(index_ptr + tl.load(order_ptr + row)) * (WIDE * cols)
        more, other = _load_pair(bias_ptr, start, cols, LAYOUT, BLOCK)
        gate, up = round_to(gate + more, DTYPE), round_to(up + other, DTYPE)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        _store_pair(gate_up_ptr, gate, up, start, cols, LAYOUT, BLOCK)
    y = round_to(_activated(gate, up, limit, alpha, offset, ACTIVATION, DTYPE), DTYPE)
    col = start + tl.arange(0, BLOCK)
    tl.store(out_ptr + row.to(tl.int64) * cols + col, y, mask=col < cols)


@triton.jit
def _moe_activation_backward_kernel(
    d_ptr,
    gate_up_ptr,
    dgate_up_ptr,
    product_ptr,
    routing_ptr,
    drouting_ptr,
    order_ptr,
    offsets_ptr,
    groups,
    cols,
    limit,
    alpha,
    offset,
    ACTIVATION: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of gate, up and routing, and the product routing act(gate) up.

    Program: one sorted row, in steps of BLOCK columns; the sum for drouting stays in registers.
    Reads d, gate and up, and the routing weight of its pair. Writes dgate_up, perhaps over gate and
    up, the product, perhaps over d, and drouting where they are needed. A pair of no expert gets
    drouting 0.
    """
    row = tl.program_id(0)
    pair = tl.load(order_ptr + row).to(tl.int64)
    if row >= tl.load(offsets_ptr + groups):  # a pair of no expert
        if drouting_ptr is not None:
            tl.store(drouting_ptr + pair, tl.zeros([], drouting_ptr.dtype.element_ty))
        return
    routing = tl.load(routing_ptr + pair).to(tl.float32)
    d_ptr += row.to(tl.int64) * cols
    WIDE: tl.constexpr = 1 if LAYOUT == "single" else 2
    gate_up_ptr += row.to(tl.int64) * (WIDE * cols)
    DTYPE: tl.constexpr = d_ptr.dtype.element_ty
    share = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        assume_cols(start, LONGEST_ROW // 2)
        col = start + tl.arange(0, BLOCK)
        d = tl.load(d_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        gate, up = _load_pair(gate_up_ptr, start, cols, LAYOUT, BLOCK)
        y = _activated(gate, up, limit, alpha, offset, ACTIVATION, DTYPE)
        share += d * y
        if product_ptr is not None:
            place = product_ptr + row.to(tl.int64) * cols + col
            tl.store(place, round_to(y * routing, DTYPE), mask=col < cols)
        if dgate_up_ptr is not None:
            dgate, dup = _differentiated(
                d * routing, gate, up, limit, alpha, offset, ACTIVATION, DTYPE
            )
            address = dgate_up_ptr + row.to(tl.int64) * (WIDE * cols)
            _store_pair(address, dgate, dup, start, cols, LAYOUT, BLOCK)
    if drouting_ptr is not None:
        total = round_to(tl.sum(share, axis=0), drouting_ptr.dtype.element_ty)
        tl.store(drouting_ptr + pair, total)


@triton.jit
def _moe_combine_kernel(
    rows_ptr,
    inverse_ptr,
    routing_ptr,
    bias_ptr,
    index_ptr,
    offsets_ptr,
    y_ptr,
    y_stride,
    groups,
    cols,
    tiles,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum over a token's pairs k of routing[t, k] (rows[inverse[t, k]] + bias[index[t, k]]).

    Program: BLOCK columns of one token. Pairs are added in their order. A pair of no expert adds
    nothing: its sorted row is past the last expert's.
    """
    token = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * BLOCK
    assume_cols(first)
    col = first + tl.arange(0, BLOCK)
    inside = col < cols
    stop = tl.load(offsets_ptr + groups)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(inverse_ptr + token * TOP_K + k)
        valid = inside & (row + col * 0 < stop)  # col * 0: the scalar as a mask of the block
        part = tl.load(rows_ptr + row.to(tl.int64) * cols + col, mask=valid, other=0.0)
        part = part.to(tl.float32)
        if bias_ptr is not None:
            expert = tl.load(index_ptr + token * TOP_K + k)
            part += tl.load(bias_ptr + expert * cols + col, mask=valid, other=0.0).to(tl.float32)
        if routing_ptr is not None:
            part *= tl.load(routing_ptr + token * TOP_K + k).to(tl.float32)
        total += part
    y_ptr += token * y_stride
    tl.store(y_ptr + col, round_to(total, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _moe_bias_share_kernel(
    dy_ptr, bias_ptr, index_ptr, drouting_ptr, dy_stride, groups, cols, top_k, BLOCK: tl.constexpr
):
    """Add the bias to the gradient of routing: drouting[pair] += dy[token] . bias[expert].

    Program: one pair, in steps of BLOCK columns; returns where the pair has no expert.
    """
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(index_ptr + pair)
    if (expert < 0) | (expert >= groups):
        return
    share = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        assume_cols(start)
        col = start + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + pair // top_k * dy_stride + col, mask=col < cols, other=0.0)
        bias = tl.load(bias_ptr + expert * cols + col, mask=col < cols, other=0.0)
        share += dy.to(tl.float32) * bias.to(tl.float32)
    total = tl.load(drouting_ptr + pair).to(tl.float32) + tl.sum(share, axis=0)
    tl.store(drouting_ptr + pair, round_to(total, drouting_ptr.dtype.element_ty))


@triton.jit
def _moe_bias_gradient_kernel(
    rows_ptr,
    routing_ptr,
    order_ptr,
    offsets_ptr,
    out_ptr,
    row_stride,
    per,
    cols,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the rows of every group, which is the gradient of its bias.

    Program: BLOCK columns of one group; passes over the rows of the group, ROWS at a time.
    With ``routing_ptr``, rows are those of tokens, gathered by ``order_ptr`` and times the routing
    weight. Otherwise they are sorted and contiguous, with a scalar base and 32-bit offsets.
    """
    group = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles) * BLOCK
    assume_cols(first, LONGEST_ROW // (2 * ROWS))
    col, r = first + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    start, stop = tl.load(offsets_ptr + group), tl.load(offsets_ptr + group + 1)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(0, stop - start, ROWS):
        at = start + step
        row = at + r
        inside = row < stop
        if routing_ptr is not None:
            pair = tl.load(order_ptr + row, mask=inside, other=0).to(tl.int64)
            ptrs = rows_ptr + (pair // per)[:, None] * row_stride + col[None, :]
        else:  # rows without gaps, a scalar base
            assume_rows(rows_ptr, row_stride, 2 * ROWS)
            ptrs = rows_ptr + at.to(tl.int64) * row_stride
            ptrs += r[:, None] * row_stride + col[None, :]
        mask = inside[:, None] & (col < cols)[None, :]
        rows = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        if routing_ptr is not None:
            rows *= tl.load(routing_ptr + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += rows
    out = round_to(tl.sum(total, axis=0), out_ptr.dtype.element_ty)
    tl.store(out_ptr + group.to(tl.int64) * cols + col, out, mask=col < cols)


# --- launchers ---

Numbers = tuple[float, float, float]  # limit, alpha, offset


def layout_of(activation: str, interleaved: bool) -> str:
    """How gate and up of a row lie."""
    if activation == "relu_squared":
        return "single"
    return "interleaved" if interleaved else "halves"


def up_config(
    info: DeviceInfo, rows: int, groups: int, cols: int, inner: int, element_bytes: int
) -> ProductConfig:
    """The GEMM's formula; one tile has ``block_n`` columns of gate and as many of up."""
    return product_config(info, rows, groups, cols, inner, element_bytes, factors=2)


def supports(x: Tensor | None, gate_up: Tensor | None = None) -> str | None:
    """No fp64: GEMMs accumulate in fp32."""
    tensor = x if x is not None else gate_up
    double = tensor is not None and tensor.dtype == torch.float64
    return "its products accumulate in float32, got float64" if double else None


def columns(x: Tensor) -> Tensor:
    """Rows whose columns are adjacent."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def activated(
    x: RowOperand,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    groups: Groups,
    keeps_gate_up: bool,
    activation_options: tuple[str, Numbers, bool],
) -> tuple[Tensor, Tensor]:
    """act(gate) * up of every row, and gate and up where they are kept."""
    activation, numbers, interleaved = activation_options
    source, (_, wide, inner) = x.source, weight.shape
    cols, parts = wide // 2, len(pieces(weight))
    weight = weight if parts > 1 else opened(weight)
    k = choice("fused_moe.up", up_config, source, groups, cols, inner)
    if layout_of(activation, interleaved) != "halves" or parts > 1:
        gate_up: Tensor | None = product("fused_moe.up_interleaved", x, weight, groups)
    else:
        gate_up = library_gemm(k, x, weight, groups)
    if gate_up is not None:
        return activation_of(
            gate_up, bias, index, groups, activation_options
        ), gate_up if keeps_gate_up else gate_up[:0]
    out = source.new_empty(groups.rows, cols)
    gate_up = source.new_empty(groups.rows if keeps_gate_up else 0, wide)
    tiles, steps = groups.tiles(k.block_m), cdiv(cols, k.block_n)
    launch(
        _moe_up_kernel,
        tiles.shape[0] * steps,
        (
            source,
            weight,
            bias,
            gate_up if keeps_gate_up else None,
            out,
            tiles,
            groups.offsets,
            groups.order if x.gather else None,
            (source.stride(0), *weight.stride()),
            cols,
            inner,
            groups.per,
            steps,
            *numbers,
        ),
        (
            activation,
            k.block_m,
            k.block_n,
            k.block_k,
            cols % k.block_n == 0,
            inner % k.block_k == 0,
            k.stages,
        ),
        k.num_warps,
    )
    return out, gate_up


def activation_of(
    gate_up: Tensor,
    bias: Tensor | None,
    index: Tensor,
    groups: Groups,
    activation_options: tuple[str, Numbers, bool],
) -> Tensor:
    """act(gate) * up of the rows of a GEMM; the bias is added to these in place."""
    activation, numbers, interleaved = activation_options
    layout = layout_of(activation, interleaved)
    cols = gate_up.shape[1] if layout == "single" else gate_up.shape[1] // 2
    out = gate_up.new_empty(groups.rows, cols)
    k = piece("activation", gate_up, cols)
    pieces = cdiv(cols, k.block)
    launch(
        _moe_activation_kernel,
        groups.rows * pieces,
        (
            gate_up,
            bias,
            out,
            index,
            groups.order,
            groups.offsets,
            groups.count,
            cols,
            pieces,
            *numbers,
        ),
        (activation, layout, k.block),
        k.num_warps,
    )
    return out


def combined(
    rows: Tensor,
    groups: Groups,
    routing: Tensor | None,
    bias: Tensor | None,
    index: Tensor,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """The sum over the pairs of every token, into ``out`` where that is given."""
    cols = rows.shape[1]
    y = rows.new_empty(groups.rows // groups.per, cols, dtype=dtype) if out is None else out
    k = piece("combine", rows, cols)
    tiles = cdiv(cols, k.block)
    factors = (groups.inverse, routing, bias, index, groups.offsets)
    launch(
        _moe_combine_kernel,
        y.shape[0] * tiles,
        (rows, *factors, y, y.stride(0), groups.count, cols, tiles),
        (groups.per, k.block),
        k.num_warps,
    )
    return y


# Bytes of a GEMM's result before the sum over pairs; backward of weights needs more than forward.
TRAINED_PAIRS_BYTES, PAIRS_BYTES = 2**28, 2**27
LEAST_COLS = 512  # narrower results read the rows too often


def combined_product(
    name: str,
    rows: RowOperand,
    weight: Tensor,
    groups: Groups,
    routing: Tensor | None,
    bias: Tensor | None,
    index: Tensor,
    dtype: torch.dtype,
    limit: int,
    update: Callable[[Tensor, slice], None] | None = None,
) -> Tensor:
    """The sum over the pairs of every token of rows times the weights of their experts.

    Some columns at a time, whose rows take ``limit`` bytes: a pair's row is as wide as a token's,
    and there are ``per`` times as many. ``update`` adds to some columns of the rows in place.
    """
    cols, size = weight.shape[1], groups.rows * rows.source.element_size()
    step = cols
    while not by_rows() and size * step > limit and step >= 2 * LEAST_COLS and not step % 32:
        step //= 2
    y = rows.source.new_empty(groups.rows // groups.per, cols, dtype=dtype)
    stop = 0
    for each in pieces(weight):
        for weight_part in opened(each).split(step, 1):
            start, stop = stop, stop + weight_part.shape[1]
            part = slice(start, stop)
            pairs = product(name, rows, weight_part, groups)
            if update is not None:
                update(pairs, part)
            part_bias = None if bias is None else bias[:, part].contiguous()
            combined(pairs, groups, routing, part_bias, index, dtype, y[:, part])
            del pairs
    return y


def _bias_gradient(rows: Tensor, groups: Groups, routing: Tensor | None) -> Tensor:
    cols = rows.shape[1]
    out, tall = rows.new_empty(groups.count, cols), 32
    checked_cols(2 * tall * cols)
    block = max(16, min(128, power_of_2(cols)))
    tiles = cdiv(cols, block)
    launch(
        _moe_bias_gradient_kernel,
        groups.count * tiles,
        (rows, routing, groups.order, groups.offsets, out, rows.stride(0), groups.per, cols, tiles),
        (tall, block),
        8,
    )
    return out


def dense(x: Tensor | None) -> Tensor | None:
    """A contiguous bias, or None."""
    return None if x is None else x.contiguous()


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
    """Sort, two GEMMs, a weighted sum."""
    first, second = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    keeps_gate_up = needs_x or needs_gate_up_weight or needs_down_weight or needs_routing
    keeps_gate_up = keeps_gate_up or needs_gate_up_bias or needs_down_bias
    index = index.contiguous()
    order, inverse, offsets = sorted_pairs(index, first.shape[0])
    if not order.numel() or not x.numel():
        gate_up = x.new_zeros(order.numel() if keeps_gate_up else 0, first.shape[1])
        return x.new_zeros(x.shape, dtype=y_dtype), gate_up, order, offsets
    groups, numbers = Groups(offsets, order, index.shape[1], inverse), (limit, alpha, up_offset)
    rows = RowOperand(columns(x), gather=True)
    inner, gate_up = activated(
        rows,
        first,
        dense(gate_up_bias),
        index,
        groups,
        keeps_gate_up,
        (activation, numbers, interleaved),
    )
    del rows
    trained = needs_gate_up_weight or needs_down_weight
    limit = TRAINED_PAIRS_BYTES if trained else PAIRS_BYTES
    factors = (groups, routing.contiguous(), down_bias, index, y_dtype, limit)
    y = combined_product("fused_moe.down", RowOperand(inner), second, *factors)
    return y, gate_up, order, offsets


def inner_gradients(
    dproduct: Tensor,
    gate_up: Tensor,
    routing: Tensor,
    groups: Groups,
    activation_options: tuple[str, Numbers, bool],
    needs_routing: bool,
    needs_inner: bool,
    needs_product: bool,
) -> tuple[Tensor | None, Tensor]:
    """Gradients of gate and up, and of routing.

    Those of gate and up overwrite these, unless a second backward pass will read them. Where it is
    needed, act(gate) * up, weighted, overwrites dproduct.
    """
    activation, numbers, interleaved = activation_options
    cols = dproduct.shape[1]
    dinner = None
    if needs_inner:
        dinner = gate_up if may_overwrite() else torch.empty_like(gate_up)
    drouting = routing.new_empty(routing.shape if needs_routing else 0)
    k = piece("activation_backward", dproduct, cols)
    launch(
        _moe_activation_backward_kernel,
        groups.rows,
        (
            dproduct,
            gate_up,
            dinner,
            dproduct if needs_product else None,
            routing,
            drouting if needs_routing else None,
            groups.order,
            groups.offsets,
            groups.count,
            cols,
            *numbers,
        ),
        (activation, layout_of(activation, interleaved), k.block, k.stages),
        k.num_warps,
    )
    return dinner, drouting


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
    upstream = RowOperand(columns(dy), gather=True)
    dgate_up, drouting, weighted = None, routing.new_empty(0), None
    if inner or needs_routing or needs_down_weight:
        second = down_weight if transposed else down_weight.mT
        dproduct = product("fused_moe.dproduct", upstream, second, groups)
        activation_options = (activation, (limit, alpha, up_offset), interleaved)
        requests = (needs_routing, inner, needs_down_weight)
        dgate_up, drouting = inner_gradients(
            dproduct, gate_up, routing, groups, activation_options, *requests
        )
        weighted = dproduct if needs_down_weight else None
        del dproduct
    if needs_routing and down_bias is not None:
        add_bias_share(drouting, upstream.source, down_bias.contiguous(), index, groups)
    if needs_down_bias:
        dother = _bias_gradient(upstream.source, groups, routing)
    if needs_gate_up_bias and dgate_up is not None:
        dbias = _bias_gradient(dgate_up, groups, None)
    # The gradient of a weight that comes last stands beside rows of x, or of the product.
    is_last = weighted is not None and weighted.shape[1] < dy.shape[1]
    if weighted is not None and not is_last:
        ddown, weighted = down_gradient(upstream, weighted, groups, transposed), None
    upstream.cached = None
    if needs_gate_up_weight and dgate_up is not None and x is not None:
        sides = (RowOperand(dgate_up), RowOperand(columns(x), gather=True))
        dfirst = weight_gradient("fused_moe.dgate_up_weight", *sides, groups, transposed)
        del sides
    if needs_x and dgate_up is not None and gate_up_weight is not None:
        transposed_weight = gate_up_weight if transposed else gate_up_weight.mT
        limit_bytes = TRAINED_PAIRS_BYTES if is_last else PAIRS_BYTES
        factors = (groups, None, None, index, dy.dtype, limit_bytes)
        dx = combined_product("fused_moe.dx", RowOperand(dgate_up), transposed_weight, *factors)
    if weighted is not None:
        ddown = down_gradient(upstream, weighted, groups, transposed, dgate_up)
    return dx, dfirst, ddown, drouting, dbias, dother


def down_gradient(
    upstream: RowOperand,
    weighted: Tensor,
    groups: Groups,
    transposed: bool,
    scratch: Tensor | None = None,
) -> Tensor:
    """The gradient of the second weight; rows of dy may overwrite ``scratch``."""
    sides = (upstream, RowOperand(weighted))
    name = "fused_moe.ddown_weight"
    return weight_gradient(name, *sides, groups, transposed, scratch=scratch)


def _zeros(
    dy: Tensor,
    routing: Tensor,
    down_weight: Tensor,
    gate_up: Tensor,
    transposed: bool,
    needs: tuple[bool, ...],
) -> Any:
    """Gradients where there are no rows."""
    wide, hidden = (down_weight.shape[0], gate_up.shape[1]), dy.shape[1]
    first = (wide[0], hidden, wide[1]) if transposed else (*wide, hidden)
    shapes = (dy.shape, first, down_weight.shape, routing.shape, wide, (wide[0], hidden))
    return tuple(
        (routing if i == 3 else dy).new_zeros(shape if is_needed else (0,))
        for i, (shape, is_needed) in enumerate(zip(shapes, needs, strict=True))
    )


def add_bias_share(
    drouting: Tensor, dy: Tensor, bias: Tensor, index: Tensor, groups: Groups
) -> None:
    """Add the share of the bias to the gradient of routing, in place."""
    cols = dy.shape[1]
    k = piece("bias_share", dy, cols)
    args = (dy, bias, index, drouting, dy.stride(0), groups.count, cols, groups.per)
    launch(_moe_bias_share_kernel, groups.rows, args, (k.block,), k.num_warps)
