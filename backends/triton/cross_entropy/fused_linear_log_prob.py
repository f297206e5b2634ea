"""Log-probabilities under ``hidden @ weight.T + bias``: Triton row kernels in the reference's loop.

Statistics are those of the cross entropy. Backward computes a chunk of logits again and overwrites
it by its gradient, each element read once and written once: with log p = z - lse,

    dz[j] = p[j] (share - entropy log p[j]) + [j = t] own
    dz / draw = scale * (1 - (z / cap)^2)

where ``grad_target``, ``grad_lse`` and ``entropy`` are numbers of the row, all 0 where it gets no
gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import LOG2E, assume_cols, round_to
from liger_multi.backends.triton.cross_entropy.cross_entropy import curve, row_config
from liger_multi.backends.triton.cross_entropy.cross_entropy_passes import fill_zero, logit
from liger_multi.backends.triton.cross_entropy.fused_linear_cross_entropy import TritonRows
from liger_multi.dispatch.launch import launch_config
from liger_multi.reference.cross_entropy.fused_linear_log_prob import forward_and_backward
from liger_multi.reference.cross_entropy.rows import Objective, Upstream


@triton.jit
def _log_prob_gradient_kernel(
    raw_ptr, target_ptr, lse_ptr, grad_target_ptr, grad_lse_ptr, entropy_ptr, row_stride,
    target_stride, cols,
    scale, softcap, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Overwrite one row of logits with its gradient.

    Program: one row; reads own, share and entropy of the row. Where all are 0 it writes zeros and
    reads no logit, so that a NaN there does no harm. Otherwise each logit is read once and
    overwritten.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = raw_ptr + row * row_stride
    assume_cols(cols)
    grad_target = tl.load(grad_target_ptr + row)
    grad_lse = tl.load(grad_lse_ptr + row)
    ENTROPY: tl.constexpr = entropy_ptr is not None
    entropy = tl.load(entropy_ptr + row) if ENTROPY else 0.0
    if (grad_target == 0.0) & (grad_lse == 0.0) & (entropy == 0.0):
        fill_zero(row_ptr, cols, BLOCK)
        return
    lse = tl.load(lse_ptr + row)
    target = tl.load(target_ptr + row * target_stride).to(tl.int32)
    for start in tl.range(0, cols, BLOCK, loop_unroll_factor=UNROLL):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        raw = tl.load(row_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        z = logit(raw, scale, softcap)
        log_p = z - lse
        dz = tl.exp2(log_p * LOG2E)
        if ENTROPY:
            dz *= grad_lse - entropy * tl.maximum(log_p, -200.0)  # below, p is 0
        else:
            dz *= grad_lse
        dz = tl.where(col == target, dz + grad_target, dz)
        if softcap is not None:
            part = z * (1.0 / softcap)
            dz *= 1.0 - part * part
        if scale is not None:
            dz *= scale
        tl.store(row_ptr + col, round_to(dz, row_ptr.dtype.element_ty), mask=mask)


class TritonLogProbRows(TritonRows):
    """Row kernels over chunks of raw logits."""

    @staticmethod
    def log_prob_gradient_(
        raw: Tensor, target: Tensor, lse: Tensor, objective: Objective, upstream: Upstream
    ) -> None:
        """``raw``, whose columns are adjacent, becomes its gradient."""
        count, cols = raw.shape
        if not raw.numel():
            return
        # the passes of the cross entropy keep as many values a column in registers
        sums = 1 + (upstream.entropy is not None) + (objective.softcap is not None)
        name = "fused_linear_log_prob.backward"
        k = launch_config(name, row_config, raw.device, rows=count, cols=cols, sums=sums)
        strides = (raw.stride(0), target.stride(0))
        launch(
            _log_prob_gradient_kernel, count,
            (raw, target, lse, *upstream, *strides, cols, *curve(objective)),
            (k.block, k.unroll), k.num_warps,
        )  # fmt: skip


forward, backward = forward_and_backward(TritonLogProbRows())
