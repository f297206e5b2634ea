"""Kernels of a mixture of experts beside its GEMMs: activation, and sums over a token's pairs.

A pair is a token and one of its experts. The first GEMM ends in the activation: a tile has the
columns of gate and those of up, in two accumulators. Where the two alternate in the weight, a pass
of its own follows the GEMM. Backward gets the gradient of act(gate) * up before the routing weight,
d, and computes in one pass

    drouting = sum of d act(gate) up,  the gradient of gate and up of (routing d),

and routing act(gate) up, which the gradient of the second weight needs, in the place of d. The sum
over the pairs of a token reads each from its sorted row: every sum has one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from liger_multi.backends.triton.activations.gated import _share, _slope
from liger_multi.backends.triton.common.rows import (
    LONGEST_ROW,
    assume_cols,
    assume_rows,
    round_to,
    sigmoid,
)
from liger_multi.backends.triton.experts.grouped import dot, load_factor, source_rows


@triton.jit
def _activated(gate, up, limit, alpha, offset, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Activation times up, in fp32; the activation is rounded first, as in Hugging Face."""
    if ACTIVATION == "swiglu_clamped":
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
    """Gradients of gate and up for the gradient d of act(gate) * up."""
    if ACTIVATION == "swiglu_clamped":
        g = tl.where(gate > limit, limit, gate)
        u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + offset
        p = sigmoid(g * alpha)
        act = round_to(g * p, DTYPE).to(tl.float32)
        dgate = tl.where(gate > limit, 0.0, d * u * (p + alpha * g * p * (1.0 - p)))
        return dgate, tl.where((up > limit) | (up < -limit), 0.0, d * act)
    else:
        p = _share(gate, ACTIVATION)
        act = round_to(gate * p, DTYPE).to(tl.float32)
        return d * up * (p + gate * _slope(gate, p, ACTIVATION)), d * act


