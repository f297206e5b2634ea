"""Statistics and gradients of rows of logits on vector cores: every loss over a vocabulary.

With z = cap * tanh(scale * raw / cap), lse = logsumexp(z), log p = z - lse and t the row's target,
one kernel reads a row once, keeping a maximum and sums for every lane:

    lse, log p[t], sum_j w[j] (lse - z[j]), entropy, the place of the maximum

and one writes a gradient from four numbers of the row:

    dz[j] = p[j] (grad_lse - entropy log p[j]) + grad_target ([j = t] - p[j]) - smooth w[j]
    draw = scale slope(z) dz

``lse`` is two numbers, of which the second is what rounding left out of the first: ``z - lse`` has
no digits where all logits lie far from 0 together. A lane's sum leaves its maximum out, whose 1
would swallow the rest where the target is nearly certain. There 1 - p[t] is a series.

A row whose numbers are all 0 gets zeros, whatever it holds.

The loops over chunks are the reference's: the linear heads are a GEMM per chunk, and row kernels on
its logits. In place, the gradient kernel writes where it read. npu_cross_entropy_loss keeps a
second tensor of the logits' size, takes no negative ignore_index and none of the options, so it is
not used.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.npu.common.launching import as_rows, block_of, jitted, start, summed
from liger_multi.reference.cross_entropy.float8 import PLAIN, Rounding
from liger_multi.reference.cross_entropy.fused_linear import scale_to
from liger_multi.reference.cross_entropy.reduction import results
from liger_multi.reference.cross_entropy.rows import (
    LogSumExp,
    Objective,
    RowStats,
    Upstream,
    needs_argmax,
    pair,
)

LOWEST: tl.constexpr = tl.constexpr(-3.0e38)


class Coefficients(NamedTuple):
    """Four numbers of every row, of which the last two may be None."""

    grad_target: Tensor
    grad_lse: Tensor
    entropy: Tensor | None = None
    smooth: Tensor | None = None


@triton.jit
def _logit(raw, scale, cap, CAPPED: tl.constexpr):
    """A raw logit after scale and softcap, in fp32; tanh(x) is 2 sigmoid(2 x) - 1."""
    z = raw.to(tl.float32) * scale
    if CAPPED:
        z = cap * (2.0 * tl.sigmoid(2.0 * (z / cap)) - 1.0)
    return z


@triton.jit
def _two_sum(a, b):
    """The rounded sum and what rounding left out; 0 where the sum is not finite."""
    high = a + b
    back = high - a
    low = (a - (high - back)) + (b - back)
    return high, tl.where(tl.abs(high) < float("inf"), low, 0.0)


@triton.jit
def _log1p(x):
    """log(1 + x) of a number that is not negative, also where it is tiny."""
    s = x / (x + 2.0)
    q = s * s
    near = 0.33333333333 + q * (0.2 + q * (0.14285714286 + q * 0.11111111111))
    return tl.where(x < 0.5, 2.0 * s + 2.0 * s * q * near, tl.log(1.0 + x))


@triton.jit
def _one_minus_exp(x):
    """1 - exp(-x) of a number that is not negative, also where it is tiny."""
    near = 1.0 - x * (1.0 / 7.0) * (1.0 - x * 0.125)
    near = 1.0 - x * (1.0 / 5.0) * (1.0 - x * (1.0 / 6.0) * near)
    near = 1.0 - x * (1.0 / 3.0) * (1.0 - x * 0.25 * near)
    return tl.where(x < 0.5, x * (1.0 - x * 0.5 * near), 1.0 - tl.exp(-x))


@jitted
def _row_statistics_kernel(
    raw_ptr,
    target_ptr,
    weight_ptr,
    lse_ptr,
    lse_low_ptr,
    log_prob_ptr,
    spread_ptr,
    entropy_ptr,
    argmax_ptr,
    raw_stride,
    target_stride,
    rows,
    cols,
    scale,
    cap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics of rows of logits, in one pass.

    Program: every num_programs-th row, in steps of BLOCK columns. Each lane keeps a running
    maximum, and sums that shrink when it grows; lanes are merged at the row's end, so that no step
    needs a reduction. A lane's sum is without its maximum: of the maximum so far and the new logit,
    the smaller joins the sum.
    Writes both parts of lse, and those of log p[t], spread, entropy and argmax that have a
    pointer. A target that is no class is never an address.
    """
    lane = tl.arange(0, BLOCK)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        row_ptr = raw_ptr + row * raw_stride
        most = tl.full([BLOCK], LOWEST, tl.float32)
        rest = tl.zeros([BLOCK], tl.float32)
        spread = tl.zeros([BLOCK], tl.float32)
        weighted = tl.zeros([BLOCK], tl.float32)
        weights = tl.zeros([BLOCK], tl.float32)
        # fp32, exact for 2^24 classes: the front end takes integers carried by a loop for addresses
        place = tl.zeros([BLOCK], tl.float32)
        for at in range(0, cols, BLOCK):
            col = at + lane
            mask = col < cols
            raw = tl.load(row_ptr + col, mask=mask, other=0.0)
            z = tl.where(mask, _logit(raw, scale, cap, CAPPED), LOWEST)
            if argmax_ptr is not None:
                place = tl.where(z > most, tl.cast(at, tl.float32), place)
            new = tl.maximum(most, z)
            shrink = tl.exp(most - new)
            e = tl.where(mask, tl.exp(z - new), 0.0)
            if entropy_ptr is not None:
                spread = shrink * (spread + (1.0 + rest) * (most - new))
                spread += e * tl.maximum(z - new, -200.0)
            rest = shrink * rest + tl.where(z > most, shrink, e)
            if spread_ptr is not None:
                w = tl.where(mask, 1.0, 0.0)
                if weight_ptr is not None:
                    w = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
                weighted += weights * (most - new) + tl.where(mask, w * (z - new), 0.0)
                weights += w
            most = new
        top = tl.max(most, 0)
        shrink = tl.exp(most - top)
        # lanes as fp32 numbers, as for argmax: a minimum of integers ends the vendor's compiler
        lanes = lane.to(tl.float32)
        first_lane = tl.min(tl.where(most == top, lanes, 0.0 + BLOCK), 0)
        others = summed(rest * shrink + tl.where(lanes == first_lane, 0.0, shrink), BLOCK)
        log_total = tl.where(top == LOWEST, float("-inf"), _log1p(others))
        lse, lse_low = _two_sum(top, log_total)
        tl.store(lse_ptr + row, lse)
        tl.store(lse_low_ptr + row, lse_low)
        if log_prob_ptr is not None:
            target = tl.load(target_ptr + row * target_stride)
            own = tl.load(row_ptr + tl.where((target >= 0) & (target < cols), target, 0))
            tl.store(log_prob_ptr + row, (_logit(own, scale, cap, CAPPED) - lse) - lse_low)
        if spread_ptr is not None:
            # sum w (lse - z), of what is relative to the maximum
            gaps = summed(weights * (top - most) - weighted, BLOCK)
            tl.store(spread_ptr + row, gaps + summed(weights, BLOCK) * log_total)
        if entropy_ptr is not None:
            below = tl.where(shrink == 0.0, 0.0, shrink * (spread + (1.0 + rest) * (most - top)))
            tl.store(entropy_ptr + row, log_total - summed(below, BLOCK) / (1.0 + others))
        if argmax_ptr is not None:
            first = tl.min(tl.where(most == top, place + lane.to(tl.float32), 0.0 + cols), 0)
            tl.store(argmax_ptr + row, first.to(tl.int32))


