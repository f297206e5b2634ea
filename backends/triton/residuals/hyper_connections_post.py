"""Residual streams after a block of hyper-connections (arXiv:2512.24880): one pass each way.

    y[i] = post[i] out + sum over j of mix[i, j] x[j]

One stream after the other is added to all of y. The tiles are those of streams.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LONGEST_ROW,
    assume_cols,
    assume_rows,
    power_of_2,
    round_to,
)
from liger_multi.backends.triton.residuals.streams import as_outs, as_tiles, tile

MOST_KEPT = 8  # streams whose sums of all pairs a thread keeps


@triton.jit
def _partly(x, TALL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH sums of neighbors in a row; if there are WIDTH threads, each has its own neighbors."""
    return tl.sum(tl.reshape(x, [TALL, WIDTH, BLOCK // WIDTH]), axis=2)


@triton.jit
def _streams_post_kernel(
    x_ptr,
    out_ptr,
    post_ptr,
    mix_ptr,
    y_ptr,
    x_stride,
    stream_stride,
    out_stride,
    cols,
    pieces,
    N: tl.constexpr,
    TALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    address = y_ptr + row * N * cols + (i[:, None] * cols + col[None, :])
    tl.store(address, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _streams_post_backward_kernel(
    dy_ptr,
    x_ptr,
    out_ptr,
    post_ptr,
    mix_ptr,
    dx_ptr,
    dout_ptr,
    dpost_ptr,
    dmix_ptr,
    dy_stride,
    dy_stream_stride,
    x_stride,
    stream_stride,
    out_stride,
    cols,
    N: tl.constexpr,
    TALL: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
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
    dmix = tl.zeros([TALL, TALL, WIDTH], tl.float32)  # indices of streams j and i
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
                partials = _partly(dy * x[None, :], TALL, WIDTH, BLOCK)
                dmix = tl.where((i == j)[:, None, None], dmix + partials[None, :, :], dmix)
            if dx_ptr is not None:
                m = tl.load(mix_ptr + (i * N + j), mask=i < N, other=0.0)
                dx = tl.sum(m.to(tl.float32)[:, None] * dy, axis=0)
                address = dx_ptr + (row * N + j) * cols + col
                tl.store(address, round_to(dx, dx_ptr.dtype.element_ty), mask=inside)
    if dpost_ptr is not None:
        total = round_to(tl.sum(dpost, axis=1), dpost_ptr.dtype.element_ty)
        tl.store(dpost_ptr + row * N + i, total, mask=i < N)
    if dmix_ptr is not None:
        address = dmix_ptr + row * (N * N) + (i[None, :] * N + i[:, None])
        total = round_to(tl.sum(dmix, axis=2), dmix_ptr.dtype.element_ty)
        tl.store(address, total, mask=(i < N)[:, None] & (i < N)[None, :])


def width_of(streams: int, block: int, size: int) -> int:
    """Parts of a sum over columns that go on apart: one a thread, or a single one."""
    return max(1, block * size // 16) if power_of_2(streams) <= MOST_KEPT else 1


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


def backward(
    dy: Tensor,
    x: Tensor,
    out: Tensor,
    post: Tensor,
    mix: Tensor,
    needs_x: bool,
    needs_out: bool,
    needs_post: bool,
    needs_mix: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All four gradients."""
    pairs = ((x, needs_x), (out, needs_out), (post, needs_post), (mix, needs_mix))
    dx, dout, dpost, dmix = (t.new_empty(t.shape if is_needed else 0) for t, is_needed in pairs)
    outputs = [m if n else None for m, (_, n) in zip((dx, dout, dpost, dmix), pairs, strict=True)]
    if dy.numel():
        up, rows, outs = as_tiles(dy), as_tiles(x), as_outs(out)
        strides = (up.stride(0), up.stride(1), rows.stride(0), rows.stride(1), outs.stride(0))
        args = (up, rows, outs, post.contiguous(), mix.contiguous(), *outputs, *strides)
        constants, threads, _ = tile("hyper_connections_post.backward", rows)
        wide = width_of(rows.shape[1], constants[2], rows.element_size())
        args = (*args, rows.shape[2])
        launch(_streams_post_backward_kernel, rows.shape[0], args, (*constants, wide), threads)
    elif x.shape[-1] == 0:
        dpost.zero_(), dmix.zero_()
    return dx, dout, dpost, dmix
