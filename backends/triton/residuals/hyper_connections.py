"""Coefficients of hyper-connections: a GEMM with few columns, sigmoids, Sinkhorn's iteration.

The GEMM is bound by the streams that it reads. So forward adds up the norm's sum of squares in the
same pass, and backward reads the streams once for both gradients. Factors are split into bf16
parts, whose sum is the fp32 number: each has 8 of its bits, so that a stream in bf16 is one part,
and matrix units multiply parts exactly. Rows are few for their length, so forward cuts them into
chunks of columns, and backward cuts the rows into chunks. Sums leave as one fp32 partial a chunk,
added in a fixed order.

Sigmoids and Sinkhorn's iteration are one launch each way. A program owns some rows, each with its N
by N matrix in registers. Backward computes the iterates again, writes them to a buffer of its own
and reads them back in reverse order. Sums of rows and columns that are masked are 1.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LOG2E,
    LONGEST_ROW,
    add_dot,
    assume_cols,
    assume_rows,
    bf16_parts,
    cdiv,
    checked_cols,
    power_of_2,
    round_to,
    sigmoid,
    sum_partials,
    warps,
)
from liger_multi.backends.triton.experts.grouped import dot
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.common.strict import by_rows
from liger_multi.reference.residuals import hyper_connections as reference
from liger_multi.reference.residuals.hyper_connections import (
    SinkhornOptions,
    implement_hyper_connections,
)

# --- the product ---

SUMMED = 512  # logits of a program that adds chunks
MOST_OUTPUTS = 128  # of a tile; ten streams have 120
# a tile's rows of so many fp32 stay below 2 GiB
MOST_COLS: tl.constexpr = tl.constexpr(2**22 - 2**16)


@dataclass(frozen=True)
class MixConfig:
    """``rows`` rows by ``block`` columns a step; ``chunks`` parts of a row, backward of the rows.

    ``library``: PyTorch's GEMMs in backward, as in the reference.
    """

    rows: int
    block: int
    stages: int
    num_warps: int
    chunks: int
    library: bool = False


MOST_CHUNKS = 8  # of a row's sum, where their number must not follow the rows


def _padded_outputs(outputs: int) -> int:
    return max(16, power_of_2(outputs))


def _stages(info: DeviceInfo, tile: int, outputs: int, block: int, limit: int) -> int:
    """Steps in flight, of fp32 streams and weights, in half of the on-chip memory."""
    return max(
        1, min(limit, info.shared_bytes // 2 // (4 * block * (tile + _padded_outputs(outputs))))
    )


def _threads(outputs: int) -> int:
    return 256 if _padded_outputs(outputs) > 32 else 128


def mix_config(info: DeviceInfo, rows: int, cols: int, outputs: int, size: int) -> MixConfig:
    """Steps of 8 KiB of streams, at most four under way; of 4 KiB where outputs are many.

    About eight programs a core, of eight steps at least. A fourth step of fp32 under way would
    spill on cores that have memory for it (ci.static, triton 3.9).
    """
    tile, wide = 64, _padded_outputs(outputs) > 32
    block = 32 if wide else min(power_of_2(checked_cols(cols)), 8192 // (tile * size))
    block, limit = max(32, block), 4 if size == 2 else 3
    stages = _stages(info, tile, outputs, block, limit)
    limit = MOST_CHUNKS if by_rows() else 8 * info.cores // cdiv(rows, tile)
    chunks = max(1, min(cdiv(cols, 8 * block), limit))
    return MixConfig(tile, block, stages, warps(_threads(outputs), info.warp_size), chunks)


def mix_gradient_config(
    info: DeviceInfo, rows: int, cols: int, outputs: int, size: int
) -> MixConfig:
    """Tiles of the weight's gradient as large as registers hold, about eight programs a core.

    Cores of little memory would keep steps under way in registers, which then spill.
    """
    tall, large = _padded_outputs(outputs), info.shared_bytes > 2**16
    area = 1024 if not large else 2048 if size == 2 else 512
    block = max(32, min(power_of_2(checked_cols(cols)), area // tall))
    chunks = max(1, min(cdiv(rows, 256), 8 * info.cores // max(1, cdiv(cols, block))))
    # fp32 has three times the parts
    tile, limit = 16 if tall > 32 else 64 // size, 4 if size == 2 else 3
    stages = _stages(info, tile, 0, block, limit if large else 1)
    return MixConfig(tile, block, stages, warps(_threads(outputs), info.warp_size), chunks)


@triton.jit
def _exact_dot(a, b, total, A: tl.constexpr, B: tl.constexpr, DEPTH: tl.constexpr):
    """``total + a @ b`` from A and B parts, without the GEMMs of parts i and j where i + j > DEPTH.

    What is left out is 2^(-8 (DEPTH + 1)) of the result.
    """
    a0, a1, a2 = bf16_parts(a)
    b0, b1, b2 = bf16_parts(b)
    total = dot(a0, b0, total)
    if B > 1:
        total = add_dot(a0, b1, total)
    if A > 1:
        total = add_dot(a1, b0, total)
    if DEPTH > 1:
        if A > 1 and B > 1:
            total = add_dot(a1, b1, total)
        if B > 2:
            total = add_dot(a0, b2, total)
        if A > 2:
            total = add_dot(a2, b0, total)
    return total


@triton.jit
def _mixes_kernel(
    x_ptr,
    w_ptr,
    partial_ptr,
    squares_ptr,
    x_stride,
    rows,
    cols,
    outputs,
    per,
    row_tiles,
    X: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Partial sums of x w' and of squares of x, over a chunk of columns of some rows.

    Program: ROWS rows and ``per`` columns, BLOCK at a time; reads x once for both sums. Writes one
    fp32 partial of each, (chunks, rows, outputs) and (chunks, rows).
    """
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(w_ptr, cols, OUTPUTS)
    assume_rows(partial_ptr, outputs, ROWS)
    assume_cols(cols, MOST_COLS)
    chunk = tl.program_id(0) // row_tiles
    row = (tl.program_id(0) % row_tiles).to(tl.int64) * ROWS
    stop = tl.minimum(per, cols - chunk * per)
    assume_cols(stop, MOST_COLS)
    r, o, c = tl.arange(0, ROWS), tl.arange(0, OUTPUTS), tl.arange(0, BLOCK)
    inside = row + r < rows
    x_ptr += row * x_stride + chunk * per
    w_ptr += chunk * per
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, stop, BLOCK, num_stages=STAGES):
        col = start + c
        x_mask = inside[:, None] & (col < stop)[None, :]
        x = tl.load(x_ptr + (r[:, None] * x_stride + col[None, :]), mask=x_mask, other=0.0)
        w_mask = (o < outputs)[:, None] & (col < stop)[None, :]
        w = tl.load(w_ptr + (o[:, None] * cols + col[None, :]), mask=w_mask, other=0.0)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        total = _exact_dot(x, tl.trans(w), total, X, W, 2)
    row += chunk.to(tl.int64) * rows
    tl.store(squares_ptr + row + r, squares, mask=inside)
    place = partial_ptr + row * outputs + (r[:, None] * outputs + o[None, :])
    tl.store(place, total, mask=inside[:, None] & (o < outputs)[None, :])


