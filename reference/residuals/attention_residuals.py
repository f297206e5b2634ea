"""Attention over depth: a softmax over blocks of one query's scores with their normed outputs."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype


def _rows(blocks: Tensor) -> Tensor:
    """``(N, ..., D)`` as (N, rows, D)."""
    return blocks.reshape(blocks.shape[0], blocks.shape[1:-1].numel(), blocks.shape[-1])


def _direction(query: Tensor, weight: Tensor | None, acc_dtype: torch.dtype) -> Tensor:
    return query.to(acc_dtype) if weight is None else query.to(acc_dtype) * weight.to(acc_dtype)


def forward(
    blocks: Tensor, query: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Some rows of all blocks at a time."""
    acc_dtype, rows = statistics_dtype(blocks.dtype), _rows(blocks)
    count, row_count, size = rows.shape
    y = rows.new_empty(row_count, size)
    p, rstd = (rows.new_empty(count, row_count, dtype=acc_dtype) for _ in range(2))
    w = _direction(query, weight, acc_dtype)
    for part in row_blocks(row_count, 3 * count * size * acc_dtype.itemsize):
        v = rows[:, part].to(acc_dtype)
        rstd[:, part] = torch.rsqrt(v.pow(2).mean(-1) + eps)
        p[:, part] = torch.softmax((v @ w) * rstd[:, part], 0)
        y[part] = (p[:, part].unsqueeze(-1) * v).sum(0).to(y.dtype)
    score_shape = blocks.shape[:-1]
    return y.view(blocks.shape[1:]), p.view(score_shape), rstd.view(score_shape)


def backward(
    dy: Tensor,
    blocks: Tensor,
    query: Tensor,
    weight: Tensor | None,
    p: Tensor,
    rstd: Tensor,
    needs_blocks: bool,
    needs_query: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``ds = p (dy v - sum p dy v)``; a score's slope by v is that of a normed row's product."""
    acc_dtype, rows, upstream = p.dtype, _rows(blocks), dy.reshape(-1, dy.shape[-1])
    count, row_count, size = rows.shape
    shares, scales = p.reshape(count, row_count, 1), rstd.reshape(count, row_count, 1)
    dblocks = rows.new_empty(rows.shape) if needs_blocks else rows.new_empty(0)
    w, dw = _direction(query, weight, acc_dtype), rows.new_zeros(size, dtype=acc_dtype)
    for part in row_blocks(row_count, 5 * count * size * acc_dtype.itemsize):
        v, g, share = rows[:, part].to(acc_dtype), upstream[part].to(acc_dtype), shares[:, part]
        n, inner = v * scales[:, part], (v * g).sum(-1, keepdim=True)
        ds = share * (inner - (share * inner).sum(0))
        dw += (ds * n).sum((0, 1))
        if needs_blocks:
            slope = (w - n * ((n @ w) / size).unsqueeze(-1)) * scales[:, part]
            dblocks[:, part] = (share * g + ds * slope).to(blocks.dtype)
    dquery = dw if weight is None else dw * weight.to(acc_dtype)
    dweight = query.new_empty(0)
    if weight is not None and needs_weight:
        dweight = (dw * query.to(acc_dtype)).to(weight.dtype)
    return (
        dblocks.view(blocks.shape) if needs_blocks else dblocks,
        dquery.to(query.dtype) if needs_query else query.new_empty(0),
        dweight,
    )
