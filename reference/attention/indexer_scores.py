"""Scores of a lightning indexer for listed keys, by blocks of queries whose keys are gathered."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_multi.reference.attention.sparse_attention import SumsByKey, gather_positions, gathered
from liger_multi.reference.common.chunking import row_blocks, statistics_dtype


def _blocks(q: Tensor, indices: Tensor, acc_dtype: torch.dtype) -> Iterator[slice]:
    row = q.shape[0] * indices.shape[-1] * (2 * q.shape[3] + 3 * q.shape[2]) * acc_dtype.itemsize
    yield from row_blocks(q.shape[1] if q.shape[0] else 0, row)


def _products(
    q: Tensor, k: Tensor, w: Tensor, indices: Tensor, rows: slice, acc_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """A block's queries, keys, weights, products (B, rows, H, K), indices, and which are valid."""
    positions, is_key = gather_positions(indices[:, rows], k.shape[1])
    queries, keys = q[:, rows].to(acc_dtype), gathered(k, positions, acc_dtype)
    return queries, keys, w[:, rows, :, None].to(acc_dtype), queries @ keys.mT, positions, is_key


def forward(q: Tensor, k: Tensor, w: Tensor, indices: Tensor, scale: float) -> Tensor:
    """A block of queries at a time."""
    acc_dtype = statistics_dtype(q.dtype)
    scores = q.new_full(indices.shape, -torch.inf, dtype=acc_dtype)
    if not k.shape[1] or not indices.numel():
        gather_positions(indices, k.shape[1])
        return scores
    for rows in _blocks(q, indices, acc_dtype):
        _, _, weights, products, _, is_key = _products(q, k, w, indices, rows, acc_dtype)
        block = (products.relu_() * weights).sum(2) * scale
        block = block.masked_fill(~is_key, -torch.inf)
        scores[:, rows] = block.masked_fill(indices[:, rows] >= k.shape[1], torch.nan)
    return scores


def backward(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    indices: Tensor,
    scale: float,
    needs_q: bool,
    needs_k: bool,
    needs_w: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of products are ``dscores w`` where the product is above 0."""
    acc_dtype = statistics_dtype(q.dtype)
    dq, dw = (
        x.new_zeros(x.shape) if is_needed else x.new_empty(0)
        for x, is_needed in ((q, needs_q), (w, needs_w))
    )
    wide = k.new_empty(0, dtype=acc_dtype)
    dk = SumsByKey(k.shape, wide, indices.shape[-1], q.shape[1]) if needs_k else None
    for rows in _blocks(q, indices, acc_dtype) if k.shape[1] and indices.numel() else ():
        queries, keys, weights, products, positions, is_key = _products(
            q, k, w, indices, rows, acc_dtype
        )
        up = (dscores[:, rows].to(acc_dtype) * scale).masked_fill(~is_key, 0)[:, :, None]
        if needs_w:
            dw[:, rows] = (products.relu() * up).sum(-1).to(w.dtype)
        dproducts = (up * weights).masked_fill(products <= 0, 0)
        if needs_q:
            dq[:, rows] = (dproducts @ keys).to(q.dtype)
        if dk is not None:
            dk.add(positions, is_key, dproducts.mT @ queries)
    return dq, (wide if dk is None else dk.result()).to(k.dtype), dw
