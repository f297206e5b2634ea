"""Cross entropy that overwrites the logits by their gradient, in one launch."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.triton import cross_entropy as rows_of
from liger_multi.reference.reduction import check_targets, divide, reduced
from liger_multi.reference.rows import Objective, Rows


def forward(
    logits: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: Optional[float],
    reduction: str,
    validate: bool,
    outputs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss and wanted outputs; ``logits`` holds the gradient of the loss (or of every row's)."""
    check_targets(target, logits.shape[1], ignore_index, validate)
    options = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
    weight = None if weight is None else weight.contiguous()
    *_, by = rows_of.reduce_rows(target, weight, None, logits.shape[1], ignore_index, reduction, "")
    rows = Rows.room(logits.shape[0], options, outputs, logits)
    wide = logits if logits.stride(1) == 1 else logits.contiguous()
    rows_of.loss_and_gradient_(wide, target, weight, options, rows, divide(torch.ones_like(by), by))
    if wide is not logits:
        logits.copy_(wide)
    return reduced(rows, target, options, reduction, by, outputs)  # type: ignore[return-value]


def backward(dloss: Tensor, logits: Tensor) -> None:
    """Scale the gradient that stands in ``logits`` by the upstream gradient."""
    logits.mul_(dloss.unsqueeze(1) if dloss.ndim else dloss)
