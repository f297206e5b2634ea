"""What Ascend's row kernels do with a chunk of raw logits; the loops are the reference's."""

from typing import Optional

import torch
from torch import Tensor

from liger_multi.backends.npu import row_kernels
from liger_multi.backends.npu.launching import as_rows
from liger_multi.backends.npu.row_kernels import Coefficients
from liger_multi.reference.gradients import scale_to
from liger_multi.reference.log_prob import Upstream
from liger_multi.reference.rows import Objective, Rows


class AscendRows:
    """Row kernels of losses over a vocabulary."""

    statistics = staticmethod(row_kernels.statistics)
    scale = staticmethod(scale_to)

    @staticmethod
    def statistics_and_gradient_(
        raw: Tensor, target: Tensor, weight: Optional[Tensor], objective: Objective,
        scales: Tensor, outputs: str,
    ) -> Rows:  # fmt: skip
        """Statistics of a chunk; ``raw`` becomes its gradient."""
        rows = row_kernels.statistics(raw, target, weight, objective, outputs)
        gradient_(raw, target, weight, rows.lse, objective, scales[0], scales[1])
        return rows

    @staticmethod
    def gradient_(
        raw: Tensor, target: Tensor, weight: Optional[Tensor], lse: Tensor, objective: Objective,
        dloss: Tensor,
    ) -> None:  # fmt: skip
        """``raw`` becomes its gradient for one upstream gradient a row."""
        gradient_(raw, target, weight, lse, objective, dloss, dloss)

    @staticmethod
    def log_prob_gradient_(
        raw: Tensor, target: Tensor, lse: Tensor, objective: Objective, upstream: Upstream
    ) -> None:
        """``raw`` becomes its gradient by log-probability, entropy and lse."""
        parts = (None if p is None else p.float() for p in upstream)
        numbers = Coefficients._make((*parts, None))
        row_kernels.gradient_into(raw, raw, target, None, lse, objective, numbers)


def gradient_(
    raw: Tensor, target: Tensor, weight: Optional[Tensor], lse: Tensor, goal: Objective,
    ce: Tensor, zl: Tensor,
) -> None:  # fmt: skip
    """Overwrite raw logits by the gradient of ``ce`` cross entropies and ``zl`` z-losses."""
    numbers = row_kernels.coefficients(target, weight, lse, goal, raw.shape[1], ce, zl)
    wide = as_rows(raw)
    row_kernels.gradient_into(wide, wide, target, weight, lse, goal, numbers)
    if wide is not raw:
        raw.copy_(wide)


def gradient(
    raw: Tensor, target: Tensor, weight: Optional[Tensor], lse: Tensor, goal: Objective,
    ce: Tensor, zl: Tensor,
) -> Tensor:  # fmt: skip
    """The same in a tensor of its own."""
    numbers = row_kernels.coefficients(target, weight, lse, goal, raw.shape[1], ce, zl)
    out = torch.empty_like(raw, memory_format=torch.contiguous_format)
    row_kernels.gradient_into(out, raw, target, weight, lse, goal, numbers)
    return out
