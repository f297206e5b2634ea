"""Cross entropy of given logits; the gradient is recomputed from the log-sum-exp in backward.

:func:`implement_cross_entropy` makes forward and backward from a backend's row kernels.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from liger_multi.reference.cross_entropy import reduction as reduction_of, rows as rows_of
from liger_multi.reference.cross_entropy.rows import LogSumExp, Objective, RowStats


class CallerRows(Protocol):
    """Row kernels of a backend for logits that the caller owns."""

    def statistics(
        self, raw: Tensor, target: Tensor, weight: Tensor | None, objective: Objective, outputs: str
    ) -> RowStats:
        """Statistics of every row; ``raw`` is left alone."""

    def gradient_into(
        self,
        out: Tensor,
        raw: Tensor,
        target: Tensor,
        weight: Tensor | None,
        lse: LogSumExp,
        objective: Objective,
        scales: tuple[Tensor, Tensor],
    ) -> None:
        """Write the gradient of ``ce * scales[0] + zl * scales[1]``; ``out`` may be ``raw``."""


def implement_cross_entropy(kernels: CallerRows) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract."""

    def forward(
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        z_loss_weight: float,
        softcap: float | None,
        reduction: str,
        validate: bool,
        outputs: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        reduction_of.check_targets(target, logits.shape[1], ignore_index, validate)
        spec = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
        rows = kernels.statistics(logits, target, weight, spec, outputs)
        denominators = reduction_of.denominators(
            target, weight, ignore_index, reduction, logits.dtype
        )
        return (
            *reduction_of.reduced(rows, target, spec, reduction, denominators, outputs),
            rows.lse_low,
            denominators,
        )  # type: ignore[return-value]

    def backward(
        dloss: Tensor,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        lse: Tensor,
        lse_low: Tensor,
        denominators: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss_weight: float,
        softcap: float | None,
        reduction: str,
    ) -> Tensor:
        spec = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        scales = reduction_of.upstream(dloss, denominators, reduction)
        normalizer = LogSumExp(lse, lse_low)
        kernels.gradient_into(dlogits, logits, target, weight, normalizer, spec, scales)
        return dlogits

    return forward, backward


def overwriting(kernels: CallerRows) -> Callable[..., Any]:
    """Forward of the contract in place; :func:`scale_` is its backward."""

    def forward(
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        z_loss_weight: float,
        softcap: float | None,
        reduction: str,
        validate: bool,
        outputs: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        reduction_of.check_targets(target, logits.shape[1], ignore_index, validate)
        spec = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
        rows = kernels.statistics(logits, target, weight, spec, outputs)
        denominators = reduction_of.denominators(
            target, weight, ignore_index, reduction, logits.dtype
        )
        unit, reduction_mode = (
            torch.ones_like(denominators[0]),
            "sum" if reduction == "none" else reduction,
        )
        scales = reduction_of.upstream(unit, denominators, reduction_mode)
        kernels.gradient_into(logits, logits, target, weight, rows.normalizer, spec, scales)
        return reduction_of.reduced(rows, target, spec, reduction, denominators, outputs)  # type: ignore[return-value]

    return forward


def scale_(dloss: Tensor, logits: Tensor) -> None:
    """Scale the gradient that stands in ``logits`` by the upstream gradient."""
    logits.mul_(dloss.unsqueeze(1) if dloss.ndim else dloss)


forward, backward = implement_cross_entropy(rows_of)
