"""Sparsemax of the last axis (arXiv:1602.02068), without sorting.

    y = max(x - tau, 0), where sum max(x - tau, 0) = 1

The sum is convex and falls with tau. Newton's method starts from ``max - 1``, which is not above
the root, approaches it from below and ends at it exactly: each step takes the elements above tau as
the support, and the support only shrinks. Divisions are rounded to nearest: where an element is at
tau, tau is that element, and the support leaves it out. A row is read once; a wider one once a
step, from the cache. Backward is that of softmax.py.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    as_rows,
    assume_cols,
    checked_cols,
    power_of_2,
    round_to,
    warps,
)
from liger_multi.backends.triton.cross_entropy.cross_entropy import row_maximum
from liger_multi.backends.triton.cross_entropy.softmax import backward_of
from liger_multi.dispatch.launch import DeviceInfo, launch_config


@dataclass(frozen=True)
class StepConfig:
    """Columns a step, one step where they hold the row, and warps a program."""

    block: int
    num_warps: int


def row_config(info: DeviceInfo, rows: int, cols: int) -> StepConfig:
    """16 columns a thread, up to 16384 in registers."""
    block = power_of_2(checked_cols(cols))
    if block > 16384:
        return StepConfig(8192, warps(info.max_threads, info.warp_size))
    return StepConfig(block, warps(min(max(block // 16, 32), info.max_threads), info.warp_size))


@triton.jit
def _sparsemax_forward_kernel(x_ptr, y_ptr, x_stride, cols, BLOCK: tl.constexpr):
    """Sparsemax of a row that fits into registers.

    Program: one row; reads x once, iterates tau in registers, writes y. Several rows a program
    would need a while loop over several tau, which Triton 3.3 cannot compile.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=float("-inf"))
    x = x.to(tl.float32)
    z = x - tl.max(x, axis=0)
    tau = -1.0
    going = 1
    while going > 0:  # the same support has the same sum: tau rises until it stays
        above = z > tau
        total = tl.sum(tl.where(above, z, 0.0), axis=0)
        higher = tl.div_rn(total - 1.0, tl.sum(above.to(tl.float32), axis=0))
        going = (higher > tau).to(tl.int32)
        tau = tl.where(higher > tau, higher, tau)
    y = tl.where(z <= tau, 0.0, z - tau)  # a NaN is kept
    tl.store(y_ptr + row * cols + col, round_to(y, y_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def _sparsemax_forward_wide_kernel(x_ptr, y_ptr, x_stride, cols, BLOCK: tl.constexpr):
    """The same for wider rows, in steps of BLOCK columns.

    Program: one row. It passes over the row for its maximum, once for each Newton step, and once to
    write y.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * cols
    assume_cols(cols)
    largest = row_maximum(x_ptr, cols, None, None, BLOCK)
    tau = -1.0
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
        higher = tl.div_rn(tl.sum(total, axis=0) - 1.0, tl.sum(counts, axis=0).to(tl.float32))
        going = (higher > tau).to(tl.int32)
        tau = tl.where(higher > tau, higher, tau)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        z = x.to(tl.float32) - largest
        y = tl.where(z <= tau, 0.0, z - tau)
        tl.store(y_ptr + col, round_to(y, y_ptr.dtype.element_ty), mask=mask)


def forward(x: Tensor) -> Tensor:
    """The rows' projections on the simplex."""
    y, x2d = x.new_empty(x.shape), as_rows(x)
    count, cols = x2d.shape
    if not y.numel():
        return y
    k = launch_config("sparsemax.forward", row_config, x.device, rows=count, cols=cols)
    wide = k.block < cols
    kernel = _sparsemax_forward_wide_kernel if wide else _sparsemax_forward_kernel
    launch(kernel, count, (x2d, y, x2d.stride(0), cols), (k.block,), k.num_warps)
    return y


def backward(dy: Tensor, y: Tensor) -> Tensor:
    """Subtract from dy its mean over the support; the gradient is 0 outside of it."""
    return backward_of(dy, y, True)
