"""What Ascend's row kernels do with a chunk of raw logits; the loops are the reference's."""

from typing import Optional

from torch import Tensor

from liger_multi.backends.npu.common.launching import as_rows
from liger_multi.backends.npu.cross_entropy import row_kernels
from liger_multi.backends.npu.cross_entropy.row_kernels import Coefficients
from liger_multi.reference.cross_entropy.float8 import PLAIN, Rounding
from liger_multi.reference.cross_entropy.fused_linear import scale_to
from liger_multi.reference.cross_entropy.rows import Objective, RowStats, Upstream


class AscendRows:
    """Row kernels of losses over a vocabulary."""

    statistics = staticmethod(row_kernels.statistics)
    scale = staticmethod(scale_to)
    rounding: Rounding = PLAIN

    @staticmethod
    def gradient_into(
        out: Tensor, raw: Tensor, target: Tensor, weight: Optional[Tensor], lse: Tensor,
        objective: Objective, scales: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Write the gradient of ``scales``' cross entropies and z-losses; ``out`` may be raw."""
        cols = raw.shape[1]
        numbers = row_kernels.coefficients(target, weight, lse, objective, cols, *scales)
        room = as_rows(out)
        given = room if out is raw else raw
        row_kernels.gradient_into(room, given, target, weight, lse, objective, numbers)
        if room is not out:
            out.copy_(room)

    @staticmethod
    def statistics_and_gradient_(
        raw: Tensor, target: Tensor, weight: Optional[Tensor], objective: Objective,
        scales: Tensor, outputs: str,
    ) -> RowStats:  # fmt: skip
        """Statistics of a chunk; ``raw`` becomes its gradient."""
        rows = row_kernels.statistics(raw, target, weight, objective, outputs)
        by = (scales[0], scales[1])
        AscendRows.gradient_into(raw, raw, target, weight, rows.lse, objective, by)
        return rows

    @staticmethod
    def gradient_(
        raw: Tensor, target: Tensor, weight: Optional[Tensor], lse: Tensor, objective: Objective,
        dloss: Tensor,
    ) -> None:  # fmt: skip
        """``raw`` becomes its gradient for one upstream gradient a row."""
        AscendRows.gradient_into(raw, raw, target, weight, lse, objective, (dloss, dloss))

    @staticmethod
    def log_prob_gradient_(
        raw: Tensor, target: Tensor, lse: Tensor, objective: Objective, upstream: Upstream
    ) -> None:
        """``raw`` becomes its gradient by log-probability, entropy and lse."""
        parts = (None if p is None else p.float() for p in upstream)
        numbers = Coefficients._make((*parts, None))
        row_kernels.gradient_into(raw, raw, target, None, lse, objective, numbers)
