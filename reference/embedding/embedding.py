"""Rows of a table; the gradient is summed in blocks of columns, in fp32."""

import functools

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype
from liger_multi.reference.cross_entropy.reduction import check_targets

aten = torch.ops.aten


@functools.cache
def rounded(scale: float, dtype: torch.dtype) -> float:
    """The factor, rounded to the dtype of the table."""
    return float(torch.tensor(scale, dtype=torch.float64).to(dtype))


def _is_row(index: Tensor, classes: int) -> Tensor:
    return (index >= 0) & (index < classes)


def forward(
    weight: Tensor, index: Tensor, classes: int, padding_idx: int, scale: float, validate: bool
) -> Tensor:
    """A gather and a product."""
    check_targets(index, classes, None, validate, "index")
    is_row = _is_row(index, classes)
    if not classes:
        return weight.new_full((index.shape[0], weight.shape[1]), float("nan"))
    y = weight.index_select(0, torch.where(is_row, index, 0))
    if scale != 1.0:
        y = y * rounded(scale, weight.dtype)
    return y if index.device.type == "cpu" else torch.where(is_row.unsqueeze(1), y, float("nan"))


def backward(dy: Tensor, index: Tensor, classes: int, padding_idx: int, scale: float) -> Tensor:
    """Sums by id in the order of the index (``index_put_`` of several threads keeps none)."""
    out, acc_dtype = dy.new_empty(classes, dy.shape[1]), statistics_dtype(dy.dtype)
    has_gradient = _is_row(index, classes) & (index != padding_idx)
    label = torch.where(
        has_gradient, index, classes
    )  # an extra row collects the gradients of ignored ids
    for block in row_blocks(dy.shape[1], (classes + index.shape[0]) * acc_dtype.itemsize):
        total = aten.embedding_dense_backward(
            dy[:, block].to(acc_dtype), label, classes + 1, classes, scale_grad_by_freq=False
        )
        out[:, block] = (total[:classes] * rounded(scale, dy.dtype)).to(dy.dtype)
    return out
