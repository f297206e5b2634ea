"""Attention over depth (arXiv:2603.15031): a token's softmax over the blocks before it.

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

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    INTERPRETED,
    LOG2E,
    LONGEST_ROW,
    assume_cols,
    assume_rows,
    cdiv,
    checked_cols,
    power_of_2,
    round_to,
    sum_partials,
    tile_rows,
    warps,
    with_stride,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.residuals import attention_residuals as reference

# --- forward kernels ---


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


@triton.jit(do_not_specialize=["rows"])
def _attention_residuals_forward_kernel(
    v_ptr,
    query_ptr,
    weight_ptr,
    y_ptr,
    p_ptr,
    rstd_ptr,
    block_stride,
    row_stride,
    blocks,
    rows,
    cols,
    eps,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
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


@triton.jit(do_not_specialize=["rows"])
def _attention_residuals_forward_wide_kernel(
    v_ptr,
    query_ptr,
    weight_ptr,
    y_ptr,
    p_ptr,
    rstd_ptr,
    block_stride,
    row_stride,
    blocks,
    rows,
    cols,
    eps,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
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


# --- backward kernels ---


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


@triton.jit(do_not_specialize=["rows"])
def _attention_residuals_backward_kernel(
    dy_ptr,
    v_ptr,
    query_ptr,
    weight_ptr,
    p_ptr,
    rstd_ptr,
    dv_ptr,
    partial_ptr,
    inner_ptr,
    dy_stride,
    block_stride,
    row_stride,
    blocks,
    rows,
    cols,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
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
        for back in tl.range(0, groups, num_stages=STAGES):  # the last blocks are still cached
            start = (groups - 1 - back) * GROUP
            at, i = tl.cast(start, tl.int64), start + group
            pair = row_mask[:, None] & (i < blocks)[None, :]
            mask = pair[:, :, None] & col_mask[None, None, :]
            place = v_ptr + first * row_stride + at * block_stride + v_at
            v = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            p, a, own = _factors(
                inner_ptr + at,
                p_ptr + first + at * rows,
                rstd_ptr + first + at * rows,
                delta[:, None],
                inner_at,
                pair_at,
                cols,
                size,
                mask=pair,
            )
            if partial_ptr is not None:
                dw += tl.sum(a[:, :, None] * v, axis=1)[:, None, :]
            if dv_ptr is not None:
                dv = p[:, :, None] * dy + a[:, :, None] * w + own[:, :, None] * v
                dv_at = row[:, None, None] * cols + group[None, :, None] * (rows * cols)
                address = dv_ptr + first * cols + at * spread + (dv_at + col[None, None, :])
                tl.store(address, round_to(dv, dv_ptr.dtype.element_ty), mask=mask)
        tl.debug_barrier()  # before the next tile's sums overwrite these
    if partial_ptr is not None:
        partial_ptr += tl.program_id(0).to(tl.int64) * cols
        tl.store(partial_ptr + col, tl.sum(tl.sum(dw, axis=1), axis=0), mask=col_mask)


@triton.jit(do_not_specialize=["rows"])
def _attention_residuals_backward_wide_kernel(
    dy_ptr,
    v_ptr,
    query_ptr,
    weight_ptr,
    p_ptr,
    rstd_ptr,
    dv_ptr,
    partial_ptr,
    inner_ptr,
    dy_stride,
    block_stride,
    row_stride,
    blocks,
    rows,
    cols,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
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
                    inner_ptr + at,
                    p_ptr + first + at * rows,
                    rstd_ptr + first + at * rows,
                    delta,
                    group,
                    group * rows,
                    cols,
                    blocks,
                    mask=i < blocks,
                )
                if partial_ptr is not None:
                    dw += tl.sum(a[:, None] * v, axis=0)
                if dv_ptr is not None:
                    dv = p[:, None] * dy.to(tl.float32)[None, :] + a[:, None] * w[None, :]
                    dv = round_to(dv + own[:, None] * v, dv_ptr.dtype.element_ty)
                    address = group[:, None] * (rows * cols) + col[None, :]
                    tl.store(dv_ptr + first * cols + at * spread + address, dv, mask=mask)
            if partial_ptr is not None:  # zeros at first, and this program's alone
                tl.store(
                    partial_ptr + col,
                    tl.load(partial_ptr + col, mask=col_mask, other=0.0) + dw,
                    mask=col_mask,
                )
        tl.debug_barrier()


# --- launchers ---

WIDEST = 8192  # columns; beyond, a row is read in steps
TILE_BYTES = 16384  # of a few blocks of a token, at a time


@dataclass(frozen=True)
class ResidualConfig:
    """``group`` blocks of ``rows`` tokens a tile, whole or in steps of ``block`` columns.

    Loads go ``stages`` - 1 tiles ahead; backward has ``programs`` persistent programs.
    """

    rows: int
    group: int
    block: int
    stages: int
    num_warps: int
    programs: int


def backward_config(info: DeviceInfo, rows: int, cols: int, size: int) -> ResidualConfig:
    """Tiles of 16 KiB; a thread has all blocks of 8 columns, of 16 where a tile has one or two.

    Narrow tokens are several, a block of each at a time. About two programs a core: what they have
    read once is still in the cache when they come back.
    """
    block = power_of_2(checked_cols(cols))
    if block > WIDEST:
        checked_cols(2 * cols)  # of two rows, a block apart
        programs = min(rows, 4 * info.cores)
        return ResidualConfig(1, 2, 2048, 1, warps(256, info.warp_size), programs)
    tile = 4096 // block if block < 512 else 1  # whatever the rows
    group = 1 if block < 512 else max(1, min(8, TILE_BYTES // size // block))
    threads = max(32, min(tile * block // 8, 256 if block <= 4096 else 512))
    programs = min(cdiv(rows, tile), info.cores * max(1, 512 // threads))
    return ResidualConfig(tile, group, block, 1, warps(threads, info.warp_size), programs)


def forward_config(info: DeviceInfo, rows: int, cols: int, size: int) -> ResidualConfig:
    """The same tiles, one per program; loads in three stages where on-chip memory holds 12 tiles.

    A thread has 32 columns, of two blocks: programs of few warps wait less for each other's sums.
    """
    k = backward_config(info, rows, cols, size)
    stages = max(1, min(3, info.shared_bytes // (4 * TILE_BYTES)))
    if size == 2 and k.rows == 1 and k.block <= WIDEST:
        threads = max(32, k.block // 32)
        k = replace(k, group=min(2, k.group), num_warps=warps(threads, info.warp_size))
    return replace(k, stages=stages, programs=0)


def _config(direction: str, formula: Callable[..., ResidualConfig], v: Tensor) -> ResidualConfig:
    return launch_config(
        f"attention_residuals.{direction}",
        formula,
        v.device,
        rows=v.shape[1],
        cols=v.shape[2],
        size=v.element_size(),
    )


def _view(blocks: Tensor) -> Tensor:
    """``(N, ..., D)`` as (N, rows, D) with adjacent columns."""
    v = blocks.reshape(blocks.shape[0], blocks.shape[1:-1].numel(), blocks.shape[-1])
    return v if v.stride(2) == 1 or v.shape[2] == 1 else v.contiguous()


def _near_blocks(group: int, v: Tensor) -> int:
    """As many blocks as span less than 2 GiB, here and in a contiguous tensor."""
    distance = max(v.stride(0), v.shape[1] * v.shape[2]) * v.element_size()
    while group > 1 and group * distance >= 2**31:
        group //= 2
    return group


def forward(
    blocks: Tensor, query: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and p and rstd (fp32) of every block and token."""
    if blocks.numel() == 0:
        return reference.forward(blocks, query, weight, eps)
    v = _view(blocks)
    count, rows, cols = v.shape
    y = v.new_empty(blocks.shape[1:])
    p, rstd = (v.new_empty(blocks.shape[:-1], dtype=torch.float32) for _ in range(2))
    k = _config("forward", forward_config, v)
    weight = None if weight is None else weight.contiguous()
    tensors = (v, query.contiguous(), weight, y, p, rstd)
    numbers = (v.stride(0), v.stride(1), count, rows, cols, eps)
    tile, group = tile_rows(k.rows, v.stride(1)), _near_blocks(k.group, v)
    lanes = tile_rows(max(1, min(64, 512 // tile)), rows)
    if k.block >= cols:
        launch(
            _attention_residuals_forward_kernel,
            cdiv(rows, tile),
            (*tensors, *numbers),
            (tile, group, k.block, lanes, k.stages),
            k.num_warps,
        )
    else:
        launch(
            _attention_residuals_forward_wide_kernel,
            rows,
            (*tensors, *numbers),
            (group, k.block, lanes, k.stages),
            k.num_warps,
        )
    return y, p, rstd


def backward(
    dy: Tensor,
    blocks: Tensor,
    query: Tensor,
    weight: Tensor | None,
    p: Tensor,
    rstd: Tensor,
    needs_blocks: bool,
    needs_query: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of blocks, query and weight; empty tensors if not needed."""
    needs_weight = needs_weight and weight is not None
    needs_direction = needs_query or needs_weight
    if blocks.numel() == 0 or not (needs_blocks or needs_direction):
        needs = (needs_blocks, needs_query, needs_weight)
        return reference.backward(dy, blocks, query, weight, p, rstd, *needs)
    v, (dy, dy_stride) = _view(blocks), with_stride(dy)
    count, rows, cols = v.shape
    k = _config("backward", backward_config, v)
    tile, group = tile_rows(k.rows, v.stride(1), dy_stride), _near_blocks(k.group, v)
    dv = v.new_empty(blocks.shape) if needs_blocks else None
    weight = None if weight is None else weight.contiguous()
    query = query.contiguous()
    wide = k.block < cols
    partial = None
    if needs_direction:  # a wide row's sums are in memory, and grow there
        empty = v.new_zeros if wide else v.new_empty
        partial = empty(k.programs, cols, dtype=torch.float32)
    inner = p.new_empty(k.programs, 2, tile, count)
    tensors = (dy, v, query, weight, p.contiguous(), rstd.contiguous(), dv, partial, inner)
    numbers = (dy_stride, v.stride(0), v.stride(1), count, rows, cols)
    kernel, constants = _attention_residuals_backward_kernel, (group, k.block, k.stages)
    if wide:
        kernel = _attention_residuals_backward_wide_kernel
    launch(
        kernel,
        k.programs,
        (*tensors, *numbers),
        constants if wide else (tile, *constants),
        k.num_warps,
    )
    dquery = dweight = query.new_empty(0)
    if partial is not None:
        dw = sum_partials(partial, torch.float32)
        if needs_query:
            dquery = (dw if weight is None else dw * weight).to(query.dtype)
        if weight is not None and needs_weight:
            dweight = (dw * query).to(weight.dtype)
    return v.new_empty(0) if dv is None else dv, dquery, dweight


def supports(blocks: Tensor) -> str | None:
    """No fp64: sums are fp32."""
    return "its sums are float32, got float64" if blocks.element_size() == 8 else None
