"""LayerNorm, ``y = (x - mean) / sqrt(var + eps) * w + b``, in the roundings of PyTorch's."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's kernel; parameters in fp32 keep the statistics of bf16 rows in fp32."""
    acc_dtype, x2d = statistics_dtype(x.dtype), as_rows(x)
    w, b = (p if p is None else p.to(acc_dtype) for p in (weight, bias))
    if w is None and acc_dtype != x.dtype:
        w = x2d.new_ones(x2d.shape[1], dtype=acc_dtype)
    result = x.new_empty(x.shape)  # no view, so that models may write to it
    y = result.view(x2d.shape)
    mean, rstd = (x2d.new_empty(x2d.shape[0], 1, dtype=acc_dtype) for _ in range(2))
    # only on a CPU the kernel takes rows of another dtype than its parameters
    widen = x.device.type != "cpu"
    for block in row_blocks(x2d.shape[0], 3 * x2d.shape[1] * acc_dtype.itemsize):
        f = x2d[block].to(acc_dtype) if widen else x2d[block]
        y[block], mean[block], rstd[block] = torch.native_layer_norm(f, f.shape[1:], w, b, eps)
    return result, mean.view(x.shape[:-1]), rstd.view(x.shape[:-1])


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
    """``dx = rstd * (g - mean(g) - n * mean(g * n))``, ``dw`` sums ``dy * n``, ``db`` ``dy``.

    Here ``n = (x - mean) * rstd`` and ``g = dy * w``.
    """
    acc_dtype, x2d, dy2d = rstd.dtype, as_rows(x), as_rows(dy)
    means, rstds = mean.reshape(-1, 1), rstd.reshape(-1, 1)
    dx = torch.empty_like(x2d, memory_format=torch.contiguous_format) if needs_x else None
    dw = x2d.new_zeros(x2d.shape[1] if needs_weight else 0, dtype=acc_dtype)
    db = x2d.new_zeros(x2d.shape[1] if needs_bias else 0, dtype=acc_dtype)
    for block in row_blocks(x2d.shape[0], 4 * x2d.shape[1] * acc_dtype.itemsize):
        n, g = (x2d[block].to(acc_dtype) - means[block]) * rstds[block], dy2d[block].to(acc_dtype)
        if needs_weight:
            dw += (g * n).sum(0)
        if needs_bias:
            db += g.sum(0)
        if dx is not None:
            g = g if weight is None else g * weight.to(acc_dtype)
            g = g - g.mean(-1, keepdim=True)
            # n sums to zero, so that the mean of g does not change that of g * n
            dx[block] = (g - n * (g * n).mean(-1, keepdim=True)) * rstds[block]
    dweight, dbias = (
        dw.to(x.dtype if weight is None else weight.dtype),
        db.to(bias_dtype or x.dtype),
    )
    return x.new_empty(0) if dx is None else dx.view(x.shape), dweight, dbias
