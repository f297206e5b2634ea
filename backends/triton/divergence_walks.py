"""Walks over one row of two distributions: normalisers, the sums of a loss, and the gradient.

The pieces of the kernels in divergence.py. ``s``, to base 2, and ``q`` are the student's logarithms
and probabilities, ``t`` and ``p`` the teacher's. What is subtracted from logits is natural: of a
row with one class, that leaves exactly 0.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.common import LN2, LOG2E, assume_cols, round_to

FORWARD: tl.constexpr = tl.constexpr(0)  # kinds
REVERSE: tl.constexpr = tl.constexpr(1)
JENSEN: tl.constexpr = tl.constexpr(2)
TVD: tl.constexpr = tl.constexpr(3)
LOGITS: tl.constexpr = tl.constexpr(0)  # forms
LOG_PROB: tl.constexpr = tl.constexpr(1)
PROB: tl.constexpr = tl.constexpr(2)
FAR: tl.constexpr = tl.constexpr(115.0)  # beyond, the smaller probability adds nothing


@triton.jit
def _values(ptr, mask, scale, FORM: tl.constexpr):
    """Scaled logits, log-probabilities, or probabilities as they are; of no class outside."""
    if FORM == PROB:
        return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    raw = tl.load(ptr, mask=mask, other=float("-inf")).to(tl.float32)
    return raw * scale if FORM == LOGITS else raw


@triton.jit
def _distribution(ptr, mask, scale, shift, FORM: tl.constexpr):
    """Logarithm, probability, and what stands in the same order as both, exactly."""
    raw = _values(ptr, mask, scale, FORM)
    if FORM == PROB:
        return tl.log2(raw), raw, raw
    s = (raw - shift if FORM == LOGITS else raw) * LOG2E
    return s, tl.exp2(s), s if FORM == LOGITS else raw


@triton.jit
def _slopes(s, q, t, p, order, beta, KIND: tl.constexpr, CONSTANT: tl.constexpr):
    """Loss of classes (base 2 but for TVD), and r (FORWARD: q r), natural."""
    if KIND == TVD:
        r = tl.where(order > 0.0, 0.5, tl.where(order < 0.0, -0.5, 0.0))
        return tl.abs(q - p) * 0.5, r
    gap = tl.where(q == p, 0.0, t - s)  # both may be 0
    if KIND == FORWARD:
        return tl.where(p == 0.0, 0.0, p * gap), -p
    if KIND == REVERSE:
        return tl.where(q == 0.0, 0.0, -q * gap), CONSTANT - gap * LN2
    gap = tl.minimum(tl.maximum(gap, -FAR), FAR)
    x = -tl.log2(1.0 - beta + beta * tl.exp2(gap))  # log q - log m
    rest = (1.0 - beta) * x
    return beta * p * (gap + x) + q * rest, rest * LN2


@triton.jit
def _both(
    student_ptr, teacher_ptr, mask, scale, s_shift, t_shift, FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr,
):  # fmt: skip
    s, q, mine = _distribution(student_ptr, mask, scale, s_shift, FORM)
    t, p, other = _distribution(teacher_ptr, mask, scale, t_shift, TEACHER_FORM)
    if FORM == TEACHER_FORM:
        order = mine - other
        order = tl.where(mine == other, 0.0, order)  # both may be infinite
    else:
        order = q - p
    return s, q, t, p, order


@triton.jit
def maximum(ptr, cols, scale, BLOCK: tl.constexpr):
    """Largest scaled logit of the first ``cols``."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, _values(ptr + col, col < cols, scale, LOGITS))
    return tl.max(best, axis=0)