@triton.jit
def _mixes_sum_kernel(
    partial_ptr,
    squares_ptr,
    mixes_ptr,
    rstd_ptr,
    rows,
    cols,
    outputs,
    chunks,
    eps,
    BLOCK: tl.constexpr,
):
    """Add the chunks in order and apply the norm.

    Program: BLOCK elements of (rows, outputs), taken as one long row; writes them times rstd. The
    element of output 0 writes the row's rstd.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, mask = place // outputs, place < rows * outputs
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for _chunk in tl.range(0, chunks):
        total += tl.load(partial_ptr + place, mask=mask, other=0.0)
        squares += tl.load(squares_ptr + row, mask=mask, other=0.0)
        partial_ptr += rows * outputs
        squares_ptr += rows
    rstd = tl.rsqrt(squares / cols + eps)
    tl.store(rstd_ptr + row, rstd, mask=mask & (place == row * outputs))
    tl.store(mixes_ptr + place, total * rstd, mask=mask)


@triton.jit
def _mixes_backward_kernel(
    x_ptr,
    w_ptr,
    d_ptr,
    own_ptr,
    dx_ptr,
    partial_ptr,
    x_stride,
    rows,
    cols,
    outputs,
    per,
    col_steps,
    X: tl.constexpr,
    W: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient of x, and partial sums of the weight's, for a chunk of rows and a block of columns.

    Program: ``per`` rows, ROWS at a time, by BLOCK columns; the weight's block stays in registers.
    Reads x and d once for both gradients. Writes dx = d w - own x, the second term being that of
    the norm, and one fp32 partial of the weight's gradient.
    """
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(w_ptr, cols, OUTPUTS)
    assume_rows(dx_ptr, cols, ROWS)
    assume_rows(d_ptr, outputs, ROWS)
    assume_cols(cols, MOST_COLS)
    chunk = tl.program_id(0) // col_steps
    start = (tl.program_id(0) % col_steps) * BLOCK
    assume_cols(start, MOST_COLS)
    col = start + tl.arange(0, BLOCK)
    r, o = tl.arange(0, ROWS), tl.arange(0, OUTPUTS)
    w_mask = (o < outputs)[:, None] & (col < cols)[None, :]
    w_place = o[:, None] * cols + col[None, :]
    w = tl.load(w_ptr + w_place, mask=w_mask, other=0.0)
    dw = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    first = chunk.to(tl.int64) * per
    left = tl.minimum(per, rows - first).to(tl.int32)
    for start in tl.range(0, left, ROWS, num_stages=STAGES):
        at = first + start
        inside = start + r < left
        x_mask = inside[:, None] & (col < cols)[None, :]
        d_mask = inside[:, None] & (o < outputs)[None, :]
        x_place = r[:, None] * x_stride + col[None, :]
        x = tl.load(x_ptr + at * x_stride + x_place, mask=x_mask, other=0.0)
        d_place = r[:, None] * outputs + o[None, :]
        d = tl.load(d_ptr + at * outputs + d_place, mask=d_mask, other=0.0)
        if partial_ptr is not None:
            dw = _exact_dot(tl.trans(d), x, dw, 3, X, 2)
        if dx_ptr is not None:
            own = tl.load(own_ptr + at + r, mask=inside, other=0.0)
            dx = _exact_dot(d, w, x.to(tl.float32) * -own[:, None], 3, W, DEPTH)
            offset = r[:, None] * cols + col[None, :]
            tl.store(
                dx_ptr + at * cols + offset, round_to(dx, dx_ptr.dtype.element_ty), mask=x_mask
            )
    if partial_ptr is not None:
        partial_ptr += chunk.to(tl.int64) * outputs * cols
        tl.store(partial_ptr + w_place, dw, mask=w_mask)


