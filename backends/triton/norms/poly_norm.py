"""Sum of the RMSNorms of the first three powers (arXiv:2411.03884), in fp32.

With n_k = x^k r_k, r_k = (mean(x^(2 k)) + eps)^(-1/2), and w_k the weight of the k-th power:

    y  = w_3 n_3 + w_2 n_2 + w_1 n_1 + b
    dx = sum over k of k x^(k-1) r_k w_k (dy - n_k S_k / cols),  S_k = sum over a row of dy n_k
    dw_k = sum over rows of S_k,  db = sum of dy

Forward gives a program a tile of rows. Backward runs persistent programs, so that the sums over
rows stay in a few registers; they leave as one fp32 partial a program. Rows too wide for registers
are read in steps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    as_rows,
    assume_cols,
    assume_rows,
    cdiv,
    round_to,
    sum_all_partials,
)
from liger_multi.backends.triton.norms.row_config import (
    BackwardConfig,
    RowConfig,
    backward_config,
    forward_config,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config

PLACES: tl.constexpr = tl.constexpr(16)  # numbers of a partial, three used: 64 bytes apart


def poly_forward_config(info: DeviceInfo, rows: int, cols: int) -> RowConfig:
    """The plain norm's formula with three values per lane where a row is read in steps."""
    return forward_config(info, rows, cols, sums=4)


def poly_backward_config(
    info: DeviceInfo, rows: int, cols: int, element_bytes: int
) -> BackwardConfig:
    """The layer norm's formula; the three powers take the registers of its second sum."""
    return backward_config(info, rows, cols, element_bytes, sums=2)


@triton.jit
def _load_weights(weight_ptr):
    """Weights of the third, second and first power, in fp32."""
    w3 = tl.load(weight_ptr).to(tl.float32)
    w2 = tl.load(weight_ptr + 1).to(tl.float32)
    w1 = tl.load(weight_ptr + 2).to(tl.float32)
    return w3, w2, w1


