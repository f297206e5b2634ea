"""Softmax of the last axis, and the backward that it shares with sparsemax.

    y = exp(x - max) / sum exp(x - max)
    dx = y (dy - sum y dy)              of sparsemax, with s = [y > 0]: s (dy - sum s dy / sum s)

Tiles of whole rows are read once. Wider rows are read twice, the second time from their end, since
the cache may still hold what was read last. The sum of exponentials is anchored at the maximum of
the first step, so that the loop carries no running maximum. It is computed again from the row's
maximum where it overflows.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LOG2E,
    as_rows,
    assume_cols,
    assume_rows,
    cdiv,
    checked_cols,
    power_of_2,
    round_to,
    warps,
)
from liger_multi.backends.triton.cross_entropy.cross_entropy import row_maximum, row_pass
from liger_multi.dispatch.launch import DeviceInfo, launch_config


@dataclass(frozen=True)
class TileConfig:
    """``rows`` whole rows a tile, or one row in steps of ``block`` columns where it is wider."""

    rows: int
    block: int
    num_warps: int


def tile_config(info: DeviceInfo, rows: int, cols: int, arrays: int) -> TileConfig:
    """Tiles of about 4096 elements, 16 of all ``arrays`` inputs a thread, of wide ones more."""
    block = power_of_2(checked_cols(cols))
    if block * arrays > 32768:
        return TileConfig(1, 8192, warps(info.max_threads, info.warp_size))
    per_tile = max(1, 4096 // block)  # whatever the rows: they decide nothing about a row's sum
    threads = min(max(per_tile * block * arrays // 16, 32), info.max_threads)
    return TileConfig(per_tile, block, warps(threads, info.warp_size))


@triton.jit(do_not_specialize=["rows"])
def _softmax_forward_kernel(
    x_ptr, y_ptr, x_stride, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Softmax of rows that fit into registers.

    Program: ROWS whole rows; reads x once, writes y.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    assume_rows(x_ptr, x_stride, ROWS)
    assume_cols(cols, BLOCK)
    mask = (first + row < rows)[:, None] & (col < cols)[None, :]
    x_offset = row[:, None] * x_stride + col[None, :]
    x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=float("-inf"))
    x = x.to(tl.float32)
    e = tl.exp2((x - tl.max(x, axis=1)[:, None]) * LOG2E)
    y = e * (1.0 / tl.sum(e, axis=1))[:, None]
    y_offset = row[:, None] * cols + col[None, :]
    tl.store(y_ptr + first * cols + y_offset, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_forward_wide_kernel(x_ptr, y_ptr, x_stride, cols, BLOCK: tl.constexpr):
    """The same for wider rows, in two passes of BLOCK columns a step.

    Program: one row. The first pass sums exponentials, the second reads x in reverse order and
    writes y.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * cols
    assume_cols(cols)
    anchor = row_maximum(x_ptr, BLOCK, None, None, BLOCK)  # rows here are wider than one step
    total, _, _, _ = row_pass(
        x_ptr,
        None,
        cols,
        anchor,
        None,
        None,
        None,
        SMOOTH=False,
        ENTROPY=False,
        ARGMAX=False,
        BLOCK=BLOCK,
        UNROLL=1,
    )
    if (total == float("inf")) | (total != total):
        anchor = row_maximum(x_ptr, cols, None, None, BLOCK)
        total, _, _, _ = row_pass(
            x_ptr,
            None,
            cols,
            anchor,
            None,
            None,
            None,
            SMOOTH=False,
            ENTROPY=False,
            ARGMAX=False,
            BLOCK=BLOCK,
            UNROLL=1,
        )
    log2_total = tl.log2(total)
    last = (tl.cdiv(cols, BLOCK) - 1) * BLOCK
    for start in tl.range(0, cols, BLOCK):
        step = last - start
        assume_cols(step)
        col = step + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        y = tl.exp2((x.to(tl.float32) - anchor) * LOG2E - log2_total)
        tl.store(y_ptr + col, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weight(y, SPARSE: tl.constexpr):
    """Weights of the sum in backward: y, or for sparsemax 1 where y is positive."""
    y = y.to(tl.float32)
    return tl.where(y > 0.0, 1.0, 0.0) if SPARSE else y


@triton.jit(do_not_specialize=["rows"])
def _softmax_backward_kernel(
    dy_ptr,
    y_ptr,
    dx_ptr,
    dy_stride,
    y_stride,
    rows,
    cols,
    SPARSE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of x for rows that fit into registers.

    Program: ROWS whole rows; reads dy and y once, writes dx. Where the weight is 0, dy is not used,
    so that a NaN there does no harm.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    assume_rows(dy_ptr, dy_stride, ROWS)
    assume_rows(y_ptr, y_stride, ROWS)
    assume_cols(cols, BLOCK)
    mask = (first + row < rows)[:, None] & (col < cols)[None, :]
    dy_offset = row[:, None] * dy_stride + col[None, :]
    y_offset = row[:, None] * y_stride + col[None, :]
    dy = tl.load(dy_ptr + first * dy_stride + dy_offset, mask=mask, other=0.0).to(tl.float32)
    w = _weight(tl.load(y_ptr + first * y_stride + y_offset, mask=mask, other=0.0), SPARSE)
    dy = tl.where(w == 0.0, 0.0, dy)
    mean = tl.sum(w * dy, axis=1)
    if SPARSE:
        mean = mean / tl.sum(w, axis=1)
    dx = w * (dy - mean[:, None])
    dx_offset = row[:, None] * cols + col[None, :]
    tl.store(dx_ptr + first * cols + dx_offset, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_backward_wide_kernel(
    dy_ptr, y_ptr, dx_ptr, dy_stride, y_stride, cols, SPARSE: tl.constexpr, BLOCK: tl.constexpr
):
    """The same for wider rows, in two passes of BLOCK columns a step.

    Program: one row. The first pass sums w * dy, the second reads again in reverse order and writes
    dx.
    """
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    y_ptr += row * y_stride
    dx_ptr += row * cols
    assume_cols(cols)
    total = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        dy = tl.load(dy_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        y = tl.load(y_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        w = _weight(y, SPARSE)
        total += tl.where(w == 0.0, 0.0, w * dy.to(tl.float32))
        if SPARSE:
            weights += w
    mean = tl.sum(total, axis=0)
    if SPARSE:
        mean = mean / tl.sum(weights, axis=0)
    last = (tl.cdiv(cols, BLOCK) - 1) * BLOCK
    for start in tl.range(0, cols, BLOCK):
        step = last - start
        assume_cols(step)
        col = step + tl.arange(0, BLOCK)
        mask = col < cols
        dy = tl.load(dy_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        y = tl.load(y_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        w = _weight(y, SPARSE)
        dx = w * (tl.where(w == 0.0, 0.0, dy.to(tl.float32)) - mean)
        tl.store(dx_ptr + col, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


def forward(x: Tensor) -> Tensor:
    """Probabilities of rows."""
    y, x2d = x.new_empty(x.shape), as_rows(x)
    count, cols = x2d.shape
    if not y.numel():
        return y
    k = launch_config("softmax.forward", tile_config, x.device, rows=count, cols=cols, arrays=1)
    if k.block < cols:
        args = (x2d, y, x2d.stride(0), cols)
        launch(_softmax_forward_wide_kernel, count, args, (k.block,), k.num_warps)
        return y
    launch(
        _softmax_forward_kernel,
        cdiv(count, k.rows),
        (x2d, y, x2d.stride(0), count, cols),
        (k.rows, k.block),
        k.num_warps,
    )
    return y


def backward_of(dy: Tensor, y: Tensor, sparse: bool) -> Tensor:
    """The gradient of x, from y alone."""
    dx, dy2d, y2d = dy.new_empty(dy.shape), as_rows(dy), as_rows(y)
    count, cols = dy2d.shape
    if not dx.numel():
        return dx
    name = "sparsemax.backward" if sparse else "softmax.backward"
    k = launch_config(name, tile_config, dy.device, rows=count, cols=cols, arrays=2)
    strides = (dy2d.stride(0), y2d.stride(0))
    if k.block < cols:
        launch(
            _softmax_backward_wide_kernel,
            count,
            (dy2d, y2d, dx, *strides, cols),
            (sparse, k.block),
            k.num_warps,
        )
        return dx
    launch(
        _softmax_backward_kernel,
        cdiv(count, k.rows),
        (dy2d, y2d, dx, *strides, count, cols),
        (sparse, k.rows, k.block),
        k.num_warps,
    )
    return dx


def backward(dy: Tensor, y: Tensor) -> Tensor:
    """``y (dy - sum y dy)``."""
    return backward_of(dy, y, False)
