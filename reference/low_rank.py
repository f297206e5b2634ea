"""Products with the two thin matrices of a low-rank update, ``scale (x a') b'``.

A base in bf16 with adapters in fp32 multiplies in fp32, as PEFT does, but some rows at a time: no
copy of ``x`` in fp32 is ever whole. The scale meets sums, never a rounded factor.
"""

import torch
from torch import Tensor

from liger_multi.reference.chunking import row_blocks


def narrow(wide: Tensor, thin: Tensor) -> Tensor:
    """``wide @ thin``, (rows, r), in the dtype of ``thin``."""
    if wide.dtype == thin.dtype:
        return wide @ thin
    made = wide.new_empty(wide.shape[0], thin.shape[1], dtype=thin.dtype)
    for block in _blocks(wide, thin.dtype):
        torch.mm(wide[block].to(thin.dtype), thin, out=made[block])
    return made


def add_(rows: Tensor, low: Tensor, thin: Tensor, scale: float) -> Tensor:
    """``rows += scale low @ thin``, rounded once."""
    if rows.dtype == low.dtype:
        return rows.addmm_(low, thin, alpha=scale)
    for block in _blocks(rows, low.dtype):
        rows[block] = torch.addmm(rows[block].to(low.dtype), low[block], thin, alpha=scale)
    return rows


def widened(low: Tensor, thin: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``scale low @ thin`` in a dtype of its own."""
    if dtype == low.dtype:
        return (low @ thin).mul_(scale)
    made = low.new_empty(low.shape[0], thin.shape[1], dtype=dtype)
    for block in _blocks(made, low.dtype):
        made[block] = (low[block] @ thin).mul_(scale)
    return made


def gradient(left: Tensor, right: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``scale left' @ right``, the gradient of a thin matrix, in its dtype."""
    if left.dtype == right.dtype == dtype:
        return (left.t() @ right).mul_(scale)
    total = left.new_zeros(left.shape[1], right.shape[1], dtype=dtype)
    wider = left if left.shape[1] > right.shape[1] else right
    for block in _blocks(wider, dtype):
        total.addmm_(left[block].to(dtype).t(), right[block].to(dtype))
    return total.mul_(scale)


def _blocks(wide: Tensor, dtype: torch.dtype) -> list[slice]:
    return list(row_blocks(wide.shape[0], wide.shape[1] * dtype.itemsize))
