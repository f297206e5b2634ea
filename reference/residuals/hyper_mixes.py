"""Logits of hyper-connections: the product of a normalized row of streams, block by block."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype


def mixes(rows: Tensor, weight: Tensor, rms_eps: float) -> tuple[Tensor, Tensor]:
    """``W v rstd`` and rstd of every row v of (rows, N C), in the dtype of statistics."""
    kind = statistics_dtype(rows.dtype)
    found, w = rows.new_empty(rows.shape[0], weight.shape[0], dtype=kind), weight.to(kind)
    rstd = rows.new_empty(rows.shape[0], dtype=kind)
    for block in row_blocks(rows.shape[0], 2 * rows.shape[1] * kind.itemsize):
        v = rows[block].to(kind)
        rstd[block] = torch.rsqrt(v.square().mean(-1) + rms_eps)
        found[block] = (v @ w.mT) * rstd[block].unsqueeze(-1)
    return found, rstd


def gradients(
    rows: Tensor, weight: Tensor, d: Tensor, own: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """``dx = d W - own v`` for every row v, and ``dW`` = the sum of d' v; empty where not needed.

    d (rows, outputs) is the gradient of W v, own (rows, 1) what the norm takes back.
    """
    kind = d.dtype
    w, dx = weight.to(kind), rows.new_empty(rows.shape if needs_x else 0)
    dweight = torch.zeros_like(w) if needs_weight else w.new_empty(0)
    for block in row_blocks(rows.shape[0], 3 * rows.shape[1] * kind.itemsize):
        v = rows[block].to(kind)
        if needs_weight:
            dweight.addmm_(d[block].mT, v)
        if needs_x:
            dx[block] = torch.addmm(v * -own[block], d[block], w).to(rows.dtype)
    return dx, dweight.to(weight.dtype)
