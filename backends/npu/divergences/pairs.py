"""Divergences of rows of two distributions on vector cores; the equations are reference/divergence.

The normalizers of logits come from the row kernel of cross_entropy/rows.py; then one kernel
sums a row's loss and ``slope``, and one writes the gradient, perhaps over the student.

The loops over chunks are those of the reference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.npu.common.launching import as_rows, block_of, jitted, start, summed
from liger_multi.backends.npu.cross_entropy.rows import normalizers
from liger_multi.reference.divergences.divergence import DivergenceSpec, DivergenceStats

FORMS = {"logits": 0, "log_prob": 1, "prob": 2}
FORMULAS = {"forward": 0, "reverse": 1, "jensen": 2, "tvd": 3}
FAR: tl.constexpr = tl.constexpr(80.0)  # beyond this gap the smaller probability adds nothing
NEAR: tl.constexpr = tl.constexpr(0.17)  # below it, a mixture's logarithm is summed as a series


@triton.jit
def _distribution(ptr, mask, scale, shift, low, FORM: tl.constexpr):
    """Logarithm, probability and the number that TVD compares; probability 0 where masked."""
    if FORM == 2:
        q = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
        # the logarithm is not used there, and must not be that of 0
        return tl.where(q > 0.0, tl.log(tl.where(q > 0.0, q, 1.0)), float("-inf")), q, q
    raw = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    s = (raw * scale - shift) - low if FORM == 0 else raw
    s = tl.where(mask, s, float("-inf"))
    return s, tl.exp(s), s


@triton.jit
def _log_mixture(gap, beta):
    """log(1 - beta + beta exp(gap)), which is log(m / q), with its digits where it is nearly 0.

    There the sum would be rounded to 1 before the logarithm, so a series replaces it, which is off
    by less than the rounded logarithm is beyond ``NEAR``.
    """
    other = 1.0 - beta
    both = beta * other
    bend = 0.5 + gap * ((other - beta) / 6 + gap * ((1.0 - 6.0 * both) / 24))
    near = beta * gap + gap * gap * both * bend
    return tl.where(tl.abs(gap) < NEAR, near, tl.log(other + beta * tl.exp(gap)))


@triton.jit
def _terms(
    student_ptr,
    teacher_ptr,
    mask,
    scale,
    s_shift,
    s_low,
    t_shift,
    t_low,
    beta,
    FORMULA: tl.constexpr,
    FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr,
):
    """Terms of the loss, q r and r of each class, and q.

    ``slope`` is the sum of q r over the row. The forward KL returns -p for q r, which is finite at
    q = 0.
    """
    s, q, students = _distribution(student_ptr, mask, scale, s_shift, s_low, FORM)
    t, p, other = _distribution(teacher_ptr, mask, scale, t_shift, t_low, TEACHER_FORM)
    if FORMULA == 3:
        a = students if FORM == TEACHER_FORM else q
        b = other if FORM == TEACHER_FORM else p
        r = tl.where(a > b, 0.5, tl.where(a < b, -0.5, 0.0))
        return tl.abs(q - p) * 0.5, q * r, r, q
    gap = tl.where(s == t, 0.0, t - s)  # both may be -inf
    if FORMULA == 0:
        share = tl.where(p == 0.0, 0.0, p / tl.where(q == 0.0, 1.0, q))
        share = tl.where((q == 0.0) & (p != 0.0), float("inf"), share)
        return tl.where(p == 0.0, 0.0, p * gap), -p, -share, q
    if FORMULA == 1:
        r = (0.0 if FORM == 0 else 1.0) - gap
        return tl.where(q == 0.0, 0.0, -q * gap), tl.where(q == 0.0, 0.0, q * r), r, q
    gap = tl.minimum(tl.maximum(gap, -FAR), FAR)
    x = -_log_mixture(gap, beta)  # log q - log m
    r = (1.0 - beta) * x
    return beta * p * (gap + x) + q * r, q * r, r, q


@jitted
def _pair_sums_kernel(
    student_ptr,
    teacher_ptr,
    lse_ptr,
    lse_low_ptr,
    teacher_lse_ptr,
    teacher_lse_low_ptr,
    loss_ptr,
    slope_ptr,
    student_stride,
    teacher_stride,
    rows,
    cols,
    scale,
    beta,
    FORMULA: tl.constexpr,
    FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss and slope of rows.

    Program: every num_programs-th row, in steps of BLOCK columns; reads both distributions once.
    Lanes are reduced at the row's end. ``slope`` is written for logits only, whose gradient needs
    it.
    """
    lane = tl.arange(0, BLOCK)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        students = student_ptr + row * student_stride
        other = teacher_ptr + row * teacher_stride
        s_shift = tl.load(lse_ptr + row) if FORM == 0 else 0.0
        s_low = tl.load(lse_low_ptr + row) if FORM == 0 else 0.0
        t_shift = tl.load(teacher_lse_ptr + row) if TEACHER_FORM == 0 else 0.0
        t_low = tl.load(teacher_lse_low_ptr + row) if TEACHER_FORM == 0 else 0.0
        loss = tl.zeros([BLOCK], tl.float32)
        slope = tl.zeros([BLOCK], tl.float32)
        for at in range(0, cols, BLOCK):
            col = at + lane
            mask = col < cols
            part, weighted, _, _ = _terms(
                students + col,
                other + col,
                mask,
                scale,
                s_shift,
                s_low,
                t_shift,
                t_low,
                beta=beta,
                FORMULA=FORMULA,
                FORM=FORM,
                TEACHER_FORM=TEACHER_FORM,
            )
            loss += tl.where(mask, part, 0.0)
            slope += tl.where(mask, weighted, 0.0)
        tl.store(loss_ptr + row, summed(loss, BLOCK))
        if FORM == 0:
            # minus the sum of the teacher's probabilities, which is 1 if they come from logits
            KNOWN: tl.constexpr = FORMULA == 0 and TEACHER_FORM == 0
            tl.store(slope_ptr + row, -1.0 if KNOWN else summed(slope, BLOCK))


