"""Passes over one row of logits, of any width: its sums, its maximum and its gradient.

They make up the kernels in cross_entropy.py. ``z`` is a logit after scale and softcap, in fp32.
Both are None or run-time numbers, so that a temperature that changes does not compile again.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.common.rows import LOG2E, assume_cols, round_to, tanh


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
def row_pass(
    row_ptr, weight_ptr, cols, anchor, scale, softcap,
    SMOOTH: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One pass over a row: sums of exp(d), exp(d) d and w d with d = z - anchor, and the argmax.

    Each lane keeps sums and a maximum of its own, so that no step waits for a reduction. Of equal
    maxima, the first column counts. ``evict_last`` asks the cache to keep the row for a later pass.
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
            spread += e * tl.maximum(d, -200.0)  # below, e is 0
        if SMOOTH:
            if weight_ptr is not None:
                d = d * tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
            smooth += tl.where(mask, d, 0.0)
        if ARGMAX:
            place = tl.where(z > best, col, place)
            best = tl.maximum(best, z)
    first = tl.min(tl.where(best == tl.max(best, axis=0), place, cols - 1), axis=0)
    return tl.sum(total, axis=0), tl.sum(spread, axis=0), tl.sum(smooth, axis=0), first


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
def fill_zero(row_ptr, cols, BLOCK: tl.constexpr):
    """Overwrite a row with zeros."""
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        tl.store(row_ptr + col, tl.zeros([BLOCK], row_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def write_gradient(
    row_ptr, out_ptr, weight_ptr, weight_sum_ptr, target, cols, anchor, log2_total, lse,
    ce_scale, zl_scale, z_weight, scale, softcap,
    SMOOTHING: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Write ce_scale * d ce + zl_scale * d zl of one row, p = exp(z - anchor) / 2^log2_total.

    The pass runs from the last columns to the first. Where the rows in flight do not fit into the
    cache together, it still holds the columns that the pass before read last (8192x128256 on an
    H200: 1381 to 1248 us).
    """
    own = (1.0 - SMOOTHING) * ce_scale
    if weight_ptr is not None:
        own *= tl.load(weight_ptr + target).to(tl.float32)
    p_scale = own + 2.0 * z_weight * lse * zl_scale
    part = ce_scale * SMOOTHING / cols
    if SMOOTHING != 0.0:
        p_scale += part * (tl.load(weight_sum_ptr) if weight_sum_ptr is not None else cols)
    last = (tl.cdiv(cols, BLOCK) - 1) * BLOCK
    for start in tl.range(0, cols, BLOCK, loop_unroll_factor=UNROLL):
        first = last - start
        assume_cols(first)
        col = first + tl.arange(0, BLOCK)
        mask = col < cols
        raw = tl.load(row_ptr + col, mask=mask, other=0.0, eviction_policy="evict_first")
        z = logit(raw, scale, softcap)
        dz = tl.exp2((z - anchor) * LOG2E - log2_total) * p_scale
        if SMOOTHING != 0.0:
            if weight_ptr is not None:
                dz -= part * tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
            else:
                dz -= part
        dz = tl.where(col == target, dz - own, dz)
        if softcap is not None:
            share = z * (1.0 / softcap)
            dz *= 1.0 - share * share
        if scale is not None:
            dz *= scale
        tl.store(out_ptr + col, round_to(dz, out_ptr.dtype.element_ty), mask=mask)
