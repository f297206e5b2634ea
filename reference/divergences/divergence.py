"""Divergences of rows of two distributions, in plain PyTorch: losses and gradients.

With q the student's probabilities of a row, p the teacher's and ``r[j] = d loss / d q[j]``::

    forward  sum p (log p - log q)                              r = -p / q
    reverse  sum q (log q - log p)                              r = log q - log p + 1
    jensen   sum beta p (log p - log m) + (1 - beta) q (log q - log m)
             with m = beta p + (1 - beta) q                     r = (1 - beta) (log q - log m)
    tvd      sum |q - p| / 2                                    r = sign(q - p) / 2

A student that is given by probabilities gets ``r``, by log-probabilities ``q r``, by logits
``scale q (r - slope)`` with ``slope = sum q r``, where constants in ``r`` cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype
from liger_multi.reference.divergences.row_stats import DivergenceSpec, DivergenceStats

FAR = 80.0  # beyond a gap of so many nats, the smaller probability adds nothing to the larger


def _distribution(raw: Tensor, form: str, scale: float, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and probabilities."""
    z = raw.to(statistics_dtype(raw.dtype))
    if form == "prob":
        return z.log(), z
    log = z * scale - lse.unsqueeze(1) if form == "logits" else z
    return log, log.exp()


def _terms(
    spec: DivergenceSpec, log_q: Tensor, q: Tensor, log_p: Tensor, p: Tensor
) -> tuple[Tensor, ...]:
    """Loss, ``q r`` and ``r`` of every class, without the constant in r where it cancels."""
    if spec.kind == "tvd":
        # logarithms that differ may have equal exponentials, and the other way round
        a, b = (q, p) if spec.form == spec.teacher_form == "prob" else (log_q, log_p)
        r = ((a > b).to(q.dtype) - (a < b).to(q.dtype)) / 2
        return (q - p).abs() / 2, q * r, r
    gap = torch.where(q == p, 0, log_p - log_q)  # both may be 0
    if spec.kind == "forward":
        return torch.where(p == 0, 0, p * gap), -p, -torch.where(p == 0, 0, p / q)
    if spec.kind == "reverse":
        r = (0.0 if spec.form == "logits" else 1.0) - gap
        return torch.where(q == 0, 0, -q * gap), torch.where(q == 0, 0, q * r), r
    gap = gap.clamp(-FAR, FAR)
    x = -torch.log1p(spec.beta * torch.expm1(gap))  # log q - log m
    r = (1 - spec.beta) * x
    return spec.beta * p * (gap + x) + q * r, q * r, r


def statistics(
    student: Tensor, teacher: Tensor, target: Tensor | None, spec: DivergenceSpec
) -> DivergenceStats:
    """Losses and residuals of rows, in blocks."""
    rows = DivergenceStats.empty(student.shape[0], spec, student)
    for block in row_blocks(student.shape[0], student.shape[1] * 8):
        found = []
        for raw, form in ((student, spec.form), (teacher, spec.teacher_form)):
            z = raw[block].to(rows.loss.dtype) * spec.scale if form == "logits" else raw[block]
            found.append(torch.logsumexp(z, -1) if form == "logits" else rows.loss.new_empty(0))
        log_q, q = _distribution(student[block], spec.form, spec.scale, found[0])
        log_p, p = _distribution(teacher[block], spec.teacher_form, spec.scale, found[1])
        loss, weighted, _ = _terms(spec, log_q, q, log_p, p)
        valid = None if target is None else target[block] != spec.ignore_index
        for room, part in zip(rows, (loss.sum(-1), *found, weighted.sum(-1)), strict=True):
            if room.numel():
                room[block] = part if valid is None else torch.where(valid, part, 0)
    return rows


def gradient_into(
    out: Tensor, student: Tensor, teacher: Tensor, target: Tensor | None, rows: DivergenceStats, spec: DivergenceSpec,
    factor: Tensor,
) -> None:  # fmt: skip
    """Write the gradient times ``factor``; ignored rows get zeros, whatever stands in them."""
    for block in row_blocks(student.shape[0], student.shape[1] * 8):
        lse, teacher_lse, slope = (part[block] if part.numel() else part for part in rows[1:])
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
