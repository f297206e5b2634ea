"""Sum of the RMSNorms of the first three powers."""

from typing import Optional

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype

POWERS = (3, 2, 1)  # in the order of the weights


def forward(x: Tensor, weight: Tensor, bias: Optional[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    """In fp32 (fp64 for fp64), block by block of rows, rounded once."""
    kind, rows = statistics_dtype(x.dtype), as_rows(x)
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    y, rstd = (
        rows.new_empty(rows.shape, dtype=dtype),
        rows.new_empty(rows.shape[0], 3, dtype=kind),
    )
    w, b = weight.to(kind), None if bias is None else bias.to(kind)
    for block in row_blocks(rows.shape[0], 5 * rows.shape[1] * kind.itemsize):
        f, total = rows[block].to(kind), None
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
    bias_dtype: Optional[torch.dtype],
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of each power.

    ``du = w r (dy - n mean(dy n))``, ``dx = k x^(k-1) du``, ``dw = sum dy n``.
    """
    kind, rows, dys, rstds = rstd.dtype, as_rows(x), as_rows(dy), as_rows(rstd)
    dx = rows.new_empty(rows.shape) if needs_x else x.new_empty(0)
    dw = weight.new_zeros(3, dtype=kind)
    db = x.new_zeros(1, dtype=kind)
    w = weight.to(kind)
    for block in row_blocks(rows.shape[0], 6 * rows.shape[1] * kind.itemsize):
        f, g = rows[block].to(kind), dys[block].to(kind)
        if needs_bias:
            db += g.sum()
        total = torch.zeros_like(f)
        for i, power in enumerate(POWERS):
            r = rstds[block, i : i + 1]
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
