"""Squared rectifier, ``y = relu(x)^2``."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype
from liger_multi.reference.common.one_piece import in_one_piece


def forward(x: Tensor) -> Tensor:
    """One rounding: the rectifier has none."""
    y = torch.square(torch.relu(x))
    return y if y.is_contiguous() else y.contiguous()


def backward(dy: Tensor, x: Tensor) -> Tensor:
    """``dx = 2 relu(x) dy``, block by block of rows; in one piece where a compiler fuses it."""
    kind = statistics_dtype(x.dtype)
    if in_one_piece():
        return (torch.relu(x).to(kind) * 2 * dy.to(kind)).to(x.dtype).contiguous()
    dx, xs, dys = x.new_empty(x.shape), as_rows(x), as_rows(dy)
    rows = as_rows(dx)
    for block in row_blocks(xs.shape[0], 2 * xs.shape[1] * kind.itemsize):
        rows[block] = torch.relu(xs[block]).to(kind) * 2 * dys[block].to(kind)
    return dx