def _digits(x: Tensor) -> int:
    """Parts of bf16 that hold the digits of a number: 8 of bf16, 11 of fp16, 24 of fp32."""
    return {torch.bfloat16: 1, torch.float16: 2}.get(x.dtype, 3)


def mixes(rows: Tensor, weight: Tensor, rms_eps: float) -> tuple[Tensor, Tensor]:
    """``W v rstd`` and rstd of every row v, in fp32."""
    if not rows.numel():
        return reference.mixes(rows, weight, rms_eps)
    (count, cols), outputs = rows.shape, weight.shape[0]
    rows, weight = rows.contiguous(), weight.contiguous()
    out = rows.new_empty(count, outputs, dtype=torch.float32)
    rstd = rows.new_empty(count, dtype=torch.float32)
    shape = {"rows": count, "cols": cols, "outputs": outputs, "size": rows.element_size()}
    k = launch_config("hyper_mixes.forward", mix_config, rows.device, **shape)
    tiles, cols_per_chunk = cdiv(count, k.rows), cdiv(cdiv(cols, k.chunks), k.block) * k.block
    chunks, tall = cdiv(cols, cols_per_chunk), _padded_outputs(outputs)
    partial, squares = out.new_empty(chunks, count * outputs), out.new_empty(chunks, count)
    args = (
        rows,
        weight,
        partial,
        squares,
        rows.stride(0),
        count,
        cols,
        outputs,
        cols_per_chunk,
        tiles,
    )
    constants = (_digits(rows), _digits(weight), k.rows, tall, k.block, k.stages)
    launch(_mixes_kernel, chunks * tiles, args, constants, k.num_warps)
    sums = (partial, squares, out, rstd, count, cols, outputs, chunks, rms_eps)
    launch(_mixes_sum_kernel, cdiv(count * outputs, SUMMED), sums, (SUMMED,), 4)
    return out, rstd


