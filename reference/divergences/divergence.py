"""Divergences of given rows of two distributions: losses and gradients, and the operators.

With q the student's probabilities of a row, p the teacher's and ``r[j] = d loss / d q[j]``::

    forward  sum p (log p - log q)                              r = -p / q
    reverse  sum q (log q - log p)                              r = log q - log p + 1
    jensen   sum beta p (log p - log m) + (1 - beta) q (log q - log m)
             with m = beta p + (1 - beta) q                     r = (1 - beta) (log q - log m)
    tvd      sum |q - p| / 2                                    r = sign(q - p) / 2

A student that is given by probabilities gets ``r``, by log-probabilities ``q r``, by logits
``scale q (r - slope)`` with ``slope = sum q r``, where constants in ``r`` cancel.

A backend's row kernels are :class:`DivergenceKernels`; here they are in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype
from liger_multi.reference.cross_entropy.rows import LogSumExp, log_sum_exp

# --- what a backend supplies ---

FORMS = ("logits", "log_prob", "prob")


@dataclass(frozen=True)
class DivergenceSpec:
    """Which divergence, of what: logits are multiplied by ``scale`` (1 / temperature)."""

    formula: str
    beta: float = 0.0
    form: str = "logits"
    teacher_form: str = "logits"
    scale: float = 1.0
    ignore_index: int = -100


def spec_of(
    name: str, beta: float, form: str, teacher_form: str, scale: float, ignore_index: int
) -> DivergenceSpec:
    """The specification of an operator; JSD with beta 0 or 1 is a KL divergence."""
    formula = {"kl_div": "forward", "tvd": "tvd", "jsd": "jensen"}[name]
    if formula == "jensen":
        formula = {0.0: "forward", 1.0: "reverse"}.get(beta, formula)
    return DivergenceSpec(formula, beta, form, teacher_form, scale, ignore_index)


class DivergenceStats(NamedTuple):
    """Loss of every row and, of logits, what backward needs: 0 for ignored rows.

    Both log-sum-exps are :class:`LogSumExp`.
    """

    loss: Tensor
    lse: Tensor
    lse_low: Tensor
    teacher_lse: Tensor
    teacher_lse_low: Tensor
    slope: Tensor

    @staticmethod
    def empty(rows: int, spec: DivergenceSpec, tensor: Tensor) -> DivergenceStats:
        """Uninitialized statistics on the device of ``tensor``; empty if the form is not logits."""
        acc_dtype, student = statistics_dtype(tensor.dtype), spec.form == "logits"
        needs = (True, *[student] * 2, *[spec.teacher_form == "logits"] * 2, student)
        return DivergenceStats._make(
            tensor.new_empty(rows if is_needed else 0, dtype=acc_dtype) for is_needed in needs
        )


class DivergenceKernels(Protocol):
    """What a backend's row kernels do with rows of a student and a teacher."""

    def statistics(
        self, student: Tensor, teacher: Tensor, target: Tensor | None, spec: DivergenceSpec
    ) -> DivergenceStats:
        """Losses and residuals of rows; rows whose target is ignored are 0."""

    def gradient_into(
        self,
        out: Tensor,
        student: Tensor,
        teacher: Tensor,
        target: Tensor | None,
        rows: DivergenceStats,
        spec: DivergenceSpec,
        factor: Tensor,
    ) -> None:
        """Write the gradient times ``factor`` (a number, or one a row); ``out`` may be student."""

    def loss_and_gradient_(
        self,
        student: Tensor,
        teacher: Tensor,
        target: Tensor | None,
        spec: DivergenceSpec,
        factor: Tensor,
    ) -> Tensor:
        """Losses of rows; the student becomes its gradient times ``factor``."""


# --- rows in plain PyTorch ---

FAR = 80.0  # beyond a gap of so many nats, the smaller probability adds nothing to the larger


