"""RMSNorm of rows of x or of x + residual: kernels on vector cores.

With s = x + residual (or x), n = s * rstd, rstd = (mean(s^2) + eps)^(-1/2), w = weight + offset:

    y  = w * n,  n first rounded to the dtype of s under the llama casting
    ds = rstd * (g - n * mean(g * n)) + what comes from other uses of s,  g = dy * w
    dw = sum over rows of dy * n

A program loops over rows, in steps of columns. Sums over rows are a kernel of their own: a program
has some columns and every so many rows, and leaves one partial.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.npu.common.launching import as_rows, block_of, jitted, start, summed
from liger_multi.backends.npu.common.limits import norm
from liger_multi.dispatch.launch import device_info


@triton.jit
def _weight(weight_ptr, col, mask, offset, ROUND: tl.constexpr):
    """Weight plus offset in fp32; ROUND: the sum is rounded to the dtype of the weight."""
    w = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32) + offset
    return w.to(weight_ptr.dtype.element_ty).to(tl.float32) if ROUND else w


@jitted
def _norm_forward_kernel(
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
    offset,
    EXACT: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMSNorm of x or of x + residual, with two passes over each row.

    Program: every num_programs-th row, in steps of BLOCK columns. The first pass sums squares, and
    writes s where there is a residual. The second reads x and residual again and writes y.
    """
    lane = tl.arange(0, BLOCK)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        total = tl.zeros([BLOCK], tl.float32)
        for at in range(0, cols, BLOCK):
            col = at + lane
            mask = col < cols
            s = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
            if residual_ptr is not None:
                r = tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0)
                rounded = (s + r.to(tl.float32)).to(s_ptr.dtype.element_ty)
                tl.store(s_ptr + row * cols + col, rounded, mask=mask)
                s = rounded.to(tl.float32)
            total += s * s
        rstd = 1.0 / tl.sqrt(summed(total, BLOCK) / cols + eps)
        tl.store(rstd_ptr + row, rstd)
        for at in range(0, cols, BLOCK):
            col = at + lane
            mask = col < cols
            s = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
            if residual_ptr is not None:
                # added again and not loaded: the store above may not have reached memory yet
                r = tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0)
                s = (s + r.to(tl.float32)).to(s_ptr.dtype.element_ty).to(tl.float32)
            n = s * rstd
            if weight_ptr is not None:
                if ROUND and residual_ptr is None:
                    n = n.to(x_ptr.dtype.element_ty).to(tl.float32)
                if ROUND and residual_ptr is not None:
                    n = n.to(s_ptr.dtype.element_ty).to(tl.float32)
                n = n * _weight(weight_ptr, col, mask, offset, not EXACT)
            tl.store(y_ptr + row * cols + col, n.to(y_ptr.dtype.element_ty), mask=mask)


