"""Kernels of attention over depth (arXiv:2603.15031): a token's softmax over the blocks before it.

With w = query * weight, and for block i of a token r_i = (mean(v_i^2) + eps)^(-1/2):

    s_i  = r_i (v_i . w),  p = softmax(s),  y = sum of p_i v_i
    ds_i = p_i (v_i . dy - sum over j of p_j v_j . dy)
    dv_i = p_i dy + a_i w - a_i r_i^2 (v_i . w) / cols v_i,  a_i = ds_i r_i
    dw   = sum over tokens and blocks of a_i v_i

The kernels are bound by memory bandwidth. Forward reads every block once. A tile holds a few blocks
of a token, or of several narrow tokens; its two sums over columns are one reduction, and a running
softmax follows. Scores wait in the buffer of p until the last maximum is known. Backward runs
persistent programs over strided tokens, with two passes over the blocks: one for the sums with dy,
and one in reverse order, from the cache, for the gradients. dw stays in registers and leaves as one
fp32 partial a program. The numbers of rows and of blocks are run-time numbers. Rows too wide for
registers are read twice, in steps of columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from liger_multi.backends.triton.common.rows import (
    INTERPRETED,
    LOG2E,
    LONGEST_ROW,
    assume_cols,
    assume_rows,
    round_to,
)


@triton.jit
def _add_pairs(a, b, other_a, other_b):
    """Add two pairs of numbers; the combine function of :func:`_two_sums`."""
    return a + other_a, b + other_b


@triton.jit
def _two_sums(a, b, AXIS: tl.constexpr):
    """Sums of two tensors along an axis, with one exchange between warps for both.

    Triton's interpreter would call the combine function for single elements, so there it is two
    sums.
    """
    if INTERPRETED:
        return tl.sum(a, axis=AXIS), tl.sum(b, axis=AXIS)
    else:
        return tl.reduce((a, b), AXIS, _add_pairs)


@triton.jit
def _load_direction(query_ptr, weight_ptr, col, mask):
    """The direction w = query * weight at some columns, in fp32; without a weight, the query."""
    w = tl.load(query_ptr + col, mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        w *= tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    return w


@triton.jit
def _store_shares(p_ptr, top, total, blocks, rows, row, row_mask, LANES: tl.constexpr):
    """Overwrite the scores in ``p_ptr`` with their softmax over blocks, LANES blocks at a time."""
    inverse = 1.0 / total
    lane = tl.arange(0, LANES)
    tl.debug_barrier()  # other threads wrote them
    for start in tl.range(0, blocks, LANES):
        mask = row_mask[:, None] & (start + lane < blocks)[None, :]
        place = p_ptr + tl.cast(start, tl.int64) * rows + (row[:, None] + lane[None, :] * rows)
        s = tl.load(place, mask=mask, other=0.0)
        tl.store(place, tl.exp2((s - top[:, None]) * LOG2E) * inverse[:, None], mask=mask)


@triton.jit
def _attention_residuals_forward_kernel(
    v_ptr, query_ptr, weight_ptr, y_ptr, p_ptr, rstd_ptr, block_stride, row_stride, blocks, rows,
    cols, eps, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attention over depth for rows that fit into registers; every block is read once.

    Program: ROWS tokens. It passes over the blocks, GROUP at a time, with a running softmax, and
    keeps the weighted sum y in registers.
    Writes rstd and the scores of each group, then y, and last the probabilities in the place of the
    scores, since their maximum is known only then.
    """
    assume_rows(v_ptr, block_stride, GROUP)
    assume_rows(v_ptr, row_stride, ROWS)
    assume_cols(cols, BLOCK)
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, group, col = tl.arange(0, ROWS), tl.arange(0, GROUP), tl.arange(0, BLOCK)
    row_mask, col_mask = first + row < rows, col < cols
    w = _load_direction(query_ptr, weight_ptr, col, col_mask)[None, None, :]
    v_ptr += first * row_stride
    p_ptr += first
    rstd_ptr += first
    rows_at = row[:, None, None] * row_stride
    v_at = rows_at + group[None, :, None] * block_stride + col[None, None, :]
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # three axes, as the tile has: another layout would be converted in every step
    y = tl.zeros([ROWS, 1, BLOCK], tl.float32)
    for start in tl.range(0, blocks, GROUP, num_stages=STAGES):
        at, inside = tl.cast(start, tl.int64), start + group < blocks
        pair = row_mask[:, None] & inside[None, :]
        mask = pair[:, :, None] & col_mask[None, None, :]
        v = tl.load(v_ptr + at * block_stride + v_at, mask=mask, other=0.0).to(tl.float32)
        squares, dots = _two_sums(v * v, v * w, 2)
        rstd = tl.rsqrt(squares / cols + eps)
        s = tl.where(inside[None, :], dots * rstd, -float("inf"))
        pair_at = row[:, None] + group[None, :] * rows
        tl.store(rstd_ptr + at * rows + pair_at, rstd, mask=pair)
        tl.store(p_ptr + at * rows + pair_at, s, mask=pair)
        higher = tl.maximum(top, tl.max(s, axis=1))
        shrunk = tl.exp2((top - higher) * LOG2E)
        p = tl.exp2((s - higher[:, None]) * LOG2E)
        total = total * shrunk + tl.sum(p, axis=1)
        y = y * shrunk[:, None, None] + tl.sum(p[:, :, None] * v, axis=1)[:, None, :]
        top = higher
    y = round_to(y * (1.0 / total)[:, None, None], y_ptr.dtype.element_ty)
    y_at = row[:, None, None] * cols + col[None, None, :]
    mask = row_mask[:, None, None] & col_mask[None, None, :]
    tl.store(y_ptr + first * cols + y_at, y, mask=mask)
    _store_shares(p_ptr, top, total, blocks, rows, row, row_mask, LANES)


