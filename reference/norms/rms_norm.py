"""RMSNorm, ``y = w * x / sqrt(mean(x^2) + eps)``, in the order of the Hugging Face classes."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype


def _scaled(
    n: Tensor, weight: Tensor | None, offset: float, casting: str, dtype: torch.dtype
) -> Tensor:
    if weight is None:
        return n.to(dtype)
    if casting == "gemma":
        return (n * (offset + weight.to(n.dtype))).to(dtype)
    w = weight + offset if offset else weight
    return w * n.to(dtype) if casting == "llama" else (w * n).to(dtype)


def output_dtype(x: Tensor, weight: Tensor | None, casting: str) -> torch.dtype:
    """The dtype of the norm: that of x, and of a weight that meets a rounded x."""
    if weight is None or casting != "llama":
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """Normalize block by block of rows; statistics in fp32 (fp64 for fp64)."""
    acc_dtype, x2d = statistics_dtype(x.dtype), as_rows(x)
    result = x.new_empty(x.shape, dtype=output_dtype(x, weight, casting))
    y = result.view(x2d.shape)  # the result is no view, so that models may write to it
    rstd = x2d.new_empty(x2d.shape[0], dtype=acc_dtype)
    for block in row_blocks(x2d.shape[0], 3 * x2d.shape[1] * acc_dtype.itemsize):
        f = x2d[block].to(acc_dtype)
        r = torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
        n = x2d[block] * r.to(x.dtype) if casting == "factor" else f * r
        y[block] = _scaled(n, weight, offset, casting, x.dtype)
        rstd[block] = r.squeeze(-1)
    return result, rstd.view(x.shape[:-1])


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """``dx = rstd * (g - n * mean(g * n))``, ``g = dy * w``; ``dw`` sums ``dy * n`` over rows."""
    return gradients(dy, None, x, weight, rstd, offset, casting, needs_x, needs_weight=needs_weight)


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
    """Those of :func:`backward`; ``ds``, from other uses of x, is added before dx is rounded."""
    acc_dtype, x2d, dy2d, rstds = rstd.dtype, as_rows(x), as_rows(dy), rstd.reshape(-1, 1)
    other_gradients = None if ds is None else as_rows(ds)
    dx = torch.empty_like(x2d, memory_format=torch.contiguous_format) if needs_x else x.new_empty(0)
    dw = None if weight is None or not needs_weight else torch.zeros_like(weight, dtype=acc_dtype)
    for block in row_blocks(x2d.shape[0], 4 * x2d.shape[1] * acc_dtype.itemsize):
        n, g = x2d[block].to(acc_dtype) * rstds[block], dy2d[block].to(acc_dtype)
        if dw is not None:
            dw += (g * (n.to(x.dtype).to(acc_dtype) if casting == "llama" else n)).sum(0)
        if needs_x:
            g = g if weight is None else g * (weight.to(acc_dtype) + offset)
            total = (g - n * (g * n).mean(-1, keepdim=True)) * rstds[block]
            dx[block] = total if other_gradients is None else total + other_gradients[block]
    dweight = x.new_empty(0) if dw is None or weight is None else dw.to(weight.dtype)
    return dx.view(x.shape) if needs_x else dx, dweight
