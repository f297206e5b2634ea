"""Sum of the RMSNorms of the first three powers."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype

POWERS = (3, 2, 1)  # in the order of the weights


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """In fp32 (fp64 for fp64), block by block of rows, rounded once."""
    acc_dtype, x2d = statistics_dtype(x.dtype), as_rows(x)
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    y, rstd = (
        x2d.new_empty(x2d.shape, dtype=dtype),
        x2d.new_empty(x2d.shape[0], 3, dtype=acc_dtype),
    )
    w, b = weight.to(acc_dtype), None if bias is None else bias.to(acc_dtype)
    for block in row_blocks(x2d.shape[0], 5 * x2d.shape[1] * acc_dtype.itemsize):
        f, total = x2d[block].to(acc_dtype), None
        for i, power in enumerate(POWERS):
            u = f**power
            r = torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)
            rstd[block, i] = r.squeeze(-1)
            term = w[i] * (u * r)
            total = term if total is None else total + term
        assert total is not None
        y[block] = total if b is None else total + b
    return y.view(x.shape), rstd.view(*x.shape[:-1], 3)


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
    """The gradient of each power.

    ``du = w r (dy - n mean(dy n))``, ``dx = k x^(k-1) du``, ``dw = sum dy n``.
    """
    acc_dtype, x2d, dy2d, rstd2d = rstd.dtype, as_rows(x), as_rows(dy), as_rows(rstd)
    dx = x2d.new_empty(x2d.shape) if needs_x else x.new_empty(0)
    dw = weight.new_zeros(3, dtype=acc_dtype)
    db = x.new_zeros(1, dtype=acc_dtype)
    w = weight.to(acc_dtype)
    for block in row_blocks(x2d.shape[0], 6 * x2d.shape[1] * acc_dtype.itemsize):
        f, g = x2d[block].to(acc_dtype), dy2d[block].to(acc_dtype)
        if needs_bias:
            db += g.sum()
        total = torch.zeros_like(f)
        for i, power in enumerate(POWERS):
            r = rstd2d[block, i : i + 1]
            n = f**power * r
            products = g * n
            dw[i] += products.sum()
            if needs_x:
                du = w[i] * r * (g - n * products.mean(-1, keepdim=True))
                total += du * power * f ** (power - 1)
        if needs_x:
            dx[block] = total
    return (
        dx.view(x.shape) if needs_x else dx,
        dw.to(weight.dtype) if needs_weight else weight.new_empty(0),
        (db if needs_bias else db.new_empty(0)).to(bias_dtype or x.dtype),
    )
