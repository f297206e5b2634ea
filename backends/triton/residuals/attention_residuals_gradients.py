"""Backward kernels of :mod:`.attention_residuals_kernels`, which has the maths."""

from __future__ import annotations

import triton
import triton.language as tl

from liger_multi.backends.triton.common.rows import LONGEST_ROW, assume_cols, assume_rows, round_to
from liger_multi.backends.triton.residuals.attention_residuals_kernels import (
    _load_direction,
    _two_sums,
)


@triton.jit
def _factors(inner_ptr, p_ptr, rstd_ptr, delta, inner_at, pair_at, cols, size, mask):
    """Coefficients of dy, w and v in dv, for some blocks: p, a and -a r^2 (v . w) / cols.

    ``inner_ptr`` holds the sums v . dy and, ``size`` elements later, v . w.
    """
    dots = tl.load(inner_ptr + inner_at, mask=mask, other=0.0)
    along = tl.load(inner_ptr + size + inner_at, mask=mask, other=0.0)
    p = tl.load(p_ptr + pair_at, mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + pair_at, mask=mask, other=0.0)
    a = p * (dots - delta) * rstd
    return p, a, -a * rstd * rstd * along / cols


@triton.jit
def _attention_residuals_backward_kernel(
    dy_ptr, v_ptr, query_ptr, weight_ptr, p_ptr, rstd_ptr, dv_ptr, partial_ptr, inner_ptr,
    dy_stride, block_stride, row_stride, blocks, rows, cols, ROWS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the blocks and of the direction w, for rows that fit into registers.

    Program: persistent; every num_programs-th tile of ROWS tokens. For each tile, it passes over
    the blocks twice, GROUP at a time:
    1. Reads v, sums v . dy and v . w over columns into ``inner_ptr``, and adds delta = sum of p (v
       . dy).
    2. In reverse order, since the blocks read last are still in the cache: reads v again, writes
       dv.

    The sum of dw stays in registers and leaves as one fp32 partial a program. Barriers make
    ``inner_ptr`` visible to all threads, and keep it until all have read it.
    """
    assume_rows(v_ptr, block_stride, GROUP)
    assume_rows(v_ptr, row_stride, ROWS)
    assume_rows(dy_ptr, dy_stride, ROWS)
    assume_rows(dv_ptr, rows * cols, GROUP)
    assume_cols(cols, BLOCK)
    row, group, col = tl.arange(0, ROWS), tl.arange(0, GROUP), tl.arange(0, BLOCK)
    col_mask, spread, size = col < cols, tl.cast(rows, tl.int64) * cols, ROWS * blocks
    w = _load_direction(query_ptr, weight_ptr, col, col_mask)[None, None, :]
    inner_ptr += tl.program_id(0).to(tl.int64) * 2 * size
    dw = tl.zeros([ROWS, 1, BLOCK], tl.float32)
    groups = tl.cdiv(blocks, GROUP)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * ROWS
        row_mask = first + row < rows
        dy_at = row[:, None, None] * dy_stride + col[None, None, :]
        dy_mask = row_mask[:, None, None] & col_mask[None, None, :]
        dy = tl.load(dy_ptr + first * dy_stride + dy_at, mask=dy_mask, other=0.0)
        dy = dy.to(tl.float32)
        delta = tl.zeros([ROWS], tl.float32)
        rows_at = row[:, None, None] * row_stride
        v_at = rows_at + group[None, :, None] * block_stride + col[None, None, :]
        pair_at = row[:, None] + group[None, :] * rows
        inner_at = row[:, None] * blocks + group[None, :]
        for start in tl.range(0, blocks, GROUP, num_stages=STAGES):
            at, i = tl.cast(start, tl.int64), start + group
            pair = row_mask[:, None] & (i < blocks)[None, :]
            mask = pair[:, :, None] & col_mask[None, None, :]
            place = v_ptr + first * row_stride + at * block_stride + v_at
            v = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dots, along = _two_sums(v * dy, v * w, 2)
            p = tl.load(p_ptr + first + at * rows + pair_at, mask=pair, other=0.0)
            delta += tl.sum(p * dots, axis=1)
            tl.store(inner_ptr + at + inner_at, dots, mask=pair)
            tl.store(inner_ptr + size + at + inner_at, along, mask=pair)
        tl.debug_barrier()
        for back in tl.range(0, groups, num_stages=STAGES):  # the last ones are nearest
            start = (groups - 1 - back) * GROUP
            at, i = tl.cast(start, tl.int64), start + group
            pair = row_mask[:, None] & (i < blocks)[None, :]
            mask = pair[:, :, None] & col_mask[None, None, :]
            place = v_ptr + first * row_stride + at * block_stride + v_at
            v = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            p, a, own = _factors(
                inner_ptr + at, p_ptr + first + at * rows, rstd_ptr + first + at * rows,
                delta[:, None], inner_at, pair_at, cols, size, pair,
            )  # fmt: skip
            if partial_ptr is not None:
                dw += tl.sum(a[:, :, None] * v, axis=1)[:, None, :]
            if dv_ptr is not None:
                dv = p[:, :, None] * dy + a[:, :, None] * w + own[:, :, None] * v
                dv_at = row[:, None, None] * cols + group[None, :, None] * (rows * cols)
                room = dv_ptr + first * cols + at * spread + (dv_at + col[None, None, :])
                tl.store(room, round_to(dv, dv_ptr.dtype.element_ty), mask=mask)
        tl.debug_barrier()  # before the next tile's sums overwrite these
    if partial_ptr is not None:
        partial_ptr += tl.program_id(0).to(tl.int64) * cols
        tl.store(partial_ptr + col, tl.sum(tl.sum(dw, axis=1), axis=0), mask=col_mask)


@triton.jit
def _attention_residuals_backward_wide_kernel(
    dy_ptr, v_ptr, query_ptr, weight_ptr, p_ptr, rstd_ptr, dv_ptr, partial_ptr, inner_ptr,
    dy_stride, block_stride, row_stride, blocks, rows, cols, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for rows too wide for registers, one token at a time, in steps of BLOCK columns.

    Program: persistent; every num_programs-th token. The first pass reads all columns of a group of
    blocks for its sums, which go to ``inner_ptr``. The second pass takes a step of columns of all
    blocks, writes dv there and adds dw to the program's own row of fp32 partials.
    """
    assume_rows(v_ptr, block_stride, GROUP)
    assume_rows(dv_ptr, rows * cols, GROUP)
    group, lane = tl.arange(0, GROUP), tl.arange(0, BLOCK)
    inner_ptr += tl.program_id(0).to(tl.int64) * 2 * blocks
    if partial_ptr is not None:
        partial_ptr += tl.program_id(0).to(tl.int64) * cols
    spread = tl.cast(rows, tl.int64) * cols
    for token in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        first = tl.cast(token, tl.int64)
        delta = tl.zeros([1], tl.float32)
        for start in tl.range(0, blocks, GROUP):
            at, i = tl.cast(start, tl.int64), start + group
            dots = tl.zeros([GROUP, BLOCK], tl.float32)
            along = tl.zeros([GROUP, BLOCK], tl.float32)
            for step in tl.range(0, cols, BLOCK, num_stages=STAGES):
                assume_cols(step, LONGEST_ROW // GROUP - BLOCK)
                col = step + lane
                col_mask, mask = col < cols, (i < blocks)[:, None] & (col < cols)[None, :]
                w = _load_direction(query_ptr, weight_ptr, col, col_mask)
                dy = tl.load(dy_ptr + first * dy_stride + col, mask=col_mask, other=0.0)
                v_at = group[:, None] * block_stride + col[None, :]
                place = v_ptr + first * row_stride + at * block_stride + v_at
                v = tl.load(place, mask=mask, other=0.0).to(tl.float32)
                dots += v * dy.to(tl.float32)[None, :]
                along += v * w[None, :]
            dots, along = _two_sums(dots, along, 1)
            p = tl.load(p_ptr + first + at * rows + group * rows, mask=i < blocks, other=0.0)
            delta += tl.sum(p * dots, axis=0)
            tl.store(inner_ptr + at + group, dots, mask=i < blocks)
            tl.store(inner_ptr + blocks + at + group, along, mask=i < blocks)
        tl.debug_barrier()
        for step in tl.range(0, cols, BLOCK):
            assume_cols(step, LONGEST_ROW // GROUP - BLOCK)
            col = step + lane
            col_mask = col < cols
            w = _load_direction(query_ptr, weight_ptr, col, col_mask)
            dy = tl.load(dy_ptr + first * dy_stride + col, mask=col_mask, other=0.0)
            dw = tl.zeros([BLOCK], tl.float32)
            for start in tl.range(0, blocks, GROUP, num_stages=STAGES):
                at, i = tl.cast(start, tl.int64), start + group
                mask = (i < blocks)[:, None] & col_mask[None, :]
                v_at = group[:, None] * block_stride + col[None, :]
                place = v_ptr + first * row_stride + at * block_stride + v_at
                v = tl.load(place, mask=mask, other=0.0).to(tl.float32)
                p, a, own = _factors(
                    inner_ptr + at, p_ptr + first + at * rows, rstd_ptr + first + at * rows,
                    delta, group, group * rows, cols, blocks, i < blocks,
                )  # fmt: skip
                if partial_ptr is not None:
                    dw += tl.sum(a[:, None] * v, axis=0)
                if dv_ptr is not None:
                    dv = p[:, None] * dy.to(tl.float32)[None, :] + a[:, None] * w[None, :]
                    dv = round_to(dv + own[:, None] * v, dv_ptr.dtype.element_ty)
                    room = group[:, None] * (rows * cols) + col[None, :]
                    tl.store(dv_ptr + first * cols + at * spread + room, dv, mask=mask)
            if partial_ptr is not None:  # zeros at first, and this program's alone
                tl.store(
                    partial_ptr + col,
                    tl.load(partial_ptr + col, mask=col_mask, other=0.0) + dw, mask=col_mask,
                )  # fmt: skip
        tl.debug_barrier()