def _distribution(raw: Tensor, form: str, scale: float, lse: LogSumExp) -> tuple[Tensor, Tensor]:
    """Log-probabilities and probabilities."""
    z = raw.to(statistics_dtype(raw.dtype))
    if form == "prob":
        return z.log(), z
    log = lse.below(z * scale) if form == "logits" else z
    return log, log.exp()


def _terms(
    spec: DivergenceSpec, log_q: Tensor, q: Tensor, log_p: Tensor, p: Tensor
) -> tuple[Tensor, ...]:
    """Loss, ``q r`` and ``r`` of every class, without the constant in r where it cancels."""
    if spec.formula == "tvd":
        # logarithms that differ may have equal exponentials, and the other way round
        a, b = (q, p) if spec.form == spec.teacher_form == "prob" else (log_q, log_p)
        r = ((a > b).to(q.dtype) - (a < b).to(q.dtype)) / 2
        return (q - p).abs() / 2, q * r, r
    gap = torch.where(log_q == log_p, 0, log_p - log_q)  # both may be -inf
    if spec.formula == "forward":
        return torch.where(p == 0, 0, p * gap), -p, -torch.where(p == 0, 0, p / q)
    if spec.formula == "reverse":
        r = (0.0 if spec.form == "logits" else 1.0) - gap
        return torch.where(q == 0, 0, -q * gap), torch.where(q == 0, 0, q * r), r
    gap = gap.clamp(-FAR, FAR)
    x = -torch.log1p(spec.beta * torch.expm1(gap))  # log q - log m
    r = (1 - spec.beta) * x
    return spec.beta * p * (gap + x) + q * r, q * r, r


def statistics(
    student: Tensor, teacher: Tensor, target: Tensor | None, spec: DivergenceSpec
) -> DivergenceStats:
    """Losses and residuals of rows, block by block."""
    rows = DivergenceStats.empty(student.shape[0], spec, student)
    for block in row_blocks(student.shape[0], student.shape[1] * 8):
        normalizers, no = [], rows.loss.new_empty(0)
        for raw, form in ((student, spec.form), (teacher, spec.teacher_form)):
            logits = form == "logits"
            z = raw[block].to(rows.loss.dtype) * spec.scale if logits else raw[block]
            normalizers.append(log_sum_exp(z) if logits else LogSumExp(no, no))
        log_q, q = _distribution(student[block], spec.form, spec.scale, normalizers[0])
        log_p, p = _distribution(teacher[block], spec.teacher_form, spec.scale, normalizers[1])
        loss, weighted, _ = _terms(spec, log_q, q, log_p, p)
        slope = weighted.sum(-1)
        if spec.formula == "forward" and spec.teacher_form == "logits":
            slope.fill_(-1)  # less the sum of p, which is not rounded
        valid = None if target is None else target[block] != spec.ignore_index
        parts = (loss.sum(-1), *normalizers[0], *normalizers[1], slope)
        for buffer, part in zip(rows, parts, strict=True):
            if buffer.numel():
                buffer[block] = part if valid is None else torch.where(valid, part, 0)
    return rows


def gradient_into(
    out: Tensor,
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None,
    rows: DivergenceStats,
    spec: DivergenceSpec,
    factor: Tensor,
) -> None:
    """Write the gradient times ``factor``; ignored rows get zeros, whatever stands in them."""
    for block in row_blocks(student.shape[0], student.shape[1] * 8):
        *normalizers, slope = (part[block] if part.numel() else part for part in rows[1:])
        lse, teacher_lse = LogSumExp(*normalizers[:2]), LogSumExp(*normalizers[2:])
        log_q, q = _distribution(student[block], spec.form, spec.scale, lse)
        log_p, p = _distribution(teacher[block], spec.teacher_form, spec.scale, teacher_lse)
        _, weighted, r = _terms(spec, log_q, q, log_p, p)
        dz = r if spec.form == "prob" else weighted
        if spec.form == "logits":
            dz = (weighted - q * slope.unsqueeze(1)) * spec.scale
        dz = dz * (factor[block].unsqueeze(1) if factor.ndim else factor)
        if target is not None:
            dz = torch.where((target[block] != spec.ignore_index).unsqueeze(1), dz, 0)
        out[block] = dz.to(out.dtype)


