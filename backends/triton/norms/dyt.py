"""Dynamic tanh (arXiv:2503.10622), elementwise but for the gradients of its parameters.

With t = tanh(alpha * x):

    y  = w * t + b
    dx = dy * w * alpha * (1 - t^2)
    dw = sum over rows of dy * t,  db = sum over rows of dy,
    dalpha = sum over all of dy * w * (1 - t^2) * x

Forward gives a program a tile. Backward gives it some columns and every so many rows: its
sums stay in registers and leave as one fp32 partial each, which a second kernel adds in a fixed
order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    as_rows,
    assume_rows,
    cdiv,
    load_or,
    power_of_2,
    round_to,
    sum_all_partials,
    sum_partials,
    tanh,
    tanh_and_slope,
    tile_rows,
    warps,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config


@dataclass(frozen=True)
class DytConfig:
    """Tiles of ``rows`` x ``block`` columns; ``groups`` programs share the rows of a block."""

    rows: int
    block: int
    num_warps: int
    groups: int
    stages: int


def dyt_config(info: DeviceInfo, rows: int, cols: int, element_bytes: int) -> DytConfig:
    """Tiles of 2048 elements, 8 a thread, of which three sums stay in registers."""
    block = max(16, min(512, power_of_2(cols)))
    per_tile = max(1, min(2048 // block, power_of_2(rows)))
    num_warps = warps(max(32, block * per_tile // 8), info.warp_size)
    groups = max(1, min(cdiv(rows, per_tile), cdiv(8 * info.cores, cdiv(cols, block))))
    stages = max(1, min(3, info.shared_bytes // (4 * per_tile * block * element_bytes)))
    return DytConfig(per_tile, block, num_warps, groups, stages)


@triton.jit
def _dyt_forward_kernel(
    x_ptr,
    alpha_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    x_stride,
    rows,
    cols,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Dynamic tanh of one tile.

    Program: ROWS rows by BLOCK columns; reads x, alpha, and weight and bias of its columns; writes
    y. Bases of tiles are 64-bit scalars, so that offsets within a tile fit into 32 bits.
    """
    first = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    start = (tl.program_id(0) % tiles) * BLOCK
    lane = tl.arange(0, BLOCK)
    col = start + lane
    row = tl.arange(0, ROWS)
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(y_ptr, cols, ROWS)
    mask = (first + row < rows)[:, None] & (col < cols)[None, :]
    alpha = tl.load(alpha_ptr).to(tl.float32)
    weight = load_or(weight_ptr, col, col < cols, 1.0)[None, :]
    bias = load_or(bias_ptr, col, col < cols, 0.0)[None, :]
    x_offset = row[:, None] * x_stride + lane[None, :]
    x_ptr += first * x_stride + start
    x = tl.load(x_ptr + x_offset, mask=mask, other=0.0).to(tl.float32)
    y = round_to(tanh(x * alpha) * weight + bias, y_ptr.dtype.element_ty)
    y_ptr += first * cols + start
    y_offset = row[:, None] * cols + lane[None, :]
    tl.store(y_ptr + y_offset, y, mask=mask)


