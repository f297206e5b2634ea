"""Steps over blocks of keys, or of queries, that the attention kernels share.

Scores are kept in powers of two: ``s2 = s * log2(e)``. A query sees the keys in ``[low, high)``;
steps whose block every query of the tile sees whole are taken without a mask.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.common import INTERPRETED, LOG2E, assume_rows, round_to, tanh

SEGMENT = tl.constexpr(32)  # steps of one fp32 sum


@triton.jit
def product(a, b):
    """A product in fp32; Triton's interpreter would take bf16 for integers."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_product(total, a, b):
    """Total plus a product; ``a`` is rounded to the dtype of ``b``."""
    a = round_to(a, b.dtype)
    if INTERPRETED and b.dtype == tl.bfloat16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def score(s, scale, softcap, CAPPED: tl.constexpr):
    """Products to scores in powers of two, and the tangent whose slope backward wants."""
    if CAPPED:
        t = tanh(s * (scale / softcap))
        return t * (softcap * LOG2E), t
    return s * (scale * LOG2E), s


@triton.jit
def load_rows(
    ptr, start, stride, count, CHECKED: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A tile of rows of DIM columns, zero past them; past ``count`` rows too, where CHECKED."""
    row, col = tl.arange(0, ROWS), tl.arange(0, SIZE)
    assume_rows(ptr, stride, ROWS)
    ptr += tl.cast(start, tl.int64) * stride
    at = ptr + (row[:, None] * stride + col[None, :])
    if CHECKED:
        mask = (start + row < count)[:, None]
        if DIM < SIZE:
            mask = mask & (col < DIM)[None, :]
        return tl.load(at, mask=mask, other=0.0)
    if DIM < SIZE:
        return tl.load(at, mask=(col < DIM)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def load_bounds(
    ranges_ptr, rows, queries, keys,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """The keys that each row sees, ``[low, high)``; rows past the last are like the last."""
    last = tl.minimum(rows, queries - 1)
    if RANGES > 0:
        at = ranges_ptr + last.to(tl.int64) * RANGES + 2 * SECOND
        return tl.maximum(tl.load(at), 0), tl.minimum(tl.load(at + 1), keys)
    high = last * 0 + keys
    if CAUSAL:
        high = tl.maximum(tl.minimum(high, last + (keys - queries) + 1), 0)
    return last * 0, high


@triton.jit
def whole_blocks(low, high, BLOCK: tl.constexpr):
    """From where to where all rows see, whole blocks of those, and to where any row sees."""
    begin, end = tl.min(low) // BLOCK * BLOCK, tl.max(high)
    first = tl.minimum((tl.max(low) + BLOCK - 1) // BLOCK * BLOCK, tl.maximum(end, begin))
    first = (first + BLOCK - 1) // BLOCK * BLOCK
    return begin, first, tl.maximum(tl.min(high) // BLOCK * BLOCK, first), end


@triton.jit
def forward_walk(
    q, acc, top, total, low, high, k_ptr, v_ptr, k_stride, v_stride, keys, begin, end,
    scale, softcap, CAPPED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add the keys of ``[begin, end)`` to the running softmax."""
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        k = load_rows(k_ptr, start, k_stride, keys, MASKED, BLOCK, DIM, SIZE)
        s, _ = score(product(q, tl.trans(k)), scale, softcap, CAPPED)
        if MASKED:
            j = (start + tl.arange(0, BLOCK))[None, :]
            s = tl.where((j >= low[:, None]) & (j < high[:, None]), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, axis=1))
        base = new
        if MASKED:
            base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(p, axis=1)
        v = load_rows(v_ptr, start, v_stride, keys, MASKED, BLOCK, VALUE_DIM, VALUE_SIZE)
        acc = acc * decay[:, None]
        acc = add_product(acc, p, v)
        top = new
    return acc, top, total


