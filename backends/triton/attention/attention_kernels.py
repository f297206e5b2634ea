"""Attention with ranges of keys: its kernels.

A program of forward owns a tile of queries and passes over the blocks of keys that any of them
sees, with a running softmax. Backward does the same for the gradient of the queries. Blocks that no
query of the tile sees are skipped, not masked; blocks that every query sees in full need no mask.
Scores are kept in powers of two: ``s2 = s * log2(e)``. A query sees the keys in ``[low, high)``.

For the gradients of keys and values, a tile of keys passes over the queries that see it. The first
tiles of keys may be global tokens, which every query sees. PARTS programs share such a long loop
and start first; their fp32 sums are added in order afterwards.
Source: Dao 2023 (arXiv:2307.08691).
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.common.rows import (
    INTERPRETED,
    LN2,
    LOG2E,
    assume_rows,
    round_to,
    tanh,
)

# --- tile loops over blocks of keys ---


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
    ptr,
    start,
    stride,
    count,
    CHECKED: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
):
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
    ranges_ptr,
    start,
    queries,
    keys,
    second,
    RANGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
):
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
    step,
    steps,
    begin,
    first,
    last,
    begin2,
    first2,
    last2,
    RANGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
def visible_mask(
    start,
    second,
    low,
    high,
    own,
    ranges_ptr,
    queries,
    keys,
    RANGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    ranges_ptr,
    own,
    queries,
    keys,
    RANGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    q,
    acc,
    top,
    total,
    own,
    ranges_ptr,
    k_ptr,
    v_ptr,
    k_stride,
    v_stride,
    queries,
    keys,
    scale,
    softcap,
    RANGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
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
            step, steps, begin, first, last, begin2, first2, last2, RANGES=RANGES, BLOCK=BLOCK
        )
        k = load_rows(k_ptr, start, k_stride, keys, True, BLOCK, DIM, SIZE)
        s, _ = score(product(q, tl.trans(k)), scale, softcap, CAPPED)
        if masked:
            visible = visible_mask(
                start,
                second,
                low,
                high,
                own,
                ranges_ptr,
                queries,
                keys,
                RANGES=RANGES,
                CAUSAL=CAUSAL,
                ROWS=q.shape[0],
                BLOCK=BLOCK,
            )
            s = tl.where(visible, s, float("-inf"))
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
    q,
    dy,
    dq,
    lse,
    inner,
    own,
    ranges_ptr,
    k_ptr,
    v_ptr,
    k_stride,
    v_stride,
    queries,
    keys,
    scale,
    softcap,
    RANGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tile loop of backward: add the keys that a tile of queries sees to the queries' gradient.

    Each step loads a block of K and V and computes p from ``lse`` (in powers of two), ds = p (dy v'
    - inner), and dq += ds k. Keys outside a query's range get p = 0.
    """
    low, high, steps, begin, first, last, begin2, first2, last2, now, end = loop_of(
        ranges_ptr, own, queries, keys, RANGES, CAUSAL, q.shape[0], BLOCK
    )
    for step in tl.range(now, end, 1 if RANGES == 4 else BLOCK, num_stages=STAGES):
        start, masked, second = place_of(
            step, steps, begin, first, last, begin2, first2, last2, RANGES=RANGES, BLOCK=BLOCK
        )
        k = load_rows(k_ptr, start, k_stride, keys, True, BLOCK, DIM, SIZE)
        v = load_rows(v_ptr, start, v_stride, keys, True, BLOCK, VALUE_DIM, VALUE_SIZE)
        s, dp = product(q, tl.trans(k)), product(dy, tl.trans(v))
        s, t = score(s, scale, softcap, CAPPED)
        p = tl.exp2(s - lse[:, None])
        if masked:
            visible = visible_mask(
                start,
                second,
                low,
                high,
                own,
                ranges_ptr,
                queries,
                keys,
                RANGES=RANGES,
                CAUSAL=CAUSAL,
                ROWS=q.shape[0],
                BLOCK=BLOCK,
            )
            p = tl.where(visible, p, 0.0)
        ds = p * (dp - inner[:, None])
        if CAPPED:
            ds = ds * (1.0 - t * t)
        dq = add_product(dq, ds, k)
    return dq


# --- programs that own a tile of queries ---


