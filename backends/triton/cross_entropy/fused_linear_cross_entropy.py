"""Cross entropy of ``hidden @ weight.T + bias``: Triton row kernels in the reference's loop.

The GEMMs are the vendor library's; statistics and gradient of a chunk of logits are one launch
that reads every row twice, the second time from the cache, and overwrites it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_multi.backends.triton.common.scaling import scale
from liger_multi.backends.triton.cross_entropy import cross_entropy as rows_of
from liger_multi.backends.triton.cross_entropy.float8 import TritonRounding
from liger_multi.reference.cross_entropy.float8 import Rounding
from liger_multi.reference.cross_entropy.fused_linear_cross_entropy import forward_and_backward
from liger_multi.reference.cross_entropy.rows import Objective, RowStats


def _contiguous(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


class TritonRows:
    """Row kernels over chunks of raw logits."""

    scale = staticmethod(scale)
    rounding: Rounding = TritonRounding()

    @staticmethod
    def statistics(
        raw: Tensor, target: Tensor, weight: Tensor | None, objective: Objective, outputs: str
    ) -> RowStats:
        """Statistics of every row; ``raw`` is left alone."""
        rows = RowStats.empty(raw.shape[0], objective, outputs, raw)
        rows_of.statistics(raw, target, _contiguous(weight), objective, rows)
        return rows

    @staticmethod
    def statistics_and_gradient_(
        raw: Tensor,
        target: Tensor,
        weight: Tensor | None,
        objective: Objective,
        scales: Tensor,
        outputs: str,
    ) -> RowStats:
        """Statistics of a chunk; ``raw`` becomes its gradient."""
        rows = RowStats.empty(raw.shape[0], objective, outputs, raw)
        rows_of.loss_and_gradient_(raw, target, _contiguous(weight), objective, rows, scales)
        return rows

    @staticmethod
    def gradient_(
        raw: Tensor,
        target: Tensor,
        weight: Tensor | None,
        lse: Tensor,
        objective: Objective,
        dloss: Tensor,
    ) -> None:
        """``raw`` becomes its gradient for one upstream gradient a row."""
        ones = torch.ones(2, dtype=torch.float32, device=raw.device)
        rows_of.gradient_into(
            raw, dloss, raw, target, _contiguous(weight), lse.contiguous(), ones, objective
        )


forward, backward = forward_and_backward(TritonRows())