@triton.jit
def query_walk(
    q, dy, dq, lse, inner, low, high, k_ptr, v_ptr, k_stride, v_stride, keys, begin, end,
    scale, softcap, CAPPED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add what the keys of ``[begin, end)`` give to the gradient of a tile of queries."""
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        k = load_rows(k_ptr, start, k_stride, keys, MASKED, BLOCK, DIM, SIZE)
        v = load_rows(v_ptr, start, v_stride, keys, MASKED, BLOCK, VALUE_DIM, VALUE_SIZE)
        s, t = score(product(q, tl.trans(k)), scale, softcap, CAPPED)
        p = tl.exp2(s - lse[:, None])
        if MASKED:
            j = (start + tl.arange(0, BLOCK))[None, :]
            p = tl.where((j >= low[:, None]) & (j < high[:, None]), p, 0.0)
        ds = p * (product(dy, tl.trans(v)) - inner[:, None])
        if CAPPED:
            ds = ds * (1.0 - t * t)
        dq = add_product(dq, ds, k)
    return dq


@triton.jit
def _key_steps(
    k, v, dk, dv, place, q_ptr, dy_ptr, lse_ptr, inner_ptr, ranges_ptr, q_stride, dy_stride,
    queries, keys, begin, end, scale, softcap,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, SECOND: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        lane = tl.arange(0, BLOCK)
        rows = start + lane
        q = load_rows(q_ptr, start, q_stride, queries, True, BLOCK, DIM, SIZE)
        dy = load_rows(dy_ptr, start, dy_stride, queries, True, BLOCK, VALUE_DIM, VALUE_SIZE)
        lse = tl.load(lse_ptr + start + lane, mask=rows < queries, other=float("inf"))
        inner = tl.load(inner_ptr + start + lane, mask=rows < queries, other=0.0)
        s, t = score(product(k, tl.trans(q)), scale, softcap, CAPPED)
        p = tl.exp2(s - (lse * LOG2E)[None, :])
        if MASKED:
            low, high = load_bounds(ranges_ptr, rows, queries, keys, RANGES, CAUSAL, SECOND)
            seen = (place[:, None] >= low[None, :]) & (place[:, None] < high[None, :])
            p = tl.where(seen, p, 0.0)
        dv = add_product(dv, p, dy)
        ds = p * (product(v, tl.trans(dy)) - inner[None, :])
        if CAPPED:
            ds = ds * (1.0 - t * t)
        dk = add_product(dk, ds, q)
    return dk, dv


@triton.jit
def key_walk(
    k, v, dk, dv, place, q_ptr, dy_ptr, lse_ptr, inner_ptr, ranges_ptr, q_stride, dy_stride,
    queries, keys, begin, end, scale, softcap,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, SECOND: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what the queries of ``[begin, end)`` give to the gradients of a tile of keys.

    Queries past the last have an infinite normaliser, so they give nothing with or without MASKED.
    In fp32 every SEGMENT steps have sums of their own: one chain of 65 537 queries was 1.04 times
    the tolerance away on an H200.
    """
    if k.dtype == tl.float32:
        for part in range(begin, end, SEGMENT * BLOCK):
            dk_part, dv_part = _key_steps(
                k, v, tl.zeros_like(dk), tl.zeros_like(dv), place, q_ptr, dy_ptr, lse_ptr,
                inner_ptr, ranges_ptr, q_stride, dy_stride, queries, keys, part,
                tl.minimum(part + SEGMENT * BLOCK, end), scale, softcap, RANGES,
                CAUSAL, SECOND, CAPPED, MASKED, BLOCK, DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
            )  # fmt: skip
            dk += dk_part
            dv += dv_part
    else:
        dk, dv = _key_steps(
            k, v, dk, dv, place, q_ptr, dy_ptr, lse_ptr, inner_ptr, ranges_ptr, q_stride,
            dy_stride, queries, keys, begin, end, scale, softcap, RANGES, CAUSAL,
            SECOND, CAPPED, MASKED, BLOCK, DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
        )  # fmt: skip
    return dk, dv
