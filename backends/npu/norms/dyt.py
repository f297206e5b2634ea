"""Dynamic tanh on vector cores, y = weight * tanh(alpha * x) + bias.

    dx = dy w alpha (1 - t^2),  dw = sum dy t,  db = sum dy,  dalpha = sum dy w (1 - t^2) x

Backward owns columns: a program has some of them and every so many rows, so that the sums stay on
chip, and writes dx as it goes. torch_npu has no operator for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.npu.common.launching import as_rows, block_of, jitted, start
from liger_multi.dispatch.launch import device_info

# --- kernels ---


@triton.jit
def _tanh(x):
    """The hyperbolic tangent t, and 1 - t^2, accurate where t is near 1.

    Below 0.25, where the quotient of exponentials loses digits, a series to x^9 takes its place.
    """
    e = tl.exp(-2.0 * tl.abs(x))
    inverse = 1.0 / (1.0 + e)
    s = x * x
    near = 0.13333333333 + s * (-0.05396825397 + s * 0.02186948854)
    near = x + x * s * (-0.33333333333 + s * near)
    far = tl.where(x < 0.0, e - 1.0, 1.0 - e) * inverse
    return tl.where(tl.abs(x) < 0.25, near, far), 4.0 * e * inverse * inverse


@jitted
def _dyt_forward_kernel(
    x_ptr,
    alpha_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    x_stride,
    rows,
    cols,
    steps,
    BLOCK: tl.constexpr,
):
    """Dynamic tanh, piece by piece.

    Program: every num_programs-th piece of BLOCK columns of one row. Reads x, weight and bias,
    writes y.
    """
    alpha = tl.load(alpha_ptr).to(tl.float32)
    for piece in range(tl.program_id(0), rows * steps, tl.num_programs(0)):
        row = tl.cast(piece // steps, tl.int64)
        col = (piece % steps) * BLOCK + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        y, _ = _tanh(alpha * x)
        if weight_ptr is not None:
            y = y * tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            y = y + tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@jitted
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
    steps,
    groups,
    BLOCK: tl.constexpr,
):
    """Gradient of x, and partial sums of the gradients of alpha, weight and bias.

    Program: every num_programs-th piece of BLOCK columns of every ``groups``-th row.
    Reads dy and x row by row and writes dx; the sums stay on chip until the piece ends. Writes one
    fp32 row of each per group, (groups, cols); that of alpha is summed over columns afterwards too.
    """
    alpha = tl.load(alpha_ptr).to(tl.float32)
    for piece in range(tl.program_id(0), steps * groups, tl.num_programs(0)):
        col = (piece % steps) * BLOCK + tl.arange(0, BLOCK)
        mask = col < cols
        group = piece // steps
        w = tl.full([BLOCK], 1.0, tl.float32)
        if weight_ptr is not None:
            w = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
        by_weight = tl.zeros([BLOCK], tl.float32)
        by_bias = tl.zeros([BLOCK], tl.float32)
        by_alpha = tl.zeros([BLOCK], tl.float32)
        for i in range(group, rows, groups):
            row = tl.cast(i, tl.int64)
            dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
            t, slope = _tanh(alpha * x)
            g = dy * w * slope
            if dweight_ptr is not None:
                by_weight += dy * t
            if dbias_ptr is not None:
                by_bias += dy
            if dalpha_ptr is not None:
                by_alpha += g * x
            if dx_ptr is not None:
                dx = (g * alpha).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + row * cols + col, dx, mask=mask)
        out = tl.cast(group, tl.int64) * cols + col
        if dalpha_ptr is not None:
            tl.store(dalpha_ptr + out, by_alpha, mask=mask)
        if dweight_ptr is not None:
            tl.store(dweight_ptr + out, by_weight, mask=mask)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + out, by_bias, mask=mask)


def run_forward(
    x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor
) -> None:
    """Write y, contiguous."""
    x = as_rows(x)
    rows, cols = x.shape
    block = block_of("dyt_forward", x, cols)
    steps = -(-cols // block)
    start(
        _dyt_forward_kernel,
        rows * steps,
        x,
        alpha,
        _contiguous(weight),
        _contiguous(bias),
        y,
        x.stride(0),
        rows=rows,
        cols=cols,
        steps=steps,
        BLOCK=block,
    )


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def run_backward(
    dy: Tensor,
    x: Tensor,
    alpha: Tensor,
    weight: Tensor | None,
    dx: Tensor | None,
    sums: tuple[bool, bool, bool],
) -> list[Tensor]:
    """Write dx, contiguous; return the needed sums over rows for alpha, weight and bias."""
    dy, x = as_rows(dy), as_rows(x)
    rows, cols = x.shape
    block = block_of("dyt_backward", x, cols)
    steps = -(-cols // block)
    groups = max(1, min(rows, device_info(x.device).cores // steps))
    parts = [
        x.new_empty((groups, cols), dtype=torch.float32) if is_needed else None
        for is_needed in sums
    ]
    start(
        _dyt_backward_kernel,
        steps * groups,
        dy,
        x,
        alpha,
        _contiguous(weight),
        dx,
        *parts,
        dy.stride(0),
        x.stride(0),
        rows,
        cols,
        steps,
        groups,
        BLOCK=block,
    )
    return [x.new_empty(0) if p is None else p.sum(0) for p in parts]


# --- launchers ---


def forward(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Dynamic tanh, computed in fp32 and rounded once."""
    dtype = x.dtype
    for t in (alpha, weight, bias):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    if y.numel():
        run_forward(x, alpha, weight, bias, y)
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
    """Gradients; empty tensors if not needed."""
    dx = x.new_empty(x.shape if needs_x else 0)
    needs, cols = (needs_alpha, needs_weight, needs_bias), x.shape[-1]
    sums = [x.new_zeros(cols if w else 0, dtype=torch.float32) for w in needs]
    if x.numel():
        sums = run_backward(dy, x, alpha, weight, dx if needs_x else None, needs)
    dalpha = sums[0].sum().to(alpha.dtype).view(alpha.shape) if needs_alpha else None
    return (
        dx,
        alpha.new_empty(0) if dalpha is None else dalpha,
        x.new_empty(0) if weight is None else sums[1].to(weight.dtype),
        sums[2].to(bias_dtype or x.dtype),
    )