@triton.jit(do_not_specialize=["rows"])
def _poly_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    rows,
    cols,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """PolyNorm of rows that fit into registers.

    Program: ROWS whole rows; reads x once, writes the three r_k of each row (third power first) and
    y.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    assume_rows(x_ptr, x_stride, ROWS)
    assume_cols(cols, BLOCK)
    row_mask = first + row < rows
    mask = row_mask[:, None] & (col < cols)[None, :]
    w3, w2, w1 = _load_weights(weight_ptr)
    x_offset = row[:, None] * x_stride + col[None, :]
    x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0).to(tl.float32)
    square = x * x
    r3 = tl.rsqrt(tl.sum(square * square * square, axis=1) / cols + eps)
    r2 = tl.rsqrt(tl.sum(square * square, axis=1) / cols + eps)
    r1 = tl.rsqrt(tl.sum(square, axis=1) / cols + eps)
    at = (first + row) * 3
    tl.store(rstd_ptr + at, r3, mask=row_mask)
    tl.store(rstd_ptr + at + 1, r2, mask=row_mask)
    tl.store(rstd_ptr + at + 2, r1, mask=row_mask)
    y = square * x * (w3 * r3)[:, None] + square * (w2 * r2)[:, None] + x * (w1 * r1)[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr).to(tl.float32)
    y_offset = row[:, None] * cols + col[None, :]
    tl.store(y_ptr + first * cols + y_offset, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _poly_norm_forward_wide_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, rstd_ptr, x_stride, cols, eps, BLOCK: tl.constexpr
):
    """The same for wider rows, in two passes of BLOCK columns a step.

    Program: one row. The first pass sums the powers 2, 4 and 6, the second reads x again and writes
    y.
    """
    row = tl.program_id(0).to(tl.int64)
    assume_cols(cols)
    sixth = tl.zeros([BLOCK], tl.float32)
    fourth = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=0.0).to(tl.float32)
        square = x * x
        second += square
        fourth += square * square
        sixth += square * square * square
    r3 = tl.rsqrt(tl.sum(sixth, axis=0) / cols + eps)
    r2 = tl.rsqrt(tl.sum(fourth, axis=0) / cols + eps)
    r1 = tl.rsqrt(tl.sum(second, axis=0) / cols + eps)
    tl.store(rstd_ptr + row * 3, r3)
    tl.store(rstd_ptr + row * 3 + 1, r2)
    tl.store(rstd_ptr + row * 3 + 2, r1)
    w3, w2, w1 = _load_weights(weight_ptr)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=0.0).to(tl.float32)
        y = x * x * x * (w3 * r3) + x * x * (w2 * r2) + x * (w1 * r1)
        if bias_ptr is not None:
            y += tl.load(bias_ptr).to(tl.float32)
        tl.store(y_ptr + row * cols + col, round_to(y, y_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def _slope(dy, x, f3, f2, f1, s3, s2, s1):
    """Gradient of x for an element, with f_k = w_k r_k and s_k = r_k S_k / cols of its row."""
    cube = f3 * (dy - x * x * x * s3) * (x * x * 3.0)
    return cube + f2 * (dy - x * x * s2) * (x * 2.0) + f1 * (dy - x * s1)


@triton.jit(do_not_specialize=["rows"])
def _poly_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride,
    x_stride,
    rows,
    cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient of x, and partial sums of those of weights and bias; rows fit into registers.

    Program: persistent; every num_programs-th tile of ROWS rows; reads dy, x and r_k, writes dx.
    The four sums stay in registers and leave as fp32 partials: three in the program's PLACES
    numbers of the first set, that of the bias in the second set.
    """
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(dy_ptr, dy_stride, ROWS)
    assume_cols(cols, BLOCK)
    x_offset = row[:, None] * x_stride + col[None, :]
    dy_offset = row[:, None] * dy_stride + col[None, :]
    dx_offset = row[:, None] * cols + col[None, :]
    w3, w2, w1 = _load_weights(weight_ptr)
    sum3 = tl.zeros([ROWS], tl.float32)
    sum2 = tl.zeros([ROWS], tl.float32)
    sum1 = tl.zeros([ROWS], tl.float32)
    sum0 = tl.zeros([ROWS], tl.float32)
    programs = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        row_mask = first + row < rows
        mask = row_mask[:, None] & (col < cols)[None, :]
        dy = tl.load(dy_ptr + first * dy_stride + dy_offset, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0).to(tl.float32)
        at = rstd_ptr + (first + row) * 3
        r3 = tl.load(at, mask=row_mask, other=0.0)
        r2 = tl.load(at + 1, mask=row_mask, other=0.0)
        r1 = tl.load(at + 2, mask=row_mask, other=0.0)
        s3 = tl.sum(dy * x * x * x, axis=1) * r3
        s2 = tl.sum(dy * x * x, axis=1) * r2
        s1 = tl.sum(dy * x, axis=1) * r1
        sum3 += s3
        sum2 += s2
        sum1 += s1
        sum0 += tl.sum(dy, axis=1)
        if dx_ptr is not None:
            dx = _slope(
                dy,
                x,
                (w3 * r3)[:, None],
                (w2 * r2)[:, None],
                (w1 * r1)[:, None],
                (r3 * s3 / cols)[:, None],
                (r2 * s2 / cols)[:, None],
                (r1 * s1 / cols)[:, None],
            )
            dx = round_to(dx, dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + first * cols + dx_offset, dx, mask=mask)
    partial_ptr += tl.program_id(0) * PLACES
    tl.store(partial_ptr, tl.sum(sum3))
    tl.store(partial_ptr + 1, tl.sum(sum2))
    tl.store(partial_ptr + 2, tl.sum(sum1))
    tl.store(partial_ptr + programs * PLACES, tl.sum(sum0))


