"""Layer norm (arXiv:1607.06450) with fp32 statistics.

With n = (x - mean) * rstd, rstd = (mean((x - mean)^2) + eps)^(-1/2):

    y  = w * n + b
    dx = rstd * (g - mean(g) - n * mean(g * n)),  g = dy * w
    dw = sum over rows of dy * n,  db = sum over rows of dy

The tiling is that of :mod:`.rms_norm`: whole rows forward, persistent programs backward
that keep both column sums in registers and leave one fp32 partial each. Rows too wide for registers
loop over columns. There, every lane has a running mean and variance of its own columns (Welford
1962), which are merged at the end of the row (Chan, Golub and LeVeque 1983).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.float8 import coded_rows
from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    assume_cols,
    assume_rows,
    cdiv,
    empty_contiguous,
    load_or,
    round_to,
    sum_all_partials,
    with_stride,
)
from liger_multi.backends.triton.float8.rows import NO_CODES, CodeBuffers
from liger_multi.backends.triton.norms.row_config import (
    BackwardConfig,
    backward_config,
    forward_config,
)
from liger_multi.dispatch.launch import launch_config


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    codes_ptr,
    scale_ptr,
    x_stride,
    rows,
    cols,
    per_col,
    eps,
    BIAS: tl.constexpr,
    WRITES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Layer norm of rows that fit into registers.

    Program: ROWS whole rows; reads x, weight and bias, writes mean, rstd, and y where WRITES. The
    variance is taken around the mean, from registers. With BIAS, that of an FP8 format, it also
    writes codes and scales of y as it is rounded.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    assume_rows(x_ptr, x_stride, ROWS)
    assume_cols(cols, BLOCK)
    row_mask = first + row < rows
    mask = row_mask[:, None] & (col < cols)[None, :]
    weight = load_or(weight_ptr, col, col < cols, 1.0)
    bias = load_or(bias_ptr, col, col < cols, 0.0)
    x_offset = row[:, None] * x_stride + col[None, :]
    x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0).to(tl.float32)
    # times 1 / cols: approximate division by 1 would miss the mean of a single column
    mean = tl.sum(x, axis=1) * per_col
    centered = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) * per_col + eps)
    tl.store(mean_ptr + first + row, mean, mask=row_mask)
    tl.store(rstd_ptr + first + row, rstd, mask=row_mask)
    y = centered * rstd[:, None] * weight[None, :] + bias[None, :]
    y_offset = row[:, None] * cols + col[None, :]
    y = round_to(y, y_ptr.dtype.element_ty)
    if WRITES:
        tl.store(y_ptr + first * cols + y_offset, y, mask=mask)
    if BIAS:
        code, scale = coded_rows(y.to(tl.float32), BIAS)
        tl.store(codes_ptr + first * cols + y_offset, code, mask=mask)
        tl.store(scale_ptr + first + row, scale, mask=row_mask)


@triton.jit
def _layer_norm_forward_wide_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    cols,
    per_col,
    eps,
    BLOCK: tl.constexpr,
):
    """The same for wider rows, in two passes of BLOCK columns a step.

    Program: one row. The first pass updates each lane's mean and sum of squares (Welford); the
    lanes are then merged. The second pass reads x again, from the cache where it is still there,
    and writes y.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * cols
    assume_cols(cols)
    means = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    count = 0.0
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        count += 1.0
        before = x.to(tl.float32) - means
        means += tl.where(mask, before / count, 0.0)
        squares += tl.where(mask, before * (x.to(tl.float32) - means), 0.0)
    # a lane of the last step may have one value less
    counts = count - tl.where(tl.arange(0, BLOCK) + (count - 1.0) * BLOCK < cols, 0.0, 1.0)
    mean = tl.sum(means * counts, axis=0) * per_col
    apart = means - mean
    rstd = tl.rsqrt(tl.sum(squares + counts * apart * apart, axis=0) * per_col + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        y = (x.to(tl.float32) - mean) * rstd * load_or(weight_ptr, col, mask, 1.0)
        y += load_or(bias_ptr, col, mask, 0.0)
        tl.store(y_ptr + col, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    dy_stride,
    x_stride,
    rows,
    cols,
    per_col,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient of x, and partial sums of those of weight and bias; rows fit into registers.

    Program: persistent; every num_programs-th tile of ROWS rows.
    Reads dy, x, mean and rstd of each tile, and writes dx. The column sums stay in registers over
    all tiles and leave as one fp32 partial a program.
    """
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(dy_ptr, dy_stride, ROWS)
    assume_cols(cols, BLOCK)
    x_offset = row[:, None] * x_stride + col[None, :]
    dy_offset = row[:, None] * dy_stride + col[None, :]
    dx_offset = row[:, None] * cols + col[None, :]
    weight = load_or(weight_ptr, col, col < cols, 1.0)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        row_mask = first + row < rows
        mask = row_mask[:, None] & (col < cols)[None, :]
        dy = tl.load(dy_ptr + first * dy_stride + dy_offset, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + first + row, mask=row_mask, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + first + row, mask=row_mask, other=0.0)[:, None]
        n = (x - mean) * rstd
        if dw_ptr is not None:
            dw += dy * n
        if db_ptr is not None:
            db += dy
        if dx_ptr is not None:
            g = dy * weight
            along = (tl.sum(g * n, axis=1) * per_col)[:, None]
            dx = (g - (tl.sum(g, axis=1) * per_col)[:, None] - n * along) * rstd
            dx = round_to(dx, dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + first * cols + dx_offset, dx, mask=mask)
    at = program.to(tl.int64) * cols
    if dw_ptr is not None:
        tl.store(dw_ptr + at + col, tl.sum(dw, axis=0), mask=col < cols)
    if db_ptr is not None:
        tl.store(db_ptr + at + col, tl.sum(db, axis=0), mask=col < cols)


@triton.jit
def _layer_norm_backward_wide_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dy_stride,
    x_stride,
    cols,
    per_col,
    BLOCK: tl.constexpr,
):
    """Gradient of x for wider rows, in two passes of BLOCK columns a step.

    Program: one row. The first pass sums g and g * n over the row, the second reads again and
    writes dx.
    """
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    x_ptr += row * x_stride
    dx_ptr += row * cols
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    assume_cols(cols)
    sums = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        dy = tl.load(dy_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_last")
        g = dy.to(tl.float32) * load_or(weight_ptr, col, mask, 1.0)
        sums += g
        products += g * ((x.to(tl.float32) - mean) * rstd)
    across = tl.sum(sums, axis=0) * per_col
    along = tl.sum(products, axis=0) * per_col
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        dy = tl.load(dy_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        g = dy.to(tl.float32) * load_or(weight_ptr, col, mask, 1.0)
        dx = (g - across - (x.to(tl.float32) - mean) * rstd * along) * rstd
        tl.store(dx_ptr + col, round_to(dx, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_backward_wide_parameters_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    dw_ptr,
    db_ptr,
    dy_stride,
    x_stride,
    rows,
    cols,
    groups,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Partial sums of the gradients of weight and bias for wider rows.

    Program: BLOCK columns and every ``groups``-th row; writes one fp32 partial of each.
    """
    group = tl.program_id(0) % groups
    first = (tl.program_id(0) // groups) * BLOCK
    assume_cols(first)
    col = first + tl.arange(0, BLOCK)
    mask = col < cols
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for index in tl.range(group, rows, groups, num_stages=STAGES):
        row = tl.cast(index, tl.int64)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        if dw_ptr is not None:
            x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
            dw += dy * ((x - tl.load(mean_ptr + row)) * tl.load(rstd_ptr + row))
        if db_ptr is not None:
            db += dy
    at = group.to(tl.int64) * cols
    if dw_ptr is not None:
        tl.store(dw_ptr + at + col, dw, mask=mask)
    if db_ptr is not None:
        tl.store(db_ptr + at + col, db, mask=mask)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize the last axis; return y, mean and rstd (fp32)."""
    return normalize(x, weight, bias, eps, NO_CODES)


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, buffers: CodeBuffers
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm with FP8 codes of y if ``buffers`` has them; y is empty if not needed."""
    shape, cols = [*x.shape[:-1]], x.shape[-1]
    mean, rstd = x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)
    if x.numel() == 0:  # the mean over zero columns is NaN
        y = empty_contiguous(x)
        buffers.fill(y)
        return buffers.where_written(y), mean.fill_(float("nan")), rstd.fill_(float("nan"))
    source, (x, stride) = x, with_stride(x)
    weight, bias = [None if p is None else p.contiguous() for p in (weight, bias)]
    rows = x.numel() // cols
    k = launch_config("layer_norm.forward", forward_config, x.device, rows=rows, cols=cols, sums=2)
    fused_buffers = buffers.inside(cols, k.block)
    y = empty_contiguous(source) if fused_buffers.writes else x.new_empty(0)
    tensors = (x, weight, bias, y, mean, rstd)
    if k.block >= cols:
        launch(
            _layer_norm_forward_kernel,
            cdiv(rows, k.rows),
            (
                *tensors,
                fused_buffers.codes,
                fused_buffers.scale,
                stride,
                rows,
                cols,
                1.0 / cols,
                eps,
            ),
            (fused_buffers.bias, fused_buffers.writes, k.rows, k.block),
            k.num_warps,
        )
    else:
        launch(
            _layer_norm_forward_wide_kernel,
            rows,
            (*tensors, stride, cols, 1.0 / cols, eps),
            (k.block,),
            k.num_warps,
        )
    if fused_buffers is not buffers:
        buffers.fill(y)
        y = buffers.where_written(y)
    return y, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    bias_dtype: torch.dtype | None,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; empty tensors if not needed."""
    weight_dtype = None if weight is None else weight.dtype
    dx = empty_contiguous(x) if needs_x else x.new_empty(0)
    sum_dtypes = [d for d, n in ((weight_dtype, needs_weight), (bias_dtype, needs_bias)) if n and d]
    if x.numel() == 0 or not (needs_x or sum_dtypes):
        sums = [x.new_zeros(x.shape[-1], dtype=d) for d in sum_dtypes]
    else:
        sums = _gradients(dy, x, weight, mean, rstd, dx, needs_weight, sum_dtypes)
    dweight = sums.pop(0) if needs_weight else x.new_empty(0, dtype=weight_dtype)
    dbias = sums.pop(0) if needs_bias else x.new_empty(0, dtype=bias_dtype)
    return dx, dweight, dbias


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    needs_weight: bool,
    sum_dtypes: list[torch.dtype],
) -> list[Tensor]:
    """Fill dx, if it has elements; sum the gradients of weight and bias in the required dtypes."""
    (dy, dy_stride), (x, x_stride) = with_stride(dy), with_stride(x)
    mean, rstd = mean.contiguous(), rstd.contiguous()
    weight = None if weight is None else weight.contiguous()
    cols, size = x.shape[-1], dy.element_size() + x.element_size()
    rows = x.numel() // cols
    k = launch_config(
        "layer_norm.backward",
        backward_config,
        x.device,
        rows=rows,
        cols=cols,
        element_bytes=size,
        sums=2,
    )
    partial = x.new_empty(len(sum_dtypes), k.programs, cols, dtype=torch.float32)
    dw, db = ([*partial, None, None] if needs_weight else [None, *partial, None])[:2]
    target, strides = dx if dx.numel() else None, (dy_stride, x_stride)
    if k.block < cols:
        _wide(dy, x, weight, mean, rstd, target, dw, db, strides=strides, rows=rows, k=k)
    else:
        launch(
            _layer_norm_backward_kernel,
            k.programs,
            (dy, x, weight, mean, rstd, target, dw, db, *strides, rows, cols, 1.0 / cols),
            (k.rows, k.block, k.stages),
            k.num_warps,
        )
    return list(sum_all_partials(partial, *sum_dtypes)) if sum_dtypes else []


def _wide(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor | None,
    dw: Tensor | None,
    db: Tensor | None,
    strides: tuple[int, int],
    rows: int,
    k: BackwardConfig,
) -> None:
    cols = x.shape[-1]
    if dx is not None:
        launch(
            _layer_norm_backward_wide_kernel,
            rows,
            (dy, x, weight, mean, rstd, dx, *strides, cols, 1.0 / cols),
            (k.block,),
            k.num_warps,
        )
    if dw is not None or db is not None:
        launch(
            _layer_norm_backward_wide_parameters_kernel,
            k.programs * cdiv(cols, k.block),
            (dy, x, mean, rstd, dw, db, *strides, rows, cols, k.programs),
            (k.block, k.stages),
            k.num_warps,
        )
