"""Logits of hyper-connections: a GEMM whose output has a few columns, and its gradients.

It is bound by the streams that it reads. So forward adds up the norm's sum of squares in the same
pass, and backward reads the streams once for both gradients. Factors are split into bf16 parts,
whose sum is the fp32 number: each has 8 of its bits, so that a stream in bf16 is one part, and
matrix units multiply parts exactly. Rows are few for their length, so forward cuts them into chunks
of columns, and backward cuts the rows into chunks. Sums leave as one fp32 partial a chunk, added in
a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    assume_cols,
    assume_rows,
    bf16_parts,
    cdiv,
    checked_cols,
    power_of_2,
    round_to,
    sum_partials,
    warps,
)
from liger_multi.backends.triton.experts.grouped import dot
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.residuals import operators as reference

SUMMED = 512  # logits of a program that adds chunks
MOST_OUTPUTS = 128  # of a tile; ten streams have 120
# a tile's rows of so many fp32 stay below 2 GiB
MOST_COLS: tl.constexpr = tl.constexpr(2**22 - 2**16)


@dataclass(frozen=True)
class MixConfig:
    """``rows`` rows by ``block`` columns a step; ``chunks`` parts of a row, backward of the rows.

    ``library``: PyTorch's GEMMs, as in the reference.
    """

    rows: int
    block: int
    stages: int
    num_warps: int
    chunks: int = 1
    library: bool = False


def _tall(outputs: int) -> int:
    return max(16, power_of_2(outputs))


def _stages(info: DeviceInfo, tile: int, outputs: int, block: int, most: int) -> int:
    """Steps in flight, of fp32 streams and weights, in half of the on-chip memory."""
    return max(1, min(most, info.shared_bytes // 2 // (4 * block * (tile + _tall(outputs)))))


def _threads(outputs: int) -> int:
    return 256 if _tall(outputs) > 32 else 128


def mix_config(info: DeviceInfo, rows: int, cols: int, outputs: int, size: int) -> MixConfig:
    """Steps of 8 KiB of streams, at most four under way; of 4 KiB where outputs are many.

    About eight programs a core, of eight steps at least. A fourth step of fp32 under way would
    spill on cores that have memory for it (ci.static, triton 3.9).
    """
    tile, wide = 64, _tall(outputs) > 32
    block = 32 if wide else min(power_of_2(checked_cols(cols)), 8192 // (tile * size))
    block, most = max(32, block), 4 if size == 2 else 3
    stages = _stages(info, tile, outputs, block, most)
    chunks = max(1, min(cdiv(cols, 8 * block), 8 * info.cores // cdiv(rows, tile)))
    return MixConfig(tile, block, stages, warps(_threads(outputs), info.warp_size), chunks)


def gradient_config(info: DeviceInfo, rows: int, cols: int, outputs: int, size: int) -> MixConfig:
    """Tiles of the weight's gradient as large as registers hold, about eight programs a core.

    Cores of little memory would keep steps under way in registers, which then spill.
    """
    tall, large = _tall(outputs), info.shared_bytes > 2**16
    area = 1024 if not large else 2048 if size == 2 else 512
    block = max(32, min(power_of_2(checked_cols(cols)), area // tall))
    chunks = max(1, min(cdiv(rows, 256), 8 * info.cores // max(1, cdiv(cols, block))))
    # fp32 has three times the parts
    tile, most = 16 if tall > 32 else 64 // size, 4 if size == 2 else 3
    stages = _stages(info, tile, 0, block, most if large else 1)
    return MixConfig(tile, block, stages, warps(_threads(outputs), info.warp_size), chunks)


@triton.jit
def _exact_dot(a, b, total, A: tl.constexpr, B: tl.constexpr, DEPTH: tl.constexpr):
    """``total + a @ b`` from A and B parts, without the GEMMs of parts i and j where i + j > DEPTH.

    What is left out is 2^(-8 (DEPTH + 1)) of the result. The small terms are added first.
    """
    a0, a1, a2 = bf16_parts(a)
    b0, b1, b2 = bf16_parts(b)
    if DEPTH > 1:
        if A > 2:
            total = dot(a2, b0, total)
        if B > 2:
            total = dot(a0, b2, total)
        if A > 1 and B > 1:
            total = dot(a1, b1, total)
    if A > 1:
        total = dot(a1, b0, total)
    if B > 1:
        total = dot(a0, b1, total)
    return dot(a0, b0, total)


@triton.jit
def _mixes_kernel(
    x_ptr, w_ptr, partial_ptr, squares_ptr, x_stride, rows, cols, outputs, per, row_tiles,
    X: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
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
    partial_ptr, squares_ptr, mixes_ptr, rstd_ptr, rows, cols, outputs, chunks, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
    x_ptr, w_ptr, d_ptr, own_ptr, dx_ptr, partial_ptr, x_stride, rows, cols, outputs, per,
    col_steps, X: tl.constexpr, W: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
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
            room = r[:, None] * cols + col[None, :]
            tl.store(dx_ptr + at * cols + room, round_to(dx, dx_ptr.dtype.element_ty), mask=x_mask)
    if partial_ptr is not None:
        partial_ptr += chunk.to(tl.int64) * outputs * cols
        tl.store(partial_ptr + w_place, dw, mask=w_mask)


def _digits(x: Tensor) -> int:
    """Parts of bf16 that hold the digits of a number: 8 of bf16, 11 of fp16, 24 of fp32."""
    return {torch.bfloat16: 1, torch.float16: 2}.get(x.dtype, 3)


def _fits(rows: Tensor, weight: Tensor) -> bool:
    """Whether a tile holds the outputs of a row, and there is something to do."""
    small = weight.shape[0] <= MOST_OUTPUTS and rows.shape[1] <= MOST_COLS.value
    return small and rows.numel() > 0 and weight.element_size() <= 4


def mixes(rows: Tensor, weight: Tensor, rms_eps: float) -> tuple[Tensor, Tensor]:
    """``W v rstd`` and rstd of every row v, in fp32."""
    if not _fits(rows, weight):
        return reference.mixes(rows, weight, rms_eps)
    (count, cols), outputs = rows.shape, weight.shape[0]
    rows, weight = rows.contiguous(), weight.contiguous()
    found = rows.new_empty(count, outputs, dtype=torch.float32)
    rstd = rows.new_empty(count, dtype=torch.float32)
    shape = {"rows": count, "cols": cols, "outputs": outputs, "size": rows.element_size()}
    k = launch_config("hyper_mixes.forward", mix_config, rows.device, **shape)
    if k.library:
        return reference.mixes(rows, weight, rms_eps)
    tiles, per = cdiv(count, k.rows), cdiv(cdiv(cols, k.chunks), k.block) * k.block
    chunks, tall = cdiv(cols, per), _tall(outputs)
    partial, squares = found.new_empty(chunks, count * outputs), found.new_empty(chunks, count)
    args = (rows, weight, partial, squares, rows.stride(0), count, cols, outputs, per, tiles)
    constants = (_digits(rows), _digits(weight), k.rows, tall, k.block, k.stages)
    launch(_mixes_kernel, chunks * tiles, args, constants, k.num_warps)
    sums = (partial, squares, found, rstd, count, cols, outputs, chunks, rms_eps)
    launch(_mixes_sum_kernel, cdiv(count * outputs, SUMMED), sums, (SUMMED,), 4)
    return found, rstd


def gradients(
    rows: Tensor, weight: Tensor, d: Tensor, own: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """Both gradients; the streams are read once."""
    if not _fits(rows, weight) or not (needs_x or needs_weight):
        return reference.mixes_gradients(rows, weight, d, own, needs_x, needs_weight)
    (count, cols), outputs = rows.shape, weight.shape[0]
    rows, weight = rows.contiguous(), weight.contiguous()
    shape = {"rows": count, "cols": cols, "outputs": outputs, "size": rows.element_size()}
    k = launch_config("hyper_mixes.backward", gradient_config, rows.device, **shape)
    if k.library:
        return reference.mixes_gradients(rows, weight, d, own, needs_x, needs_weight)
    per, steps = cdiv(cdiv(count, k.chunks), k.rows) * k.rows, cdiv(cols, k.block)
    chunks = cdiv(count, per)
    dx = rows.new_empty(rows.shape) if needs_x else None
    partial = d.new_empty(chunks, outputs * cols) if needs_weight else None
    args = (rows, weight, d.contiguous(), own.contiguous(), dx, partial)
    sizes = (rows.stride(0), count, cols, outputs, per, steps)
    depth = 1 if rows.element_size() == 2 else 2
    tile = (_digits(rows), _digits(weight), depth, k.rows, _tall(outputs), k.block, k.stages)
    launch(_mixes_backward_kernel, chunks * steps, (*args, *sizes), tile, k.num_warps)
    dweight = weight.new_empty(0)
    if partial is not None:
        dweight = sum_partials(partial, weight.dtype).view(weight.shape)
    return rows.new_empty(0) if dx is None else dx, dweight
