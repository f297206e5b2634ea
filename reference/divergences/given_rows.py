"""Forward and backward of a divergence of given rows, over a backend's row kernels."""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from liger_multi.reference.cross_entropy.reduction import divide
from liger_multi.reference.divergences import divergence as rows_of
from liger_multi.reference.divergences.row_stats import DivergenceKernels, DivergenceStats, spec_of


class ReferenceRows:
    """Row kernels in plain PyTorch."""

    statistics = staticmethod(rows_of.statistics)
    gradient_into = staticmethod(rows_of.gradient_into)
    loss_and_gradient_ = staticmethod(rows_of.loss_and_gradient_)


def valid_rows(target: Tensor | None, loss: Tensor, ignore_index: int) -> Tensor:
    """How many rows count, without axes, in the dtype of the loss."""
    if target is None:
        return torch.full((), loss.shape[0], dtype=loss.dtype, device=loss.device)
    return (target != ignore_index).sum(dtype=loss.dtype)


def reduced(loss: Tensor, count: Tensor, reduction: str) -> Tensor:
    """Losses of rows, their sum, or their mean over valid rows (0 without any)."""
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else divide(loss.sum(), count)


def forward_and_backward(
    name: str, kernels: DivergenceKernels
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract ``name``."""

    def forward(
        student: Tensor, teacher: Tensor, target: Optional[Tensor], beta: float, form: str,
        teacher_form: str, scale: float, ignore_index: int, reduction: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        spec = spec_of(name, beta, form, teacher_form, scale, ignore_index)
        rows = kernels.statistics(student, teacher, target, spec)
        count = valid_rows(target, rows.loss, ignore_index)
        return reduced(rows.loss, count, reduction), *rows[1:]

    def backward(
        dloss: Tensor, student: Tensor, teacher: Tensor, target: Optional[Tensor], lse: Tensor,
        teacher_lse: Tensor, slope: Tensor, beta: float, form: str, teacher_form: str,
        scale: float, ignore_index: int, reduction: str,
    ) -> Tensor:  # fmt: skip
        spec = spec_of(name, beta, form, teacher_form, scale, ignore_index)
        if reduction == "mean":
            loss = dloss.new_empty(student.shape[0])
            dloss = divide(dloss, valid_rows(target, loss, ignore_index))
        out = student.new_empty(student.shape)
        rows = DivergenceStats(lse.new_empty(0), lse, teacher_lse, slope)
        kernels.gradient_into(out, student, teacher, target, rows, spec, dloss)
        return out

    return forward, backward


def overwriting(name: str, kernels: DivergenceKernels) -> Callable[..., Tensor]:
    """Forward of the contract ``name`` in place; backward scales what stands in the student."""

    def forward(
        student: Tensor, teacher: Tensor, target: Optional[Tensor], beta: float, form: str,
        teacher_form: str, scale: float, ignore_index: int, reduction: str,
    ) -> Tensor:  # fmt: skip
        spec = spec_of(name, beta, form, teacher_form, scale, ignore_index)
        count = valid_rows(
            target, DivergenceStats.empty(student.shape[0], spec, student).loss, ignore_index
        )
        one = torch.ones_like(count)
        factor = divide(one, count) if reduction == "mean" else one
        loss = kernels.loss_and_gradient_(student, teacher, target, spec, factor)
        return reduced(loss, count, reduction)

    return forward


def scale_(dloss: Tensor, student: Tensor) -> None:
    """Scale the gradient that stands in ``student`` by the upstream gradient."""
    student.mul_(dloss.unsqueeze(1) if dloss.ndim else dloss)
