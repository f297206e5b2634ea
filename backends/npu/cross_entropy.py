"""Cross entropy of given logits by Ascend kernels.

npu_cross_entropy_loss keeps a second tensor of the logits' size, takes no negative ignore_index
and none of the options, so it is not used.
"""

from typing import Optional

from torch import Tensor

from liger_multi.backends.npu import logits as rows_of
from liger_multi.backends.npu import row_kernels
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
    rows = row_kernels.statistics(logits, target, weight, goal, outputs)
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
    """Gradient of logits from ``lse``, scaled by the upstream gradient of the row."""
    goal = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
    scales = reduction_of.upstream(dloss, denominators, reduction)
    return rows_of.gradient(logits, target, weight, lse, goal, *scales)
