"""Log-probabilities of chosen classes of a row, with one pass over the row in each direction.

    log_prob[k] = z[index[k]] - lse,  z = scale * logits
    dz[j] = sum_k d[k] ([j = index[k]] - p[j])

The sum of exponentials is anchored at the maximum of the row's first step, and computed again from
the row's maximum where it overflows. A class may be chosen more than once: its gradients are added
while the step that holds the class is in registers, so nothing is added in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import LN2, LOG2E, assume_cols, round_to
from liger_multi.backends.triton.cross_entropy.cross_entropy import (
    fill_zero,
    row_config,
    row_maximum,
    row_pass,
)
from liger_multi.dispatch.launch import launch_config
from liger_multi.reference.cross_entropy.reduction import check_targets


@triton.jit
def _selective_log_softmax_forward_kernel(
    logits_ptr, index_ptr, log_prob_ptr, lse_ptr, row_stride, choices, cols, ignore_index, scale,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Log-probabilities of the chosen classes of one row.

    Program: one row. Reads the row for its lse, then the logits of the ``choices`` classes again.
    Writes lse and log-probabilities: 0 for ``ignore_index``, NaN for a class that is none, which is
    never an address.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    assume_cols(cols)
    anchor = row_maximum(row_ptr, tl.minimum(cols, BLOCK), scale, None, BLOCK)
    total, _, _, _ = row_pass(
        row_ptr, None, cols, anchor, scale, None, False, False, False, BLOCK, UNROLL
    )
    if (total == float("inf")) | (total != total):
        anchor = row_maximum(row_ptr, cols, scale, None, BLOCK)
        total, _, _, _ = row_pass(
            row_ptr, None, cols, anchor, scale, None, False, False, False, BLOCK, 1
        )
    log_total = tl.log2(total) * LN2
    tl.store(lse_ptr + row, anchor + log_total)
    index_ptr += row * choices
    log_prob_ptr += row * choices
    for k in tl.range(0, choices):
        index = tl.load(index_ptr + k)
        inside = (index >= 0) & (index < cols)
        z = tl.load(row_ptr + tl.where(inside, index, 0)).to(tl.float32)
        if scale is not None:
            z *= scale
        found = tl.where(inside, (z - anchor) - log_total, float("nan"))
        tl.store(log_prob_ptr + k, tl.where(index == ignore_index, 0.0, found))


@triton.jit
def _arrived(d_ptr, index_ptr, k, cols, ignore_index):
    """The k-th chosen class and its upstream gradient, 0 for a class that does not count."""
    index = tl.load(index_ptr + k)
    valid = (index != ignore_index) & (index >= 0) & (index < cols)
    return index, tl.where(valid, tl.load(d_ptr + k).to(tl.float32), 0.0)


@triton.jit
def _selective_log_softmax_backward_kernel(
    d_ptr, logits_ptr, index_ptr, lse_ptr, out_ptr, row_stride, choices, cols, ignore_index, scale,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Gradient of one row of logits.

    Program: one row. Reads the choices' gradients for their sum; where all are 0, it writes zeros
    and reads no logit. Otherwise it reads each step of logits once, adds the gradients of the
    choices within the step, and writes it.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    out_ptr += row * cols
    assume_cols(cols)
    index_ptr += row * choices
    d_ptr += row * choices
    share = 0.0
    some = 0
    for k in tl.range(0, choices):
        _, d = _arrived(d_ptr, index_ptr, k, cols, ignore_index)
        share += d
        some += (d != 0.0).to(tl.int32)
    if some == 0:
        fill_zero(out_ptr, cols, BLOCK)
        return
    lse = tl.load(lse_ptr + row)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        z = tl.load(row_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        z = z.to(tl.float32)
        if scale is not None:
            z *= scale
        dz = -share * tl.exp2((z - lse) * LOG2E)
        for k in tl.range(0, choices):
            index, d = _arrived(d_ptr, index_ptr, k, cols, ignore_index)
            if (index >= start) & (index < start + BLOCK):
                dz += tl.where(col == index, d, 0.0)
        if scale is not None:
            dz *= scale
        tl.store(out_ptr + col, round_to(dz, out_ptr.dtype.element_ty), mask=mask)


def _columns(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def forward(
    logits: Tensor, index: Tensor, scale: float, ignore_index: int, validate: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and the lse of every row."""
    (count, cols), choices = logits.shape, index.shape[1]
    check_targets(index, cols, ignore_index, validate, "index")
    found = logits.new_empty(index.shape, dtype=torch.float32)
    lse, logits = logits.new_empty(count, dtype=torch.float32), _columns(logits)
    if count:
        name = "selective_log_softmax.forward"
        k = launch_config(name, row_config, logits.device, rows=count, cols=cols, sums=1)
        args = (logits, index.contiguous(), found, lse, logits.stride(0), choices, cols)
        launch(
            _selective_log_softmax_forward_kernel, count,
            (*args, ignore_index, None if scale == 1.0 else scale), (k.block, k.unroll),
            k.num_warps,
        )  # fmt: skip
    return found, lse


def backward(
    dlog_prob: Tensor, logits: Tensor, index: Tensor, lse: Tensor, scale: float, ignore_index: int
) -> Tensor:
    """Gradient of logits, from ``lse``."""
    (count, cols), choices = logits.shape, index.shape[1]
    out, logits = logits.new_empty(logits.shape), _columns(logits)
    if out.numel():
        name = "selective_log_softmax.backward"
        sums = 1 + (choices > 1)  # the loop over choices takes registers
        k = launch_config(name, row_config, logits.device, rows=count, cols=cols, sums=sums)
        args = (dlog_prob.contiguous(), logits, index.contiguous(), lse.contiguous(), out)
        launch(
            _selective_log_softmax_backward_kernel, count,
            (*args, logits.stride(0), choices, cols, ignore_index, None if scale == 1.0 else scale),
            (k.block, k.unroll), k.num_warps,
        )  # fmt: skip
    return out
