"""Cross entropy that overwrites the logits by their gradient: no second tensor of their size."""

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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss and wanted outputs; ``logits`` holds the gradient of the loss (or of every row's)."""
    reduction_of.check_targets(target, logits.shape[1], ignore_index, validate)
    goal = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
    rows = rows_of.statistics(logits, target, weight, goal, outputs)
    by = reduction_of.denominators(target, weight, ignore_index, reduction, logits.dtype)
    scales = reduction_of.upstream(
        torch.ones_like(by[0]), by, "sum" if reduction == "none" else reduction
    )
    rows_of.gradient_into(logits, logits, target, weight, rows.lse, goal, scales)
    return reduction_of.reduced(rows, target, goal, reduction, by, outputs)  # type: ignore[return-value]


def backward(dloss: Tensor, logits: Tensor) -> None:
    """Scale the gradient that stands in ``logits`` by the upstream gradient."""
    logits.mul_(dloss.unsqueeze(1) if dloss.ndim else dloss)