@triton.jit
def _poly_norm_backward_wide_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride,
    x_stride,
    rows,
    cols,
    BLOCK: tl.constexpr,
):
    """The same for wider rows, one at a time, in two passes of BLOCK columns a step.

    Program: persistent; every num_programs-th row. The first pass sums dy x^k over the row, the
    second reads again and writes dx.
    """
    assume_cols(cols)
    w3, w2, w1 = _load_weights(weight_ptr)
    sum3 = 0.0
    sum2 = 0.0
    sum1 = 0.0
    sum0 = 0.0
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        r3 = tl.load(rstd_ptr + row * 3)
        r2 = tl.load(rstd_ptr + row * 3 + 1)
        r1 = tl.load(rstd_ptr + row * 3 + 2)
        lane3 = tl.zeros([BLOCK], tl.float32)
        lane2 = tl.zeros([BLOCK], tl.float32)
        lane1 = tl.zeros([BLOCK], tl.float32)
        lane0 = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, cols, BLOCK):
            col = start + tl.arange(0, BLOCK)
            dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=0.0).to(tl.float32)
            lane0 += dy
            lane1 += dy * x
            lane2 += dy * x * x
            lane3 += dy * x * x * x
        s3 = tl.sum(lane3, axis=0) * r3
        s2 = tl.sum(lane2, axis=0) * r2
        s1 = tl.sum(lane1, axis=0) * r1
        sum3 += s3
        sum2 += s2
        sum1 += s1
        sum0 += tl.sum(lane0, axis=0)
        if dx_ptr is not None:
            for start in tl.range(0, cols, BLOCK):
                col = start + tl.arange(0, BLOCK)
                mask = col < cols
                dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
                x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
                dx = _slope(
                    dy, x, w3 * r3, w2 * r2, w1 * r1, r3 * s3 / cols, r2 * s2 / cols, r1 * s1 / cols
                )
                tl.store(
                    dx_ptr + row * cols + col, round_to(dx, dx_ptr.dtype.element_ty), mask=mask
                )
    partial_ptr += tl.program_id(0) * PLACES
    tl.store(partial_ptr, sum3)
    tl.store(partial_ptr + 1, sum2)
    tl.store(partial_ptr + 2, sum1)
    tl.store(partial_ptr + tl.num_programs(0) * PLACES, sum0)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """y, and rstd (fp32) of the third, second and first power."""
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    rstd = x.new_empty((*x.shape[:-1], 3), dtype=torch.float32)
    if x.numel() == 0:
        return y, rstd.fill_(float("nan"))  # the mean over zero columns is NaN
    x, weight = as_rows(x), weight.contiguous()
    rows, cols = x.shape
    k = launch_config("poly_norm.forward", poly_forward_config, x.device, rows=rows, cols=cols)
    tensors = (x, weight, bias, y, rstd, x.stride(0))
    if k.block >= cols:
        launch(
            _poly_norm_forward_kernel,
            cdiv(rows, k.rows),
            (*tensors, rows, cols, eps),
            (k.rows, k.block),
            k.num_warps,
        )
    else:
        launch(_poly_norm_forward_wide_kernel, rows, (*tensors, cols, eps), (k.block,), k.num_warps)
    return y, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    bias_dtype: torch.dtype | None,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; empty tensors if not needed."""
    dx, dtypes = x.new_empty(x.shape if needs_x else 0), (weight.dtype, bias_dtype or x.dtype)
    if x.numel() == 0:
        sums: tuple[Tensor, ...] = tuple(x.new_zeros(3, dtype=d) for d in dtypes)
    else:
        dy, x, rstd, weight = as_rows(dy), as_rows(x), rstd.contiguous(), weight.contiguous()
        rows, cols = x.shape
        size = dy.element_size() + x.element_size()
        k = launch_config(
            "poly_norm.backward",
            poly_backward_config,
            x.device,
            rows=rows,
            cols=cols,
            element_bytes=size,
        )
        # the second set has the bias in its first place
        partial = x.new_zeros((2, k.programs, PLACES.value), dtype=torch.float32)
        tensors = (dy, x, weight, rstd, dx if needs_x else None, partial[0])
        sizes = (dy.stride(0), x.stride(0), rows, cols)
        if k.block >= cols:
            constants = (k.rows, k.block, k.stages)
            launch(
                _poly_norm_backward_kernel, k.programs, (*tensors, *sizes), constants, k.num_warps
            )
        else:
            launch(
                _poly_norm_backward_wide_kernel,
                k.programs,
                (*tensors, *sizes),
                (k.block,),
                k.num_warps,
            )
        sums = sum_all_partials(partial, *dtypes) if needs_weight or needs_bias else (dx, dx)
    dweight = sums[0][:3] if needs_weight else weight.new_empty(0)
    return dx, dweight, sums[1][:1].clone() if needs_bias else x.new_empty(0, dtype=dtypes[1])