def mixes_gradients(
    rows: Tensor, weight: Tensor, d: Tensor, row_scale: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """Both gradients; the streams are read once."""
    if not rows.numel() or not (needs_x or needs_weight):
        return reference.mixes_gradients(rows, weight, d, row_scale, needs_x, needs_weight)
    (count, cols), outputs = rows.shape, weight.shape[0]
    rows, weight = rows.contiguous(), weight.contiguous()
    shape = {"rows": count, "cols": cols, "outputs": outputs, "size": rows.element_size()}
    k = launch_config("hyper_mixes.backward", mix_gradient_config, rows.device, **shape)
    if k.library and not by_rows():
        return reference.mixes_gradients(rows, weight, d, row_scale, needs_x, needs_weight)
    rows_per_chunk, steps = cdiv(cdiv(count, k.chunks), k.rows) * k.rows, cdiv(cols, k.block)
    chunks = cdiv(count, rows_per_chunk)
    dx = rows.new_empty(rows.shape) if needs_x else None
    partial = d.new_empty(chunks, outputs * cols) if needs_weight else None
    args = (rows, weight, d.contiguous(), row_scale.contiguous(), dx, partial)
    sizes = (rows.stride(0), count, cols, outputs, rows_per_chunk, steps)
    depth = 1 if rows.element_size() == 2 else 2
    tile = (
        _digits(rows),
        _digits(weight),
        depth,
        k.rows,
        _padded_outputs(outputs),
        k.block,
        k.stages,
    )
    launch(_mixes_backward_kernel, chunks * steps, (*args, *sizes), tile, k.num_warps)
    dweight = weight.new_empty(0)
    if partial is not None:
        dweight = sum_partials(partial, weight.dtype).view(weight.shape)
    return rows.new_empty(0) if dx is None else dx, dweight


# --- sigmoids, and Sinkhorn's iteration ---


@dataclass(frozen=True)
class SinkhornConfig:
    """``rows`` rows a program."""

    rows: int
    num_warps: int


def sinkhorn_config(info: DeviceInfo, streams: int) -> SinkhornConfig:
    """Matrices of about 256 elements together for one warp: their sums need no other."""
    return SinkhornConfig(max(1, 256 // power_of_2(streams) ** 2), 1)


@triton.jit
def _softmax_rows(z, mask):
    """Softmax over the last axis of (rows, N, N), with 0 where masked and for a row of -inf."""
    top = tl.max(tl.where(mask, z, -float("inf")), axis=2)
    p = tl.where(mask, tl.exp2((z - tl.where(top == top, top, 0.0)[:, :, None]) * LOG2E), 0.0)
    total = tl.sum(p, axis=2)
    return p / tl.where(total > 0, total, 1.0)[:, :, None]


@triton.jit
def _divide(m, COLUMNS: tl.constexpr, eps, mask):
    """One normalization of Sinkhorn's iteration, by the sums of columns or of rows, and those sums.

    The sums have the shape of m and are 1 where masked.
    """
    if COLUMNS:
        total = (tl.sum(m, axis=1) + eps)[:, None, :] + tl.zeros_like(m)
    else:
        total = (tl.sum(m, axis=2) + eps)[:, :, None] + tl.zeros_like(m)
    total = tl.where(mask, total, 1.0)
    return m / total, total


@triton.jit
def _logits(m, bias_ptr, scale_ptr, at, mask, PART: tl.constexpr):
    """Logits bias + m * scale of one of the three parts, and the part's scale."""
    scale = tl.load(scale_ptr + PART).to(tl.float32)
    return tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32) + m * scale, scale


@triton.jit(do_not_specialize=["rows"])
def _sinkhorn_kernel(
    m_ptr,
    bias_ptr,
    scale_ptr,
    pre_ptr,
    post_ptr,
    mix_ptr,
    rows,
    steps,
    eps,
    post_scale,
    N: tl.constexpr,
    TALL: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Coefficients pre, post and mix of some rows.

    Program: ROWS rows of N (N + 2) numbers, the matrix padded from N to TALL.
    Reads them, a bias for each and a scale for each part. Writes pre = sigmoid + eps, post =
    sigmoid times ``post_scale``, and mix: the softmax plus eps, divided by its column sums, then
    ``steps`` - 1 times by its row sums and column sums (Sinkhorn).
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, i = tl.arange(0, ROWS), tl.arange(0, TALL)
    inside = (first + row < rows)[:, None] & (i < N)[None, :]
    mask = inside[:, :, None] & (i < N)[None, None, :]
    m_ptr += first * (N * (N + 2))
    pair, wide = row[:, None] * N + i[None, :], row[:, None] * (N * (N + 2)) + i[None, :]
    m = tl.load(m_ptr + wide, mask=inside, other=0.0)
    z, _ = _logits(m, bias_ptr, scale_ptr, i[None, :], (i < N)[None, :], 0)
    tl.store(pre_ptr + first * N + pair, sigmoid(z) + eps, mask=inside)
    m = tl.load(m_ptr + N + wide, mask=inside, other=0.0)
    z, _ = _logits(m, bias_ptr + N, scale_ptr, i[None, :], (i < N)[None, :], 1)
    tl.store(post_ptr + first * N + pair, sigmoid(z) * post_scale, mask=inside)
    at = (i[:, None] * N + i[None, :])[None, :, :]
    row = row[:, None, None]
    m = tl.load(m_ptr + 2 * N + (row * (N * (N + 2)) + at), mask=mask, other=0.0)
    both = ((i < N)[:, None] & (i < N)[None, :])[None, :, :]
    z, _ = _logits(m, bias_ptr + 2 * N, scale_ptr, at, both, 2)
    m = tl.where(mask, _softmax_rows(z, mask) + eps, 0.0)
    m, _ = _divide(m, True, eps, mask)
    for _step in tl.range(1, steps):
        m, _ = _divide(m, False, eps, mask)
        m, _ = _divide(m, True, eps, mask)
    tl.store(mix_ptr + first * (N * N) + (row * (N * N) + at), m, mask=mask)


@triton.jit
def _undivide(d, m, total, COLUMNS: tl.constexpr):
    """Gradient of the input of one normalization, from its result m and its sums."""
    if COLUMNS:
        share = tl.sum(d * m, axis=1)[:, None, :]
    else:
        share = tl.sum(d * m, axis=2)[:, :, None]
    return (d - share) / total


@triton.jit
def _sinkhorn_backward_kernel(
    m_ptr,
    bias_ptr,
    scale_ptr,
    rstd_ptr,
    dpre_ptr,
    dpost_ptr,
    dmix_ptr,
    d_ptr,
    own_ptr,
    sums_ptr,
    kept_ptr,
    rows,
    steps,
    eps,
    post_scale,
    length,
    wide_sums,
    N: tl.constexpr,
    TALL: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of m, times rstd; the norm's own term; and partial sums for bias and scale.

    Program: ROWS rows. First pre and post, whose sigmoids are elementwise. Then mix: Sinkhorn's
    iterates are computed again and stored in ``kept_ptr``, then read in reverse order, one
    normalization at a time, and last the softmax. The barrier makes the iterates visible to all
    threads.
    ``own_ptr`` gets sum(d m) rstd^2 / length: the factor of x in the gradient through the norm.
    ``sums_ptr`` gets one fp32 row a program: the gradients of the biases, then those of the scales.
    """
    assume_cols(steps, LONGEST_ROW // (2 * ROWS * N * N))
    base = tl.program_id(0).to(tl.int64) * ROWS
    row, i = tl.arange(0, ROWS), tl.arange(0, TALL)
    inside = (base + row < rows)[:, None] & (i < N)[None, :]
    mask = inside[:, :, None] & (i < N)[None, None, :]
    m_ptr += base * (N * (N + 2))
    d_ptr += base * (N * (N + 2))
    if sums_ptr is not None:
        sums_ptr += tl.program_id(0).to(tl.int64) * wide_sums
    rstd = tl.load(rstd_ptr + base + row, mask=base + row < rows, other=0.0)
    own = tl.zeros([ROWS], tl.float32)
    pair, wide = row[:, None] * N + i[None, :], row[:, None] * (N * (N + 2)) + i[None, :]
    for half in tl.static_range(2):  # pre, then post
        m = tl.load(m_ptr + half * N + wide, mask=inside, other=0.0)
        z, scale = _logits(m, bias_ptr + half * N, scale_ptr, i[None, :], (i < N)[None, :], half)
        p = sigmoid(z)
        d = tl.zeros([ROWS, TALL], tl.float32)
        if half == 0:
            if dpre_ptr is not None:
                d = tl.load(dpre_ptr + base * N + pair, mask=inside, other=0.0)
        else:
            if dpost_ptr is not None:
                d = tl.load(dpost_ptr + base * N + pair, mask=inside, other=0.0)
                d *= post_scale
        d *= p * (1.0 - p)
        if sums_ptr is not None:
            tl.store(sums_ptr + half * N + i, tl.sum(d, axis=0), mask=i < N)
            tl.store(sums_ptr + N * (N + 2) + half, tl.sum(tl.sum(d * m, axis=1), axis=0))
        d *= scale
        own += tl.sum(d * m, axis=1)
        tl.store(d_ptr + half * N + wide, d * rstd[:, None], mask=inside)
    at = (i[:, None] * N + i[None, :])[None, :, :]
    both = ((i < N)[:, None] & (i < N)[None, :])[None, :, :]
    square = row[:, None, None] * (N * (N + 2)) + at
    d = tl.zeros([ROWS, TALL, TALL], tl.float32)
    logits = tl.load(m_ptr + 2 * N + square, mask=mask, other=0.0)
    z, scale = _logits(logits, bias_ptr + 2 * N, scale_ptr, at, both, 2)
    if dmix_ptr is not None:
        first = _softmax_rows(z, mask)
        row = row[:, None, None]
        d = tl.load(dmix_ptr + base * (N * N) + (row * (N * N) + at), mask=mask, other=0.0)
        # iterate t of a row is at t N N of the row's part of the buffer
        kept_ptr += base * ((2 * steps - 1) * N * N)
        kept = kept_ptr + (row * ((2 * steps - 1) * N * N) + at)
        m = tl.where(mask, first + eps, 0.0)
        tl.store(kept, m, mask=mask)
        for step in tl.range(1, steps):
            m, _ = _divide(m, True, eps, mask)
            tl.store(kept + (2 * step - 1) * N * N, m, mask=mask)
            m, _ = _divide(m, False, eps, mask)
            tl.store(kept + 2 * step * N * N, m, mask=mask)
        tl.debug_barrier()
        for back in tl.range(1, steps):
            step = steps - back
            before = tl.load(kept + 2 * step * N * N, mask=mask, other=0.0)
            m, total = _divide(before, True, eps, mask)
            d = _undivide(d, m, total, True)
            before = tl.load(kept + (2 * step - 1) * N * N, mask=mask, other=0.0)
            m, total = _divide(before, False, eps, mask)
            d = _undivide(d, m, total, False)
        m, total = _divide(tl.where(mask, first + eps, 0.0), True, eps, mask)
        d = tl.where(mask, _undivide(d, m, total, True), 0.0)
        d = first * (d - tl.sum(d * first, axis=2)[:, :, None])
    if sums_ptr is not None:
        place = sums_ptr + 2 * N + (i[:, None] * N + i[None, :])
        tl.store(place, tl.sum(d, axis=0), mask=(i < N)[:, None] & (i < N)[None, :])
        total = tl.sum(tl.sum(tl.sum(d * logits, axis=2), axis=1), axis=0)
        tl.store(sums_ptr + N * (N + 2) + 2, total)
    d *= scale
    own += tl.sum(tl.sum(d * logits, axis=2), axis=1)
    tl.store(d_ptr + 2 * N + square, d * rstd[:, None, None], mask=mask)
    row = tl.arange(0, ROWS)
    tl.store(own_ptr + base + row, own * rstd * rstd / length, mask=base + row < rows)


class TritonParts:
    """Launches of the kernels for coefficients."""

    mixes = staticmethod(mixes)
    mixes_gradients = staticmethod(mixes_gradients)

    @staticmethod
    def values(
        m: Tensor, bias: Tensor, scale: Tensor, options: SinkhornOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sigmoids, and the last iterate."""
        rows, count = m.shape[0], options[0]
        pre, post = m.new_empty(rows, count), m.new_empty(rows, count)
        mix = m.new_empty(rows, count, count)
        if rows:
            k = launch_config("hyper_connections.forward", sinkhorn_config, m.device, streams=count)
            args = (m.contiguous(), bias.contiguous(), scale.contiguous(), pre, post, mix, rows)
            constants = (count, power_of_2(count), k.rows)
            launch(
                _sinkhorn_kernel, cdiv(rows, k.rows), (*args, *options[1:]), constants, k.num_warps
            )
        return pre, post, mix

    @staticmethod
    def gradient(
        m: Tensor,
        bias: Tensor,
        scale: Tensor,
        rstd: Tensor,
        length: int,
        grads: tuple[Tensor | None, ...],
        options: SinkhornOptions,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One launch, and one that adds what programs leave of the parameters' gradients."""
        (rows, outputs), (count, steps, *_) = m.shape, options
        d, row_scale = m.new_empty(m.shape), m.new_empty(rows, 1)
        if not rows:
            dbias, dscale = (
                t.new_zeros(t.shape if n else 0) for t, n in zip((bias, scale), needs, strict=True)
            )
            return d, row_scale, dbias, dscale
        k = launch_config("hyper_connections.backward", sinkhorn_config, m.device, streams=count)
        checked_cols(2 * steps * k.rows * count * count)  # a tile's part of the iterates
        programs = cdiv(rows, k.rows)
        wide = cdiv(outputs + 3, 16) * 16  # what is past them is not used
        sums = m.new_empty(programs, wide) if any(needs) else None
        iterates = m.new_empty(
            rows * (2 * steps - 1) * count * count if grads[2] is not None else 0
        )
        dense = [None if g is None else g.contiguous() for g in grads]
        inputs = (m.contiguous(), bias.contiguous(), scale.contiguous(), rstd.contiguous())
        args = (*inputs, *dense, d, row_scale, sums, iterates, rows, *options[1:], length, wide)
        constants = (count, power_of_2(count), k.rows)
        launch(_sinkhorn_backward_kernel, programs, args, constants, k.num_warps)
        total = row_scale.new_empty(0) if sums is None else sum_partials(sums, torch.float32)
        dbias = total[:outputs].to(bias.dtype) if needs[0] else bias.new_empty(0)
        dscale = (
            total[outputs : outputs + 3].to(scale.dtype, copy=True)
            if needs[1]
            else scale.new_empty(0)
        )
        return d, row_scale, dbias, dscale


forward, backward = implement_hyper_connections(TritonParts())


def supports(x: Tensor, weight: Tensor) -> str | None:
    """Why a call is refused, or None: iterates are fp32, and a tile holds all outputs of a row."""
    if x.element_size() == 8:
        return "its iterates are float32, got float64"
    if weight.element_size() == 8:
        return "multiplies by a weight of at most float32, got float64"
    outputs, cols = weight.shape
    if outputs > MOST_OUTPUTS:
        return f"takes up to {MOST_OUTPUTS} outputs, got {outputs}"
    if cols > MOST_COLS.value:
        return f"takes rows of up to {MOST_COLS.value} columns, got {cols}"
    return None
