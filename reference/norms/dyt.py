"""Dynamic tanh, ``y = weight * tanh(alpha * x) + bias``, rounded once."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype


def _acc_dtype(*tensors: Tensor | None) -> torch.dtype:
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return statistics_dtype(torch.float64 if wide else torch.float32)


def forward(x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """In fp32 (fp64 for fp64), block by block of rows."""
    acc_dtype, x2d, dtype = _acc_dtype(x, alpha, weight, bias), as_rows(x), x.dtype
    for t in (alpha, weight, bias):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    w, b = (None if t is None else t.to(acc_dtype) for t in (weight, bias))
    a = alpha.reshape(1).to(acc_dtype)
    y = x2d.new_empty(x2d.shape, dtype=dtype)
    for block in row_blocks(x2d.shape[0], 3 * x2d.shape[1] * acc_dtype.itemsize):
        t = torch.tanh(a * x2d[block].to(acc_dtype))
        t = t if w is None else t * w
        y[block] = t if b is None else t + b
    return y.view(x.shape)


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
    """``dx = dy w alpha (1 - t^2)``; ``dalpha`` sums ``dy w (1 - t^2) x``, ``dw`` ``dy t``."""
    acc_dtype, x2d, dy2d, none = (
        _acc_dtype(dy, x, alpha, weight),
        as_rows(x),
        as_rows(dy),
        x.new_empty(0),
    )
    a, w = alpha.reshape(1).to(acc_dtype), None if weight is None else weight.to(acc_dtype)
    cols = x2d.shape[1]
    dx = x2d.new_empty(x2d.shape) if needs_x else none
    da = x2d.new_zeros(1 if needs_alpha else 0, dtype=acc_dtype)
    dw = x2d.new_zeros(cols if needs_weight else 0, dtype=acc_dtype)
    db = x2d.new_zeros(cols if needs_bias else 0, dtype=acc_dtype)
    for block in row_blocks(x2d.shape[0], 5 * cols * acc_dtype.itemsize):
        f, g = x2d[block].to(acc_dtype), dy2d[block].to(acc_dtype)
        t = torch.tanh(a * f)
        if needs_bias:
            db += g.sum(0)
        if needs_weight:
            dw += (g * t).sum(0)
        if needs_x or needs_alpha:
            # 1 - t^2 has no digit left where t is nearly 1
            g = (g if w is None else g * w) * torch.cosh(a * f).pow(-2)
            if needs_alpha:
                da += (g * f).sum()
            if needs_x:
                dx[block] = g * a
    dweight = none if weight is None else dw.to(weight.dtype)
    dalpha = da.to(alpha.dtype)
    return (
        dx.view(x.shape) if needs_x else dx,
        dalpha.view(alpha.shape) if needs_alpha else dalpha,
        dweight,
        db.to(bias_dtype or x.dtype),
    )
