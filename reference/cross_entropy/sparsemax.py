"""Sparsemax of the last axis, in blocks of rows.

Of the values in falling order, the first k belong to the support for the largest k with
``1 + k x[k] > x[1] + ... + x[k]``; then ``tau = (x[1] + ... + x[k] - 1) / k``.
"""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype


def forward(x: Tensor) -> Tensor:
    """Sparsemax by sorting, relative to the maximum so that no large numbers cancel."""
    x2d, y = as_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out, cols = as_rows(y), x.shape[-1]
    count = torch.arange(1, cols + 1, dtype=statistics_dtype(x.dtype), device=x.device)
    for block in row_blocks(x2d.shape[0], cols * 32):
        z = x2d[block].to(count.dtype)
        z = z - z.amax(-1, keepdim=True)
        fallen = z.sort(-1, descending=True).values
        total = fallen.cumsum(-1) - 1
        k = (fallen * count > total).sum(-1, keepdim=True).clamp(min=1)
        out[block] = (z - total.gather(-1, k - 1) / k).clamp(min=0).to(x.dtype)
    return y


def backward(dy: Tensor, y: Tensor) -> Tensor:
    """Subtract from dy its mean over the support; the gradient is 0 outside of it."""
    dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    dy2d, y2d, out = as_rows(dy), as_rows(y), as_rows(dx)
    for block in row_blocks(out.shape[0], out.shape[1] * 16):
        support = y2d[block] > 0
        d = torch.where(support, dy2d[block].to(statistics_dtype(dy.dtype)), 0)
        mean = d.sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
        out[block] = torch.where(support, d - mean, 0).to(dx.dtype)
    return dx
