"""Rows of a table, and their gradient from sorted ids: every row of it is written once.

Forward gathers tiles of rows. Backward sorts the ids (stably, so that sums have one order) and
finds where each class begins. One program per row of the gradient adds the rows of its run and
writes the sum, or zeros for an unused class: no zero fill, no atomic additions. A long run of one
id would keep one program busy for long. So windows of the sorted ids that hold a single id are
summed first, each by a program of its own.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    assume_cols,
    assume_rows,
    cdiv,
    checked_cols,
    power_of_2,
    round_to,
    warps,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.cross_entropy.reduction import check_targets
from liger_multi.reference.embedding.embedding import rounded


@dataclass(frozen=True)
class GatherConfig:
    """``rows`` rows by ``block`` columns a tile."""

    rows: int
    block: int
    num_warps: int


def gather_config(info: DeviceInfo, rows: int, cols: int) -> GatherConfig:
    """Tiles of about 4096 elements, 16 a thread."""
    block = min(4096, power_of_2(checked_cols(cols)))
    per_tile = max(1, min(4096 // block, power_of_2(rows)))
    return GatherConfig(per_tile, block, warps(max(32, per_tile * block // 16), info.warp_size))


@triton.jit
def _embedding_forward_kernel(
    weight_ptr,
    index_ptr,
    y_ptr,
    weight_stride,
    rows,
    classes,
    cols,
    steps,
    scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather rows of the table, times ``scale`` where there is one.

    Program: ROWS ids by BLOCK columns; reads the ids and their rows, writes y. An id that is no
    class is never an address; its row is NaN. With one id, the row's address is a scalar, which
    leaves 32-bit offsets to the loads.
    """
    first = (tl.program_id(0) // steps).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    start = (tl.program_id(0) % steps) * BLOCK
    assume_cols(start)
    col = start + tl.arange(0, BLOCK)
    row_mask = first + row < rows
    mask = row_mask[:, None] & (col < cols)[None, :]
    if ROWS == 1:  # a scalar base
        index = tl.load(index_ptr + first)
        inside = (index >= 0) & (index < classes)
        weight_ptr += tl.where(inside, index, 0) * weight_stride
        width = tl.where(inside, cols, 0)
        y = tl.load(weight_ptr + col[None, :], mask=(col < width)[None, :], other=float("nan"))
    else:
        index = tl.load(index_ptr + first + row, mask=row_mask, other=0)
        inside = (index >= 0) & (index < classes)
        place = tl.where(inside, index, 0)[:, None] * weight_stride + col[None, :]
        y = tl.load(weight_ptr + place, mask=mask & inside[:, None], other=float("nan"))
    if scale is not None:
        y = y.to(tl.float32) * scale
    assume_rows(y_ptr, cols, ROWS)
    y_offset = row[:, None] * cols + col[None, :]
    y = y if scale is None else round_to(y, y_ptr.dtype.element_ty)
    tl.store(y_ptr + first * cols + y_offset, y, mask=mask)


@triton.jit
def _sum_rows(dy_ptr, order_ptr, dy_stride, start, stop, col, col_mask, total, ROWS: tl.constexpr):
    """Add the rows of dy that sorted positions ``start`` to ``stop`` come from to ``total``."""
    row = tl.arange(0, ROWS)
    for at in tl.range(start, stop, ROWS):
        if ROWS == 1:  # a scalar base
            place = dy_ptr + tl.load(order_ptr + at) * dy_stride
            dy = tl.load(place + col[None, :], mask=col_mask[None, :], other=0.0)
        else:
            row_mask = at + row < stop
            place = tl.load(order_ptr + at + row, mask=row_mask, other=0)
            dy = tl.load(
                dy_ptr + place[:, None] * dy_stride + col[None, :],
                mask=row_mask[:, None] & col_mask[None, :],
                other=0.0,
            )
        total += dy.to(tl.float32)
    return total


@triton.jit
def _embedding_windows_kernel(
    dy_ptr,
    ids_ptr,
    order_ptr,
    partial_ptr,
    dy_stride,
    count,
    cols,
    steps,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the rows of dy over a window of sorted ids that are all equal.

    Program: one window of WINDOW positions by BLOCK columns. It returns where the window is cut off
    by the end or holds several ids: its first and last differ. Otherwise it writes one fp32
    partial.
    """
    window = tl.program_id(0) // steps
    start = window * WINDOW
    if start + WINDOW > count:
        return
    # ids are sorted: equal ends mean that all are equal
    if tl.load(ids_ptr + start) != tl.load(ids_ptr + start + WINDOW - 1):
        return
    first = (tl.program_id(0) % steps) * BLOCK
    assume_cols(first)
    col = first + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    total = _sum_rows(
        dy_ptr, order_ptr, dy_stride, start, start + WINDOW, col, col < cols, total, ROWS=ROWS
    )
    partial_ptr += window.to(tl.int64) * cols
    tl.store(partial_ptr + col, tl.sum(total, axis=0), mask=col < cols)


@triton.jit
def _embedding_backward_kernel(
    dy_ptr,
    order_ptr,
    bounds_ptr,
    partial_ptr,
    out_ptr,
    dy_stride,
    cols,
    steps,
    padding_idx,
    scale,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of one row of the table.

    Program: one class by BLOCK columns; ``bounds_ptr`` says where its run of sorted positions
    begins and ends.
    Reads the rows of dy of positions before the first whole window, the partials of whole windows,
    then the rows of the rest. Writes the sum times ``scale``, rounded once; zeros for a class
    without ids and for ``padding_idx``.
    """
    label = tl.program_id(0) // steps
    first = (tl.program_id(0) % steps) * BLOCK
    assume_cols(first)
    col = first + tl.arange(0, BLOCK)
    col_mask = col < cols
    out_ptr += label.to(tl.int64) * cols
    start = tl.load(bounds_ptr + label)
    stop = tl.load(bounds_ptr + label + 1)
    if (start == stop) | (label == padding_idx):
        tl.store(out_ptr + col, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=col_mask)
        return
    # the run's whole windows lie between its head and its tail
    head = tl.minimum(stop, tl.cdiv(start, WINDOW) * WINDOW)
    tail = tl.maximum(head, stop // WINDOW * WINDOW)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    total = _sum_rows(dy_ptr, order_ptr, dy_stride, start, head, col, col_mask, total, ROWS=ROWS)
    assume_rows(partial_ptr, cols, ROWS)
    row = tl.arange(0, ROWS)
    offset = row[:, None] * cols + col[None, :]
    for step in tl.range(0, tail // WINDOW - head // WINDOW, ROWS):
        window = head // WINDOW + step
        mask = (window + row < tail // WINDOW)[:, None] & col_mask[None, :]
        partials = partial_ptr + window.to(tl.int64) * cols
        total += tl.load(partials + offset, mask=mask, other=0.0)
    total = _sum_rows(dy_ptr, order_ptr, dy_stride, tail, stop, col, col_mask, total, ROWS=ROWS)
    row_sum = tl.sum(total, axis=0) * scale
    tl.store(out_ptr + col, round_to(row_sum, out_ptr.dtype.element_ty), mask=col_mask)


def _columns(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _narrow(index: Tensor, classes: int) -> Tensor:
    """Ids in 32 bits, which sort in half the time; ids out of range stay out of range."""
    if classes >= 2**31 - 1:
        return index
    return index.clamp(-1, classes).to(torch.int32)


def forward(
    weight: Tensor, index: Tensor, classes: int, padding_idx: int, scale: float, validate: bool
) -> Tensor:
    """A gather and a scale."""
    check_targets(index, classes, None, validate, "index")
    count, cols = index.shape[0], weight.shape[1]
    y, weight = weight.new_empty(count, cols), _columns(weight)
    if not y.numel():
        return y
    k = launch_config("embedding.forward", gather_config, weight.device, rows=count, cols=cols)
    steps, factor = cdiv(cols, k.block), rounded(scale, weight.dtype)
    launch(
        _embedding_forward_kernel,
        cdiv(count, k.rows) * steps,
        (
            weight,
            index.contiguous(),
            y,
            weight.stride(0),
            count,
            classes,
            cols,
            steps,
            None if factor == 1.0 else factor,
        ),
        (k.rows, k.block),
        k.num_warps,
    )
    return y


def backward(dy: Tensor, index: Tensor, classes: int, padding_idx: int, scale: float) -> Tensor:
    """Sums by id, in the order of the index."""
    (count, cols), out = dy.shape, dy.new_empty(classes, dy.shape[1])
    if not out.numel():
        return out
    dy, device = _columns(dy), dy.device
    ids, order = torch.sort(_narrow(index, classes), stable=True)
    class_ids = torch.arange(classes + 1, device=device, dtype=ids.dtype)
    bounds = torch.searchsorted(ids, class_ids, out_int32=True)
    k = launch_config("embedding.backward", gather_config, device, rows=count, cols=cols)
    # about as many windows in the longest run as rows in a window
    window, steps = max(64, power_of_2(math.isqrt(count)) // 2), cdiv(cols, k.block)
    partial = dy.new_empty(count // window, cols, dtype=torch.float32)
    tile = (window, k.rows, k.block)
    if partial.shape[0]:
        launch(
            _embedding_windows_kernel,
            partial.shape[0] * steps,
            (dy, ids, order, partial, dy.stride(0), count, cols, steps),
            tile,
            k.num_warps,
        )
    launch(
        _embedding_backward_kernel,
        classes * steps,
        (
            dy,
            order,
            bounds,
            partial,
            out,
            dy.stride(0),
            cols,
            steps,
            padding_idx,
            rounded(scale, dy.dtype),
        ),
        tile,
        k.num_warps,
    )
    return out
