"""Steps over blocks of keys, or of queries, that the attention kernels share.

Scores are kept in powers of two: ``s2 = s * log2(e)``. A query sees the keys in ``[low, high)``;
steps whose block every query of the tile sees whole are taken without a mask.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.common.rows import INTERPRETED, LOG2E, assume_rows, round_to, tanh


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
def store_rows(
    ptr, value, start, stride, count, ROWS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr
):
    """Store a tile of rows of DIM columns, but for rows past ``count``."""
    row, col = tl.arange(0, ROWS), tl.arange(0, SIZE)
    mask = (start + row < count)[:, None] & (col < DIM)[None, :]
    assume_rows(ptr, stride, ROWS)
    ptr += tl.cast(start, tl.int64) * stride
    at = ptr + (row[:, None] * stride + col[None, :])
    tl.store(at, round_to(value, ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_bounds(
    ranges_ptr, start, queries, keys, second,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The keys that each row of a tile sees, ``[low, high)``; past the last, rows are like it."""
    row = tl.maximum(tl.minimum(tl.arange(0, ROWS), queries - 1 - start), 0)
    if RANGES > 0:
        ranges_ptr += tl.cast(start, tl.int64) * RANGES + 2 * second
        low, high = tl.load(ranges_ptr + row * RANGES), tl.load(ranges_ptr + row * RANGES + 1)
        return tl.maximum(low, 0), tl.minimum(high, keys)
    high = row * 0 + keys
    if CAUSAL:
        high = tl.maximum(tl.minimum(high, start + row + (keys - queries) + 1), 0)
    return row * 0, high


@triton.jit
def whole_blocks(low, high, keys, BLOCK: tl.constexpr):
    """Steps over what any row sees, where they begin, and from where to where all rows see."""
    some = low < high
    low, high = tl.where(some, low, keys), tl.where(some, high, 0)
    begin, end = tl.min(low) // BLOCK * BLOCK, tl.max(high)
    steps = tl.maximum((end - begin + BLOCK - 1) // BLOCK, 0)
    return steps, begin, (tl.max(low) + BLOCK - 1) // BLOCK * BLOCK, tl.min(high) // BLOCK * BLOCK


@triton.jit
def loop_over(steps, begin, RANGES: tl.constexpr, BLOCK: tl.constexpr):
    """What ``place_of`` wants a loop to run over."""
    if RANGES == 4:
        return 0, steps
    return begin, begin + steps * BLOCK


@triton.jit
def place_of(
    step, steps, begin, first, last, begin2, first2, last2,
    RANGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where a step stands, whether it needs a mask, and of which range it is.

    One loop takes the steps of both ranges, by number; those of one range are told by their place,
    which takes fewer registers.
    """
    start, second = step, 0
    if RANGES == 4:
        other = step >= steps
        start = tl.where(other, begin2 + (step - steps) * BLOCK, begin + step * BLOCK)
        first, last = tl.where(other, first2, first), tl.where(other, last2, last)
        second = other.to(tl.int32)
    return tl.multiple_of(start, BLOCK), (start < first) | (start + BLOCK > last), second


@triton.jit
def seen_by(
    start, second, low, high, own, ranges_ptr, queries, keys,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which keys of a block the rows of a tile see; of two ranges no bounds stay in registers."""
    if RANGES == 4:
        low, high = load_bounds(ranges_ptr, own, queries, keys, second, RANGES, CAUSAL, ROWS)
    j = (start + tl.arange(0, BLOCK))[None, :]
    return (j >= low[:, None]) & (j < high[:, None])


@triton.jit
def forward_loop(
    q, acc, top, total, own, ranges_ptr, k_ptr, v_ptr, k_stride, v_stride, queries, keys, scale,
    softcap, RANGES: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add the keys that rows see to the running softmax."""
    low, high = load_bounds(ranges_ptr, own, queries, keys, 0, RANGES, CAUSAL, q.shape[0])
    steps, begin, first, last = whole_blocks(low, high, keys, BLOCK)
    steps2, begin2, first2, last2 = 0, begin, first, last
    if RANGES == 4:
        low2, high2 = load_bounds(ranges_ptr, own, queries, keys, 1, RANGES, CAUSAL, q.shape[0])
        steps2, begin2, first2, last2 = whole_blocks(low2, high2, keys, BLOCK)
    now, end = loop_over(steps + steps2, begin, RANGES, BLOCK)
    for step in tl.range(now, end, 1 if RANGES == 4 else BLOCK, num_stages=STAGES):
        start, masked, second = place_of(
            step, steps, begin, first, last, begin2, first2, last2, RANGES, BLOCK
        )
        k = load_rows(k_ptr, start, k_stride, keys, True, BLOCK, DIM, SIZE)
        s, _ = score(product(q, tl.trans(k)), scale, softcap, CAPPED)
        if masked:
            seen = seen_by(
                start, second, low, high, own, ranges_ptr, queries, keys, RANGES, CAUSAL,
                q.shape[0], BLOCK,
            )  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(p, axis=1)
        v = load_rows(v_ptr, start, v_stride, keys, True, BLOCK, VALUE_DIM, VALUE_SIZE)
        acc = add_product(acc * decay[:, None], p, v)
        top = new
    return acc, top, total


@triton.jit
def query_loop(
    q, dy, dq, lse, inner, own, ranges_ptr, k_ptr, v_ptr, k_stride, v_stride, queries, keys,
    scale, softcap, RANGES: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_SIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what the keys that rows see give to the gradient of a tile of queries."""
    low, high = load_bounds(ranges_ptr, own, queries, keys, 0, RANGES, CAUSAL, q.shape[0])
    steps, begin, first, last = whole_blocks(low, high, keys, BLOCK)
    steps2, begin2, first2, last2 = 0, begin, first, last
    if RANGES == 4:
        low2, high2 = load_bounds(ranges_ptr, own, queries, keys, 1, RANGES, CAUSAL, q.shape[0])
        steps2, begin2, first2, last2 = whole_blocks(low2, high2, keys, BLOCK)
    now, end = loop_over(steps + steps2, begin, RANGES, BLOCK)
    for step in tl.range(now, end, 1 if RANGES == 4 else BLOCK, num_stages=STAGES):
        start, masked, second = place_of(
            step, steps, begin, first, last, begin2, first2, last2, RANGES, BLOCK
        )
        k = load_rows(k_ptr, start, k_stride, keys, True, BLOCK, DIM, SIZE)
        v = load_rows(v_ptr, start, v_stride, keys, True, BLOCK, VALUE_DIM, VALUE_SIZE)
        s, dp = product(q, tl.trans(k)), product(dy, tl.trans(v))
        s, t = score(s, scale, softcap, CAPPED)
        p = tl.exp2(s - lse[:, None])
        if masked:
            seen = seen_by(
                start, second, low, high, own, ranges_ptr, queries, keys, RANGES, CAUSAL,
                q.shape[0], BLOCK,
            )  # fmt: skip
            p = tl.where(seen, p, 0.0)
        ds = p * (dp - inner[:, None])
        if CAPPED:
            ds = ds * (1.0 - t * t)
        dq = add_product(dq, ds, k)
    return dq
