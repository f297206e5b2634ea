"""Divergences of rows of two distributions: KL, Jensen-Shannon, total variation.

The equations are those of reference/divergences/divergence.py. One program owns one row of any
width. Logits are read once for both normalizers, anchored at the maximum of the row's first step,
so that the loop carries no running maximum. KL comes out of the same pass. The other losses and
``slope`` need a second pass, in reverse order, to reuse cached data. The gradient is a last pass
and may overwrite the student. Log-probabilities and probabilities are read once for both loss and
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import assume_cols, checked_cols, power_of_2, warps
from liger_multi.backends.triton.cross_entropy import cross_entropy_inplace
from liger_multi.backends.triton.cross_entropy.cross_entropy_passes import fill_zero
from liger_multi.backends.triton.cross_entropy.cross_entropy_reduce import filled
from liger_multi.backends.triton.divergences.divergence_passes import (
    FORWARD,
    LOGITS,
    REVERSE,
    normalize,
    sums,
    write_gradient,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.divergences.divergence import DivergenceSpec, DivergenceStats

KINDS = {"forward": 0, "reverse": 1, "jensen": 2, "tvd": 3}
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
def _store_row(loss_ptr, lse_ptr, teacher_lse_ptr, slope_ptr, row, loss, lse, teacher_lse, slope):
    """Write the loss of a row and, where they have a pointer, its normalizers and slope."""
    tl.store(loss_ptr + row, loss)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, lse)
    if teacher_lse_ptr is not None:
        tl.store(teacher_lse_ptr + row, teacher_lse)
    if slope_ptr is not None:
        tl.store(slope_ptr + row, slope)


@triton.jit
def _divergence_forward_kernel(
    student_ptr, teacher_ptr, target_ptr, factor_ptr, loss_ptr, lse_ptr, teacher_lse_ptr, slope_ptr,
    student_stride, teacher_stride, target_stride, factor_stride, cols, ignore_index, scale, beta,
    KIND: tl.constexpr, FORM: tl.constexpr, TEACHER_FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
            _store_row(loss_ptr, lse_ptr, teacher_lse_ptr, slope_ptr, row, 0.0, 0.0, 0.0, 0.0)
            if factor_ptr is not None:
                fill_zero(student_ptr, cols, BLOCK)
            return
    s_shift = 0.0
    t_shift = 0.0
    loss = 0.0
    slope = 0.0
    if FORM == LOGITS or TEACHER_FORM == LOGITS:
        s_shift, t_shift, loss = normalize(
            student_ptr, teacher_ptr, cols, scale, KIND, FORM, TEACHER_FORM, BLOCK
        )
    DONE: tl.constexpr = (FORM == LOGITS and TEACHER_FORM == LOGITS) and KIND <= REVERSE
    LATER: tl.constexpr = factor_ptr is not None and FORM != LOGITS
    if DONE:
        slope = -1.0 if KIND == FORWARD else loss
    elif not LATER:
        loss, slope = sums(
            student_ptr, teacher_ptr, cols, scale, s_shift, t_shift, beta, KIND, FORM, TEACHER_FORM,
            BLOCK,
        )  # fmt: skip
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + row * factor_stride).to(tl.float32)
        if FORM == LOGITS:
            factor *= scale
        found = write_gradient(
            student_ptr, teacher_ptr, student_ptr, cols, scale, s_shift, t_shift, slope, factor,
            beta, KIND, FORM, TEACHER_FORM, LATER, BLOCK,
        )  # fmt: skip
        if LATER:
            loss = found
    _store_row(
        loss_ptr, lse_ptr, teacher_lse_ptr, slope_ptr, row, loss, s_shift, t_shift,
        slope,
    )  # fmt: skip


@triton.jit
def _divergence_backward_kernel(
    student_ptr, teacher_ptr, target_ptr, factor_ptr, lse_ptr, teacher_lse_ptr, slope_ptr, out_ptr,
    student_stride, teacher_stride, target_stride, factor_stride, out_stride, cols, ignore_index,
    scale, beta, KIND: tl.constexpr, FORM: tl.constexpr, TEACHER_FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
    t_shift = 0.0
    slope = 0.0
    factor = tl.load(factor_ptr + row * factor_stride).to(tl.float32)
    if FORM == LOGITS:
        s_shift = tl.load(lse_ptr + row)
        slope = tl.load(slope_ptr + row)
        factor *= scale
    if TEACHER_FORM == LOGITS:
        t_shift = tl.load(teacher_lse_ptr + row)
    write_gradient(
        student_ptr + row * student_stride, teacher_ptr + row * teacher_stride, out_ptr, cols,
        scale, s_shift, t_shift, slope, factor, beta, KIND, FORM, TEACHER_FORM, False,
        BLOCK,
    )  # fmt: skip


def _columns(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _step(x: Tensor | None) -> int:
    return x.stride(0) if x is not None and x.dim() else 0


def _beta(spec: DivergenceSpec) -> float | None:
    """None for the usual 0.5: then the weights are equal constants, with no choice per class."""
    return None if spec.beta == 0.5 else spec.beta


def _constants(spec: DivergenceSpec, block: int) -> tuple[int, ...]:
    return KINDS[spec.kind], FORMS[spec.form], FORMS[spec.teacher_form], block


def _rows(
    name: str, student: Tensor, teacher: Tensor, target: Tensor | None, spec: DivergenceSpec,
    factor: Tensor | None,
) -> DivergenceStats:  # fmt: skip
    rows, (count, cols) = DivergenceStats.empty(student.shape[0], spec, student), student.shape
    if not count:
        return rows
    kept = rows if factor is None else (rows.loss, None, None, None)
    shape = {"rows": count, "cols": cols, "logits": int(spec.form == "logits")}
    shape["element_bytes"] = student.element_size() + teacher.element_size()
    k = launch_config(f"{name}.forward", sum_config, student.device, **shape)
    launch(
        _divergence_forward_kernel, count,
        (student, teacher, target, factor, *(filled(r) for r in kept), student.stride(0),
         teacher.stride(0), _step(target), _step(factor), cols, spec.ignore_index, spec.scale,
         _beta(spec)),
        _constants(spec, k.block), k.num_warps,
    )  # fmt: skip
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
            _divergence_backward_kernel, count,
            (student, teacher, target, factor, *(filled(r) for r in rows[1:]), out,
             student.stride(0), teacher.stride(0), _step(target), _step(factor), out.stride(0),
             cols, spec.ignore_index, spec.scale, _beta(spec)),
            _constants(spec, k.block), k.num_warps,
        )  # fmt: skip

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
