"""Sum of two scaled tensors and its RMSNorm, forward in one pass.

With s = a x + b residual, where a x and b residual are rounded first unless the factor is 1:

    y = w * s * rstd,  dx = a ds,  dresidual = b ds

The kernels of ``rms_norm`` compute ds from dy and the gradient of other uses of s. A further
pass scales it for each term whose factor is not 1.
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
)
from liger_multi.backends.triton.norms import fused_add_rms_norm
from liger_multi.backends.triton.norms.rms_norm import _load_weight, _normalized
from liger_multi.backends.triton.norms.row_config import forward_config
from liger_multi.dispatch.launch import launch_config


@triton.jit
def _load_scaled(ptr, at, mask, scale):
    """Load a term in fp32; a scale multiplies it, rounded as a multiplication of PyTorch's."""
    x = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    if scale is not None:
        x = round_to(x * scale, ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["rows"])
def _scaled_add_rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    s_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    rows,
    cols,
    eps,
    x_scale,
    residual_scale,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scaled sum and RMSNorm of rows that fit into registers.

    Program: ROWS whole rows; reads x, residual and weight, writes s, rstd and y. The norm is that
    of s as it is stored, so that backward sees the same numbers.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    assume_rows(x_ptr, x_stride, ROWS)
    assume_rows(residual_ptr, residual_stride, ROWS)
    assume_cols(cols, BLOCK)
    row_mask = first + row < rows
    mask = row_mask[:, None] & (col < cols)[None, :]
    weight = _load_weight(weight_ptr, col, col < cols, OFFSET, EXACT)
    at = row[:, None] * x_stride + col[None, :]
    s = _load_scaled(x_ptr + first * x_stride, at, mask, x_scale)
    at = row[:, None] * residual_stride + col[None, :]
    s += _load_scaled(residual_ptr + first * residual_stride, at, mask, residual_scale)
    s = round_to(s, s_ptr.dtype.element_ty)
    y_offset = row[:, None] * cols + col[None, :]
    tl.store(s_ptr + first * cols + y_offset, s, mask=mask)
    s = s.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(s * s, axis=1) / cols + eps)
    tl.store(rstd_ptr + first + row, rstd, mask=row_mask)
    y = _normalized(s, rstd[:, None], s_ptr.dtype.element_ty, ROUND) * weight[None, :]
    tl.store(y_ptr + first * cols + y_offset, round_to(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scaled_add_rms_norm_forward_wide_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    s_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    cols,
    eps,
    x_scale,
    residual_scale,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same for wider rows, in two passes of BLOCK columns a step.

    Program: one row. The first pass sums squares, the second adds the terms again and writes s and
    y.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    assume_cols(cols)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        s = _load_scaled(x_ptr, col, mask, x_scale)
        s += _load_scaled(residual_ptr, col, mask, residual_scale)
        s = round_to(s, s_ptr.dtype.element_ty).to(tl.float32)
        squares += s * s
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / cols + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        # summed again: what other threads of the program stored might not be visible yet
        s = _load_scaled(x_ptr, col, mask, x_scale)
        s += _load_scaled(residual_ptr, col, mask, residual_scale)
        s = round_to(s, s_ptr.dtype.element_ty)
        tl.store(s_ptr + row * cols + col, s, mask=mask)
        weight = _load_weight(weight_ptr, col, mask, OFFSET, EXACT)
        y = _normalized(s.to(tl.float32), rstd, s_ptr.dtype.element_ty, ROUND) * weight
        tl.store(y_ptr + row * cols + col, round_to(y, y_ptr.dtype.element_ty), mask=mask)


def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    x_scale: float,
    residual_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of the sum, the sum as it was rounded, and rstd (fp32)."""
    sum_dtype = torch.promote_types(x.dtype, residual.dtype)
    rounds = casting == "llama" and weight is not None
    dtype = (
        torch.promote_types(sum_dtype, weight.dtype) if weight is not None and rounds else sum_dtype
    )
    y, s = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=sum_dtype)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return y, s, rstd
    x, residual = as_rows(x), as_rows(residual)
    weight = None if weight is None else weight.contiguous()
    rows, cols = x.shape
    scales = (
        None if x_scale == 1.0 else x_scale,
        None if residual_scale == 1.0 else residual_scale,
    )
    constants = (offset, casting == "gemma", rounds)
    k = launch_config(
        "fused_scaled_add_rms_norm.forward", forward_config, x.device, rows=rows, cols=cols
    )
    tensors = (x, residual, weight, y, s, rstd, x.stride(0), residual.stride(0))
    if k.block >= cols:
        launch(
            _scaled_add_rms_norm_forward_kernel,
            cdiv(rows, k.rows),
            (*tensors, rows, cols, eps, *scales),
            (*constants, k.rows, k.block),
            k.num_warps,
        )
    else:
        launch(
            _scaled_add_rms_norm_forward_wide_kernel,
            rows,
            (*tensors, cols, eps, *scales),
            (*constants, k.block),
            k.num_warps,
        )
    return y, s, rstd


def backward(
    new_residual: Tensor,
    dy: Tensor | None,
    dnew_residual: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    x_scale: float,
    residual_scale: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype,
    needs_x: bool,
    needs_residual: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the sum, scaled for each term, and that of weight."""
    ds, dweight = fused_add_rms_norm.backward(
        new_residual,
        dy,
        dnew_residual,
        weight,
        rstd,
        offset=offset,
        casting=casting,
        needs_x=needs_x,
        needs_residual=needs_residual,
        needs_weight=needs_weight,
    )
    dx = (ds * x_scale).to(x_dtype) if needs_x else ds.new_empty(0, dtype=x_dtype)
    if not needs_residual:
        return dx, ds.new_empty(0, dtype=residual_dtype), dweight
    dresidual = ds if residual_scale == 1.0 else ds * residual_scale
    return dx, dresidual.to(residual_dtype), dweight
