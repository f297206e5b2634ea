"""As cross_entropy, over the logits: the gradient kernel writes where it read."""

from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.npu import logits as rows_of
from liger_multi.backends.npu import row_kernels
from liger_multi.reference import reduction as reduction_of
from liger_multi.reference.cross_entropy_inplace import backward
from liger_multi.reference.rows import Objective

__all__ = ["backward", "forward"]


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
    rows = row_kernels.statistics(logits, target, weight, goal, outputs)
    by = reduction_of.denominators(target, weight, ignore_index, reduction, logits.dtype)
    one, how = torch.ones_like(by[0]), "sum" if reduction == "none" else reduction
    scales = reduction_of.upstream(one, by, how)
    rows_of.gradient_(logits, target, weight, rows.lse, goal, *scales)
    return reduction_of.reduced(rows, target, goal, reduction, by, outputs)  # type: ignore[return-value]
