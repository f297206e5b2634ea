"""Softmax of the last axis, in blocks of rows."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype


def forward(x: Tensor) -> Tensor:
    """PyTorch's softmax, in at least fp32."""
    x2d, y = as_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = as_rows(y)
    for block in row_blocks(x2d.shape[0], x2d.shape[1] * 8):
        out[block] = torch.softmax(x2d[block].to(statistics_dtype(x.dtype)), -1).to(x.dtype)
    return y


def backward(dy: Tensor, y: Tensor) -> Tensor:
    """``y (dy - sum y dy)``."""
    dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    dy2d, y2d, out = as_rows(dy), as_rows(y), as_rows(dx)
    for block in row_blocks(out.shape[0], out.shape[1] * 16):
        p = y2d[block].to(statistics_dtype(y.dtype))
        weighted = p * dy2d[block]
        out[block] = (weighted - p * weighted.sum(-1, keepdim=True)).to(dx.dtype)
    return dx
