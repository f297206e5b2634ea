"""Log-probabilities of chosen classes of a row, with one pass over the row in each direction.

    log_prob[k] = z[index[k]] - lse,  z = scale * logits
    dz[j] = sum_k d[k] ([j = index[k]] - p[j])

The sum of exponentials is anchored at the likeliest of the chosen classes, which it leaves out: its
log-probability is -log1p of the rest. The sum is computed again from the row's maximum where that
lies far above, and ``lse`` is kept in two numbers, as in cross_entropy.py. A class may be chosen
more than once: its gradients are added while the step that holds the class is in registers, so
nothing is added in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    LN2,
    LOG2E,
    assume_cols,
    log1p,
    one_minus_exp,
    round_to,
    two_sum,
)
from liger_multi.backends.triton.cross_entropy.cross_entropy import (
    fill_zero,
    logit,
    row_config,
    row_maximum,
    row_pass,
)
from liger_multi.dispatch.launch import launch_config
from liger_multi.reference.cross_entropy.reduction import check_targets

MANY: tl.constexpr = tl.constexpr(32)  # choices that are looked at together


@triton.jit
def _chosen(row_ptr, index_ptr, first, choices, cols, scale):
    """MANY choices from ``first`` on: class, whether it is one, and its logit, -inf if it is not.

    A class that is none is never an address.
    """
    k = first + tl.arange(0, MANY)
    index = tl.load(index_ptr + k, mask=k < choices, other=-1)
    inside = (index >= 0) & (index < cols)
    raw = tl.load(row_ptr + tl.where(inside, index, 0), mask=inside, other=0.0)
    return k, index, inside, tl.where(inside, logit(raw, scale, None), float("-inf"))


@triton.jit
def _selective_log_softmax_forward_kernel(
    logits_ptr,
    index_ptr,
    log_prob_ptr,
    lse_ptr,
    lse_low_ptr,
    row_stride,
    choices,
    cols,
    ignore_index,
    scale,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Log-probabilities of the chosen classes of one row.

    Program: one row. Reads the logits of the ``choices`` classes, then the row for its lse, then
    those logits again. Writes both parts of lse, and log-probabilities: 0 for ``ignore_index``, NaN
    for a class that is none.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    assume_cols(cols)
    index_ptr += row * choices
    log_prob_ptr += row * choices
    anchor = float("-inf")
    likeliest = -1
    for first in tl.range(0, choices, MANY):
        _, index, _, z = _chosen(row_ptr, index_ptr, first, choices, cols, scale)
        top = tl.max(z, axis=0)
        place = tl.max(tl.where(z == top, index, -1), axis=0).to(tl.int32)
        likeliest = tl.where(top > anchor, place, likeliest)
        anchor = tl.maximum(anchor, top)
    if likeliest < 0:
        anchor = row_maximum(row_ptr, tl.minimum(cols, BLOCK), scale, None, BLOCK)
    others, _, _, _ = row_pass(
        row_ptr,
        None,
        cols,
        anchor,
        likeliest,
        scale,
        None,
        SMOOTH=False,
        ENTROPY=False,
        ARGMAX=False,
        BLOCK=BLOCK,
        UNROLL=UNROLL,
    )
    log_total = log1p(others)
    if likeliest < 0:  # no class was left out of the sum
        log_total = tl.log2(others) * LN2
    if (others >= 4294967296.0) | (others != others):
        anchor = row_maximum(row_ptr, cols, scale, None, BLOCK)
        total, _, _, _ = row_pass(
            row_ptr,
            None,
            cols,
            anchor,
            None,
            scale,
            None,
            SMOOTH=False,
            ENTROPY=False,
            ARGMAX=False,
            BLOCK=BLOCK,
            UNROLL=1,
        )
        log_total = tl.log2(total) * LN2
    lse, lse_low = two_sum(anchor, log_total)
    tl.store(lse_ptr + row, lse)
    tl.store(lse_low_ptr + row, lse_low)
    for first in tl.range(0, choices, MANY):
        k, index, inside, z = _chosen(row_ptr, index_ptr, first, choices, cols, scale)
        log_prob = tl.where(inside, (z - lse) - lse_low, float("nan"))
        tl.store(log_prob_ptr + k, tl.where(index == ignore_index, 0.0, log_prob), mask=k < choices)


@triton.jit
def _arrived(d_ptr, index_ptr, k, cols, ignore_index):
    """The k-th chosen class and its upstream gradient, 0 for a class that does not count."""
    index = tl.load(index_ptr + k)
    valid = (index != ignore_index) & (index >= 0) & (index < cols)
    return index, tl.where(valid, tl.load(d_ptr + k).to(tl.float32), 0.0)


@triton.jit
def _certain(d_ptr, row_ptr, index_ptr, lse, lse_low, choices, cols, ignore_index, scale):
    """The chosen class with more than half of the probability, or -1, and the gradient there.

    It gets its own upstream gradient times 1 - p, and what arrives at others times -p: the
    difference of their sum and its own has no digits where p is nearly 1.
    """
    nll = float("inf")
    certain = -1
    for first in tl.range(0, choices, MANY):
        _, index, inside, z = _chosen(row_ptr, index_ptr, first, choices, cols, scale)
        each = tl.where(inside & (index != ignore_index), lse_low - (z - lse), float("inf"))
        least = tl.min(each, axis=0)
        place = tl.max(tl.where(each == least, index, -1), axis=0).to(tl.int32)
        certain = tl.where((least < 0.69) & (least < nll), place, certain)
        nll = tl.minimum(nll, least)
    own = 0.0
    others = 0.0
    if certain >= 0:
        for k in tl.range(0, choices):
            index, d = _arrived(d_ptr, index_ptr, k, cols, ignore_index)
            own += tl.where(index == certain, d, 0.0)
            others += tl.where(index == certain, 0.0, d)
    return certain, own * one_minus_exp(nll) - others * tl.exp2(nll * -LOG2E)


@triton.jit
def _selective_log_softmax_backward_kernel(
    d_ptr,
    logits_ptr,
    index_ptr,
    lse_ptr,
    lse_low_ptr,
    out_ptr,
    row_stride,
    choices,
    cols,
    ignore_index,
    scale,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Gradient of one row of logits.

    Program: one row. Reads the choices' gradients for their sum; where all are 0, it writes zeros
    and reads no logit. Otherwise it reads the choices' logits, and each step of logits once, adds
    the gradients of the choices within the step, and writes it.
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
    lse_low = tl.load(lse_low_ptr + row)
    certain, at_certain = _certain(
        d_ptr, row_ptr, index_ptr, lse, lse_low, choices, cols, ignore_index, scale=scale
    )
    log2_low = lse_low * LOG2E
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        z = tl.load(row_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        z = logit(z, scale, None)
        dz = -share * tl.exp2((z - lse) * LOG2E - log2_low)
        for k in tl.range(0, choices):
            index, d = _arrived(d_ptr, index_ptr, k, cols, ignore_index)
            if (index >= start) & (index < start + BLOCK):
                dz += tl.where(col == index, d, 0.0)
        dz = tl.where(col == certain, at_certain, dz)
        if scale is not None:
            dz *= scale
        tl.store(out_ptr + col, round_to(dz, out_ptr.dtype.element_ty), mask=mask)


def _columns(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def forward(
    logits: Tensor, index: Tensor, scale: float, ignore_index: int, validate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and the lse of every row, in two numbers."""
    (count, cols), choices = logits.shape, index.shape[1]
    check_targets(index, cols, ignore_index, validate, "index")
    log_probs = logits.new_empty(index.shape, dtype=torch.float32)
    lse, lse_low = (logits.new_empty(count, dtype=torch.float32) for _ in range(2))
    logits = _columns(logits)
    if count:
        name = "selective_log_softmax.forward"
        k = launch_config(name, row_config, logits.device, rows=count, cols=cols, sums=1)
        args = (logits, index.contiguous(), log_probs, lse, lse_low, logits.stride(0))
        launch(
            _selective_log_softmax_forward_kernel,
            count,
            (*args, choices, cols, ignore_index, None if scale == 1.0 else scale),
            (k.block, k.unroll),
            k.num_warps,
        )
    return log_probs, lse, lse_low


def backward(
    dlog_prob: Tensor,
    logits: Tensor,
    index: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    scale: float,
    ignore_index: int,
) -> Tensor:
    """Gradient of logits, from ``lse``."""
    (count, cols), choices = logits.shape, index.shape[1]
    out, logits = logits.new_empty(logits.shape), _columns(logits)
    if out.numel():
        name = "selective_log_softmax.backward"
        sums = 1 + (choices > 1)  # the loop over choices takes registers
        k = launch_config(name, row_config, logits.device, rows=count, cols=cols, sums=sums)
        saved = (lse.contiguous(), lse_low.contiguous())
        args = (dlog_prob.contiguous(), logits, index.contiguous(), *saved, out)
        launch(
            _selective_log_softmax_backward_kernel,
            count,
            (*args, logits.stride(0), choices, cols, ignore_index, None if scale == 1.0 else scale),
            (k.block, k.unroll),
            k.num_warps,
        )
    return out