@triton.jit
def _attention_residuals_forward_wide_kernel(
    v_ptr, query_ptr, weight_ptr, y_ptr, p_ptr, rstd_ptr, block_stride, row_stride, blocks, rows,
    cols, eps, GROUP: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The same for rows too wide for registers; every block is read twice.

    Program: one token. The first pass reads all columns of a group of blocks, and writes rstd and
    scores. The probabilities then replace the scores. The second pass takes a step of columns of
    all blocks and writes y there.
    """
    assume_rows(v_ptr, block_stride, GROUP)
    first = tl.program_id(0).to(tl.int64)
    group, lane = tl.arange(0, GROUP), tl.arange(0, BLOCK)
    v_ptr += first * row_stride
    p_ptr += first
    rstd_ptr += first
    top, total = tl.full([1], -float("inf"), tl.float32), tl.zeros([1], tl.float32)
    for start in tl.range(0, blocks, GROUP):
        at, inside = tl.cast(start, tl.int64), start + group < blocks
        squares = tl.zeros([GROUP, BLOCK], tl.float32)
        dots = tl.zeros([GROUP, BLOCK], tl.float32)
        for step in tl.range(0, cols, BLOCK, num_stages=STAGES):
            assume_cols(step, LONGEST_ROW // GROUP - BLOCK)
            col = step + lane
            w = _load_direction(query_ptr, weight_ptr, col, col < cols)
            v_at = group[:, None] * block_stride + col[None, :]
            mask = inside[:, None] & (col < cols)[None, :]
            v = tl.load(v_ptr + at * block_stride + v_at, mask=mask, other=0.0).to(tl.float32)
            squares += v * v
            dots += v * w[None, :]
        squares, dots = _two_sums(squares, dots, 1)
        rstd = tl.rsqrt(squares / cols + eps)
        s = tl.where(inside, dots * rstd, -float("inf"))
        tl.store(rstd_ptr + at * rows + group * rows, rstd, mask=inside)
        tl.store(p_ptr + at * rows + group * rows, s, mask=inside)
        higher = tl.maximum(top, tl.max(s, axis=0))
        total = total * tl.exp2((top - higher) * LOG2E)
        total += tl.sum(tl.exp2((s - higher) * LOG2E), axis=0)
        top = higher
    one = tl.arange(0, 1)
    _store_shares(p_ptr, top, total, blocks, rows, one, one == 0, LANES)
    tl.debug_barrier()
    for step in tl.range(0, cols, BLOCK):
        assume_cols(step, LONGEST_ROW // GROUP - BLOCK)
        col = step + lane
        y = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, blocks, GROUP, num_stages=STAGES):
            at, inside = tl.cast(start, tl.int64), start + group < blocks
            p = tl.load(p_ptr + at * rows + group * rows, mask=inside, other=0.0)
            v_at = group[:, None] * block_stride + col[None, :]
            mask = inside[:, None] & (col < cols)[None, :]
            v = tl.load(v_ptr + at * block_stride + v_at, mask=mask, other=0.0).to(tl.float32)
            y += tl.sum(p[:, None] * v, axis=0)
        y = round_to(y, y_ptr.dtype.element_ty)
        tl.store(y_ptr + first * cols + col, y, mask=col < cols)