@triton.jit
def _totals(
    student_ptr, teacher_ptr, cols, scale, s_anchor, t_anchor, KIND: tl.constexpr,
    FORM: tl.constexpr, TEACHER_FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of exp2 over the anchors; of logits on both sides also that of KL's terms."""
    lane = tl.arange(0, BLOCK)
    s_total = tl.zeros([BLOCK], tl.float32)
    t_total = tl.zeros([BLOCK], tl.float32)
    cross = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + lane
        mask = col < cols
        if FORM == LOGITS:
            s = (_values(student_ptr + col, mask, scale, LOGITS) - s_anchor) * LOG2E
            q = tl.exp2(s)
            s_total += q
        if TEACHER_FORM == LOGITS:
            t = (_values(teacher_ptr + col, mask, scale, LOGITS) - t_anchor) * LOG2E
            p = tl.exp2(t)
            t_total += p
        if FORM == LOGITS and TEACHER_FORM == LOGITS:
            if KIND == FORWARD:
                cross += tl.where(p == 0.0, 0.0, p * (t - s))
            if KIND == REVERSE:
                cross += tl.where(q == 0.0, 0.0, q * (s - t))
    return tl.sum(s_total, axis=0), tl.sum(t_total, axis=0), tl.sum(cross, axis=0)


@triton.jit
def normalise(
    student_ptr, teacher_ptr, cols, scale, KIND: tl.constexpr, FORM: tl.constexpr,
    TEACHER_FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lse of logits (0 of other forms) and, of logits on both sides, KL in one walk."""
    s_anchor = 0.0
    t_anchor = 0.0
    first = tl.minimum(cols, BLOCK)
    if FORM == LOGITS:
        s_anchor = maximum(student_ptr, first, scale, BLOCK)
    if TEACHER_FORM == LOGITS:
        t_anchor = maximum(teacher_ptr, first, scale, BLOCK)
    s_total, t_total, cross = _totals(
        student_ptr, teacher_ptr, cols, scale, s_anchor, t_anchor, KIND, FORM, TEACHER_FORM, BLOCK
    )
    # the first step's maximum is no anchor where another step's lies far above it, or it is -inf
    LIMIT: tl.constexpr = 4294967296.0 if KIND <= REVERSE else float("inf")  # KL is a difference
    if (s_total >= LIMIT) | (t_total >= LIMIT) | (s_total != s_total) | (t_total != t_total):
        if FORM == LOGITS:
            s_anchor = maximum(student_ptr, cols, scale, BLOCK)
        if TEACHER_FORM == LOGITS:
            t_anchor = maximum(teacher_ptr, cols, scale, BLOCK)
        s_total, t_total, cross = _totals(
            student_ptr, teacher_ptr, cols, scale, s_anchor, t_anchor, KIND, FORM, TEACHER_FORM,
            BLOCK,
        )  # fmt: skip
    # the logarithm of a quotient near 1 has more digits than a difference of logarithms
    loss = cross / t_total + tl.log2(s_total / t_total)
    if KIND == REVERSE:
        loss = cross / s_total + tl.log2(t_total / s_total)
    s_lse = s_anchor
    t_lse = t_anchor
    if FORM == LOGITS:
        s_lse += tl.log2(s_total) * LN2
    if TEACHER_FORM == LOGITS:
        t_lse += tl.log2(t_total) * LN2
    return s_lse, t_lse, loss * LN2


@triton.jit
def sums(
    student_ptr, teacher_ptr, cols, scale, s_shift, t_shift, beta, KIND: tl.constexpr,
    FORM: tl.constexpr, TEACHER_FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss and slope of a row, from its end: what was read last may still be in the cache."""
    lane = tl.arange(0, BLOCK)
    loss = tl.zeros([BLOCK], tl.float32)
    slope = tl.zeros([BLOCK], tl.float32)
    steps = tl.cdiv(cols, BLOCK)
    for step in tl.range(0, steps):
        first = (steps - 1 - step) * BLOCK
        assume_cols(first)
        col = first + lane
        s, q, t, p, order = _both(
            student_ptr + col, teacher_ptr + col, col < cols, scale, s_shift, t_shift, FORM,
            TEACHER_FORM,
        )  # fmt: skip
        each, r = _slopes(s, q, t, p, order, beta, KIND, 0.0)
        loss += each
        if FORM == LOGITS:
            slope += r if KIND == FORWARD else tl.where(q == 0.0, 0.0, q * r)
    total = tl.sum(loss, axis=0)
    return total if KIND == TVD else total * LN2, tl.sum(slope, axis=0)


@triton.jit
def write_gradient(
    student_ptr, teacher_ptr, out_ptr, cols, scale, s_shift, t_shift, slope, factor, beta,
    KIND: tl.constexpr, FORM: tl.constexpr, TEACHER_FORM: tl.constexpr, SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient times ``factor``; the loss of the same walk is returned if ``SUM``."""
    lane = tl.arange(0, BLOCK)
    loss = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + lane
        mask = col < cols
        s, q, t, p, order = _both(
            student_ptr + col, teacher_ptr + col, mask, scale, s_shift, t_shift, FORM,
            TEACHER_FORM,
        )  # fmt: skip
        each, r = _slopes(s, q, t, p, order, beta, KIND, 0.0 if FORM == LOGITS else 1.0)
        if SUM:
            loss += each
        if KIND == FORWARD:
            dz = r - q * slope if FORM == LOGITS else r
            if FORM == PROB:
                dz = tl.where(p == 0.0, 0.0, r / q)
        else:
            dz = r - slope if FORM == LOGITS else r
            if FORM != PROB:
                dz = tl.where(q == 0.0, 0.0, q * dz)
        tl.store(out_ptr + col, round_to(dz * factor, out_ptr.dtype.element_ty), mask=mask)
    total = tl.sum(loss, axis=0)
    return total if KIND == TVD else total * LN2
