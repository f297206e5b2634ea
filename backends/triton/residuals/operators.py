"""Residual streams before and after a block of hyper-connections (arXiv:2512.24880).

A tile has all streams of some columns, which are read once in forward and once in backward. A
thread has the same columns of every stream, so that sums over streams stay within it. Forward gives
a program one tile, backward one row. In ``y[i] = post[i] out + sum over j of mix[i, j] x[j]``, one
stream after the other is added to all. The sums over columns that gradients of coefficients need
stay in registers until the row ends: no atomic additions. The number of rows is a run-time number,
that of streams a kernel's constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LONGEST_ROW,
    assume_cols,
    assume_rows,
    cdiv,
    checked_cols,
    power_of_2,
    round_to,
    tile_rows,
    warps,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config

# --- kernels ---

LARGEST = 4096  # elements of a tile
MOST_KEPT = 8  # streams whose sums of all pairs a thread keeps


@dataclass(frozen=True)
class StreamConfig:
    """All streams of ``block`` columns a step."""

    block: int
    num_warps: int


def stream_config(info: DeviceInfo, streams: int, cols: int, size: int) -> StreamConfig:
    """Columns that 128 threads load by 16 bytes each; fewer of both where streams are many."""
    each = 16 // size
    most = min(128 * each, LARGEST // power_of_2(streams))
    block = max(16, min(power_of_2(checked_cols(cols)), most))
    return StreamConfig(block, warps(max(32, block // each), info.warp_size))


@triton.jit
def _partly(x, TALL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH sums of neighbors in a row; if there are WIDTH threads, each has its own neighbors."""
    return tl.sum(tl.reshape(x, [TALL, WIDTH, BLOCK // WIDTH]), axis=2)


@triton.jit
def _streams_pre_kernel(
    x_ptr, pre_ptr, y_ptr, x_stride, stream_stride, cols, pieces, N: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    dy_ptr, x_ptr, pre_ptr, dx_ptr, dpre_ptr, dy_stride, x_stride, stream_stride, cols,
    N: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the weighted sum: dx[i] = pre[i] dy, dpre[i] = sum over columns of x[i] dy.

    Program: one row, in steps of BLOCK columns of all streams; reads dy, and x if dpre is wanted.
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
            room = dx_ptr + row * N * cols + (i[:, None] * cols + col[None, :])
            tl.store(room, dx, mask=mask)
    if dpre_ptr is not None:
        dpre = round_to(tl.sum(share, axis=1), dpre_ptr.dtype.element_ty)
        tl.store(dpre_ptr + row * N + i, dpre, mask=i < N)


@triton.jit
def _streams_post_kernel(
    x_ptr, out_ptr, post_ptr, mix_ptr, y_ptr, x_stride, stream_stride, out_stride, cols, pieces,
    N: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Streams after a block: y[i] = post[i] out + sum over j of mix[i, j] x[j].

    Program: BLOCK columns of one row. All outputs i stay in registers while the streams j are
    loaded one after the other.
    """
    row = (tl.program_id(0) // pieces).to(tl.int64)
    start, i = (tl.program_id(0) % pieces) * BLOCK, tl.arange(0, TALL)
    assume_rows(y_ptr, cols, TALL)
    assume_cols(start, LONGEST_ROW // TALL - BLOCK)
    col = start + tl.arange(0, BLOCK)
    x_ptr += row * x_stride
    mix_ptr += row * (N * N)
    post = tl.load(post_ptr + row * N + i, mask=i < N, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + row * out_stride + col, mask=col < cols, other=0.0).to(tl.float32)
    y = post[:, None] * out[None, :]
    for j in tl.static_range(N):
        x = tl.load(x_ptr + j * stream_stride + col, mask=col < cols, other=0.0).to(tl.float32)
        m = tl.load(mix_ptr + (i * N + j), mask=i < N, other=0.0).to(tl.float32)
        y += m[:, None] * x[None, :]
    mask = (i < N)[:, None] & (col < cols)[None, :]
    room = y_ptr + row * N * cols + (i[:, None] * cols + col[None, :])
    tl.store(room, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _streams_post_backward_kernel(
    dy_ptr, x_ptr, out_ptr, post_ptr, mix_ptr, dx_ptr, dout_ptr, dpost_ptr, dmix_ptr, dy_stride,
    dy_stream_stride, x_stride, stream_stride, out_stride, cols, N: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of the streams, of the block's output, and of post and mix.

    Program: one row, in steps of BLOCK columns. Each step reads dy of all streams, out, and x of
    one stream j after the other; it writes dout and dx[j].
    The sums for dpost and dmix keep WIDTH lanes each in registers and are reduced once, at the
    row's end. ``tl.where`` picks row j of dmix, since registers cannot be indexed by a number.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TALL)
    post = tl.load(post_ptr + row * N + i, mask=i < N, other=0.0).to(tl.float32)
    assume_rows(dy_ptr, dy_stream_stride, TALL)
    dy_ptr += row * dy_stride
    x_ptr += row * x_stride
    out_ptr += row * out_stride
    mix_ptr += row * (N * N)
    dpost = tl.zeros([TALL, WIDTH], tl.float32)
    dmix = tl.zeros([TALL, TALL, WIDTH], tl.float32)  # of streams j, i
    for start in tl.range(0, cols, BLOCK):
        assume_cols(start, LONGEST_ROW // TALL - BLOCK)
        col = start + tl.arange(0, BLOCK)
        inside, mask = col < cols, (i < N)[:, None] & (col < cols)[None, :]
        at = dy_ptr + (i[:, None] * dy_stream_stride + col[None, :])
        dy = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if dout_ptr is not None:
            dout = round_to(tl.sum(post[:, None] * dy, axis=0), dout_ptr.dtype.element_ty)
            tl.store(dout_ptr + row * cols + col, dout, mask=inside)
        if dpost_ptr is not None:
            out = tl.load(out_ptr + col, mask=inside, other=0.0).to(tl.float32)
            dpost += _partly(dy * out[None, :], TALL, WIDTH, BLOCK)
        for j in tl.static_range(N):
            if dmix_ptr is not None:
                place = x_ptr + j * stream_stride + col
                x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
                found = _partly(dy * x[None, :], TALL, WIDTH, BLOCK)
                dmix = tl.where((i == j)[:, None, None], dmix + found[None, :, :], dmix)
            if dx_ptr is not None:
                m = tl.load(mix_ptr + (i * N + j), mask=i < N, other=0.0)
                dx = tl.sum(m.to(tl.float32)[:, None] * dy, axis=0)
                room = dx_ptr + (row * N + j) * cols + col
                tl.store(room, round_to(dx, dx_ptr.dtype.element_ty), mask=inside)
    if dpost_ptr is not None:
        total = round_to(tl.sum(dpost, axis=1), dpost_ptr.dtype.element_ty)
        tl.store(dpost_ptr + row * N + i, total, mask=i < N)
    if dmix_ptr is not None:
        room = dmix_ptr + row * (N * N) + (i[None, :] * N + i[:, None])
        total = round_to(tl.sum(dmix, axis=2), dmix_ptr.dtype.element_ty)
        tl.store(room, total, mask=(i < N)[:, None] & (i < N)[None, :])


def as_tiles(x: Tensor) -> Tensor:
    """View (or copy) ``(..., N, C)`` as ``(rows, N, C)`` with adjacent columns, streams near."""
    rows = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
    tall = power_of_2(checked_cols(rows.shape[1] * rows.shape[2]) and rows.shape[1])
    near = tile_rows(tall, rows.stride(1)) == tall
    return rows if near and (rows.stride(2) == 1 or rows.shape[2] == 1) else rows.contiguous()


def as_outs(x: Tensor) -> Tensor:
    """View (or copy) ``(..., C)`` as ``(rows, C)`` with adjacent columns."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def tile(name: str, rows: Tensor) -> tuple[tuple[int, int, int], int, int]:
    """Constants of a launch over rows of streams (rows, N, C), its warps, and pieces of a row."""
    _, streams, cols = rows.shape
    sizes = {"streams": streams, "cols": cols, "size": rows.element_size()}
    k = launch_config(name, stream_config, rows.device, **sizes)
    return (streams, power_of_2(streams), k.block), k.num_warps, cdiv(cols, k.block)


def width_of(streams: int, block: int, size: int) -> int:
    """Parts of a sum over columns that go on apart: one a thread, or a single one."""
    return max(1, block * size // 16) if power_of_2(streams) <= MOST_KEPT else 1


# --- before a block ---


class HyperConnectionsPre:
    """The weighted sum of residual streams: one pass each way."""

    @staticmethod
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

    @staticmethod
    def backward(
        dy: Tensor, x: Tensor, pre: Tensor, needs_x: bool, needs_pre: bool
    ) -> tuple[Tensor, Tensor]:
        """Both gradients."""
        dx = x.new_empty(x.shape if needs_x else 0)
        dpre = pre.new_zeros(pre.shape if needs_pre else 0)
        if dy.numel() and (needs_x or needs_pre):
            rows, up = as_tiles(x), as_outs(dy)
            args = (
                up, rows, pre.contiguous(), dx if needs_x else None, dpre if needs_pre else None,
                up.stride(0), rows.stride(0), rows.stride(1), rows.shape[2],
            )  # fmt: skip
            constants, threads, _ = tile("hyper_connections_pre.backward", rows)
            launch(_streams_pre_backward_kernel, rows.shape[0], args, constants, threads)
        return dx, dpre


# --- after a block ---


class HyperConnectionsPost:
    """Residual streams after a block: one pass each way."""

    @staticmethod
    def forward(x: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        """``y[i] = post[i] out + sum of mix[i, j] x[j]``."""
        y = x.new_empty(x.shape)
        if y.numel():
            rows, outs = as_tiles(x), as_outs(out)
            constants, threads, pieces = tile("hyper_connections_post.forward", rows)
            sizes = (rows.stride(0), rows.stride(1), outs.stride(0), rows.shape[2], pieces)
            args = (rows, outs, post.contiguous(), mix.contiguous(), y, *sizes)
            launch(_streams_post_kernel, rows.shape[0] * pieces, args, constants, threads)
        return y

    @staticmethod
    def backward(
        dy: Tensor, x: Tensor, out: Tensor, post: Tensor, mix: Tensor, needs_x: bool,
        needs_out: bool, needs_post: bool, needs_mix: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """All four gradients."""
        pairs = ((x, needs_x), (out, needs_out), (post, needs_post), (mix, needs_mix))
        dx, dout, dpost, dmix = (t.new_empty(t.shape if needed else 0) for t, needed in pairs)
        made = [m if n else None for m, (_, n) in zip((dx, dout, dpost, dmix), pairs, strict=True)]
        if dy.numel():
            up, rows, outs = as_tiles(dy), as_tiles(x), as_outs(out)
            strides = (up.stride(0), up.stride(1), rows.stride(0), rows.stride(1), outs.stride(0))
            args = (up, rows, outs, post.contiguous(), mix.contiguous(), *made, *strides)
            constants, threads, _ = tile("hyper_connections_post.backward", rows)
            wide = width_of(rows.shape[1], constants[2], rows.element_size())
            args = (*args, rows.shape[2])
            launch(_streams_post_backward_kernel, rows.shape[0], args, (*constants, wide), threads)
        elif x.shape[-1] == 0:
            dpost.zero_(), dmix.zero_()
        return dx, dout, dpost, dmix


OPERATORS = {
    "hyper_connections_pre": HyperConnectionsPre,
    "hyper_connections_post": HyperConnectionsPost,
}
