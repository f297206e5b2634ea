"""The weighted sum of residual streams before a block (arXiv:2512.24880): one pass each way.

    y = sum over i of pre[i] x[i]

The tiles are those of streams.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import LONGEST_ROW, assume_cols, assume_rows, round_to
from liger_multi.backends.triton.residuals.streams import as_outs, as_tiles, tile


@triton.jit
def _streams_pre_kernel(
    x_ptr,
    pre_ptr,
    y_ptr,
    x_stride,
    stream_stride,
    cols,
    pieces,
    N: tl.constexpr,
    TALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighted sum of the streams before a block: y = sum over i of pre[i] x[i].

    Program: BLOCK columns of one row, of all N streams (padded to TALL); reads x, writes y.
    """
    row = (tl.program_id(0) // pieces).to(tl.int64)
    start, i = (tl.program_id(0) % pieces) * BLOCK, tl.arange(0, TALL)
    assume_rows(x_ptr, stream_stride, TALL)
    assume_cols(start, LONGEST_ROW // TALL - BLOCK)
    pre = tl.load(pre_ptr + row * N + i, mask=i < N, other=0.0).to(tl.float32)
    col = start + tl.arange(0, BLOCK)
    mask = (i < N)[:, None] & (col < cols)[None, :]
    at = x_ptr + row * x_stride + (i[:, None] * stream_stride + col[None, :])
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    y = round_to(tl.sum(pre[:, None] * x, axis=0), y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * cols + col, y, mask=col < cols)


@triton.jit
def _streams_pre_backward_kernel(
    dy_ptr,
    x_ptr,
    pre_ptr,
    dx_ptr,
    dpre_ptr,
    dy_stride,
    x_stride,
    stream_stride,
    cols,
    N: tl.constexpr,
    TALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of the weighted sum: dx[i] = pre[i] dy, dpre[i] = sum over columns of x[i] dy.

    Program: one row, in steps of BLOCK columns of all streams; reads dy, and x if dpre is needed.
    The sums for dpre are reduced over lanes once, at the row's end.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TALL)
    pre = tl.load(pre_ptr + row * N + i, mask=i < N, other=0.0).to(tl.float32)
    assume_rows(x_ptr, stream_stride, TALL)
    assume_rows(dx_ptr, cols, TALL)
    x_ptr += row * x_stride
    dy_ptr += row * dy_stride
    share = tl.zeros([TALL, BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        assume_cols(start, LONGEST_ROW // TALL - BLOCK)
        col = start + tl.arange(0, BLOCK)
        mask = (i < N)[:, None] & (col < cols)[None, :]
        dy = tl.load(dy_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        if dpre_ptr is not None:
            at = x_ptr + (i[:, None] * stream_stride + col[None, :])
            share += tl.load(at, mask=mask, other=0.0).to(tl.float32) * dy[None, :]
        if dx_ptr is not None:
            dx = round_to(pre[:, None] * dy[None, :], dx_ptr.dtype.element_ty)
            address = dx_ptr + row * N * cols + (i[:, None] * cols + col[None, :])
            tl.store(address, dx, mask=mask)
    if dpre_ptr is not None:
        dpre = round_to(tl.sum(share, axis=1), dpre_ptr.dtype.element_ty)
        tl.store(dpre_ptr + row * N + i, dpre, mask=i < N)


def forward(x: Tensor, pre: Tensor) -> Tensor:
    """``y = sum of pre[i] x[i]``."""
    y = x.new_empty((*x.shape[:-2], x.shape[-1]))
    if y.numel():
        rows = as_tiles(x)
        constants, threads, pieces = tile("hyper_connections_pre.forward", rows)
        args = (
            rows,
            pre.contiguous(),
            y,
            rows.stride(0),
            rows.stride(1),
            rows.shape[2],
            pieces,
        )
        launch(_streams_pre_kernel, rows.shape[0] * pieces, args, constants, threads)
    return y


def backward(
    dy: Tensor, x: Tensor, pre: Tensor, needs_x: bool, needs_pre: bool
) -> tuple[Tensor, Tensor]:
    """Both gradients."""
    dx = x.new_empty(x.shape if needs_x else 0)
    dpre = pre.new_zeros(pre.shape if needs_pre else 0)
    if dy.numel() and (needs_x or needs_pre):
        rows, up = as_tiles(x), as_outs(dy)
        args = (
            up,
            rows,
            pre.contiguous(),
            dx if needs_x else None,
            dpre if needs_pre else None,
            up.stride(0),
            rows.stride(0),
            rows.stride(1),
            rows.shape[2],
        )
        constants, threads, _ = tile("hyper_connections_pre.backward", rows)
        launch(_streams_pre_backward_kernel, rows.shape[0], args, constants, threads)
    return dx, dpre
