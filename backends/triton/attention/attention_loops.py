"""Tile loops over blocks of keys, shared by the attention kernels.

Scores are kept in powers of two: ``s2 = s * log2(e)``. A query sees the keys in ``[low, high)``.
Blocks that every query of the tile sees in full need no mask.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.common.rows import INTERPRETED, LOG2E, assume_rows, round_to, tanh


@triton.jit
def product(a, b):
    """``a @ b`` in fp32, without rounding fp32 operands to TF32.

    Triton's interpreter treats bf16 as integers in a GEMM, so there operands are cast first.
    """
    if INTERPRETED and a.dtype == tl.bfloat16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_product(total, a, b):
    """``total + a @ b``, with ``a`` rounded to the dtype of ``b``.

    Probabilities and gradients of scores are fp32; matrix units take both operands in one dtype.
    """
    a = round_to(a, b.dtype)
    if INTERPRETED and b.dtype == tl.bfloat16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def score(s, scale, softcap, CAPPED: tl.constexpr):
    """Scores in powers of two from ``q @ k``, and the tanh of the softcap for its derivative.

    Without a softcap, the second value is not used.
    """
    if CAPPED:
        t = tanh(s * (scale / softcap))
        return t * (softcap * LOG2E), t
    return s * (scale * LOG2E), s


@triton.jit
def load_rows(
    ptr, start, stride, count, CHECKED: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Load a tile of ROWS rows of DIM columns, padded with zeros to SIZE columns.

    CHECKED: rows from ``count`` on are zeros as well. Otherwise every row of the tile must exist.
    """
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
    """Store a tile of rows of DIM columns, without the rows from ``count`` on."""
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
    """The range of keys ``[low, high)`` that each query of a tile sees.

    The range comes from ``ranges_ptr`` (number ``second`` of each query), or is that of all keys,
    or ends at the causal diagonal. Rows past the last query repeat its range, so that they add no
    blocks.
    """
    row = tl.maximum(tl.minimum(tl.arange(0, ROWS), queries - 1 - start), 0)
    if RANGES > 0:
        ranges_ptr += tl.cast(start, tl.int64) * RANGES + 2 * second
        low, high = tl.load(ranges_ptr + row * RANGES), tl.load(ranges_ptr + row * RANGES + 1)
        return tl.maximum(low, 0), tl.minimum(high, keys)
    high = row * 0 + keys  # one number per row
    if CAUSAL:
        high = tl.maximum(tl.minimum(high, start + row + (keys - queries) + 1), 0)
    return row * 0, high


@triton.jit
def whole_blocks(low, high, keys, BLOCK: tl.constexpr):
    """Which blocks of keys a tile of queries needs, and which of those need no mask.

    Returns the number of blocks that any query sees, the key where the first one begins, and the
    range of keys that all queries see, cut to whole blocks. A query with an empty range needs no
    block, and leaves no block without a mask.
    """
    some = low < high
    low, high = tl.where(some, low, keys), tl.where(some, high, 0)
    begin, end = tl.min(low) // BLOCK * BLOCK, tl.max(high)
    steps = tl.maximum((end - begin + BLOCK - 1) // BLOCK, 0)
    return steps, begin, (tl.max(low) + BLOCK - 1) // BLOCK * BLOCK, tl.min(high) // BLOCK * BLOCK


@triton.jit
def loop_over(steps, begin, RANGES: tl.constexpr, BLOCK: tl.constexpr):
    """Start and end of the loop whose steps :func:`place_of` translates.

    With two ranges, steps are numbers of blocks. With one, they are positions.
    """
    if RANGES == 4:
        return 0, steps
    return begin, begin + steps * BLOCK


@triton.jit
def place_of(
    step, steps, begin, first, last, begin2, first2, last2,
    RANGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where a step begins, whether it needs a mask, and which range it belongs to.

    With two ranges, one loop runs over the blocks of both, by number. With one range, the loop
    variable is the position itself, which takes fewer registers.
    """
    start, second = step, 0
    if RANGES == 4:
        other = step >= steps
        start = tl.where(other, begin2 + (step - steps) * BLOCK, begin + step * BLOCK)
        first, last = tl.where(other, first2, first), tl.where(other, last2, last)
        second = other.to(tl.int32)
    # a hint for vector loads: every block begins at a multiple of BLOCK
    return tl.multiple_of(start, BLOCK), (start < first) | (start + BLOCK > last), second


@triton.jit
def seen_by(
    start, second, low, high, own, ranges_ptr, queries, keys,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which keys of a block the queries of a tile see.

    With two ranges, the bounds are loaded again in each masked step, so that they occupy no
    registers between steps.
    """
    if RANGES == 4:
        low, high = load_bounds(ranges_ptr, own, queries, keys, second, RANGES, CAUSAL, ROWS)
    j = (start + tl.arange(0, BLOCK))[None, :]
    return (j >= low[:, None]) & (j < high[:, None])


@triton.jit
def loop_of(
    ranges_ptr, own, queries, keys, RANGES: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loop over the blocks of keys that a tile of queries sees, of one range or of two.

    Returns the bounds of the first range, what :func:`place_of` needs of both ranges, and the
    loop's start and end.
    """
    low, high = load_bounds(ranges_ptr, own, queries, keys, 0, RANGES, CAUSAL, ROWS)
    steps, begin, first, last = whole_blocks(low, high, keys, BLOCK)
    steps2, begin2, first2, last2 = 0, begin, first, last
    if RANGES == 4:
        low2, high2 = load_bounds(ranges_ptr, own, queries, keys, 1, RANGES, CAUSAL, ROWS)
        steps2, begin2, first2, last2 = whole_blocks(low2, high2, keys, BLOCK)
    now, end = loop_over(steps + steps2, begin, RANGES, BLOCK)
    return low, high, steps, begin, first, last, begin2, first2, last2, now, end


@triton.jit
def forward_loop(
    q, acc, top, total, own, ranges_ptr, k_ptr, v_ptr, k_stride, v_stride, queries, keys, scale,
    softcap, RANGES: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Tile loop of forward: add the keys that a tile of queries sees to its running softmax.

    Each step loads a block of K, computes and masks scores, rescales ``acc`` and ``total`` to the
    new maximum ``top``, loads V and adds its part. A row that has seen no key has ``top`` = -inf;
    the base is then 0, since -inf - -inf would be NaN.
    """
    low, high, steps, begin, first, last, begin2, first2, last2, now, end = loop_of(
        ranges_ptr, own, queries, keys, RANGES, CAUSAL, q.shape[0], BLOCK
    )
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
    """Tile loop of backward: add the keys that a tile of queries sees to the queries' gradient.

    Each step loads a block of K and V and computes p from ``lse`` (in powers of two), ds = p (dy v'
    - inner), and dq += ds k. Keys outside a query's range get p = 0.
    """
    low, high, steps, begin, first, last, begin2, first2, last2, now, end = loop_of(
        ranges_ptr, own, queries, keys, RANGES, CAUSAL, q.shape[0], BLOCK
    )
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
