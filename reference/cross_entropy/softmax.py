"""Softmax of the last axis, in blocks of rows."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype


def forward(x: Tensor) -> Tensor:
    """PyTorch's, in fp32 at least."""
    rows, y = as_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = as_rows(y)
    for block in row_blocks(rows.shape[0], rows.shape[1] * 8):
        out[block] = torch.softmax(rows[block].to(statistics_dtype(x.dtype)), -1).to(x.dtype)
    return y


def backward(dy: Tensor, y: Tensor) -> Tensor:
    """``y (dy - sum y dy)``."""
    dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    upstream, given, out = as_rows(dy), as_rows(y), as_rows(dx)
    for block in row_blocks(out.shape[0], out.shape[1] * 16):
        p = given[block].to(statistics_dtype(y.dtype))
        weighted = p * upstream[block]
        out[block] = (weighted - p * weighted.sum(-1, keepdim=True)).to(dx.dtype)
    return dx
