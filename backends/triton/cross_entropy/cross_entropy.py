"""Cross entropy of rows of logits, with class weights, label smoothing, z-loss and softcap.

With z = cap * tanh(scale * raw / cap), p = softmax(z), lse = logsumexp(z) and t the row's target:

    ce = (1 - eps) w[t] (lse - z[t]) + eps / V * sum_j w[j] (lse - z[j])
    zl = z_loss_weight * lse^2
    d ce / dz[j] = (1 - eps) w[t] (p[j] - [j = t]) + eps / V * (p[j] sum(w) - w[j])
    d zl / dz[j] = 2 z_loss_weight lse p[j]
    dz / draw = scale * (1 - (z / cap)^2)

One program owns one row of any width. The sum of exponentials is anchored at the target's logit,
which is known before the first column. So the loop carries no running maximum and has no barrier,
and the loss is the logarithm of a sum that is at least 1. Where that sum overflows (a loss above
88) or the anchor is not finite, a second pass starts from the row's maximum. The gradient may
overwrite the row in a further pass, while the row is still in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LN2,
    assume_cols,
    checked_cols,
    power_of_2,
    warps,
)
from liger_multi.backends.triton.cross_entropy.cross_entropy_passes import (
    fill_zero,
    logit,
    row_maximum,
    row_pass,
    write_gradient,
)
from liger_multi.backends.triton.cross_entropy.cross_entropy_reduce import filled, finish
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.cross_entropy.reduction import check_targets
from liger_multi.reference.cross_entropy.rows import Objective, RowStats


@dataclass(frozen=True)
class RowConfig:
    """Columns a step, warps a program, and how often the compiler unrolls the loop over steps."""

    block: int
    num_warps: int
    unroll: int


def row_config(info: DeviceInfo, rows: int, cols: int, sums: int) -> RowConfig:
    """16 columns a thread, fewer where more than one sum a column must stay in registers."""
    block = min(power_of_2(checked_cols(cols)), 16384 if cols > 65536 else 8192)
    if sums > 1:  # with 4096 columns and 5 values each, sm100 spills (triton 3.6)
        block = min(block, 4096 if sums < 5 else 2048)
    threads = info.max_threads if block > 8192 else max(32, min(512, block // 8))
    return RowConfig(block, warps(threads, info.warp_size), 1)


@triton.jit
def _store_rows(
    ce_ptr, zl_ptr, lse_ptr, log_prob_ptr, entropy_ptr, argmax_ptr, row,
    ce, zl, lse, log_prob, entropy, argmax,
):  # fmt: skip
    """Write what a row gives: its loss, and the statistics that were asked for."""
    tl.store(ce_ptr + row, ce)
    if zl_ptr is not None:
        tl.store(zl_ptr + row, zl)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, lse)
    if log_prob_ptr is not None:
        tl.store(log_prob_ptr + row, log_prob)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)
    if argmax_ptr is not None:
        tl.store(argmax_ptr + row, argmax)


@triton.jit
def _cross_entropy_forward_kernel(
    logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, scales_ptr, ce_ptr, zl_ptr, lse_ptr,
    log_prob_ptr, entropy_ptr, argmax_ptr, row_stride, target_stride, cols, ignore_index, z_weight,
    scale, softcap, SMOOTHING: tl.constexpr, ADD_ZL: tl.constexpr, GRADIENT: tl.constexpr,
    INVERSE: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Loss and statistics of one row of logits; with GRADIENT, its gradient overwrites them.

    Program: one row.
    Reads the target and its logit, then the row in one pass, or in three where the anchor was no
    good (maximum, then the sums again). Writes ce, and those of zl, lse, log_prob, entropy and
    argmax that have a pointer.
    GRADIENT: a last pass overwrites the logits, scaled by the two numbers at ``scales_ptr``;
    INVERSE: by their inverses, with 0 for 0.
    An ignored row gives zeros and the argmax -1. A target that is no class never becomes an
    address: the row gets a NaN loss and a zero gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    assume_cols(cols)
    target = tl.load(target_ptr + row * target_stride)
    if target == ignore_index:
        _store_rows(
            ce_ptr, zl_ptr, lse_ptr, log_prob_ptr, entropy_ptr, argmax_ptr, row,
            0.0, 0.0, 0.0, 0.0, 0.0, -1,
        )  # fmt: skip
        if GRADIENT:
            fill_zero(row_ptr, cols, BLOCK)
        return
    inside = (target >= 0) & (target < cols)
    target = tl.where(inside, target, 0).to(tl.int32)
    own = logit(tl.load(row_ptr + target), scale, softcap)
    anchor = own
    ENTROPY: tl.constexpr = entropy_ptr is not None
    ARGMAX: tl.constexpr = argmax_ptr is not None
    total, spread, smooth, argmax = row_pass(
        row_ptr, weight_ptr, cols, anchor, scale, softcap, SMOOTHING != 0.0, ENTROPY, ARGMAX,
        BLOCK, UNROLL,
    )  # fmt: skip
    # entropy is a difference, which loses digits where the anchor lies far below the maximum
    if (total >= (4294967296.0 if ENTROPY else float("inf"))) | (total != total):
        anchor = row_maximum(row_ptr, cols, scale, softcap, BLOCK)
        total, spread, smooth, argmax = row_pass(
            row_ptr, weight_ptr, cols, anchor, scale, softcap, SMOOTHING != 0.0, ENTROPY, ARGMAX,
            BLOCK, 1,
        )  # fmt: skip
    log2_total = tl.log2(total)
    log_total = log2_total * LN2
    lse = anchor + log_total
    nll = tl.where(inside, log_total - (own - anchor), float("nan"))
    ce = nll * (1.0 - SMOOTHING)
    if weight_ptr is not None:
        ce *= tl.load(weight_ptr + target).to(tl.float32)
    if SMOOTHING != 0.0:
        weights = tl.load(weight_sum_ptr) if weight_sum_ptr is not None else cols
        ce += SMOOTHING / cols * (weights * log_total - smooth)
    zl = z_weight * lse * lse
    entropy = log_total - spread / total
    if GRADIENT:
        if inside:
            ce_scale = tl.load(scales_ptr)
            zl_scale = tl.load(scales_ptr + 1)
            if INVERSE:
                ce_scale = tl.where(ce_scale == 0.0, 0.0, 1.0 / ce_scale)
                zl_scale = tl.where(zl_scale == 0.0, 0.0, 1.0 / zl_scale)
            write_gradient(
                row_ptr, row_ptr, weight_ptr, weight_sum_ptr, target, cols, anchor, log2_total, lse,
                ce_scale, zl_scale, z_weight, scale, softcap, SMOOTHING, BLOCK, UNROLL,
            )  # fmt: skip
        else:
            fill_zero(row_ptr, cols, BLOCK)
    if ADD_ZL:
        ce += zl
    _store_rows(
        ce_ptr, zl_ptr, lse_ptr, log_prob_ptr, entropy_ptr, argmax_ptr, row,
        ce, zl, lse, -nll, entropy, argmax,
    )  # fmt: skip


@triton.jit
def _cross_entropy_backward_kernel(
    dloss_ptr, logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, lse_ptr, denominators_ptr,
    out_ptr, dloss_stride, row_stride, target_stride, out_stride, cols, ignore_index, z_weight,
    scale, softcap, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Gradient of one row of logits from its saved lse.

    Program: one row; reads its target, upstream gradient, lse, the denominators of the mean and,
    once, the logits. Writes the gradient; zeros for rows that are ignored or whose target is no
    class.
    """
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * out_stride
    assume_cols(cols)
    target = tl.load(target_ptr + row * target_stride)
    if (target == ignore_index) | (target < 0) | (target >= cols):
        fill_zero(out_ptr, cols, BLOCK)
        return
    dloss = tl.load(dloss_ptr + row * dloss_stride).to(tl.float32)
    weight_total = tl.load(denominators_ptr)
    count = tl.load(denominators_ptr + 1)
    ce_scale = tl.where(weight_total == 0.0, 0.0, dloss / weight_total)
    zl_scale = tl.where(count == 0.0, 0.0, dloss / count)
    lse = tl.load(lse_ptr + row)
    row_ptr = logits_ptr + row * row_stride
    write_gradient(
        row_ptr, out_ptr, weight_ptr, weight_sum_ptr, target.to(tl.int32), cols, lse, 0.0, lse,
        ce_scale, zl_scale, z_weight, scale, softcap, SMOOTHING, BLOCK, UNROLL,
    )  # fmt: skip


