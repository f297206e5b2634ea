"""Root mean square norm (arXiv:1910.07467), in the roundings of the Hugging Face classes.

With n = x * rstd, rstd = (mean(x^2) + eps)^(-1/2) and w = weight + offset:

    y  = w * n,  n first rounded to x's dtype under the llama casting
    dx = rstd * (g - n * mean(g * n)),  g = dy * w
    dw = sum over rows of dy * n

Forward gives a program a tile of whole rows. Backward runs a few persistent programs a core over
strided tiles, so that the weight's gradient stays in registers and leaves as one fp32 partial a
program; a second kernel sums those in a fixed order. Rows too wide for registers loop over columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common import (
    as_rows,
    cdiv,
    power_of_2,
    round_to,
    sum_partials,
    warps,
)
from liger_multi.backends.triton.launching import launch
from liger_multi.launch import DeviceInfo, knobs

# columns; beyond, or soon after, a row's registers spill on some target of ci.static (triton 3.9)
WIDEST_FORWARD = 16384
WIDEST_BACKWARD = 8192


@dataclass(frozen=True)
class RowKnobs:
    """``rows`` whole rows a tile, or one row in steps of ``block`` columns where it is wider."""

    rows: int
    block: int
    num_warps: int


@dataclass(frozen=True)
class BackwardKnobs:
    """As RowKnobs; ``programs`` persistent programs, loads ``stages`` - 1 tiles ahead."""

    rows: int
    block: int
    num_warps: int
    programs: int
    stages: int


def forward_knobs(info: DeviceInfo, rows: int, cols: int) -> RowKnobs:
    """Tiles of about 4096 elements, 16 or more of them a thread."""
    block = power_of_2(cols)
    if block > WIDEST_FORWARD:
        return RowKnobs(1, 8192, warps(info.max_threads, info.warp_size))
    per_tile = max(1, min(4096 // block, power_of_2(rows)))
    threads = min(per_tile * block // 16, info.max_threads)
    return RowKnobs(per_tile, block, warps(threads, info.warp_size))


def backward_knobs(info: DeviceInfo, rows: int, cols: int, tile_bytes: int) -> BackwardKnobs:
    """Tiles of 4096 to 8192 elements, stages by on-chip memory; tile_bytes: of one dy and one x."""
    block = power_of_2(cols)
    if block > WIDEST_BACKWARD:
        programs = min(rows, 4 * info.cores)
        return BackwardKnobs(1, 4096, warps(512, info.warp_size), programs, 1)
    elements = 4096 if block <= 512 else 8192
    per_tile = max(1, min(elements // block, power_of_2(rows)))
    threads = min(max(per_tile * block // 16, 32), 256 if block <= 4096 else 512)
    stages = max(1, min(3, info.shared_bytes // (per_tile * block * tile_bytes)))
    programs = min(cdiv(rows, per_tile), info.cores * (1 if block > 2048 else 2))
    return BackwardKnobs(per_tile, block, warps(threads, info.warp_size), programs, stages)


@triton.jit
def _load_weight(weight_ptr, col, mask, OFFSET: tl.constexpr, EXACT: tl.constexpr):
    if weight_ptr is None:
        return tl.full(col.shape, 1.0, tl.float32)
    else:
        weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32) + OFFSET
        if OFFSET != 0.0 and not EXACT:
            weight = round_to(weight, weight_ptr.dtype.element_ty).to(tl.float32)
        return weight


@triton.jit
def _normalized(x, rstd, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    n = x * rstd
    if ROUND:
        n = round_to(n, DTYPE).to(tl.float32)
    return n


@triton.jit
def _rms_norm_forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, x_stride, rows, cols, eps,
    OFFSET: tl.constexpr, EXACT: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    row_mask = first + row < rows
    mask = row_mask[:, None] & (col < cols)[None, :]
    weight = _load_weight(weight_ptr, col, col < cols, OFFSET, EXACT)
    x_offset = row[:, None] * x_stride + col[None, :]
    x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / cols + eps)
    tl.store(rstd_ptr + first + row, rstd, mask=row_mask)
    y = _normalized(x, rstd[:, None], x_ptr.dtype.element_ty, ROUND) * weight[None, :]
    y_offset = row[:, None] * cols + col[None, :]
    tl.store(y_ptr + first * cols + y_offset, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_forward_wide_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, x_stride, cols, eps,
    OFFSET: tl.constexpr, EXACT: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * cols
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + col, mask=col < cols, other=0.0, eviction_policy="evict_last")
        x = x.to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / cols + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        weight = _load_weight(weight_ptr, col, mask, OFFSET, EXACT)
        y = _normalized(x.to(tl.float32), rstd, x_ptr.dtype.element_ty, ROUND) * weight
        tl.store(y_ptr + col, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, dy_stride, x_stride, rows, cols,
    OFFSET: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    x_offset = row[:, None] * x_stride + col[None, :]
    dy_offset = row[:, None] * dy_stride + col[None, :]
    dx_offset = row[:, None] * cols + col[None, :]
    weight = _load_weight(weight_ptr, col, col < cols, OFFSET, True)[None, :]
    partial = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        row_mask = first + row < rows
        mask = row_mask[:, None] & (col < cols)[None, :]
        dy = tl.load(dy_ptr + first * dy_stride + dy_offset, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + first + row, mask=row_mask, other=0.0)[:, None]
        n = x * rstd
        if partial_ptr is not None:
            partial += dy * _normalized(x, rstd, x_ptr.dtype.element_ty, ROUND)
        if dx_ptr is not None:
            g = dy * weight
            dx = (g - n * (tl.sum(g * n, axis=1) / cols)[:, None]) * rstd
            dx = round_to(dx, dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + first * cols + dx_offset, dx, mask=mask)
    if partial_ptr is not None:
        partial_ptr += program.to(tl.int64) * cols
        tl.store(partial_ptr + col, tl.sum(partial, axis=0), mask=col < cols)


@triton.jit
def _rms_norm_backward_wide_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dy_stride, x_stride, cols,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    x_ptr += row * x_stride
    dx_ptr += row * cols
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        dy = tl.load(dy_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        g = dy.to(tl.float32) * _load_weight(weight_ptr, col, mask, OFFSET, True)
        products += g * (x.to(tl.float32) * rstd)
    mean = tl.sum(products, axis=0) / cols
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        dy = tl.load(dy_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        g = dy.to(tl.float32) * _load_weight(weight_ptr, col, mask, OFFSET, True)
        dx = (g - x.to(tl.float32) * rstd * mean) * rstd
        tl.store(dx_ptr + col, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward_wide_weight_kernel(
    dy_ptr, x_ptr, rstd_ptr, partial_ptr, dy_stride, x_stride, rows, cols, groups,
    ROUND: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % groups
    col = (tl.program_id(0) // groups) * BLOCK + tl.arange(0, BLOCK)
    mask = col < cols
    partial = tl.zeros([BLOCK], tl.float32)
    for index in tl.range(group, rows, groups, num_stages=STAGES):
        row = tl.cast(index, tl.int64)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        partial += dy * _normalized(x, tl.load(rstd_ptr + row), x_ptr.dtype.element_ty, ROUND)
    tl.store(partial_ptr + group.to(tl.int64) * cols + col, partial, mask=mask)


def _rounds(casting: str, weight: Optional[Tensor]) -> bool:
    # without a weight there is one rounding only, that of the output
    return casting == "llama" and weight is not None


def forward(
    x: Tensor, weight: Optional[Tensor], eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """Normalize the last axis; return y and rstd (fp32)."""
    dtype = x.dtype
    if weight is not None and casting == "llama":
        dtype = torch.promote_types(x.dtype, weight.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return y, rstd.fill_(float("nan"))  # the mean of no column
    x = as_rows(x)
    weight = None if weight is None else weight.contiguous()
    rows, cols = x.shape
    k = knobs("rms_norm.forward", forward_knobs, x.device, rows=rows, cols=cols)
    kind = (offset, casting == "gemma", _rounds(casting, weight))
    if k.block >= cols:
        launch(
            _rms_norm_forward_kernel, cdiv(rows, k.rows),
            (x, weight, y, rstd, x.stride(0), rows, cols, eps), (*kind, k.rows, k.block),
            k.num_warps,
        )  # fmt: skip
    else:
        launch(
            _rms_norm_forward_wide_kernel, rows, (x, weight, y, rstd, x.stride(0), cols, eps),
            (*kind, k.block), k.num_warps,
        )  # fmt: skip
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Optional[Tensor], rstd: Tensor, offset: float, casting: str,
    needs_x: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and weight; one that nobody needs is an empty tensor."""
    needs_weight = needs_weight and weight is not None
    dx = x.new_empty(x.shape if needs_x else 0)
    if x.numel() == 0 or not (needs_x or needs_weight):
        dweight = x.new_empty(0) if weight is None else torch.zeros_like(weight)
        return dx, dweight if needs_weight else dweight.new_empty(0)
    dy, x, rstd = as_rows(dy), as_rows(x), rstd.contiguous()
    weight = None if weight is None else weight.contiguous()
    rows, cols = x.shape
    size = dy.element_size() + x.element_size()
    k = knobs("rms_norm.backward", backward_knobs, x.device, rows=rows, cols=cols, tile_bytes=size)
    partial = x.new_empty((k.programs, cols), dtype=torch.float32) if needs_weight else None
    if k.block < cols:
        _backward_wide(dy, x, weight, rstd, dx if needs_x else None, partial, offset, casting, k)
    else:
        launch(
            _rms_norm_backward_kernel, k.programs,
            (dy, x, weight, rstd, dx if needs_x else None, partial, dy.stride(0), x.stride(0),
             rows, cols),
            (offset, _rounds(casting, weight), k.rows, k.block, k.stages), k.num_warps,
        )  # fmt: skip
    if partial is None or weight is None:
        return dx, x.new_empty(0)
    return dx, sum_partials(partial, weight.dtype)


def _backward_wide(
    dy: Tensor, x: Tensor, weight: Optional[Tensor], rstd: Tensor, dx: Optional[Tensor],
    partial: Optional[Tensor], offset: float, casting: str, k: BackwardKnobs,
) -> None:  # fmt: skip
    rows, cols = x.shape
    strides = (dy.stride(0), x.stride(0))
    if dx is not None:
        launch(
            _rms_norm_backward_wide_kernel, rows, (dy, x, weight, rstd, dx, *strides, cols),
            (offset, k.block), k.num_warps,
        )  # fmt: skip
    if partial is not None:
        groups = partial.shape[0]
        launch(
            _rms_norm_backward_wide_weight_kernel, groups * cdiv(cols, k.block),
            (dy, x, rstd, partial, *strides, rows, cols, groups),
            (_rounds(casting, weight), k.block, k.stages), k.num_warps,
        )  # fmt: skip
