"""The weighted sum of residual streams, ``y = sum of pre[i] x[i]``."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype


def as_streams(x: Tensor) -> Tensor:
    """View (or copy) ``(..., N, C)`` as ``(rows, N, C)``."""
    return x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def forward(x: Tensor, pre: Tensor) -> Tensor:
    """Block by block of rows, in fp32."""
    acc_dtype, rows = statistics_dtype(x.dtype), as_streams(x)
    weights = pre.reshape(rows.shape[:2])
    y = x.new_empty(rows.shape[0], rows.shape[2])
    for block in row_blocks(rows.shape[0], 2 * rows.shape[1:].numel() * acc_dtype.itemsize):
        y[block] = (
            (rows[block].to(acc_dtype) * weights[block].to(acc_dtype).unsqueeze(-1))
            .sum(1)
            .to(x.dtype)
        )
    return y.view(*x.shape[:-2], x.shape[-1])


def backward(
    dy: Tensor, x: Tensor, pre: Tensor, needs_x: bool, needs_pre: bool
) -> tuple[Tensor, Tensor]:
    """``dx[i] = pre[i] dy`` and ``dpre[i] = x[i] . dy``."""
    acc_dtype, rows = statistics_dtype(x.dtype), as_streams(x)
    weights, up = pre.reshape(rows.shape[:2]), dy.reshape(rows.shape[0], rows.shape[2])
    dx, dpre = (
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        pre.new_empty(rows.shape[:2]),
    )
    for block in row_blocks(rows.shape[0], 3 * rows.shape[1:].numel() * acc_dtype.itemsize):
        d = up[block].to(acc_dtype).unsqueeze(1)
        dx[block] = (weights[block].to(acc_dtype).unsqueeze(-1) * d).to(dx.dtype)
        dpre[block] = (rows[block].to(acc_dtype) * d).sum(-1).to(dpre.dtype)
    return (
        dx.view(x.shape) if needs_x else x.new_empty(0),
        dpre.view(pre.shape) if needs_pre else pre.new_empty(0),
    )