@triton.jit
def _dyt_backward_kernel(
    dy_ptr,
    x_ptr,
    alpha_ptr,
    weight_ptr,
    dx_ptr,
    dalpha_ptr,
    dweight_ptr,
    dbias_ptr,
    dy_stride,
    x_stride,
    rows,
    cols,
    groups,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient of x, and partial sums of the gradients of alpha, weight and bias.

    Program: BLOCK columns and every ``groups``-th tile of ROWS rows.
    Reads dy and x of each tile and writes dx. The sums stay in registers over all tiles and leave
    at the end: one fp32 row of dweight and of dbias a group, one number of dalpha a program. Loads
    are STAGES - 1 tiles ahead.
    """
    group = tl.program_id(0) % groups
    start = (tl.program_id(0) // groups) * BLOCK
    lane = tl.arange(0, BLOCK)
    col = start + lane
    row = tl.arange(0, ROWS)
    assume_rows(dy_ptr, dy_stride, ROWS)
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(dx_ptr, cols, ROWS)
    dy_ptr += start
    x_ptr += start
    alpha = tl.load(alpha_ptr).to(tl.float32)
    weight = load_or(weight_ptr, col, col < cols, 1.0)[None, :]
    x_offset = row[:, None] * x_stride + lane[None, :]
    dy_offset = row[:, None] * dy_stride + lane[None, :]
    dx_offset = row[:, None] * cols + lane[None, :]
    dalpha = tl.zeros([ROWS, BLOCK], tl.float32)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(group, tl.cdiv(rows, ROWS), groups, num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        mask = (first + row < rows)[:, None] & (col < cols)[None, :]
        dy = tl.load(dy_ptr + first * dy_stride + dy_offset, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0).to(tl.float32)
        value, slope = tanh_and_slope(x * alpha)
        if dweight_ptr is not None:
            dweight += dy * value
        if dbias_ptr is not None:
            dbias += dy
        slope *= dy * weight
        if dalpha_ptr is not None:
            dalpha += slope * x
        if dx_ptr is not None:
            dx = round_to(slope * alpha, dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + (first * cols + start) + dx_offset, dx, mask=mask)
    at = group.to(tl.int64) * cols + start
    if dalpha_ptr is not None:
        tl.store(dalpha_ptr + tl.program_id(0), tl.sum(dalpha))
    if dweight_ptr is not None:
        tl.store(dweight_ptr + at + lane, tl.sum(dweight, axis=0), mask=col < cols)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + at + lane, tl.sum(dbias, axis=0), mask=col < cols)


def forward(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Weight * tanh(alpha * x) + bias in the promoted dtype."""
    dtype = torch.promote_types(x.dtype, alpha.dtype)
    for t in (weight, bias):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    if x.numel():
        x = as_rows(x)
        weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
        rows, cols = x.shape
        size = x.element_size()
        k = launch_config(
            "dyt.forward", dyt_config, x.device, rows=rows, cols=cols, element_bytes=size
        )
        tiles, rows_per_tile = cdiv(cols, k.block), tile_rows(k.rows, x.stride(0), cols)
        launch(
            _dyt_forward_kernel,
            cdiv(rows, rows_per_tile) * tiles,
            (x, alpha, weight, bias, y, x.stride(0), rows, cols, tiles),
            (rows_per_tile, k.block),
            k.num_warps,
        )
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    alpha: Tensor,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    needs_x: bool,
    needs_alpha: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x and the parameters; empty tensors if not needed."""
    weight_dtype = x.dtype if weight is None else weight.dtype
    sum_dtypes = [d for d, n in ((weight_dtype, needs_weight), (bias_dtype, needs_bias)) if n and d]
    dx = x.new_empty(x.shape if needs_x else 0)
    dalpha = alpha.new_empty(alpha.shape if needs_alpha else 0)
    if x.numel() == 0:
        sums = [x.new_zeros(x.shape[-1], dtype=d) for d in sum_dtypes]
        dalpha.zero_()
    else:
        sums, total = _gradients(
            dy, x, alpha, weight, dx if needs_x else None, needs_alpha, needs_weight, sum_dtypes
        )
        dalpha = dalpha if total is None else total.view(alpha.shape)
    dweight = sums.pop(0) if needs_weight else x.new_empty(0, dtype=weight_dtype)
    dbias = sums.pop(0) if needs_bias else x.new_empty(0, dtype=bias_dtype)
    return dx, dalpha, dweight, dbias


def _gradients(
    dy: Tensor,
    x: Tensor,
    alpha: Tensor,
    weight: Tensor | None,
    dx: Tensor | None,
    needs_alpha: bool,
    needs_weight: bool,
    sum_dtypes: list[torch.dtype],
) -> tuple[list[Tensor], Tensor | None]:
    """Fill dx; sum the gradients of weight and bias in the required dtypes, and that of alpha."""
    dy, x, weight = as_rows(dy), as_rows(x), None if weight is None else weight.contiguous()
    rows, cols = x.shape
    size = dy.element_size() + x.element_size()
    k = launch_config(
        "dyt.backward", dyt_config, x.device, rows=rows, cols=cols, element_bytes=size
    )
    programs = k.groups * cdiv(cols, k.block)
    partial = x.new_empty((len(sum_dtypes), k.groups, cols), dtype=torch.float32)
    dw, db = ([*partial, None, None] if needs_weight else [None, *partial, None])[:2]
    da = x.new_empty((programs, 1), dtype=torch.float32) if needs_alpha else None
    strides = (dy.stride(0), x.stride(0))
    launch(
        _dyt_backward_kernel,
        programs,
        (dy, x, alpha, weight, dx, da, dw, db, *strides, rows, cols, k.groups),
        (tile_rows(k.rows, *strides, cols), k.block, k.stages),
        k.num_warps,
    )
    sums = list(sum_all_partials(partial, *sum_dtypes)) if sum_dtypes else []
    return sums, None if da is None else sum_partials(da, alpha.dtype)
