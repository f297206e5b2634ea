"""Sparsemax of the last axis (arXiv:1602.02068), without sorting.

    y = max(x - tau, 0), where sum max(x - tau, 0) = 1

The sum is convex and falls with tau, so that Newton's method from ``max - 1``, which is not above
the root, comes to it from below and ends at it exactly: each step takes the elements above tau as
the support, and the support only shrinks. A tile of rows is read once; wider rows again a step,
from the cache. Backward is that of softmax.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common import as_rows, cdiv, round_to
from liger_multi.backends.triton.cross_entropy_walks import row_maximum
from liger_multi.backends.triton.launching import launch
from liger_multi.backends.triton.softmax import backward_of, tile_knobs
from liger_multi.launch import knobs


@triton.jit
def _sparsemax_forward_kernel(
    x_ptr, y_ptr, x_stride, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (first + row < rows)[:, None] & (col < cols)[None, :]
    x_offset = row[:, None] * x_stride + col[None, :]
    x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=float("-inf"))
    x = x.to(tl.float32)
    z = x - tl.max(x, axis=1)[:, None]
    tau = tl.full([ROWS], -1.0, tl.float32)
    before = tl.zeros([ROWS], tl.int32) + (cols + 1)
    going = 1
    while going > 0:
        above = z > tau[:, None]
        count = tl.sum(above.to(tl.int32), axis=1)
        tau = (tl.sum(tl.where(above, z, 0.0), axis=1) - 1.0) / count.to(tl.float32)
        going = tl.max((count < before).to(tl.int32), axis=0)
        before = count
    y = tl.where(z <= tau[:, None], 0.0, z - tau[:, None])  # NaN stays
    y_offset = row[:, None] * cols + col[None, :]
    tl.store(y_ptr + first * cols + y_offset, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sparsemax_forward_wide_kernel(x_ptr, y_ptr, x_stride, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * cols
    largest = row_maximum(x_ptr, cols, None, None, BLOCK)
    tau = -1.0
    before = cols + 1
    going = 1
    while going > 0:
        total = tl.zeros([BLOCK], tl.float32)
        counts = tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, cols, BLOCK):
            col = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + col, mask=col < cols, other=float("-inf"))
            z = x.to(tl.float32) - largest
            total += tl.where(z > tau, z, 0.0)
            counts += (z > tau).to(tl.int32)
        count = tl.sum(counts, axis=0)
        tau = (tl.sum(total, axis=0) - 1.0) / count.to(tl.float32)
        going = (count < before).to(tl.int32)
        before = count
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        z = x.to(tl.float32) - largest
        y = tl.where(z <= tau, 0.0, z - tau)
        tl.store(y_ptr + col, round_to(y, y_ptr.dtype.element_ty), mask=mask)


def forward(x: Tensor) -> Tensor:
    """The rows' projections on the simplex."""
    y, rows = x.new_empty(x.shape), as_rows(x)
    count, cols = rows.shape
    if not y.numel():
        return y
    k = knobs("sparsemax.forward", tile_knobs, x.device, rows=count, cols=cols, arrays=2)
    if k.block < cols:
        args = (rows, y, rows.stride(0), cols)
        launch(_sparsemax_forward_wide_kernel, count, args, (k.block,), k.num_warps)
        return y
    launch(
        _sparsemax_forward_kernel, cdiv(count, k.rows), (rows, y, rows.stride(0), count, cols),
        (k.rows, k.block), k.num_warps,
    )  # fmt: skip
    return y


def backward(dy: Tensor, y: Tensor) -> Tensor:
    """On the support, less the mean over it."""
    return backward_of(dy, y, True)