def _columns(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def _sums(options: Objective) -> int:
    return 1 + bool(options.label_smoothing) + (options.softcap is not None)


def curve(options: Objective) -> tuple[Optional[float], Optional[float]]:
    """Scale and softcap as the kernels take them: None where they change nothing."""
    return None if options.logit_scale == 1.0 else options.logit_scale, options.softcap


def weight_sum(weight: Optional[Tensor], options: Objective) -> Optional[Tensor]:
    """Sum of the class weights, one fp32 element, where label smoothing will read it."""
    if weight is None or not options.label_smoothing:
        return None
    return weight.sum(dtype=torch.float32)


def _launch_rows(
    logits: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    total: Optional[Tensor],
    options: Objective,
    rows: RowStats,
    scales: Optional[Tensor],
    add_zl: bool,
    inverse: bool = False,
) -> None:
    count, cols = logits.shape
    if not count:
        return
    # each of these keeps one or two more fp32 values a column through the pass
    sums = _sums(options) + (rows.entropy.numel() > 0) + 2 * (rows.argmax.numel() > 0)
    k = launch_config(
        "cross_entropy.forward", row_config, logits.device, rows=count, cols=cols, sums=sums
    )
    launch(
        _cross_entropy_forward_kernel, count,
        (logits, target, weight, total, scales, *(filled(r) for r in rows), logits.stride(0),
         target.stride(0), cols, options.ignore_index, options.z_loss_weight, *curve(options)),
        (options.label_smoothing, add_zl, scales is not None, inverse, k.block, k.unroll),
        k.num_warps,
    )  # fmt: skip


def statistics(
    logits: Tensor, target: Tensor, weight: Optional[Tensor], options: Objective, rows: RowStats
) -> None:
    """Fill ``rows`` with the statistics of logits whose columns are adjacent."""
    total = weight_sum(weight, options)
    _launch_rows(logits, target, weight, total, options, rows, None, False)


def loss_and_gradient_(
    logits: Tensor, target: Tensor, weight: Optional[Tensor], options: Objective, rows: RowStats,
    scales: Tensor, *, add_zl: bool = False, inverse: bool = False,
) -> None:  # fmt: skip
    """Fill ``rows``, then overwrite raw logits with the gradient, in one launch.

    Args:
        logits: (rows, V) with adjacent columns, to be overwritten.
        target: (rows,) class ids.
        weight: (V,) contiguous class weights.
        options: The objective.
        rows: Buffers of the statistics; empty tensors are skipped.
        scales: Two fp32 elements, the gradient is that of ``scales[0] * ce + scales[1] * zl``.
        add_zl: Add ``zl`` to ``ce`` in ``rows``.
        inverse: ``scales`` are divisors; 0 means no gradient.
    """
    total = weight_sum(weight, options)
    _launch_rows(logits, target, weight, total, options, rows, scales, add_zl, inverse)


def gradient_into(
    out: Tensor, dloss: Tensor, logits: Tensor, target: Tensor, weight: Optional[Tensor],
    lse: Tensor, denominators: Tensor, options: Objective,
) -> None:  # fmt: skip
    """Write the gradient of raw logits, perhaps over them; ``dloss`` is a scalar or (rows,)."""
    count, cols = logits.shape
    if not logits.numel():
        return
    sums = _sums(options)
    k = launch_config(
        "cross_entropy.backward", row_config, logits.device, rows=count, cols=cols, sums=sums
    )
    launch(
        _cross_entropy_backward_kernel, count,
        (dloss, logits, target, weight, weight_sum(weight, options), lse, denominators, out,
         dloss.stride(0) if dloss.dim() else 0, logits.stride(0), target.stride(0), out.stride(0),
         cols, options.ignore_index, options.z_loss_weight, *curve(options)),
        (options.label_smoothing, k.block, k.unroll), k.num_warps,
    )  # fmt: skip


def forward(
    logits: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: Optional[float],
    reduction: str,
    validate: bool,
    outputs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss and wanted outputs, then ``lse`` of every row and the denominators of the mean."""
    count, cols = logits.shape
    check_targets(target, cols, ignore_index, validate)
    options = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
    weight = None if weight is None else weight.contiguous()
    rows = RowStats.empty(count, options, outputs, logits)
    total = weight_sum(weight, options)
    add_zl = reduction == "none" and z_loss_weight != 0.0
    _launch_rows(_columns(logits), target, weight, total, options, rows, None, add_zl)
    return finish(rows, target, weight, cols, ignore_index, reduction, outputs)


def backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    lse: Tensor,
    denominators: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss_weight: float,
    softcap: Optional[float],
    reduction: str,
) -> Tensor:
    """Gradient of logits from ``lse``, scaled by the upstream gradient of the row."""
    options = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
    dlogits = logits.new_empty(logits.shape)
    weight = None if weight is None else weight.contiguous()
    gradient_into(
        dlogits, dloss, _columns(logits), target, weight, lse.contiguous(), denominators, options
    )
    return dlogits