def loss_and_gradient_(
    student: Tensor, teacher: Tensor, target: Tensor | None, spec: DivergenceSpec, factor: Tensor
) -> Tensor:
    """Losses of rows; the student becomes its gradient."""
    rows = statistics(student, teacher, target, spec)
    gradient_into(student, student, teacher, target, rows, spec, factor)
    return rows.loss


# --- operators of given rows ---


class ReferenceRows:
    """Row kernels in plain PyTorch."""

    statistics = staticmethod(statistics)
    gradient_into = staticmethod(gradient_into)
    loss_and_gradient_ = staticmethod(loss_and_gradient_)


def divisor(
    target: Tensor | None, rows: int, dtype: torch.dtype, ignore_index: int
) -> Tensor | int:
    """How many rows count, at least 1: without any, losses and gradients are 0 by themselves.

    All rows count without a target, and nothing has to be computed on the device.
    """
    if target is None:
        return max(1, rows)
    return (target != ignore_index).sum(dtype=dtype).clamp_(min=1)


def reduced(loss: Tensor, count: Tensor | int, reduction: str) -> Tensor:
    """Losses of rows, their sum, or their mean over the rows that count."""
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / count


def forward_and_backward(
    name: str, kernels: DivergenceKernels
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract ``name``."""

    def forward(
        student: Tensor,
        teacher: Tensor,
        target: Tensor | None,
        beta: float,
        form: str,
        teacher_form: str,
        scale: float,
        ignore_index: int,
        reduction: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        spec = spec_of(name, beta, form, teacher_form, scale, ignore_index)
        rows = kernels.statistics(student, teacher, target, spec)
        count = divisor(target, student.shape[0], rows.loss.dtype, ignore_index)
        return reduced(rows.loss, count, reduction), *rows[1:]

    def backward(
        dloss: Tensor,
        student: Tensor,
        teacher: Tensor,
        target: Tensor | None,
        lse: Tensor,
        lse_low: Tensor,
        teacher_lse: Tensor,
        teacher_lse_low: Tensor,
        slope: Tensor,
        beta: float,
        form: str,
        teacher_form: str,
        scale: float,
        ignore_index: int,
        reduction: str,
    ) -> Tensor:
        spec = spec_of(name, beta, form, teacher_form, scale, ignore_index)
        if reduction == "mean":
            dloss = dloss / divisor(target, student.shape[0], dloss.dtype, ignore_index)
        out = student.new_empty(student.shape)
        statistics = (lse, lse_low, teacher_lse, teacher_lse_low, slope)
        rows = DivergenceStats(lse.new_empty(0), *statistics)
        kernels.gradient_into(out, student, teacher, target, rows, spec, dloss)
        return out

    return forward, backward


def overwriting(name: str, kernels: DivergenceKernels) -> Callable[..., Tensor]:
    """Forward of the contract ``name`` in place; backward scales what stands in the student."""

    def forward(
        student: Tensor,
        teacher: Tensor,
        target: Tensor | None,
        beta: float,
        form: str,
        teacher_form: str,
        scale: float,
        ignore_index: int,
        reduction: str,
    ) -> Tensor:
        spec = spec_of(name, beta, form, teacher_form, scale, ignore_index)
        dtype = statistics_dtype(student.dtype)
        count = divisor(target, student.shape[0], dtype, ignore_index)
        unit = student.new_ones((), dtype=dtype)
        factor = unit / count if reduction == "mean" else unit
        loss = kernels.loss_and_gradient_(student, teacher, target, spec, factor)
        return reduced(loss, count, reduction)

    return forward


def scale_(dloss: Tensor, student: Tensor) -> None:
    """Scale the gradient that stands in ``student`` by the upstream gradient."""
    student.mul_(dloss.unsqueeze(1) if dloss.ndim else dloss)