@triton.jit
def _place(blocks, heads, RANGES: tl.constexpr):
    """Block of queries, head and batch of this program; blocks that see most keys come first.

    Under a causal mask those are the last blocks. With two ranges they are the first blocks, where
    the global tokens are; there all heads of one block precede the next block.
    """
    pid = tl.program_id(0)
    block, rest = blocks - 1 - pid % blocks, pid // blocks
    if RANGES == 4:
        each = tl.num_programs(0) // blocks
        block, rest = pid // each, pid % each
    return block, (rest % heads).to(tl.int64), (rest // heads).to(tl.int64)


@triton.jit
def _attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    ranges_ptr,
    y_ptr,
    lse_ptr,
    strides,
    sizes,
    scale,
    softcap,
    RANGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention forward of one tile of queries, with a running softmax over the keys.

    Program: BLOCK_M queries of one head. Several heads may share one head of K and V (a group).
    Strides go from one element of the batch, head and row to the next.
    Reads its queries once, then the blocks of K and V that any of them sees. Writes y in the order
    (batch, query, head) and lse, the natural log-sum-exp of the scores.
    A sink is a score without a value: it starts the maximum and the sum. A row that sees neither a
    key nor a sink gets y = 0 and lse = -inf.
    """
    q_strides, k_strides, v_strides = strides[0:3], strides[3:6], strides[6:9]
    ranges_batch, blocks, heads, groups, queries, keys = sizes
    DIM: tl.constexpr = DIMS[0]
    SIZE: tl.constexpr = DIMS[1]
    VALUE_DIM: tl.constexpr = DIMS[2]
    VALUE_SIZE: tl.constexpr = DIMS[3]
    block, head, batch = _place(blocks, heads, RANGES)
    group = head // (heads // groups)
    start = block * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    q_ptr += batch * q_strides[0] + head * q_strides[1]
    k_ptr += batch * k_strides[0] + group * k_strides[1]
    v_ptr += batch * v_strides[0] + group * v_strides[1]
    q = load_rows(q_ptr, start, q_strides[2], queries, True, BLOCK_M, DIM, SIZE)
    if RANGES > 0:
        ranges_ptr += batch * ranges_batch
    acc = tl.zeros([BLOCK_M, VALUE_SIZE], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        # + total, which is 0: the scalar becomes one number per row
        top = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E + total
        total += 1.0
    acc, top, total = forward_loop(
        q,
        acc,
        top,
        total,
        start,
        ranges_ptr,
        k_ptr,
        v_ptr,
        k_stride=k_strides[2],
        v_stride=v_strides[2],
        queries=queries,
        keys=keys,
        scale=scale,
        softcap=softcap,
        RANGES=RANGES,
        CAUSAL=CAUSAL,
        CAPPED=CAPPED,
        BLOCK=BLOCK_N,
        DIM=DIM,
        SIZE=SIZE,
        VALUE_DIM=VALUE_DIM,
        VALUE_SIZE=VALUE_SIZE,
        STAGES=STAGES,
    )
    some = total > 0.0
    total = tl.where(some, total, 1.0)
    lse = tl.where(some, (top + tl.log2(total)) * LN2, float("-inf"))
    tl.store(lse_ptr + (batch * heads + head) * queries + rows, lse, mask=rows < queries)
    y_ptr += (batch * queries * heads + head) * VALUE_DIM
    y = acc / total[:, None]
    store_rows(y_ptr, y, start, heads * VALUE_DIM, queries, BLOCK_M, VALUE_DIM, VALUE_SIZE)


@triton.jit
def _attention_backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dy_ptr,
    y_ptr,
    lse_ptr,
    ranges_ptr,
    dq_ptr,
    inner_ptr,
    strides,
    sizes,
    scale,
    softcap,
    RANGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient of one tile of queries, and the sums of dy * y that other gradients need.

    Program: BLOCK_M queries of one head. Strides as in forward.
    Reads dy and y first, and writes their sum of products per row to ``inner_ptr``. The gradients
    of keys and sinks read it later. With ``dq_ptr``, it then reads q and lse, passes over K and V
    as forward does, and writes dq. Rows past the last query get lse = inf, so that their
    probabilities are 0.
    """
    q_strides = strides[0:3]
    k_strides = strides[3:6]
    v_strides = strides[6:9]
    dy_strides = strides[9:12]
    y_strides = strides[12:15]
    ranges_batch, blocks, heads, groups, queries, keys = sizes
    DIM: tl.constexpr = DIMS[0]
    SIZE: tl.constexpr = DIMS[1]
    VALUE_DIM: tl.constexpr = DIMS[2]
    VALUE_SIZE: tl.constexpr = DIMS[3]
    block, head, batch = _place(blocks, heads, RANGES)
    group = head // (heads // groups)
    start = block * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    dy_ptr += batch * dy_strides[0] + head * dy_strides[1]
    y_ptr += batch * y_strides[0] + head * y_strides[1]
    dy = load_rows(dy_ptr, start, dy_strides[2], queries, True, BLOCK_M, VALUE_DIM, VALUE_SIZE)
    y = load_rows(y_ptr, start, y_strides[2], queries, True, BLOCK_M, VALUE_DIM, VALUE_SIZE)
    inner = tl.sum(dy.to(tl.float32) * y.to(tl.float32), axis=1)
    here = (batch * heads + head) * queries + rows
    tl.store(inner_ptr + here, inner, mask=rows < queries)
    if dq_ptr is not None:
        lse = tl.load(lse_ptr + here, mask=rows < queries, other=float("inf")) * LOG2E
        q_ptr += batch * q_strides[0] + head * q_strides[1]
        k_ptr += batch * k_strides[0] + group * k_strides[1]
        v_ptr += batch * v_strides[0] + group * v_strides[1]
        q = load_rows(q_ptr, start, q_strides[2], queries, True, BLOCK_M, DIM, SIZE)
        if RANGES > 0:
            ranges_ptr += batch * ranges_batch
        dq = tl.zeros([BLOCK_M, SIZE], tl.float32)
        dq = query_loop(
            q,
            dy,
            dq,
            lse,
            inner,
            start,
            ranges_ptr,
            k_ptr,
            v_ptr=v_ptr,
            k_stride=k_strides[2],
            v_stride=v_strides[2],
            queries=queries,
            keys=keys,
            scale=scale,
            softcap=softcap,
            RANGES=RANGES,
            CAUSAL=CAUSAL,
            CAPPED=CAPPED,
            BLOCK=BLOCK_N,
            DIM=DIM,
            SIZE=SIZE,
            VALUE_DIM=VALUE_DIM,
            VALUE_SIZE=VALUE_SIZE,
            STAGES=STAGES,
        )
        dq_ptr += (batch * queries * heads + head) * DIM
        store_rows(dq_ptr, dq * scale, start, heads * DIM, queries, BLOCK_M, DIM, SIZE)


# --- programs that own a tile of keys ---


SEGMENT = tl.constexpr(32)  # steps of one fp32 sum
SHARED = 2  # first tiles of keys whose queries several programs may share


@triton.jit
def _key_steps(
    k,
    v,
    dk,
    dv,
    place,
    q_ptr,
    dy_ptr,
    lse_ptr,
    inner_ptr,
    ranges_ptr,
    strides,
    lengths,
    now,
    end,
    bounds,
    scale,
    softcap,
    RANGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the queries of the loop steps ``[now, end)`` to the gradients of a tile of keys.

    Scores are transposed, keys by queries. Each step loads q, dy, lse and inner of a block of
    queries and computes p, dv += p dy, ds = p (v dy' - inner), and dk += ds q.
    """
    q_stride, dy_stride = strides
    queries, keys = lengths
    steps, begin, first, last, begin2, first2, last2 = bounds
    DIM: tl.constexpr = DIMS[0]
    SIZE: tl.constexpr = DIMS[1]
    VALUE_DIM: tl.constexpr = DIMS[2]
    VALUE_SIZE: tl.constexpr = DIMS[3]
    for step in tl.range(now, end, 1 if RANGES == 4 else BLOCK, num_stages=STAGES):
        start, masked, second = place_of(
            step, steps, begin, first, last, begin2, first2, last2, RANGES=RANGES, BLOCK=BLOCK
        )
        lane = tl.arange(0, BLOCK)
        rows = start + lane
        q = load_rows(q_ptr, start, q_stride, queries, True, BLOCK, DIM, SIZE)
        dy = load_rows(dy_ptr, start, dy_stride, queries, True, BLOCK, VALUE_DIM, VALUE_SIZE)
        lse = tl.load(lse_ptr + start + lane, mask=rows < queries, other=float("inf"))
        inner = tl.load(inner_ptr + start + lane, mask=rows < queries, other=0.0)
        s, t = score(product(k, tl.trans(q)), scale, softcap, CAPPED)
        p = tl.exp2(s - (lse * LOG2E)[None, :])
        if CAUSAL or RANGES > 0:
            if masked:
                low, high = load_bounds(
                    ranges_ptr, start, queries, keys, second, RANGES, CAUSAL, BLOCK
                )
                visible = (place[:, None] >= low[None, :]) & (place[:, None] < high[None, :])
                p = tl.where(visible, p, 0.0)
        dv = add_product(dv, p, dy)
        ds = p * (product(v, tl.trans(dy)) - inner[None, :])
        if CAPPED:
            ds = ds * (1.0 - t * t)
        dk = add_product(dk, ds, q)
    return dk, dv


@triton.jit
def _key_loop(
    k,
    v,
    dk,
    dv,
    place,
    q_ptr,
    dy_ptr,
    lse_ptr,
    inner_ptr,
    ranges_ptr,
    strides,
    lengths,
    now,
    end,
    bounds,
    scale,
    softcap,
    RANGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the queries of the loop steps ``[now, end)``, in segments where the dtype is fp32.

    Queries past the last have lse = inf, so that they add nothing. In fp32, every SEGMENT steps
    have sums of their own: one chain of 65,537 queries was 1.04 times the tolerance away on an
    H200.
    """
    if k.dtype == tl.float32:
        LONG: tl.constexpr = SEGMENT if RANGES == 4 else SEGMENT * BLOCK
        for part in range(now, end, LONG):
            dk_part, dv_part = _key_steps(
                k,
                v,
                tl.zeros_like(dk),
                tl.zeros_like(dv),
                place,
                q_ptr,
                dy_ptr,
                lse_ptr,
                inner_ptr=inner_ptr,
                ranges_ptr=ranges_ptr,
                strides=strides,
                lengths=lengths,
                now=part,
                end=tl.minimum(part + LONG, end),
                bounds=bounds,
                scale=scale,
                softcap=softcap,
                RANGES=RANGES,
                CAUSAL=CAUSAL,
                CAPPED=CAPPED,
                BLOCK=BLOCK,
                DIMS=DIMS,
                STAGES=STAGES,
            )
            dk += dk_part
            dv += dv_part
    else:
        dk, dv = _key_steps(
            k,
            v,
            dk,
            dv,
            place,
            q_ptr,
            dy_ptr,
            lse_ptr,
            inner_ptr=inner_ptr,
            ranges_ptr=ranges_ptr,
            strides=strides,
            lengths=lengths,
            now=now,
            end=end,
            bounds=bounds,
            scale=scale,
            softcap=softcap,
            RANGES=RANGES,
            CAUSAL=CAUSAL,
            CAPPED=CAPPED,
            BLOCK=BLOCK,
            DIMS=DIMS,
            STAGES=STAGES,
        )
    return dk, dv


@triton.jit
def _tile_bounds(tile_bounds_ptr, tile, tiles, BLOCK: tl.constexpr):
    """Tile bounds of one tile of keys, of one range, from the table of ``tile_bounds``.

    Returns the number of blocks of queries, the query where the first one begins, and the range of
    queries that see the whole tile, as ``whole_blocks`` does for keys.
    """
    tile_bounds_ptr += tile
    begin = tl.load(tile_bounds_ptr)
    steps = tl.maximum(tl.load(tile_bounds_ptr + tiles) - begin, 0)
    first, last = tl.load(tile_bounds_ptr + 2 * tiles), tl.load(tile_bounds_ptr + 3 * tiles)
    return steps, begin * BLOCK, first * BLOCK, last * BLOCK


@triton.jit
def _is_shared(tile_bounds_ptr, tile, tiles, queries, BLOCK: tl.constexpr, SHARED: tl.constexpr):
    """Whether programs share a tile: one of the first, with a quarter of the queries in bounds."""
    steps, _, _, _ = _tile_bounds(tile_bounds_ptr, tile, tiles, BLOCK)
    steps2, _, _, _ = _tile_bounds(tile_bounds_ptr + 4 * tiles, tile, tiles, BLOCK)
    return (tile < SHARED) & ((steps + steps2) * BLOCK >= queries // 4)


@triton.jit
def _attention_backward_keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dy_ptr,
    lse_ptr,
    inner_ptr,
    ranges_ptr,
    tile_bounds_ptr,
    parts_ptr,
    dk_ptr,
    dv_ptr,
    strides,
    sizes,
    scale,
    softcap,
    RANGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SHARED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Gradients of one tile of keys and values, summed over the queries that see it.

    Program: BLOCK_N keys of one head of K and V, or one of PARTS shares of such a tile's queries.
    Reads its K and V once, then q, dy, lse and inner of the queries in the tile bounds, for every
    head of the group in turn. Writes dk and dv; a share writes fp32 sums to ``parts_ptr`` instead.
    ``tile_bounds_ptr`` holds the tile bounds: (batch, ranges, 4, tiles), of first, last, first
    whole and last whole block. Without ranges, the bounds follow from the causal diagonal. With two
    ranges, all heads of a tile precede the next tile, and shares precede whole tiles, since the
    first tiles take longest. Both kinds of programs exist for the first SHARED tiles; those of the
    kind that does not apply return at once, so that the host needs no sync.
    """
    q_strides = strides[0:3]
    k_strides = strides[3:6]
    v_strides = strides[6:9]
    dy_strides = strides[9:12]
    ranges_batch, tiles, heads, groups, queries, keys = sizes
    DIM: tl.constexpr = DIMS[0]
    SIZE: tl.constexpr = DIMS[1]
    VALUE_DIM: tl.constexpr = DIMS[2]
    VALUE_SIZE: tl.constexpr = DIMS[3]
    pid = tl.program_id(0)
    EXTRA: tl.constexpr = SHARED * PARTS if PARTS > 1 else 0
    each = tl.num_programs(0) // (tiles + EXTRA)
    tile, rest, part, parts = pid % tiles, pid // tiles, 0, 1
    if RANGES == 4:  # the first tiles, whose loops may be long, come first
        slot, rest = pid // each, pid % each
        tile = slot - EXTRA
        if PARTS > 1:
            if tile < 0:
                tile, part, parts = slot // PARTS, slot % PARTS, PARTS
    group, batch = (rest % groups).to(tl.int64), (rest // groups).to(tl.int64)
    if RANGES > 0:
        # 2 * RANGES numbers per tile and element; ranges_batch is 0 where all share one table
        tile_bounds_ptr += ranges_batch // queries * 2 * batch * tiles
        ranges_ptr += batch * ranges_batch
    if PARTS > 1:
        if _is_shared(tile_bounds_ptr, tile, tiles, queries, BLOCK_M, SHARED) != (parts > 1):
            return
    start = tile * BLOCK_N
    place = start + tl.arange(0, BLOCK_N)
    k_ptr += batch * k_strides[0] + group * k_strides[1]
    v_ptr += batch * v_strides[0] + group * v_strides[1]
    k = load_rows(k_ptr, start, k_strides[2], keys, True, BLOCK_N, DIM, SIZE)
    v = load_rows(v_ptr, start, v_strides[2], keys, True, BLOCK_N, VALUE_DIM, VALUE_SIZE)
    begin, first, last = 0, 0, queries + BLOCK_M  # all queries see the tile: no mask
    if RANGES > 0:
        steps, begin, first, last = _tile_bounds(tile_bounds_ptr, tile, tiles, BLOCK_M)
    else:
        if CAUSAL:
            begin = tl.maximum(start - (keys - queries), 0) // BLOCK_M * BLOCK_M
            first = start + BLOCK_N - 1 - (keys - queries)
        steps = tl.maximum((queries - begin + BLOCK_M - 1) // BLOCK_M, 0)
    steps2, begin2, first2, last2 = 0, begin, first, last
    if RANGES == 4:
        steps2, begin2, first2, last2 = _tile_bounds(
            tile_bounds_ptr + 4 * tiles, tile, tiles, BLOCK_M
        )
    now, end = loop_over(steps + steps2, begin, RANGES, BLOCK_M)
    if PARTS > 1:
        share = (end + parts - 1) // parts
        now = part * share
        end = tl.minimum(now + share, end)
    dk = tl.zeros([BLOCK_N, SIZE], tl.float32)
    dv = tl.zeros([BLOCK_N, VALUE_SIZE], tl.float32)
    for h in range(heads // groups):
        head = group * (heads // groups) + h
        here = (batch * heads + head) * queries
        dk, dv = _key_loop(
            k, v, dk, dv, place, q_ptr=q_ptr + batch * q_strides[0] + head * q_strides[1],
            dy_ptr=dy_ptr + batch * dy_strides[0] + head * dy_strides[1], lse_ptr=lse_ptr + here,
            inner_ptr=inner_ptr + here, ranges_ptr=ranges_ptr,
            strides=(q_strides[2], dy_strides[2]), lengths=(queries, keys), now=now, end=end,
            bounds=(steps, begin, first, last, begin2, first2, last2), scale=scale, softcap=softcap,
            RANGES=RANGES, CAUSAL=CAUSAL, CAPPED=CAPPED, BLOCK=BLOCK_M, DIMS=DIMS, STAGES=STAGES,
        )  # fmt: skip
    if PARTS > 1:
        if parts > 1:
            parts_ptr += pid.to(tl.int64) * BLOCK_N * (SIZE + VALUE_SIZE)
            store_rows(parts_ptr, dk, 0, SIZE, BLOCK_N, BLOCK_N, SIZE, SIZE)
            parts_ptr += BLOCK_N * SIZE
            store_rows(parts_ptr, dv, 0, VALUE_SIZE, BLOCK_N, BLOCK_N, VALUE_SIZE, VALUE_SIZE)
            return
    _store(
        dk, dv, dk_ptr, dv_ptr, scale, start, batch, group, groups=groups, keys=keys,
        BLOCK_N=BLOCK_N, DIM=DIM, SIZE=SIZE, VALUE_DIM=VALUE_DIM, VALUE_SIZE=VALUE_SIZE,
    )  # fmt: skip


@triton.jit
def _store(
    dk,
    dv,
    dk_ptr,
    dv_ptr,
    scale,
    start,
    batch,
    group,
    groups,
    keys,
    BLOCK_N: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
):
    """Write dk, times the scale of the scores, and dv of a tile of keys; each where it is needed.

    The order in memory is (batch, key, head).
    """
    if dk_ptr is not None:
        dk_ptr += (batch * keys * groups + group) * DIM
        store_rows(dk_ptr, dk * scale, start, groups * DIM, keys, BLOCK_N, DIM, SIZE)
    if dv_ptr is not None:
        dv_ptr += (batch * keys * groups + group) * VALUE_DIM
        store_rows(dv_ptr, dv, start, groups * VALUE_DIM, keys, BLOCK_N, VALUE_DIM, VALUE_SIZE)


@triton.jit
def _attention_parts_kernel(
    parts_ptr,
    tile_bounds_ptr,
    dk_ptr,
    dv_ptr,
    ranges_batch,
    tiles,
    groups,
    queries,
    keys,
    scale,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Sum the partial gradients that the programs of a shared tile left, in order.

    Program: one of the first SHARED tiles of keys of one head of K and V; it returns where the tile
    was not shared. Reads PARTS partials of dk and dv from ``parts_ptr``; writes dk and dv.
    """
    each = tl.num_programs(0) // SHARED
    tile, rest = tl.program_id(0) // each, tl.program_id(0) % each
    group, batch = (rest % groups).to(tl.int64), (rest // groups).to(tl.int64)
    tile_bounds_ptr += ranges_batch // queries * 2 * batch * tiles
    if not _is_shared(tile_bounds_ptr, tile, tiles, queries, BLOCK_M, SHARED):
        return
    dk = tl.zeros([BLOCK_N, SIZE], tl.float32)
    dv = tl.zeros([BLOCK_N, VALUE_SIZE], tl.float32)
    for part in range(PARTS):
        at = ((tile * PARTS + part) * each + rest).to(tl.int64) * BLOCK_N * (SIZE + VALUE_SIZE)
        dk += load_rows(parts_ptr + at, 0, SIZE, BLOCK_N, False, BLOCK_N, SIZE, SIZE)
        at += BLOCK_N * SIZE
        dv += load_rows(
            parts_ptr + at, 0, VALUE_SIZE, BLOCK_N, False, BLOCK_N, VALUE_SIZE, VALUE_SIZE
        )
    _store(
        dk,
        dv,
        dk_ptr,
        dv_ptr,
        scale,
        tile * BLOCK_N,
        batch,
        group,
        groups=groups,
        keys=keys,
        BLOCK_N=BLOCK_N,
        DIM=DIM,
        SIZE=SIZE,
        VALUE_DIM=VALUE_DIM,
        VALUE_SIZE=VALUE_SIZE,
    )
