"""Divergences of rows of two distributions: KL, Jensen-Shannon, total variation.

The equations are those of reference/divergences/divergence.py, the loops over chunks those of the
reference. One program owns one row of any width. Logits are read once for both normalizers,
anchored at the maximum of the row's first step, so that the loop carries no running maximum. KL
comes out of the same pass. The other losses and ``slope`` need a second pass, in reverse order, to
reuse cached data. The gradient is a last pass and may overwrite the student. Log-probabilities and
probabilities are read once for both loss and gradient.

Kernels are made of passes over one row: normalizers, the sums of a loss, and the gradient. ``s``,
to base 2, and ``q`` are the student's logarithms and probabilities, ``t`` and ``p`` the teacher's.
What is subtracted from logits is natural: in a row with one class, the difference is then exactly
0. It is two numbers, as in cross_entropy.py: logits far from 0 keep their digits.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LN2,
    LOG2E,
    assume_cols,
    at_most,
    checked_cols,
    log2_near,
    power_of_2,
    round_to,
    two_sum,
    warps,
)
from liger_multi.backends.triton.cross_entropy import cross_entropy_inplace
from liger_multi.backends.triton.cross_entropy.cross_entropy import fill_zero, filled
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.divergences.divergence import DivergenceSpec, DivergenceStats

FORWARD: tl.constexpr = tl.constexpr(0)  # kinds
REVERSE: tl.constexpr = tl.constexpr(1)
JENSEN: tl.constexpr = tl.constexpr(2)
TVD: tl.constexpr = tl.constexpr(3)
LOGITS: tl.constexpr = tl.constexpr(0)  # forms
LOG_PROB: tl.constexpr = tl.constexpr(1)
PROB: tl.constexpr = tl.constexpr(2)


# beyond so many powers of 2 between both, the smaller probability adds nothing to the larger
FAR: tl.constexpr = tl.constexpr(115.0)
NEAR: tl.constexpr = tl.constexpr(0.25)  # below it, a mixture's logarithm is summed as a series
GONE: tl.constexpr = tl.constexpr(160.0)  # exp2 of it is 0 below


@triton.jit
def _values(ptr, mask, scale, FORM: tl.constexpr):
    """Scaled logits, log-probabilities or probabilities in fp32; of a masked class, those of 0."""
    if FORM == PROB:
        return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    raw = tl.load(ptr, mask=mask, other=float("-inf")).to(tl.float32)
    return raw * scale if FORM == LOGITS else raw


@triton.jit
def _logarithm(ptr, mask, scale, shift, low, FORM: tl.constexpr):
    """Natural logarithm of the probability, from logits or from log-probabilities."""
    raw = _values(ptr, mask, scale, FORM)
    return (raw - shift) - low if FORM == LOGITS else raw


@triton.jit
def _distribution(ptr, mask, scale, shift, low, FORM: tl.constexpr):
    """Logarithm, to base 2 if probabilities are given and else natural, and probability."""
    if FORM == PROB:
        q = _values(ptr, mask, scale, FORM)
        return tl.log2(q), q
    s = _logarithm(ptr, mask, scale, shift, low, FORM)
    return s, tl.exp2(s * LOG2E)


@triton.jit
def _slopes(gap, q, p, a, b, beta, FORMULA: tl.constexpr, CONSTANT: tl.constexpr):
    """Loss terms of classes, and r, whose product with q is the slope's term.

    Terms are to base 2; those of TVD are natural and twice the loss. r is natural. FORWARD returns
    q r in its place, which stays finite where q is 0. CONSTANT is a summand of REVERSE's r.
    """
    if FORMULA == TVD:
        return tl.abs(q - p), tl.where(a > b, 0.5, tl.where(a < b, -0.5, 0.0))
    if FORMULA == FORWARD:
        return tl.where(p == 0.0, 0.0, p * gap), -p
    if FORMULA == REVERSE:
        return tl.where(q == 0.0, 0.0, -q * gap), CONSTANT - gap * LN2
    teachers, students = _weights(beta)
    gap = tl.minimum(tl.maximum(gap, -FAR), FAR)
    x = -_log2_mixture(gap, beta)  # log q - log m
    return teachers * p * (gap + x) + q * (students * x), students * x * LN2


@triton.jit
def _both(
    student_ptr,
    teacher_ptr,
    mask,
    scale,
    s_shift,
    s_low,
    t_shift,
    t_low,
    FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr,
):
    """Both distributions of a step: log2(p / q), q, p, and two numbers whose order is theirs.

    Natural logarithms are subtracted before they are scaled: the difference of those nearby is then
    exact. TVD compares the last two: rounded probabilities could tie where logits differ. Different
    forms have no number in common that orders them exactly, so probabilities are compared.
    """
    s, q = _distribution(student_ptr, mask, scale, s_shift, s_low, FORM)
    t, p = _distribution(teacher_ptr, mask, scale, t_shift, t_low, TEACHER_FORM)
    if FORM == TEACHER_FORM and FORM != PROB:
        return tl.where(s == t, 0.0, t - s) * LOG2E, q, p, s, t  # both may be -inf
    if FORM != PROB:
        s *= LOG2E
    if TEACHER_FORM != PROB:
        t *= LOG2E
    return tl.where(s == t, 0.0, t - s), q, p, q, p


@triton.jit
def _weights(beta):
    """Weights of teacher and student in the mixture m, at least 1e-30 so that log m is finite."""
    if beta is None:
        return 0.5, 0.5
    else:
        return tl.maximum(beta, 1e-30), tl.maximum(1.0 - beta, 1e-30)


@triton.jit
def _bend(gap, beta):
    """log2(1 - beta + beta 2^gap) - beta gap near 0, where it is of second order in the gap.

    Three terms of the series, of which the second is 0 at 0.5. Up to ``NEAR`` they are off by less
    than the rounded logarithm is beyond.
    """
    square = gap * gap
    if beta is None:
        return square * (LN2 / 8 - square * (LN2 * LN2 * LN2 / 192))
    else:
        teachers, students = _weights(beta)
        both = teachers * students
        third = both * (students - teachers) * (LN2 * LN2 / 6)
        fourth = both * (1.0 - 6.0 * both) * (LN2 * LN2 * LN2 / 24)
        return square * (both * (LN2 / 2) + gap * (third + gap * fourth))


@triton.jit
def _log2_mixture(gap, beta):
    """log2(1 - beta + beta 2^gap), which is log2(m / q), with its digits where it is nearly 0.

    There the sum would be rounded to 1 before the logarithm. A class with a probability near 1
    outweighs all others in the loss and in ``slope``, so that its rounding would hide them.
    """
    teachers, students = _weights(beta)
    near = teachers * gap + _bend(gap, beta)
    far = log2_near(students + teachers * tl.exp2(gap))
    return tl.where(tl.abs(gap) < NEAR, near, far)


@triton.jit
def _logarithms(
    student_ptr,
    teacher_ptr,
    mask,
    scale,
    s_shift,
    s_low,
    t_shift,
    t_low,
    FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr,
):
    """Logarithms to base 2 of both probabilities of a step's classes, and log2(p / q).

    Given log-probabilities are subtracted before they are scaled, which is exact of those nearby.
    Of logits the last subtraction of the normalizer rounds in any case, and is one with scaling.
    """
    if FORM == LOGITS and TEACHER_FORM == LOGITS:
        s = _values(student_ptr, mask, scale, LOGITS)
        t = _values(teacher_ptr, mask, scale, LOGITS)
        s = tl.fma(s - s_shift, LOG2E, -s_low * LOG2E)
        t = tl.fma(t - t_shift, LOG2E, -t_low * LOG2E)
        return s, t, t - s
    s = _logarithm(student_ptr, mask, scale, s_shift, s_low, FORM)
    t = _logarithm(teacher_ptr, mask, scale, t_shift, t_low, TEACHER_FORM)
    return s * LOG2E, t * LOG2E, (t - s) * LOG2E


@triton.jit
def _jensen_terms(s, t, gap, beta):
    """Terms q log2(m / q) and, with p log2(m / p) added to it, both; 0 where both are 0.

    With e the smaller probability over the larger, log2 m is log2 of the larger plus log2(w + w'
    e). Nothing cancels in that sum, but where e is nearly 1 a series replaces it, as in
    :func:`_log2_mixture`.
    """
    teachers, students = _weights(beta)
    far = at_most(tl.abs(gap), GONE)  # both may be -inf
    large = tl.exp2(tl.maximum(s, t, propagate_nan=tl.PropagateNan.ALL))
    up = gap > 0.0
    of_less = tl.where(up, students, teachers)
    near = _bend(gap, beta) - of_less * far
    e = tl.exp2(far * -1.0)
    of_large = log2_near(tl.where(up, teachers, students) + of_less * e)
    of_large = tl.where(far < NEAR, near, of_large)
    of_small = e * (far + of_large)
    return large * tl.where(up, of_small, of_large), large * (of_large + of_small)


@triton.jit
def maximum(ptr, cols, scale, BLOCK: tl.constexpr):
    """The largest scaled logit of the first ``cols`` columns.

    Four neighbors are reduced first, so that the accumulator takes a quarter of a step's registers.
    """
    best = tl.full([BLOCK // 4], float("-inf"), tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        z = _values(ptr + col, col < cols, scale, LOGITS)
        best = tl.maximum(best, tl.max(tl.reshape(z, [BLOCK // 4, 4]), axis=1))
    return tl.max(best, axis=0)


@triton.jit
def _folded(x, BLOCK: tl.constexpr):
    """Sums of 4 neighbors in a thread: an accumulator takes a quarter of a step's registers."""
    return tl.sum(tl.reshape(x, [BLOCK // 4, 4]), axis=1)


@triton.jit
def _totals(
    student_ptr,
    teacher_ptr,
    cols,
    scale,
    s_anchor,
    t_anchor,
    FORMULA: tl.constexpr,
    FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One pass: sums of exp over the anchors and, for logits on both sides, of KL's terms."""
    lane = tl.arange(0, BLOCK)
    s_total = tl.zeros([BLOCK // 4], tl.float32)
    t_total = tl.zeros([BLOCK // 4], tl.float32)
    cross = tl.zeros([BLOCK // 4], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + lane
        mask = col < cols
        if FORM == LOGITS:
            s = _values(student_ptr + col, mask, scale, LOGITS) - s_anchor
            q = tl.exp2(s * LOG2E)
            s_total += _folded(q, BLOCK)
        if TEACHER_FORM == LOGITS:
            t = _values(teacher_ptr + col, mask, scale, LOGITS) - t_anchor
            p = tl.exp2(t * LOG2E)
            t_total += _folded(p, BLOCK)
        if FORM == LOGITS and TEACHER_FORM == LOGITS:
            if FORMULA == FORWARD:
                cross += _folded(tl.where(p == 0.0, 0.0, p * (t - s)), BLOCK)
            if FORMULA == REVERSE:
                cross += _folded(tl.where(q == 0.0, 0.0, q * (s - t)), BLOCK)
    return tl.sum(s_total, axis=0), tl.sum(t_total, axis=0), tl.sum(cross, axis=0)


@triton.jit
def normalize(
    student_ptr,
    teacher_ptr,
    cols,
    scale,
    FORMULA: tl.constexpr,
    FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Both parts of the lse of logits (0 of other forms) and, for logits on both sides, KL.

    The anchor is the maximum of the row's first step. Where it turns out to be too low, or -inf, a
    second pass starts from the row's maximum.
    """
    s_anchor = 0.0
    t_anchor = 0.0
    first = tl.minimum(cols, BLOCK)
    if FORM == LOGITS:
        s_anchor = maximum(student_ptr, first, scale, BLOCK)
    if TEACHER_FORM == LOGITS:
        t_anchor = maximum(teacher_ptr, first, scale, BLOCK)
    s_total, t_total, cross = _totals(
        student_ptr,
        teacher_ptr,
        cols,
        scale,
        s_anchor,
        t_anchor,
        FORMULA=FORMULA,
        FORM=FORM,
        TEACHER_FORM=TEACHER_FORM,
        BLOCK=BLOCK,
    )
    # the first step's maximum is no anchor where another step's lies far above it, or it is -inf
    LIMIT: tl.constexpr = 4294967296.0 if FORMULA <= REVERSE else float("inf")  # KL is a difference
    if (s_total >= LIMIT) | (t_total >= LIMIT) | (s_total != s_total) | (t_total != t_total):
        if FORM == LOGITS:
            s_anchor = maximum(student_ptr, cols, scale, BLOCK)
        if TEACHER_FORM == LOGITS:
            t_anchor = maximum(teacher_ptr, cols, scale, BLOCK)
        s_total, t_total, cross = _totals(
            student_ptr,
            teacher_ptr,
            cols,
            scale,
            s_anchor,
            t_anchor,
            FORMULA=FORMULA,
            FORM=FORM,
            TEACHER_FORM=TEACHER_FORM,
            BLOCK=BLOCK,
        )
    # the logarithm of a quotient near 1 has more digits than a difference of logarithms
    loss = cross / t_total + tl.log2(s_total / t_total) * LN2
    if FORMULA == REVERSE:
        loss = cross / s_total + tl.log2(t_total / s_total) * LN2
    s_lse = s_anchor
    s_low = 0.0
    t_lse = t_anchor
    t_low = 0.0
    if FORM == LOGITS:
        s_lse, s_low = two_sum(s_anchor, tl.log2(s_total) * LN2)
    if TEACHER_FORM == LOGITS:
        t_lse, t_low = two_sum(t_anchor, tl.log2(t_total) * LN2)
    return s_lse, s_low, t_lse, t_low, loss


@triton.jit
def sums(
    student_ptr,
    teacher_ptr,
    cols,
    scale,
    s_shift,
    s_low,
    t_shift,
    t_low,
    beta,
    FORMULA: tl.constexpr,
    FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss and slope of a row, in a pass from its end, to reuse what the last one left in cache."""
    LOGS: tl.constexpr = FORMULA == JENSEN and (FORM != PROB and TEACHER_FORM != PROB)
    teachers, students = _weights(beta)
    lane = tl.arange(0, BLOCK)
    loss = tl.zeros([BLOCK // 4], tl.float32)
    slope = tl.zeros([BLOCK // 4], tl.float32)
    steps = tl.cdiv(cols, BLOCK)
    for step in tl.range(0, steps):
        first = (steps - 1 - step) * BLOCK
        assume_cols(first)
        col = first + lane
        mask = col < cols
        if LOGS:
            s, t, gap = _logarithms(
                student_ptr + col, teacher_ptr + col, mask, scale, s_shift, s_low, t_shift, t_low,
                FORM=FORM, TEACHER_FORM=TEACHER_FORM,
            )  # fmt: skip
            of_student, of_both = _jensen_terms(s, t, gap, beta)
            loss += _folded(of_both, BLOCK)
            slope += _folded(of_student, BLOCK)
        else:
            gap, q, p, a, b = _both(
                student_ptr + col,
                teacher_ptr + col,
                mask,
                scale,
                s_shift,
                s_low,
                t_shift,
                t_low,
                FORM=FORM,
                TEACHER_FORM=TEACHER_FORM,
            )
            each, r = _slopes(gap, q, p, a, b, beta, FORMULA=FORMULA, CONSTANT=0.0)
            loss += _folded(each, BLOCK)
            if FORM == LOGITS:
                if FORMULA == FORWARD:
                    slope += _folded(r, BLOCK)
                else:
                    slope += _folded(
                        q * r if FORMULA == TVD else tl.where(q == 0.0, 0.0, q * r), BLOCK
                    )
    total = tl.sum(loss, axis=0)
    weighted = tl.sum(slope, axis=0)
    if LOGS:
        loss = (teachers * total + (students - teachers) * weighted) * -LN2
        return loss, weighted * (-students * LN2)
    return total * (0.5 if FORMULA == TVD else LN2), weighted


@triton.jit
def write_gradient(
    student_ptr,
    teacher_ptr,
    out_ptr,
    cols,
    scale,
    s_shift,
    s_low,
    t_shift,
    t_low,
    slope,
    factor,
    beta,
    FORMULA: tl.constexpr,
    FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the student's gradient times ``factor``; with SUM, return the loss from the same pass.

    For logits the gradient is q (r - slope), where ``slope`` is the sum of q r over the row.
    """
    LOGS: tl.constexpr = FORMULA == JENSEN and (FORM != PROB and TEACHER_FORM != PROB)
    teachers, students = _weights(beta)
    by_log = -students * LN2 * factor
    lane = tl.arange(0, BLOCK)
    loss = tl.zeros([BLOCK // 4], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + lane
        mask = col < cols
        if LOGS:
            s, t, gap = _logarithms(
                student_ptr + col, teacher_ptr + col, mask, scale, s_shift, s_low, t_shift, t_low,
                FORM=FORM, TEACHER_FORM=TEACHER_FORM,
            )  # fmt: skip
            if SUM:
                of_student, of_both = _jensen_terms(s, t, gap, beta)
                each = teachers * of_both + (students - teachers) * of_student
                loss -= _folded(each, BLOCK)
                dz = of_student * by_log
            else:
                gap = at_most(gap, FAR)  # beyond, q is nothing; both may be -inf
                q = tl.exp2(s)
                dz = q * (_log2_mixture(gap, beta) * by_log - slope * factor)
        else:
            gap, q, p, a, b = _both(
                student_ptr + col,
                teacher_ptr + col,
                mask,
                scale,
                s_shift,
                s_low,
                t_shift,
                t_low,
                FORM=FORM,
                TEACHER_FORM=TEACHER_FORM,
            )
            each, r = _slopes(
                gap,
                q,
                p,
                a,
                b,
                beta,
                FORMULA=FORMULA,
                CONSTANT=0.0 if FORM == LOGITS else 1.0,
            )
            if SUM:
                loss += _folded(each, BLOCK)
            if FORMULA == FORWARD:
                dz = r - q * slope if FORM == LOGITS else r
                if FORM == PROB:
                    dz = tl.where(p == 0.0, 0.0, r / q)
            else:
                dz = r - slope if FORM == LOGITS else r
                if FORM != PROB:
                    dz = q * dz if FORMULA == TVD else tl.where(q == 0.0, 0.0, q * dz)
            dz *= factor
        tl.store(out_ptr + col, round_to(dz, out_ptr.dtype.element_ty), mask=mask)
    return tl.sum(loss, axis=0) * (0.5 if FORMULA == TVD else LN2)


# --- kernels and launchers ---


FORMULAS = {"forward": 0, "reverse": 1, "jensen": 2, "tvd": 3}
FORMS = {"logits": 0, "log_prob": 1, "prob": 2}
LEAST = 32  # columns a step, of which 4 are summed at once


@dataclass(frozen=True)
class PairConfig:
    """Columns a step and warps a program."""

    block: int
    num_warps: int


def sum_config(
    info: DeviceInfo, rows: int, cols: int, logits: int, element_bytes: int
) -> PairConfig:
    """64 bytes a thread, with ``element_bytes`` of both a column: loads hide what is computed.

    ``logits``: rows are read more than once, so that few of them at a time should be in the cache.
    """
    block = min(max(power_of_2(checked_cols(cols)), LEAST), 8192 if logits else 4096)
    threads = min(info.max_threads, max(32, block * element_bytes // 64))
    return PairConfig(block, warps(threads, info.warp_size))


def gradient_config(info: DeviceInfo, rows: int, cols: int, logits: int) -> PairConfig:
    """8 columns of both a thread, which has one to write as well."""
    block = min(max(power_of_2(checked_cols(cols)), LEAST), 8192)
    return PairConfig(block, warps(min(info.max_threads, max(32, block // 8)), info.warp_size))


@triton.jit
def _store_row(
    loss_ptr,
    lse_ptr,
    lse_low_ptr,
    teacher_lse_ptr,
    teacher_lse_low_ptr,
    slope_ptr,
    row,
    loss,
    lse,
    lse_low,
    teacher_lse,
    teacher_lse_low,
    slope,
):
    """Write the loss of a row and, where they have a pointer, its normalizers and slope."""
    tl.store(loss_ptr + row, loss)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, lse)
        tl.store(lse_low_ptr + row, lse_low)
    if teacher_lse_ptr is not None:
        tl.store(teacher_lse_ptr + row, teacher_lse)
        tl.store(teacher_lse_low_ptr + row, teacher_lse_low)
    if slope_ptr is not None:
        tl.store(slope_ptr + row, slope)


@triton.jit
def _divergence_forward_kernel(
    student_ptr,
    teacher_ptr,
    target_ptr,
    factor_ptr,
    loss_ptr,
    lse_ptr,
    lse_low_ptr,
    teacher_lse_ptr,
    teacher_lse_low_ptr,
    slope_ptr,
    student_stride,
    teacher_stride,
    target_stride,
    factor_stride,
    cols,
    ignore_index,
    scale,
    beta,
    FORMULA: tl.constexpr,
    FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss of one row; with ``factor_ptr``, the student's gradient in the place of the student.

    Program: one row; an ignored one gives zeros.
    Reads student and teacher in up to three passes: normalizers, sums of the loss, gradient. DONE:
    both sides are logits and the loss is a KL, which the first pass has summed. LATER: the gradient
    needs no sum of the row, so that the gradient's pass adds up the loss.
    Writes loss, both lse and slope, which backward needs.
    """
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    assume_cols(cols)
    if target_ptr is not None:
        if tl.load(target_ptr + row * target_stride) == ignore_index:
            _store_row(
                loss_ptr, lse_ptr, lse_low_ptr, teacher_lse_ptr, teacher_lse_low_ptr, slope_ptr,
                row, 0.0, lse=0.0, lse_low=0.0, teacher_lse=0.0, teacher_lse_low=0.0, slope=0.0,
            )  # fmt: skip
            if factor_ptr is not None:
                fill_zero(student_ptr, cols, BLOCK)
            return
    s_shift = 0.0
    s_low = 0.0
    t_shift = 0.0
    t_low = 0.0
    loss = 0.0
    slope = 0.0
    if FORM == LOGITS or TEACHER_FORM == LOGITS:
        s_shift, s_low, t_shift, t_low, loss = normalize(
            student_ptr, teacher_ptr, cols, scale, FORMULA, FORM, TEACHER_FORM, BLOCK
        )
    DONE: tl.constexpr = (FORM == LOGITS and TEACHER_FORM == LOGITS) and FORMULA <= REVERSE
    LATER: tl.constexpr = factor_ptr is not None and FORM != LOGITS
    if DONE:
        slope = -1.0 if FORMULA == FORWARD else loss
    elif not LATER:
        loss, slope = sums(
            student_ptr, teacher_ptr, cols, scale, s_shift, s_low, t_shift, t_low, beta=beta,
            FORMULA=FORMULA, FORM=FORM, TEACHER_FORM=TEACHER_FORM, BLOCK=BLOCK,
        )  # fmt: skip
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + row * factor_stride).to(tl.float32)
        if FORM == LOGITS:
            factor *= scale
        written_loss = write_gradient(
            student_ptr,
            teacher_ptr,
            student_ptr,
            cols,
            scale,
            s_shift,
            s_low,
            t_shift,
            t_low=t_low,
            slope=slope,
            factor=factor,
            beta=beta,
            FORMULA=FORMULA,
            FORM=FORM,
            TEACHER_FORM=TEACHER_FORM,
            SUM=LATER,
            BLOCK=BLOCK,
        )
        if LATER:
            loss = written_loss
    _store_row(
        loss_ptr,
        lse_ptr,
        lse_low_ptr,
        teacher_lse_ptr,
        teacher_lse_low_ptr,
        slope_ptr,
        row,
        loss,
        lse=s_shift,
        lse_low=s_low,
        teacher_lse=t_shift,
        teacher_lse_low=t_low,
        slope=slope,
    )


@triton.jit
def _divergence_backward_kernel(
    student_ptr,
    teacher_ptr,
    target_ptr,
    factor_ptr,
    lse_ptr,
    lse_low_ptr,
    teacher_lse_ptr,
    teacher_lse_low_ptr,
    slope_ptr,
    out_ptr,
    student_stride,
    teacher_stride,
    target_stride,
    factor_stride,
    out_stride,
    cols,
    ignore_index,
    scale,
    beta,
    FORMULA: tl.constexpr,
    FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of the student's row, from the normalizers and the slope of forward.

    Program: one row; reads both distributions once and writes the gradient; zeros for an ignored
    row.
    """
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * out_stride
    assume_cols(cols)
    if target_ptr is not None:
        if tl.load(target_ptr + row * target_stride) == ignore_index:
            fill_zero(out_ptr, cols, BLOCK)
            return
    s_shift = 0.0
    s_low = 0.0
    t_shift = 0.0
    t_low = 0.0
    slope = 0.0
    factor = tl.load(factor_ptr + row * factor_stride).to(tl.float32)
    if FORM == LOGITS:
        s_shift = tl.load(lse_ptr + row)
        s_low = tl.load(lse_low_ptr + row)
        slope = tl.load(slope_ptr + row)
        factor *= scale
    if TEACHER_FORM == LOGITS:
        t_shift = tl.load(teacher_lse_ptr + row)
        t_low = tl.load(teacher_lse_low_ptr + row)
    write_gradient(
        student_ptr + row * student_stride,
        teacher_ptr + row * teacher_stride,
        out_ptr,
        cols,
        scale,
        s_shift,
        s_low,
        t_shift,
        t_low=t_low,
        slope=slope,
        factor=factor,
        beta=beta,
        FORMULA=FORMULA,
        FORM=FORM,
        TEACHER_FORM=TEACHER_FORM,
        SUM=False,
        BLOCK=BLOCK,
    )


def _columns(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _step(x: Tensor | None) -> int:
    return x.stride(0) if x is not None and x.dim() else 0


def _beta(spec: DivergenceSpec) -> float | None:
    """None for the usual 0.5: then the weights are equal constants, with no choice per class."""
    return None if spec.beta == 0.5 else spec.beta


def _constants(spec: DivergenceSpec, block: int) -> tuple[int, ...]:
    return FORMULAS[spec.formula], FORMS[spec.form], FORMS[spec.teacher_form], block


def _rows(
    name: str,
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None,
    spec: DivergenceSpec,
    factor: Tensor | None,
) -> DivergenceStats:
    rows, (count, cols) = DivergenceStats.empty(student.shape[0], spec, student), student.shape
    if not count:
        return rows
    statistics = rows if factor is None else (rows.loss, *[None] * 5)
    shape = {"rows": count, "cols": cols, "logits": int(spec.form == "logits")}
    shape["element_bytes"] = student.element_size() + teacher.element_size()
    k = launch_config(f"{name}.forward", sum_config, student.device, **shape)
    launch(
        _divergence_forward_kernel,
        count,
        (
            student,
            teacher,
            target,
            factor,
            *filled(*statistics),
            student.stride(0),
            teacher.stride(0),
            _step(target),
            _step(factor),
            cols,
            spec.ignore_index,
            spec.scale,
            _beta(spec),
        ),
        _constants(spec, k.block),
        k.num_warps,
    )
    return rows


class TritonPairs:
    """Row kernels over rows of a student and a teacher.

    Args:
        name: The divergence's name in launch tables.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def statistics(
        self, student: Tensor, teacher: Tensor, target: Tensor | None, spec: DivergenceSpec
    ) -> DivergenceStats:
        """Losses and residuals of rows."""
        return _rows(self.name, _columns(student), _columns(teacher), target, spec, None)

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
        """Write the gradient times ``factor``."""
        count, cols = student.shape
        if not student.numel():
            return
        student, teacher = _columns(student), _columns(teacher)
        shape = {"rows": count, "cols": cols, "logits": int(spec.form == "logits")}
        k = launch_config(f"{self.name}.backward", gradient_config, student.device, **shape)
        launch(
            _divergence_backward_kernel,
            count,
            (
                student,
                teacher,
                target,
                factor,
                *filled(*rows[1:]),
                out,
                student.stride(0),
                teacher.stride(0),
                _step(target),
                _step(factor),
                out.stride(0),
                cols,
                spec.ignore_index,
                spec.scale,
                _beta(spec),
            ),
            _constants(spec, k.block),
            k.num_warps,
        )

    def loss_and_gradient_(
        self,
        student: Tensor,
        teacher: Tensor,
        target: Tensor | None,
        spec: DivergenceSpec,
        factor: Tensor,
    ) -> Tensor:
        """Losses of rows; the student becomes its gradient."""
        wide = _columns(student)
        loss = _rows(self.name, wide, _columns(teacher), target, spec, factor).loss
        if wide is not student:
            student.copy_(wide)
        return loss


def scale_(dloss: Tensor, student: Tensor) -> None:
    """Scale the gradient in ``student`` by the upstream gradient, unless that is 1."""
    cross_entropy_inplace.backward(dloss, student)