@jitted
def _norm_backward_kernel(
    dy_ptr,
    ds_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dy_stride,
    ds_stride,
    x_stride,
    rows,
    cols,
    offset,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of s, with two passes over each row.

    Program: every num_programs-th row, in steps of BLOCK columns. The first pass sums g * n, the
    second reads again, adds the gradient of other uses of s (``ds_ptr``) and writes dx.
    """
    lane = tl.arange(0, BLOCK)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        rstd = tl.load(rstd_ptr + row)
        total = tl.zeros([BLOCK], tl.float32)
        for at in range(0, cols, BLOCK):
            col = at + lane
            mask = col < cols
            g = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
            n = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32) * rstd
            if weight_ptr is not None:
                g = g * _weight(weight_ptr, col, mask, offset, not EXACT)
            total += g * n
        mean = summed(total, BLOCK) / cols
        for at in range(0, cols, BLOCK):
            col = at + lane
            mask = col < cols
            g = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
            n = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32) * rstd
            if weight_ptr is not None:
                g = g * _weight(weight_ptr, col, mask, offset, not EXACT)
            dx = (g - n * mean) * rstd
            if ds_ptr is not None:
                ds = tl.load(ds_ptr + row * ds_stride + col, mask=mask, other=0.0)
                dx += ds.to(tl.float32)
            tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@jitted
def _norm_weight_kernel(
    dy_ptr,
    x_ptr,
    rstd_ptr,
    partial_ptr,
    dy_stride,
    x_stride,
    rows,
    cols,
    steps,
    groups,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Partial sums of the weight's gradient.

    Program: every num_programs-th piece of BLOCK columns of every ``groups``-th row; writes one
    fp32 row of partials per group.
    """
    lane = tl.arange(0, BLOCK)
    for piece in range(tl.program_id(0), steps * groups, tl.num_programs(0)):
        col = (piece % steps) * BLOCK + lane
        mask = col < cols
        group = piece // steps
        total = tl.zeros([BLOCK], tl.float32)
        for i in range(group, rows, groups):
            row = tl.cast(i, tl.int64)
            dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
            n = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
            n = n * tl.load(rstd_ptr + row)
            if ROUND:
                n = n.to(x_ptr.dtype.element_ty).to(tl.float32)
            total += dy * n
        tl.store(partial_ptr + tl.cast(group, tl.int64) * cols + col, total, mask=mask)


def normalize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the sum (or x) that it is the norm of, and rstd (fp32)."""
    sum_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    wide = weight is not None and casting == "llama"
    dtype = (
        torch.promote_types(sum_dtype, weight.dtype) if weight is not None and wide else sum_dtype
    )
    y = x.new_empty(x.shape, dtype=dtype)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    s = None if residual is None else x.new_empty(x.shape, dtype=sum_dtype)
    if x.numel() == 0:
        return y, x if s is None else s, rstd.fill_(float("nan"))  # a mean over no columns is NaN
    x2d, residual2d = as_rows(x), None if residual is None else as_rows(residual)
    rows, cols = x2d.shape
    start(
        _norm_forward_kernel,
        rows,
        x2d,
        residual2d,
        None if weight is None else weight.contiguous(),
        y,
        s,
        rstd,
        x_stride=x2d.stride(0),
        residual_stride=0 if residual2d is None else residual2d.stride(0),
        rows=rows,
        cols=cols,
        eps=eps,
        offset=offset,
        EXACT=casting == "gemma" or offset == 0.0,
        ROUND=casting == "llama",
        BLOCK=block_of("norm_forward", y, cols),
    )
    return y, x if s is None else s, rstd


def kernel_gradients(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the normalized rows, with ``ds`` of their other uses added, and of weight."""
    dx = x.new_empty(x.shape if needs_x else 0)
    needs_weight = needs_weight and weight is not None
    if x.numel() == 0:
        dweight = x.new_empty(0) if weight is None else torch.zeros_like(weight)
        return dx, dweight if needs_weight else dweight.new_empty(0)
    dy, x, rstd = as_rows(dy), as_rows(x), rstd.contiguous()
    rows, cols = x.shape
    if needs_x:
        ds = None if ds is None else as_rows(ds)
        start(
            _norm_backward_kernel,
            rows,
            dy,
            ds,
            x,
            None if weight is None else weight.contiguous(),
            rstd,
            dx,
            dy_stride=dy.stride(0),
            ds_stride=0 if ds is None else ds.stride(0),
            x_stride=x.stride(0),
            rows=rows,
            cols=cols,
            offset=offset,
            EXACT=casting == "gemma" or offset == 0.0,
            BLOCK=block_of("norm_backward", dx, cols),
        )
    if weight is None or not needs_weight:
        return dx, x.new_empty(0)
    return dx, _weight_gradient(dy, x, rstd, casting == "llama").to(weight.dtype)


def _weight_gradient(dy: Tensor, x: Tensor, rstd: Tensor, rounds: bool) -> Tensor:
    rows, cols = x.shape
    block = block_of("norm_weight", x, cols)
    steps = -(-cols // block)
    groups = max(1, min(rows, device_info(x.device).cores // steps))
    partial = x.new_empty((groups, cols), dtype=torch.float32)
    start(
        _norm_weight_kernel,
        steps * groups,
        dy,
        x,
        rstd,
        partial,
        dy.stride(0),
        x.stride(0),
        rows=rows,
        cols=cols,
        steps=steps,
        groups=groups,
        ROUND=rounds,
        BLOCK=block,
    )
    return partial.sum(0)


def gradients(
    dy: Tensor,
    ds: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """The same; ``ds``, from other uses of x, is added before dx is rounded.

    So is not what npu_rms_norm_backward returns: with ``ds``, it serves fp32 alone.
    """
    exact = ds is None or dy.dtype == torch.float32
    fits = exact and dy.dtype == x.dtype and norm(x, weight, offset) is None
    if weight is None or not fits or not (needs_x and needs_weight):
        return kernel_gradients(
            dy, ds, x, weight, rstd, offset, casting, needs_x=needs_x, needs_weight=needs_weight
        )
    gamma = (weight + offset if offset else weight).contiguous()
    dx, dweight = torch.ops.npu.npu_rms_norm_backward(
        dy.contiguous(), x.contiguous(), gamma, rstd.reshape(*x.shape[:-1], 1)
    )
    return dx if ds is None else dx + ds, dweight.to(weight.dtype)