@jitted
def _pair_gradient_kernel(
    student_ptr,
    teacher_ptr,
    lse_ptr,
    lse_low_ptr,
    teacher_lse_ptr,
    teacher_lse_low_ptr,
    slope_ptr,
    factor_ptr,
    out_ptr,
    student_stride,
    teacher_stride,
    out_stride,
    rows,
    cols,
    scale,
    beta,
    FORMULA: tl.constexpr,
    FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of the student, times the row's factor.

    Program: every num_programs-th row, in steps of BLOCK columns; reads both distributions once,
    and may overwrite the student. A factor of 0 gives zeros, whatever the row holds.
    """
    lane = tl.arange(0, BLOCK)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        students = student_ptr + row * student_stride
        other = teacher_ptr + row * teacher_stride
        s_shift = tl.load(lse_ptr + row) if FORM == 0 else 0.0
        s_low = tl.load(lse_low_ptr + row) if FORM == 0 else 0.0
        t_shift = tl.load(teacher_lse_ptr + row) if TEACHER_FORM == 0 else 0.0
        t_low = tl.load(teacher_lse_low_ptr + row) if TEACHER_FORM == 0 else 0.0
        slope = tl.load(slope_ptr + row) if FORM == 0 else 0.0
        factor = tl.load(factor_ptr + row)
        for at in range(0, cols, BLOCK):
            col = at + lane
            mask = col < cols
            _, weighted, r, q = _terms(
                students + col,
                other + col,
                mask,
                scale,
                s_shift,
                s_low,
                t_shift,
                t_low,
                beta=beta,
                FORMULA=FORMULA,
                FORM=FORM,
                TEACHER_FORM=TEACHER_FORM,
            )
            dz = r if FORM == 2 else weighted
            if FORM == 0:
                dz = (weighted - q * slope) * scale
            dz = tl.where(factor == 0.0, 0.0, dz * factor)
            tl.store(out_ptr + row * out_stride + col, dz.to(out_ptr.dtype.element_ty), mask=mask)


def _constants(spec: DivergenceSpec, name: str, x: Tensor) -> dict[str, int]:
    return {
        "FORMULA": FORMULAS[spec.formula],
        "FORM": FORMS[spec.form],
        "TEACHER_FORM": FORMS[spec.teacher_form],
        "BLOCK": block_of(name, x, x.shape[1]),
    }


def _row_factors(
    factor: Tensor, target: Tensor | None, count: int, spec: DivergenceSpec, student: Tensor
) -> Tensor:
    """One number a row, 0 where the row is ignored."""
    wide = factor.float().reshape(-1).expand(count)
    if target is not None:
        wide = torch.where(target != spec.ignore_index, wide, 0)
    return wide.contiguous()


class AscendPairs:
    """Row kernels over rows of a student and a teacher."""

    @staticmethod
    def statistics(
        student: Tensor, teacher: Tensor, target: Tensor | None, spec: DivergenceSpec
    ) -> DivergenceStats:
        """Losses and residuals of rows."""
        student, teacher = as_rows(student), as_rows(teacher)
        rows, (count, cols) = DivergenceStats.empty(student.shape[0], spec, student), student.shape
        if spec.form == "logits":
            high_part, low_part = normalizers(student, spec.scale)
            rows = rows._replace(lse=high_part, lse_low=low_part)
        if spec.teacher_form == "logits":
            high_part, low_part = normalizers(teacher, spec.scale)
            rows = rows._replace(teacher_lse=high_part, teacher_lse_low=low_part)
        start(
            _pair_sums_kernel,
            count,
            student,
            teacher,
            *rows[1:5],
            rows.loss,
            rows.slope,
            student.stride(0),
            teacher.stride(0),
            count,
            cols,
            spec.scale,
            spec.beta,
            **_constants(spec, "pair_sums", student),
        )
        if target is None:
            return rows
        valid = target != spec.ignore_index
        return DivergenceStats._make(torch.where(valid, r, 0) if r.numel() else r for r in rows)

    @staticmethod
    def gradient_into(
        out: Tensor,
        student: Tensor,
        teacher: Tensor,
        target: Tensor | None,
        rows: DivergenceStats,
        spec: DivergenceSpec,
        factor: Tensor,
    ) -> None:
        """Write the gradient times ``factor``; ``out`` may be the student."""
        student2d, teacher = as_rows(student), as_rows(teacher)
        count, cols = student2d.shape
        buffer = student2d if out is student else out
        start(
            _pair_gradient_kernel,
            count,
            student2d,
            teacher,
            *rows[1:],
            _row_factors(factor, target, count, spec, student2d),
            buffer,
            student2d.stride(0),
            teacher.stride(0),
            buffer.stride(0),
            count,
            cols,
            spec.scale,
            spec.beta,
            **_constants(spec, "pair_gradient", student2d),
        )
        if out is student and buffer is not out:
            out.copy_(buffer)

    @classmethod
    def loss_and_gradient_(
        cls,
        student: Tensor,
        teacher: Tensor,
        target: Tensor | None,
        spec: DivergenceSpec,
        factor: Tensor,
    ) -> Tensor:
        """Losses of rows; the student becomes its gradient."""
        rows = cls.statistics(student, teacher, target, spec)
        cls.gradient_into(student, student, teacher, target, rows, spec, factor)
        return rows.loss
