"""Cross entropy of given logits; the gradient is recomputed from ``lse`` in backward."""

from typing import Optional

import torch
from torch import Tensor

from liger_multi.reference import objective as rows_of
from liger_multi.reference import reduction as reduction_of
from liger_multi.reference.rows import Objective


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss and wanted outputs, then ``lse`` of every row and the denominators of the mean."""
    reduction_of.check_targets(target, logits.shape[1], ignore_index, validate)
    goal = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
    rows = rows_of.statistics(logits, target, weight, goal, outputs)
    by = reduction_of.denominators(target, weight, ignore_index, reduction, logits.dtype)
    return (*reduction_of.reduced(rows, target, goal, reduction, by, outputs), by)  # type: ignore[return-value]


def backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    lse: Tensor,
    denominators: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: Optional[float],
    reduction: str,
) -> Tensor:
    """``(p - onehot)`` and its kin, scaled by the upstream gradient of the row."""
    goal = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    scales = reduction_of.upstream(dloss, denominators, reduction)
    rows_of.gradient_into(dlogits, logits, target, weight, lse, goal, scales)
    return dlogits