@triton.jit
def _load_pair(ptr, start, cols, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Gate and up of BLOCK columns of one row, in fp32; INTERLEAVED: they alternate in memory."""
    if INTERLEAVED:
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(ptr + at, mask=at < 2 * cols, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, [BLOCK, 2]))
    else:
        col = start + tl.arange(0, BLOCK)
        gate = tl.load(ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        return gate, tl.load(ptr + cols + col, mask=col < cols, other=0.0).to(tl.float32)


@triton.jit
def _store_pair(ptr, gate, up, start, cols, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """Store two rows of BLOCK columns where :func:`_load_pair` reads gate and up."""
    if INTERLEAVED:
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        both = round_to(tl.reshape(tl.join(gate, up), [2 * BLOCK]), ptr.dtype.element_ty)
        tl.store(ptr + at, both, mask=at < 2 * cols)
    else:
        col = start + tl.arange(0, BLOCK)
        tl.store(ptr + col, round_to(gate, ptr.dtype.element_ty), mask=col < cols)
        tl.store(ptr + cols + col, round_to(up, ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def _moe_up_kernel(
    x_ptr, w_ptr, bias_ptr, kept_ptr, out_ptr, tiles_ptr, offsets_ptr, order_ptr, x_stride,
    w_stride, n_stride, k_stride, cols, inner, per, steps, limit, alpha, offset,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """First grouped GEMM with the activation in its epilogue: act(gate) * up of gathered rows.

    Program: BLOCK_M sorted rows of one expert by BLOCK_N columns. The table of tiles names the
    expert and the first row; programs past its last tile return.
    Reads the rows of x, by ``order_ptr``, and both column blocks of the expert's weight, BLOCK_K at
    a time. Gate and up have an accumulator each, so that a tile of x is loaded once for both.
    Writes act(gate) * up and, with ``kept_ptr``, gate and up for backward. Both are rounded to the
    dtype of the output before the activation, as the result of a GEMM of its own would be.
    """
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
    gate_up_ptr, bias_ptr, out_ptr, index_ptr, order_ptr, offsets_ptr, groups, cols, tiles, limit,
    alpha, offset, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Activation after a library's GEMM; the bias is added to gate and up in place.

    Program: BLOCK columns of one sorted row. Rows past the last expert's are not touched.
    """
    row, piece = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    assume_cols(piece, LONGEST_ROW // (2 * BLOCK))
    start = piece * BLOCK
    if row >= tl.load(offsets_ptr + groups):
        return
    gate_up_ptr += row.to(tl.int64) * (2 * cols)
    gate, up = _load_pair(gate_up_ptr, start, cols, INTERLEAVED, BLOCK)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        bias_ptr += tl.load(index_ptr + tl.load(order_ptr + row)) * (2 * cols)
        more, other = _load_pair(bias_ptr, start, cols, INTERLEAVED, BLOCK)
        gate, up = round_to(gate + more, DTYPE), round_to(up + other, DTYPE)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        _store_pair(gate_up_ptr, gate, up, start, cols, INTERLEAVED, BLOCK)
    y = round_to(_activated(gate, up, limit, alpha, offset, ACTIVATION, DTYPE), DTYPE)
    col = start + tl.arange(0, BLOCK)
    tl.store(out_ptr + row.to(tl.int64) * cols + col, y, mask=col < cols)


@triton.jit
def _moe_activation_backward_kernel(
    d_ptr, gate_up_ptr, dgate_up_ptr, routing_ptr, drouting_ptr, order_ptr, offsets_ptr, groups,
    cols, limit, alpha, offset, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of gate, up and routing; routing act(gate) up takes the place of d.

    Program: one sorted row, in steps of BLOCK columns; the sum for drouting stays in registers.
    Reads d, gate and up, and the routing weight of its pair. Writes over d, and dgate_up and
    drouting where they are wanted. A pair of no expert gets drouting 0.
    """
    row = tl.program_id(0)
    pair = tl.load(order_ptr + row).to(tl.int64)
    if row >= tl.load(offsets_ptr + groups):  # a pair of no expert
        if drouting_ptr is not None:
            tl.store(drouting_ptr + pair, tl.zeros([], drouting_ptr.dtype.element_ty))
        return
    routing = tl.load(routing_ptr + pair).to(tl.float32)
    d_ptr += row.to(tl.int64) * cols
    gate_up_ptr += row.to(tl.int64) * (2 * cols)
    DTYPE: tl.constexpr = d_ptr.dtype.element_ty
    share = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        assume_cols(start, LONGEST_ROW // 2)
        col = start + tl.arange(0, BLOCK)
        d = tl.load(d_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        gate, up = _load_pair(gate_up_ptr, start, cols, INTERLEAVED, BLOCK)
        y = _activated(gate, up, limit, alpha, offset, ACTIVATION, DTYPE)
        share += d * y
        tl.store(d_ptr + col, round_to(y * routing, DTYPE), mask=col < cols)
        if dgate_up_ptr is not None:
            dgate, dup = _differentiated(
                d * routing, gate, up, limit, alpha, offset, ACTIVATION, DTYPE
            )
            room = dgate_up_ptr + row.to(tl.int64) * (2 * cols)
            _store_pair(room, dgate, dup, start, cols, INTERLEAVED, BLOCK)
    if drouting_ptr is not None:
        total = round_to(tl.sum(share, axis=0), drouting_ptr.dtype.element_ty)
        tl.store(drouting_ptr + pair, total)


@triton.jit
def _moe_combine_kernel(
    rows_ptr, inverse_ptr, routing_ptr, bias_ptr, index_ptr, offsets_ptr, y_ptr, groups, cols,
    tiles, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        mine = inside & (row + col * 0 < stop)  # col * 0: the scalar as a mask of the block
        part = tl.load(rows_ptr + row.to(tl.int64) * cols + col, mask=mine, other=0.0)
        part = part.to(tl.float32)
        if bias_ptr is not None:
            expert = tl.load(index_ptr + token * TOP_K + k)
            part += tl.load(bias_ptr + expert * cols + col, mask=mine, other=0.0).to(tl.float32)
        if routing_ptr is not None:
            part *= tl.load(routing_ptr + token * TOP_K + k).to(tl.float32)
        total += part
    tl.store(y_ptr + token * cols + col, round_to(total, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _moe_bias_share_kernel(
    dy_ptr, bias_ptr, index_ptr, drouting_ptr, dy_stride, groups, cols, top_k, BLOCK: tl.constexpr
):  # fmt: skip
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
    rows_ptr, routing_ptr, order_ptr, offsets_ptr, out_ptr, row_stride, per, cols, tiles,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        found = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        if routing_ptr is not None:
            found *= tl.load(routing_ptr + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += found
    out = round_to(tl.sum(total, axis=0), out_ptr.dtype.element_ty)
    tl.store(out_ptr + group.to(tl.int64) * cols + col, out, mask=col < cols)
