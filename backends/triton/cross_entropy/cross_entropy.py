"""Cross entropy of rows of logits, with class weights, label smoothing, z-loss and softcap.

With z = cap * tanh(scale * raw / cap), p = softmax(z), lse = logsumexp(z) and t the row's target:

    ce = (1 - eps) w[t] (lse - z[t]) + eps / V * sum_j w[j] (lse - z[j])
    zl = z_loss_weight * lse^2
    d ce / dz[j] = (1 - eps) w[t] (p[j] - [j = t]) + eps / V * (p[j] sum(w) - w[j])
    d zl / dz[j] = 2 z_loss_weight lse p[j]
    dz / draw = scale * (1 - (z / cap)^2)

One program owns one row of any width. The sum of exponentials is anchored at the target's logit,
which is known before the first column. So the loop carries no running maximum and has no barrier,
and the loss is log1p of the sum over the other classes, which keeps its digits where the target is
nearly certain. Where that sum is 2^32 (a loss above 22) or the anchor is not finite, a second pass
starts from the row's maximum; with an entropy, also where that is below a quarter of the loss. The
gradient may overwrite the row in a further pass, while the row is still in the cache.

``lse`` is two numbers, of which the second is what rounding left out of the first: ``z - lse`` has
no digits where all logits lie far from 0 together. ``p[t] - 1`` has none where the target is nearly
certain, so the gradient there is made of ``1 - exp(-loss)`` by its series.

Kernels are made of passes over one row of any width: its sums, its maximum and its gradient. The
softcap and the scale are None or run-time numbers, so that a temperature that changes does not
compile again. One program makes the loss of the rows: sums, and the denominators of the mean.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LN2,
    LOG2E,
    assume_cols,
    checked_cols,
    log1p,
    one_minus_exp,
    power_of_2,
    round_to,
    sum_rows,
    tanh,
    tanh_and_slope,
    two_sum,
    warps,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.common.strict import strict
from liger_multi.reference.cross_entropy.reduction import check_targets
from liger_multi.reference.cross_entropy.rows import LogSumExp, Objective, RowStats

# --- passes over one row; z is a logit after scale and softcap, in fp32 ---


@triton.jit
def logit(raw, scale, softcap):
    """A raw logit after scale and softcap, in fp32."""
    z = raw.to(tl.float32)
    if scale is not None:
        z = z * scale
    if softcap is not None:
        z = softcap * tanh(z * (1.0 / softcap))
    return z


@triton.jit
def logit_and_slope(raw, scale, softcap):
    """The same, and its derivative by the raw logit; 1 - (z / cap)^2 has no digits near the cap."""
    z, slope = raw.to(tl.float32), 1.0
    if scale is not None:
        z = z * scale
    if softcap is not None:
        z, slope = tanh_and_slope(z * (1.0 / softcap))
        z *= softcap
    if scale is not None:
        slope *= scale
    return z, slope


@triton.jit
def row_pass(
    row_ptr,
    weight_ptr,
    cols,
    anchor,
    without,
    scale,
    softcap,
    SMOOTH: tl.constexpr,
    ENTROPY: tl.constexpr,
    ARGMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One pass over a row: sums of exp(d), exp(d) d and w d with d = z - anchor, and the argmax.

    Each lane keeps sums and a maximum of its own, so that no step waits for a reduction. Of equal
    maxima, the first column counts. ``evict_last`` asks the cache to keep the row for a later pass.
    The sum of exp(d) is without the column ``without``, if any, beside which the others may be too
    small to add. No step pays for that: the column's lane is summed once more, without it.
    """
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    spread = tl.zeros([BLOCK], tl.float32)
    smooth = tl.zeros([BLOCK], tl.float32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = lane
    for start in tl.range(0, cols, BLOCK, loop_unroll_factor=UNROLL):
        col = start + lane
        mask = col < cols
        raw = tl.load(row_ptr + col, mask=mask, other=float("-inf"), eviction_policy="evict_last")
        z = logit(raw, scale, softcap)
        if scale is not None or softcap is not None:
            z = tl.where(mask, z, float("-inf"))
        d = z - anchor
        e = tl.exp2(d * LOG2E)
        total += e
        if ENTROPY:
            spread += e * tl.maximum(d, -200.0)  # exp is 0 below this
        if SMOOTH:
            if weight_ptr is not None:
                d = d * tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
            smooth += tl.where(mask, d, 0.0)
        if ARGMAX:
            place = tl.where(z > best, col, place)
            best = tl.maximum(best, z)
    first = tl.min(tl.where(best == tl.max(best, axis=0), place, cols - 1), axis=0)
    if without is not None:
        others = _lane_without(row_ptr, cols, anchor, without, scale, softcap, BLOCK)
        total = tl.where(lane == without % BLOCK, others, total)
    return tl.sum(total, axis=0), tl.sum(spread, axis=0), tl.sum(smooth, axis=0), first


@triton.jit
def _lane_without(row_ptr, cols, anchor, without, scale, softcap, BLOCK: tl.constexpr):
    """Sum of exp(z - anchor) over the columns of a lane, every BLOCK-th, without one of them.

    They are few, so every warp reads them all, from the cache.
    """
    total = tl.zeros([32], tl.float32)
    for start in tl.range(0, cols, 32 * BLOCK, loop_unroll_factor=1):
        col = without % BLOCK + start + tl.arange(0, 32) * BLOCK
        mask = (col < cols) & (col != without)
        raw = tl.load(row_ptr + col, mask=mask, other=float("-inf"))
        z = tl.where(mask, logit(raw, scale, softcap), float("-inf"))
        total += tl.exp2((z - anchor) * LOG2E)
    return tl.sum(total, axis=0)


@triton.jit
def _anchored_too_low(others, spread, ENTROPY: tl.constexpr):
    """Whether the sums have too few digits, since the maximum is far above the anchor or no number.

    Exponents then lose digits, and so do differences. An entropy is a small difference of large
    numbers where another class than the anchor's is nearly certain.
    """
    low = (others >= 4294967296.0) | (others != others)
    if ENTROPY:
        log_total = log1p(others)
        low |= (others >= 1.0) & (4.0 * (log_total - spread / (1.0 + others)) < log_total)
    return low


@triton.jit
def row_maximum(row_ptr, cols, scale, softcap, BLOCK: tl.constexpr):
    """The largest logit of the first ``cols`` columns of a row, after scale and softcap."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        raw = tl.load(row_ptr + col, mask=col < cols, other=float("-inf"))
        z = logit(raw, scale, softcap)
        best = tl.maximum(best, tl.where(col < cols, z, float("-inf")))
    return tl.max(best, axis=0)


@triton.jit
def target_nll(row_ptr, target, lse, lse_low, scale, softcap):
    """-log p of the target, whose logit is read before any thread overwrites the row."""
    own = logit(tl.load(row_ptr + target), scale, softcap)
    tl.debug_barrier()
    return lse_low - (own - lse)


@triton.jit
def fill_zero(row_ptr, cols, BLOCK: tl.constexpr):
    """Overwrite a row with zeros."""
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        tl.store(row_ptr + col, tl.zeros([BLOCK], row_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def _gradient_of(
    raw,
    col,
    mask,
    target,
    lse,
    log2_low,
    at_target,
    p_scale,
    part,
    weight_ptr,
    scale,
    softcap,
    SMOOTHING: tl.constexpr,
):
    """The gradient of a tile of raw logits; see :func:`write_gradient`."""
    z, slope = logit_and_slope(raw, scale, softcap)
    dz = tl.exp2((z - lse) * LOG2E - log2_low) * p_scale
    if SMOOTHING != 0.0:
        if weight_ptr is not None:
            dz -= part * tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
        else:
            dz -= part
    dz = tl.where(col == target, at_target, dz)
    if softcap is not None or scale is not None:
        dz *= slope
    return dz


@triton.jit
def write_gradient(
    row_ptr,
    out_ptr,
    weight_ptr,
    weight_sum_ptr,
    target,
    cols,
    lse,
    lse_low,
    nll,
    ce_scale,
    zl_scale,
    z_weight,
    scale,
    softcap,
    kept,
    kept_after,
    SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Write ce_scale * d ce + zl_scale * d zl of one row, p = exp((z - lse) - lse_low).

    ``nll`` is -log p of the target, whose gradient is computed before the pass.
    The pass runs from the last columns to the first. Where the rows in flight do not fit into the
    cache together, it still holds the columns that the pass before read last (8192x128256 on an
    H200: 1381 to 1248 us). KEPT: so many columns, from :func:`kept_from` on, are ``kept``, and the
    second half of them ``kept_after``.
    """
    own = (1.0 - SMOOTHING) * ce_scale
    weight = 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + target).to(tl.float32)
        own *= weight
    grad_lse = 2.0 * z_weight * lse * zl_scale
    part = ce_scale * SMOOTHING / cols
    if SMOOTHING != 0.0:
        grad_lse += part * (tl.load(weight_sum_ptr) if weight_sum_ptr is not None else cols)
    p_scale = own + grad_lse
    at_target = grad_lse * tl.exp2(nll * -LOG2E) - own * one_minus_exp(nll)
    if SMOOTHING != 0.0:
        at_target -= part * weight
    log2_low = lse_low * LOG2E
    read = kept_from(cols, BLOCK, KEPT)
    if KEPT > 0:
        for after in tl.static_range(2):
            end = read + after * (KEPT // 2) + tl.arange(0, KEPT // 2)
            last_dz = _gradient_of(
                kept_after if after else kept,
                end,
                end < cols,
                target,
                lse,
                log2_low,
                at_target,
                p_scale,
                part=part,
                weight_ptr=weight_ptr,
                scale=scale,
                softcap=softcap,
                SMOOTHING=SMOOTHING,
            )
            tl.store(
                out_ptr + end,
                round_to(last_dz, out_ptr.dtype.element_ty),
                mask=end < cols,
                eviction_policy="evict_first",
            )
    last = (tl.cdiv(read, BLOCK) - 1) * BLOCK
    for start in tl.range(0, read, BLOCK, loop_unroll_factor=UNROLL):
        first = last - start
        assume_cols(first)
        col = first + tl.arange(0, BLOCK)
        mask = col < cols
        raw = tl.load(row_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        dz = _gradient_of(
            raw,
            col,
            mask,
            target,
            lse,
            log2_low,
            at_target,
            p_scale,
            part=part,
            weight_ptr=weight_ptr,
            scale=scale,
            softcap=softcap,
            SMOOTHING=SMOOTHING,
        )
        tl.store(
            out_ptr + col,
            round_to(dz, out_ptr.dtype.element_ty),
            mask=mask,
            eviction_policy="evict_first",
        )


@triton.jit
def kept_from(cols, BLOCK: tl.constexpr, KEPT: tl.constexpr):
    """The first column of those that stay in registers between two passes over a row."""
    tl.static_assert(KEPT == 0 or KEPT >= BLOCK)  # whole steps come before them
    if KEPT > 0:
        return tl.cdiv(tl.maximum(cols - KEPT, 0), BLOCK) * BLOCK
    else:
        return cols


@triton.jit
def _keep(row_ptr, first, cols, anchor, without, scale, COLS: tl.constexpr):
    """COLS columns from ``first`` on, and the sum of their exp(z - anchor) without one column's."""
    col = first + tl.arange(0, COLS)
    raw = tl.load(row_ptr + col, mask=col < cols, other=0.0, eviction_policy="evict_first")
    return raw, _kept_sum(raw, (col < cols) & (col != without), anchor, scale)


@triton.jit
def _kept_sum(kept, mask, anchor, scale):
    """Sum of exp(z - anchor) of columns that are in registers."""
    z = tl.where(mask, logit(kept, scale, None), float("-inf"))
    return tl.sum(tl.exp2((z - anchor) * LOG2E), axis=0)


# --- from rows to the loss ---


@dataclass(frozen=True)
class ReduceConfig:
    """Rows a step and warps of the one program."""

    block: int
    num_warps: int


def reduce_config(info: DeviceInfo, rows: int) -> ReduceConfig:
    """One program for all rows, 8 of them a thread."""
    block = min(4096, power_of_2(rows))
    return ReduceConfig(block, warps(block // 8, info.warp_size))


@triton.jit
def _cross_entropy_reduce_kernel(
    target_ptr,
    weight_ptr,
    ce_ptr,
    zl_ptr,
    argmax_ptr,
    loss_ptr,
    z_loss_ptr,
    accuracy_ptr,
    denominators_ptr,
    target_stride,
    rows,
    cols,
    ignore_index,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Denominators of the mean and, where asked for, the reduced losses and the accuracy.

    Program: the only one, so that sums have one order. It passes over the rows, BLOCK at a time.
    Reads targets, their weights, and the rows' ce, zl and argmax. Writes the denominators (sum of
    weights, count), and loss, z-loss and accuracy where they have a pointer. A mean over nothing is
    0.
    """
    ce = tl.zeros([BLOCK], tl.float32)
    zl = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    hits = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < rows
        target = tl.load(target_ptr + row.to(tl.int64) * target_stride, mask=mask, other=0)
        valid = mask & (target != ignore_index)
        count += valid.to(tl.int32)
        if weight_ptr is not None:
            label = tl.where((target >= 0) & (target < cols), target, 0)
            weights += tl.load(weight_ptr + label, mask=valid, other=0.0).to(tl.float32)
        if ce_ptr is not None:
            ce += tl.load(ce_ptr + row, mask=mask, other=0.0)
        if zl_ptr is not None:
            zl += tl.load(zl_ptr + row, mask=mask, other=0.0)
        if argmax_ptr is not None:
            argmax = tl.load(argmax_ptr + row, mask=mask, other=-1)
            hits += (valid & (argmax == target)).to(tl.int32)
    counted = tl.sum(count, axis=0).to(tl.float32)
    by_weight = tl.full([], 1.0, tl.float32)
    by_count = by_weight
    if MEAN:
        by_count = counted
        by_weight = tl.sum(weights, axis=0) if weight_ptr is not None else counted
    tl.store(denominators_ptr, by_weight)
    tl.store(denominators_ptr + 1, by_count)
    z_loss = tl.sum(zl, axis=0)
    z_loss = tl.where(by_count == 0.0, 0.0, z_loss / by_count)
    if loss_ptr is not None:
        loss = tl.sum(ce, axis=0)
        tl.store(loss_ptr, tl.where(by_weight == 0.0, 0.0, loss / by_weight) + z_loss)
    if z_loss_ptr is not None:
        tl.store(z_loss_ptr, z_loss)
    if accuracy_ptr is not None:
        tl.store(accuracy_ptr, tl.sum(hits, axis=0).to(tl.float32) / tl.maximum(counted, 1.0))


def filled(*outputs: Tensor | None) -> list[Tensor | None]:
    """Pointers for kernels: None in place of every output that was not requested."""
    return [x if x is not None and x.numel() else None for x in outputs]


def reduce_rows(
    target: Tensor,
    weight: Tensor | None,
    rows: RowStats | None,
    cols: int,
    ignore_index: int,
    reduction: str,
    outputs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, z_loss, token_accuracy (scalars, empty where unwanted) and the two denominators.

    Without ``rows`` only the denominators are computed.
    """
    requested = outputs.split(",") if rows is not None else []
    needs = (rows is not None, "z_loss" in requested, "token_accuracy" in requested)
    loss, z_loss, accuracy = [
        target.new_empty(() if is_needed else (0,), dtype=torch.float32) for is_needed in needs
    ]
    denominators = target.new_empty(2, dtype=torch.float32)
    ce, zl, argmax = (rows.ce, rows.zl, rows.argmax) if rows is not None else (None, None, None)
    count = target.shape[0]
    k = launch_config("cross_entropy.reduce", reduce_config, target.device, rows=count)
    launch(
        _cross_entropy_reduce_kernel,
        1,
        (
            target,
            weight,
            *filled(ce, zl, argmax, loss, z_loss, accuracy),
            denominators,
            target.stride(0),
            count,
            cols,
            ignore_index,
        ),
        (reduction == "mean", k.block),
        k.num_warps,
    )
    return loss, z_loss, accuracy, denominators


def finish(
    rows: RowStats,
    target: Tensor,
    weight: Tensor | None,
    cols: int,
    ignore_index: int,
    reduction: str,
    outputs: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The outputs of the contract and the denominators; ``ce`` holds ``zl`` too for none."""
    requested = outputs.split(",")
    as_is = "predicted_tokens" in requested or not rows.argmax.numel()
    predicted = rows.argmax if as_is else rows.argmax.new_empty(0)
    if reduction == "none":
        z_loss = rows.zl if "z_loss" in requested else rows.ce.new_empty(0)
        loss, denominators, accuracy = rows.ce, rows.ce.new_ones(2), rows.ce.new_empty(0)
        if "token_accuracy" in requested:
            accuracy = ((rows.argmax == target) & (target != ignore_index)).to(torch.float32)
    else:
        loss, z_loss, accuracy, denominators = reduce_rows(
            target, weight, rows, cols, ignore_index, reduction, outputs
        )
    return loss, z_loss, accuracy, predicted, rows.log_prob, rows.entropy, rows.lse, denominators


# --- kernels of rows, and launchers ---


@dataclass(frozen=True)
class RowConfig:
    """Columns a step, warps a program, and how often the compiler unrolls the loop over steps.

    ``kept``: bytes of a row that stay in registers until the gradient overwrites them; 0: none.
    """

    block: int
    num_warps: int
    unroll: int
    kept: int = 0


def row_config(info: DeviceInfo, rows: int, cols: int, sums: int, gradient: int = 0) -> RowConfig:
    """16 columns a thread, fewer where more than one sum a column must stay in registers.

    ``gradient``: 1 where the gradient overwrites the row; entries of launch tables ask for it.
    """
    block = min(power_of_2(checked_cols(cols)), 16384 if cols > 65536 else 8192)
    if sums > 1:  # with 4096 columns and 5 values each, sm100 spills (triton 3.6)
        block = min(block, 4096 if sums < 5 else 2048)
    threads = info.max_threads if block > 8192 else max(32, min(512, block // 8))
    return RowConfig(block, warps(threads, info.warp_size), 1)


@triton.jit
def _store_rows(
    ce_ptr,
    zl_ptr,
    lse_ptr,
    lse_low_ptr,
    log_prob_ptr,
    entropy_ptr,
    argmax_ptr,
    row,
    ce,
    zl,
    lse,
    lse_low,
    log_prob,
    entropy,
    argmax,
):
    """Write what a row gives: its loss, and the statistics that were asked for."""
    tl.store(ce_ptr + row, ce)
    if zl_ptr is not None:
        tl.store(zl_ptr + row, zl)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, lse)
    if lse_low_ptr is not None:
        tl.store(lse_low_ptr + row, lse_low)
    if log_prob_ptr is not None:
        tl.store(log_prob_ptr + row, log_prob)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)
    if argmax_ptr is not None:
        tl.store(argmax_ptr + row, argmax)


@triton.jit
def _cross_entropy_forward_kernel(
    logits_ptr,
    target_ptr,
    weight_ptr,
    weight_sum_ptr,
    scales_ptr,
    ce_ptr,
    zl_ptr,
    lse_ptr,
    lse_low_ptr,
    log_prob_ptr,
    entropy_ptr,
    argmax_ptr,
    strides,
    cols,
    ignore_index,
    z_weight,
    scale,
    softcap,
    SMOOTHING: tl.constexpr,
    ADD_ZL: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Loss and statistics of one row of logits; with GRADIENT, its gradient overwrites them.

    Program: one row.
    Reads the target and its logit, then the row in one pass, or in three where the anchor was no
    good. Writes ce, and those of zl, both parts of lse, log_prob, entropy and argmax with pointers.
    GRADIENT: a last pass overwrites the logits, scaled by the numbers at ``scales_ptr`` (-1: by
    their inverses, 0 for 0). KEPT: so many of the last columns stay in registers meanwhile.
    An ignored row gives zeros, argmax -1. A target that is no class is no address: NaN, zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * strides[0]
    assume_cols(cols)
    target = tl.load(target_ptr + row * strides[1])
    if target == ignore_index:
        _store_rows(
            ce_ptr, zl_ptr, lse_ptr, lse_low_ptr, log_prob_ptr, entropy_ptr, argmax_ptr, row,
            ce=0.0, zl=0.0, lse=0.0, lse_low=0.0, log_prob=0.0, entropy=0.0, argmax=-1,
        )  # fmt: skip
        if GRADIENT != 0:
            fill_zero(row_ptr, cols, BLOCK)
        return
    inside = (target >= 0) & (target < cols)
    target = tl.where(inside, target, 0).to(tl.int32)
    own = logit(tl.load(row_ptr + target), scale, softcap)
    anchor = own
    ENTROPY: tl.constexpr = entropy_ptr is not None
    ARGMAX: tl.constexpr = argmax_ptr is not None
    tl.static_assert(KEPT == 0 or not (SMOOTHING or ENTROPY or ARGMAX or softcap is not None))
    read = kept_from(cols, BLOCK, KEPT)
    others, spread, smooth, argmax = row_pass(
        row_ptr, weight_ptr, read, anchor, target, scale, softcap, SMOOTH=SMOOTHING != 0.0,
        ENTROPY=ENTROPY, ARGMAX=ARGMAX, BLOCK=BLOCK, UNROLL=UNROLL,
    )  # fmt: skip
    kept, kept_after = 0.0, 0.0
    if KEPT > 0:
        kept, sum_kept = _keep(row_ptr, read, cols, anchor, target, scale, KEPT // 2)
        after = read + KEPT // 2
        kept_after, sum_after = _keep(row_ptr, after, cols, anchor, target, scale, KEPT // 2)
        others += sum_kept + sum_after
    total, log_total = 1.0 + others, log1p(others)
    nll = log_total
    if _anchored_too_low(others, spread, ENTROPY):
        anchor = row_maximum(row_ptr, cols, scale, softcap, BLOCK)
        total, spread, smooth, argmax = row_pass(
            row_ptr, weight_ptr, read, anchor, None, scale, softcap, SMOOTH=SMOOTHING != 0.0,
            ENTROPY=ENTROPY, ARGMAX=ARGMAX, BLOCK=BLOCK, UNROLL=1,
        )  # fmt: skip
        if KEPT > 0:
            kept, sum_kept = _keep(row_ptr, read, cols, anchor, -1, scale, KEPT // 2)
            after = read + KEPT // 2
            kept_after, sum_after = _keep(row_ptr, after, cols, anchor, -1, scale, KEPT // 2)
            total += sum_kept + sum_after
        log_total = tl.log2(total) * LN2
        nll = log_total - (own - anchor)
    lse, lse_low = two_sum(anchor, log_total)
    nll = tl.where(inside, nll, float("nan"))
    ce = nll * (1.0 - SMOOTHING)
    if weight_ptr is not None:
        ce *= tl.load(weight_ptr + target).to(tl.float32)
    if SMOOTHING != 0.0:
        weights = tl.load(weight_sum_ptr) if weight_sum_ptr is not None else cols
        ce += SMOOTHING / cols * (weights * log_total - smooth)
    zl = z_weight * lse * lse
    entropy = log_total - spread / total
    if ADD_ZL:
        ce += zl
    _store_rows(
        ce_ptr, zl_ptr, lse_ptr, lse_low_ptr, log_prob_ptr, entropy_ptr, argmax_ptr, row,
        ce=ce, zl=zl, lse=lse, lse_low=lse_low, log_prob=-nll, entropy=entropy, argmax=argmax,
    )  # fmt: skip
    if GRADIENT != 0:
        if inside:
            ce_scale = 1.0
            zl_scale = 1.0
            if scales_ptr is not None:
                ce_scale = tl.load(scales_ptr)
                zl_scale = tl.load(scales_ptr + 1)
                if GRADIENT < 0:
                    ce_scale = tl.where(ce_scale == 0.0, 0.0, 1.0 / ce_scale)
                    zl_scale = tl.where(zl_scale == 0.0, 0.0, 1.0 / zl_scale)
            write_gradient(
                row_ptr, row_ptr, weight_ptr, weight_sum_ptr, target, cols, lse, lse_low, nll=nll,
                ce_scale=ce_scale, zl_scale=zl_scale, z_weight=z_weight, scale=scale,
                softcap=softcap, kept=kept, kept_after=kept_after, SMOOTHING=SMOOTHING, BLOCK=BLOCK,
                UNROLL=UNROLL, KEPT=KEPT,
            )  # fmt: skip
        else:
            fill_zero(row_ptr, cols, BLOCK)


@triton.jit
def _cross_entropy_backward_kernel(
    dloss_ptr,
    logits_ptr,
    target_ptr,
    weight_ptr,
    weight_sum_ptr,
    lse_ptr,
    lse_low_ptr,
    denominators_ptr,
    out_ptr,
    dloss_stride,
    row_stride,
    target_stride,
    out_stride,
    cols,
    ignore_index,
    z_weight,
    scale,
    softcap,
    SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Gradient of one row of logits from its saved lse.

    Program: one row; reads its target and the target's logit, upstream gradient, both parts of lse,
    the denominators of the mean and, once, the logits. Writes the gradient, perhaps over them;
    zeros for rows that are ignored or whose target is no class.
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
    lse_low = tl.load(lse_low_ptr + row)
    row_ptr = logits_ptr + row * row_stride
    nll = target_nll(row_ptr, target, lse, lse_low, scale, softcap)
    write_gradient(
        row_ptr,
        out_ptr,
        weight_ptr,
        weight_sum_ptr,
        target.to(tl.int32),
        cols,
        lse,
        lse_low,
        nll=nll,
        ce_scale=ce_scale,
        zl_scale=zl_scale,
        z_weight=z_weight,
        scale=scale,
        softcap=softcap,
        kept=0.0,
        kept_after=0.0,
        SMOOTHING=SMOOTHING,
        BLOCK=BLOCK,
        UNROLL=UNROLL,
        KEPT=0,
    )


def _columns(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def _sums(options: Objective) -> int:
    return 1 + bool(options.label_smoothing) + (options.softcap is not None)


def curve(options: Objective) -> tuple[float | None, float | None]:
    """Scale and softcap as the kernels take them: None where they change nothing."""
    return None if options.logit_scale == 1.0 else options.logit_scale, options.softcap


def weight_sum(weight: Tensor | None, options: Objective) -> Tensor | None:
    """Sum of the class weights, one fp32 element, where label smoothing will read it."""
    if weight is None or not options.label_smoothing:
        return None
    return sum_rows(weight.float().view(-1, 1), torch.float32)


def _launch_rows(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    total: Tensor | None,
    options: Objective,
    rows: RowStats,
    scales: Tensor | None = None,
    add_zl: bool = False,
    *,
    gradient: bool = False,
    inverse: bool = False,
) -> None:
    count, cols = logits.shape
    if not count:
        return
    # each of these keeps one or two more fp32 values a column through the pass
    sums = _sums(options) + (rows.entropy.numel() > 0) + 2 * (rows.argmax.numel() > 0)
    k = launch_config(
        "cross_entropy.forward",
        row_config,
        logits.device,
        rows=count,
        cols=cols,
        sums=sums,
        gradient=int(gradient and not strict()),  # equal bits: the same launch for statistics alone
    )
    launch(
        _cross_entropy_forward_kernel,
        count,
        (
            logits,
            target,
            weight,
            total,
            scales,
            *filled(*rows),
            (logits.stride(0), target.stride(0)),
            cols,
            options.ignore_index,
            options.z_loss_weight,
            *curve(options),
        ),
        (
            options.label_smoothing,
            add_zl,
            (-1 if inverse else 1) if gradient else 0,
            k.block,
            k.unroll,
            k.kept // logits.element_size(),
        ),
        k.num_warps,
    )


def statistics(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: Objective, rows: RowStats
) -> None:
    """Fill ``rows`` with the statistics of logits whose columns are adjacent."""
    total = weight_sum(weight, options)
    _launch_rows(logits, target, weight, total, options, rows)


def loss_and_gradient_(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: Objective,
    rows: RowStats,
    scales: Tensor | None,
    *,
    add_zl: bool = False,
    inverse: bool = False,
) -> None:
    """Fill ``rows``, then overwrite raw logits with the gradient, in one launch.

    Args:
        logits: (rows, V) with adjacent columns, to be overwritten.
        target: (rows,) class ids.
        weight: (V,) contiguous class weights.
        options: The objective.
        rows: Buffers of the statistics; empty tensors are skipped.
        scales: Two fp32 elements, the gradient is that of ``scales[0] * ce + scales[1] * zl``;
            None for two ones.
        add_zl: Add ``zl`` to ``ce`` in ``rows``.
        inverse: ``scales`` are divisors; 0 means no gradient.
    """
    total = weight_sum(weight, options)
    _launch_rows(
        logits, target, weight, total, options, rows, scales, add_zl, gradient=True, inverse=inverse
    )


def gradient_into(
    out: Tensor,
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: LogSumExp,
    denominators: Tensor,
    options: Objective,
) -> None:
    """Write the gradient of raw logits, perhaps over them; ``dloss`` is a scalar or (rows,)."""
    count, cols = logits.shape
    if not logits.numel():
        return
    sums = _sums(options)
    k = launch_config(
        "cross_entropy.backward", row_config, logits.device, rows=count, cols=cols, sums=sums
    )
    launch(
        _cross_entropy_backward_kernel,
        count,
        (
            dloss,
            logits,
            target,
            weight,
            weight_sum(weight, options),
            *lse,
            denominators,
            out,
            dloss.stride(0) if dloss.dim() else 0,
            logits.stride(0),
            target.stride(0),
            out.stride(0),
            cols,
            options.ignore_index,
            options.z_loss_weight,
            *curve(options),
        ),
        (options.label_smoothing, k.block, k.unroll),
        k.num_warps,
    )


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
    """Loss and requested outputs, then both parts of ``lse`` and the denominators of the mean."""
    count, cols = logits.shape
    check_targets(target, cols, ignore_index, validate)
    options = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
    weight = None if weight is None else weight.contiguous()
    rows = RowStats.empty(count, options, outputs, logits)
    total = weight_sum(weight, options)
    add_zl = reduction == "none" and z_loss_weight != 0.0
    _launch_rows(_columns(logits), target, weight, total, options, rows, add_zl=add_zl)
    *results, denominators = finish(rows, target, weight, cols, ignore_index, reduction, outputs)
    return (*results, rows.lse_low, denominators)  # type: ignore[return-value]


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
    """Gradient of logits from ``lse``, scaled by the upstream gradient of the row."""
    options = Objective(ignore_index, label_smoothing, z_loss_weight, softcap)
    dlogits = logits.new_empty(logits.shape)
    weight = None if weight is None else weight.contiguous()
    gradient_into(
        dlogits,
        dloss,
        _columns(logits),
        target,
        weight,
        LogSumExp(lse.contiguous(), lse_low.contiguous()),
        denominators,
        options,
    )
    return dlogits
