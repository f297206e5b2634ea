"""Row kernels of linear heads and of log-probabilities: statistics and gradients of logits.

The GEMMs of a head are the vendor library's. Statistics and gradient of a chunk of logits are one
launch that reads every row twice, the second time from the cache, and overwrites it.
Log-probabilities have the same statistics. Their backward computes a chunk of logits again and
overwrites it by its gradient, each element read once and written once: with log p = z - lse,

    dz[j] = p[j] (grad_lse - entropy log p[j]) + grad_target ([j = t] - p[j])
    dz / draw = scale * (1 - (z / cap)^2)

where ``grad_target``, ``grad_lse`` and ``entropy`` are numbers of the row, all 0 where it gets no
gradient. A gradient times a factor on the device is rounded once to another dtype: PyTorch has one
vectorized launch only where all dtypes agree, and an fp32 sum of 128256x2048 that becomes bf16 took
1.4 ms there (H200, 2026-11), four times what its bytes need.
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
    cdiv,
    one_minus_exp,
    round_to,
    warps,
)
from liger_multi.backends.triton.cross_entropy import cross_entropy as rows_of
from liger_multi.backends.triton.cross_entropy.cross_entropy import (
    curve,
    fill_zero,
    finish,
    logit_and_slope,
    row_config,
    target_nll,
)
from liger_multi.backends.triton.cross_entropy.float8 import TritonRounding
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.cross_entropy import reduction as reduction_of
from liger_multi.reference.cross_entropy.float8 import Rounding
from liger_multi.reference.cross_entropy.fused_linear import scale_to
from liger_multi.reference.cross_entropy.rows import LogSumExp, Objective, RowStats, Upstream


@dataclass(frozen=True)
class FlatConfig:
    """Elements and warps of a program."""

    block: int
    num_warps: int


def flat_config(info: DeviceInfo) -> FlatConfig:
    """8 elements a thread: one 16-byte access of a 16-bit dtype."""
    return FlatConfig(1024, warps(128, info.warp_size))


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, by_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Multiply a contiguous tensor by a factor, over the number at ``by_ptr + 1``, and cast it.

    Program: BLOCK elements; reads the factor from the device, so that the host needs no sync.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    mask = first + lane < size
    factor = tl.load(factor_ptr).to(tl.float32)
    if by_ptr is not None:
        by = tl.load(by_ptr + 1).to(tl.float32)
        factor = tl.where(by == 0.0, 0.0, tl.div_rn(factor, by))
    x = tl.load(x_ptr + first + lane, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + first + lane, round_to(x * factor, out_ptr.dtype.element_ty), mask=mask)


def scale(
    gradient: Tensor,
    factor: Tensor | None,
    dtype: torch.dtype,
    denominators: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor:
    """``gradient * factor / denominators[1]`` in fp32, rounded once; a cast without a factor."""
    if factor is None or not gradient.numel():
        return scale_to(gradient, factor, dtype)
    out = (
        gradient
        if overwrite and gradient.dtype == dtype
        else torch.empty_like(gradient, dtype=dtype)
    )
    k = launch_config("scale", flat_config, gradient.device)
    size = gradient.numel()
    launch(
        _scale_kernel,
        cdiv(size, k.block),
        (gradient, factor, denominators, out, size),
        (k.block,),
        k.num_warps,
    )
    return out


# --- cross entropy of a head ---


def _contiguous(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


class TritonRows:
    """Row kernels over chunks of raw logits."""

    scale = staticmethod(scale)
    rounding: Rounding = TritonRounding()

    @staticmethod
    def statistics(
        raw: Tensor, target: Tensor, weight: Tensor | None, objective: Objective, outputs: str
    ) -> RowStats:
        """Statistics of every row; ``raw`` is left alone."""
        rows = RowStats.empty(raw.shape[0], objective, outputs, raw)
        rows_of.statistics(raw, target, _contiguous(weight), objective, rows)
        return rows

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
        rows = RowStats.empty(raw.shape[0], objective, outputs, raw)
        rows_of.loss_and_gradient_(raw, target, _contiguous(weight), objective, rows, scales)
        return rows

    @staticmethod
    def results(
        rows: RowStats,
        target: Tensor,
        weight: Tensor | None,
        objective: Objective,
        reduction: str,
        outputs: str,
    ) -> tuple[Tensor, ...]:
        """The outputs of the contract and the divisors, in one launch."""
        if reduction == "none":
            return reduction_of.results(rows, target, weight, objective, reduction, outputs)
        weight, ignored = _contiguous(weight), objective.ignore_index
        cols = 0 if weight is None else weight.shape[0]
        return finish(rows, target, weight, cols, ignored, reduction, outputs)

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
        unit = torch.ones(2, dtype=torch.float32, device=raw.device)
        rows_of.gradient_into(raw, dloss, raw, target, _contiguous(weight), lse, unit, objective)


# --- log-probabilities, of a head and of given logits ---


@triton.jit
def _log_prob_gradient_kernel(
    raw_ptr,
    target_ptr,
    lse_ptr,
    lse_low_ptr,
    grad_target_ptr,
    grad_lse_ptr,
    entropy_ptr,
    out_ptr,
    row_stride,
    target_stride,
    out_stride,
    cols,
    scale,
    softcap,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Write the gradient of one row of logits, perhaps over it.

    Program: one row; reads grad_target, grad_lse and entropy of the row. Where all are 0 it writes
    zeros and reads no logit, so that a NaN there does no harm. Otherwise it reads the target's
    logit, and then each logit once, before its gradient is written.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = raw_ptr + row * row_stride
    out_ptr += row * out_stride
    assume_cols(cols)
    grad_target = tl.load(grad_target_ptr + row)
    grad_lse = tl.load(grad_lse_ptr + row)
    ENTROPY: tl.constexpr = entropy_ptr is not None
    entropy = tl.load(entropy_ptr + row) if ENTROPY else 0.0
    if (grad_target == 0.0) & (grad_lse == 0.0) & (entropy == 0.0):
        fill_zero(out_ptr, cols, BLOCK)
        return
    lse = tl.load(lse_ptr + row)
    lse_low = tl.load(lse_low_ptr + row)
    target = tl.load(target_ptr + row * target_stride).to(tl.int32)
    nll = target_nll(row_ptr, target, lse, lse_low, scale, softcap)
    # a certain target's own gradient is what the other classes' probabilities leave of it
    at_target = tl.exp2(nll * -LOG2E) * (grad_lse + entropy * tl.minimum(nll, 200.0))
    at_target += grad_target * one_minus_exp(nll)
    p_scale = grad_lse - grad_target
    log2_low = lse_low * LOG2E
    for start in tl.range(0, cols, BLOCK, loop_unroll_factor=UNROLL):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        raw = tl.load(row_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        z, slope = logit_and_slope(raw, scale, softcap)
        log2_p = (z - lse) * LOG2E - log2_low
        dz = tl.exp2(log2_p)
        if ENTROPY:
            dz *= p_scale - (entropy * LN2) * tl.maximum(log2_p, -288.0)  # below, p is 0
        else:
            dz *= p_scale
        dz = tl.where(col == target, at_target, dz)
        if softcap is not None or scale is not None:
            dz *= slope
        tl.store(out_ptr + col, round_to(dz, out_ptr.dtype.element_ty), mask=mask)


class TritonLogProbRows(TritonRows):
    """Row kernels over chunks of raw logits."""

    @staticmethod
    def log_prob_gradient_(
        raw: Tensor,
        target: Tensor,
        lse: LogSumExp,
        objective: Objective,
        upstream: Upstream,
        out: Tensor | None = None,
    ) -> None:
        """The gradient of ``raw``, whose columns are adjacent; over it without ``out``."""
        out, (count, cols) = raw if out is None else out, raw.shape
        if not raw.numel():
            return
        # the passes of the cross entropy keep as many values a column in registers
        sums = 1 + (upstream.entropy is not None) + (objective.softcap is not None)
        name = "fused_linear_log_prob.backward"
        k = launch_config(name, row_config, raw.device, rows=count, cols=cols, sums=sums)
        strides = (raw.stride(0), target.stride(0), out.stride(0))
        launch(
            _log_prob_gradient_kernel,
            count,
            (raw, target, *lse, *upstream, out, *strides, cols, *curve(objective)),
            (k.block, k.unroll),
            k.num_warps,
        )