@jitted
def _row_gradient_kernel(
    raw_ptr,
    target_ptr,
    weight_ptr,
    lse_ptr,
    lse_low_ptr,
    grad_target_ptr,
    grad_lse_ptr,
    entropy_ptr,
    smooth_ptr,
    out_ptr,
    raw_stride,
    target_stride,
    out_stride,
    rows,
    cols,
    scale,
    cap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of rows of logits from four numbers of each.

    Program: every num_programs-th row, in steps of BLOCK columns; reads the target's
    logit, and then each logit once, and may overwrite it. The row's numbers are grad_target,
    grad_lse and, where they have a pointer, entropy and smooth.
    """
    lane = tl.arange(0, BLOCK)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        row_ptr = raw_ptr + row * raw_stride
        target = tl.load(target_ptr + row * target_stride).to(tl.int32)
        lse = tl.load(lse_ptr + row)
        lse_low = tl.load(lse_low_ptr + row)
        grad_target = tl.load(grad_target_ptr + row)
        grad_lse = tl.load(grad_lse_ptr + row)
        some = (grad_target != 0.0) | (grad_lse != 0.0)
        entropy = 0.0
        smooth = 0.0
        if entropy_ptr is not None:
            entropy = tl.load(entropy_ptr + row)
            some = some | (entropy != 0.0)
        if smooth_ptr is not None:
            smooth = tl.load(smooth_ptr + row)
            some = some | (smooth != 0.0)
        place = tl.where((target >= 0) & (target < cols), target, 0)
        own = (_logit(tl.load(row_ptr + place), scale, cap, CAPPED) - lse) - lse_low
        at_target = tl.exp(own) * (grad_lse - entropy * tl.maximum(own, -200.0))
        at_target += grad_target * _one_minus_exp(-own)
        p_scale = grad_lse - grad_target
        if smooth_ptr is not None:
            if weight_ptr is not None:
                at_target -= smooth * tl.load(weight_ptr + place).to(tl.float32)
            else:
                at_target -= smooth
        for at in range(0, cols, BLOCK):
            col = at + lane
            mask = col < cols
            raw = tl.load(row_ptr + col, mask=mask, other=0.0)
            z = _logit(raw, scale, cap, CAPPED)
            log_p = (z - lse) - lse_low
            dz = tl.exp(log_p)
            if entropy_ptr is not None:
                dz = dz * (p_scale - entropy * tl.maximum(log_p, -200.0))
            else:
                dz = dz * p_scale
            if smooth_ptr is not None:
                if weight_ptr is not None:
                    w = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
                    dz = dz - smooth * w
                else:
                    dz = dz - smooth
            dz = tl.where(col == target, at_target, dz)
            if CAPPED:
                e = tl.exp(tl.abs(raw.to(tl.float32) * scale / cap) * -2.0)
                dz = dz * (4.0 * e / ((1.0 + e) * (1.0 + e)))  # 1 - (z / cap)^2 to all digits
            dz = tl.where(some, dz * scale, 0.0)
            tl.store(out_ptr + row * out_stride + col, dz.to(out_ptr.dtype.element_ty), mask=mask)


def _curve(spec: Objective) -> tuple[float, float, bool]:
    return spec.logit_scale, spec.softcap or 1.0, spec.softcap is not None


def _filled(t: Tensor) -> Tensor | None:
    return t if t.numel() else None


def normalizers(raw: Tensor, scale: float) -> LogSumExp:
    """The lse of scaled rows alone."""
    raw2d = as_rows(raw)
    lse = LogSumExp._make(raw.new_empty(raw.shape[0], dtype=torch.float32) for _ in range(2))
    count, cols = raw2d.shape
    start(
        _row_statistics_kernel,
        count,
        raw2d,
        None,
        None,
        *lse,
        None,
        None,
        None,
        None,
        raw2d.stride(0),
        0,
        count,
        cols,
        scale,
        1.0,
        CAPPED=False,
        BLOCK=block_of("row_statistics", raw2d, cols),
    )
    return lse


def statistics(
    raw: Tensor, target: Tensor, weight: Tensor | None, spec: Objective, outputs: str
) -> RowStats:
    """Statistics of every row; ``raw`` is left alone."""
    raw = as_rows(raw)
    rows, (count, cols) = RowStats.empty(raw.shape[0], spec, outputs, raw), raw.shape
    log_prob, spread = torch.empty_like(rows.lse), None
    argmax = target.new_empty(count if needs_argmax(outputs) else 0, dtype=torch.int32)
    if spec.label_smoothing:
        spread = torch.empty_like(rows.lse)
    scale, cap, capped = _curve(spec)
    start(
        _row_statistics_kernel,
        count,
        raw,
        target,
        None if weight is None else weight.contiguous(),
        *rows.normalizer,
        log_prob,
        spread,
        _filled(rows.entropy),
        _filled(argmax),
        raw.stride(0),
        target.stride(0),
        count,
        cols,
        scale,
        cap,
        CAPPED=capped,
        BLOCK=block_of("row_statistics", raw, cols),
    )
    return _finished(rows, target, weight, spec, log_prob, spread, argmax, cols)


def _finished(
    rows: RowStats,
    target: Tensor,
    weight: Tensor | None,
    spec: Objective,
    log_prob: Tensor,
    spread: Tensor | None,
    argmax: Tensor,
    cols: int,
) -> RowStats:
    """Statistics of rows from what the kernel wrote; those of ignored rows are 0."""
    valid = target != spec.ignore_index
    in_vocabulary = (target >= 0) & (target < cols)
    log_prob = torch.where(in_vocabulary, log_prob, float("nan"))  # NaN for no class
    ce = -log_prob
    if weight is not None:
        ce = ce * weight.float()[torch.where(in_vocabulary, target, 0)]
    if spread is not None:
        eps = spec.label_smoothing
        ce = (1 - eps) * ce + eps / cols * spread
    zl = spec.z_loss_weight * rows.lse.square()
    statistics = (ce, zl, *rows.normalizer, log_prob, rows.entropy)
    statistics_of_rows = [
        torch.where(valid, m, 0) if buffer.numel() else buffer
        for m, buffer in zip(statistics, rows)
    ]
    winners = torch.where(valid, argmax.long(), -1) if argmax.numel() else rows.argmax
    return RowStats._make((*statistics_of_rows, winners))


def coefficients(
    target: Tensor,
    weight: Tensor | None,
    lse: LogSumExp,
    spec: Objective,
    cols: int,
    ce: Tensor,
    zl: Tensor,
) -> Coefficients:
    """Coefficients of the gradient of ``ce`` cross entropies plus ``zl`` z-losses."""
    valid = (target != spec.ignore_index) & (target >= 0) & (target < cols)
    eps = spec.label_smoothing
    grad_target = torch.full_like(lse.high, 1 - eps)
    if weight is not None:
        grad_target = grad_target * weight.float()[torch.where(valid, target, 0)]
    total = eps if weight is None else eps / cols * weight.float().sum()
    grad_lse = ce * total + zl * (2 * spec.z_loss_weight) * lse.high
    parts = (
        -ce * grad_target,
        grad_lse.expand(target.shape),
        None,
        (ce * (eps / cols)).expand(target.shape) if eps else None,
    )
    return Coefficients._make(None if p is None else torch.where(valid, p, 0) for p in parts)


def gradient_into(
    out: Tensor,
    raw: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: LogSumExp,
    spec: Objective,
    numbers: Coefficients,
) -> None:
    """Write the gradient of raw logits; ``out`` may be ``raw``, if its columns are adjacent."""
    raw2d, (count, cols) = as_rows(raw), raw.shape
    scale, cap, capped = _curve(spec)
    lse = lse.at(slice(None))
    start(
        _row_gradient_kernel,
        count,
        raw2d,
        target,
        None if weight is None else weight.contiguous(),
        *lse,
        *(None if p is None else p.contiguous() for p in numbers),
        out,
        raw2d.stride(0),
        target.stride(0),
        out.stride(0),
        count,
        cols,
        scale,
        cap,
        CAPPED=capped,
        BLOCK=block_of("row_gradient", raw2d, cols),
    )


class AscendRows:
    """Row kernels of losses over a vocabulary."""

    statistics = staticmethod(statistics)
    results = staticmethod(results)
    scale = staticmethod(scale_to)
    rounding: Rounding = PLAIN

    @staticmethod
    def gradient_into(
        out: Tensor,
        raw: Tensor,
        target: Tensor,
        weight: Tensor | None,
        lse: LogSumExp,
        objective: Objective,
        scales: tuple[Tensor, Tensor],
    ) -> None:
        """Write the gradient of ``scales``' cross entropies and z-losses; ``out`` may be raw."""
        cols = raw.shape[1]
        numbers = coefficients(target, weight, lse, objective, cols, *scales)
        out2d = as_rows(out)
        source = out2d if out is raw else raw
        gradient_into(out2d, source, target, weight, lse, objective, numbers)
        if out2d is not out:
            out.copy_(out2d)

    @staticmethod
    def statistics_and_gradient_(
        raw: Tensor,
        target: Tensor,
        weight: Tensor | None,
        objective: Objective,
        scales: Tensor | None,
        outputs: str,
    ) -> RowStats:
        """Statistics of a chunk; ``raw`` becomes its gradient."""
        rows = statistics(raw, target, weight, objective, outputs)
        factors = pair(scales, rows.lse)
        AscendRows.gradient_into(raw, raw, target, weight, rows.normalizer, objective, factors)
        return rows

    @staticmethod
    def gradient_(
        raw: Tensor,
        target: Tensor,
        weight: Tensor | None,
        lse: LogSumExp,
        objective: Objective,
        dloss: Tensor,
    ) -> None:
        """``raw`` becomes its gradient for one upstream gradient a row."""
        AscendRows.gradient_into(raw, raw, target, weight, lse, objective, (dloss, dloss))

    @staticmethod
    def log_prob_gradient_(
        raw: Tensor,
        target: Tensor,
        lse: LogSumExp,
        objective: Objective,
        upstream: Upstream,
        out: Tensor | None = None,
    ) -> None:
        """The gradient of ``raw`` by log-probability, entropy and lse; over it without ``out``."""
        parts = (None if p is None else p.float() for p in upstream)
        numbers = Coefficients._make((*parts, None))
        gradient_into(raw if out is None else out, raw, target, None, lse, objective, numbers)
