"""A lightning indexer: scores of listed keys with gradients, scores of all keys, and the selection.

``score = scale sum_h w[h] relu(q[h] . k)``. Products of 16-bit numbers are exact in fp32, so
results differ from others by the order of sums alone. Heads are added in order.
Source: DeepSeek-AI 2025 (arXiv:2512.02556).
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.attention.attention_kernels import (
    add_product,
    load_rows,
    product,
    store_rows,
)
from liger_multi.backends.triton.attention.sparse_attention_kernels import (
    load_list,
    load_places,
)
from liger_multi.backends.triton.common.rows import assume_rows, round_to


@triton.jit
def _relu(s):
    """max(s, 0), and NaN of NaN, as in PyTorch: the plain maximum would return 0."""
    return tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL)


# --- scores of listed keys ---


@triton.jit
def _indexer_scores_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    indices_ptr,
    scores_ptr,
    q_strides,
    k_strides,
    w_strides,
    queries,
    keys,
    heads,
    count,
    scale,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores of the keys that one query lists.

    Program: one query. BLOCK_H is at least the number of heads. Strides of q go from one element of
    the batch, query and head to the next.
    Reads q and w once, then the listed keys, BLOCK_N at a time. Writes scores (batch, query, slot):
    -inf where absent, NaN for a key that does not exist.
    """
    pid = tl.program_id(0).to(tl.int64)
    query, batch = pid % queries, pid // queries
    head = tl.arange(0, BLOCK_H)
    own = head < heads
    q_ptr += batch * q_strides[0] + query * q_strides[1]
    w_ptr += batch * w_strides[0] + query * w_strides[1]
    k_ptr += batch * k_strides[0]
    q = load_places(q_ptr, head, own, q_strides[2], DIM, SIZE)
    w = tl.load(w_ptr + head * w_strides[2], mask=own, other=0.0).to(tl.float32)
    for start in tl.range(0, count, BLOCK_N, num_stages=STAGES):
        place, inside = load_list(indices_ptr + pid * count, start, count, keys, BLOCK_N)
        k = load_places(k_ptr, place, inside, k_strides[1], DIM, SIZE)
        s = _relu(product(k, tl.trans(q)))
        scores = tl.sum(s * w[None, :], axis=1) * scale
        scores = tl.where(place < 0, float("-inf"), scores)
        scores = tl.where(place >= keys, float("nan"), scores)
        slot = start + tl.arange(0, BLOCK_N)
        tl.store(scores_ptr + pid * count + slot, scores, mask=slot < count)


@triton.jit
def _indexer_backward_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    indices_ptr,
    dscores_ptr,
    dq_ptr,
    dw_ptr,
    parts_ptr,
    q_strides,
    k_strides,
    w_strides,
    begin,
    queries,
    keys,
    heads,
    count,
    scale,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of one query and its weights, and what it gives to the keys that it lists.

    Program: one query of one element of the batch to which q, k, w, lists and results point
    already; the first query is ``begin``. Reads q and w once, then the listed keys and the
    gradients of their scores. Writes dq (query, head), dw (query, head) and, with ``parts_ptr``,
    fp32 rows (query, slot); those of absent slots are never read.
    """
    row = tl.program_id(0).to(tl.int64)
    query = begin + row
    head = tl.arange(0, BLOCK_H)
    own = head < heads
    q = load_places(q_ptr + query * q_strides[1], head, own, q_strides[2], DIM, SIZE)
    w_ptr += query * w_strides[1]
    w = tl.load(w_ptr + head * w_strides[2], mask=own, other=0.0).to(tl.float32)
    dq = tl.zeros([BLOCK_H, SIZE], tl.float32)
    dw = tl.zeros([BLOCK_H], tl.float32)
    for start in tl.range(0, count, BLOCK_N, num_stages=STAGES):
        place, inside = load_list(indices_ptr + query * count, start, count, keys, BLOCK_N)
        slot = start + tl.arange(0, BLOCK_N)
        up = tl.load(dscores_ptr + query * count + slot, mask=inside, other=0.0) * scale
        k = load_places(k_ptr, place, inside, k_strides[1], DIM, SIZE)
        s = product(k, tl.trans(q))
        dw += tl.sum(_relu(s) * up[:, None], axis=0)
        dproducts = tl.where(s <= 0.0, 0.0, up[:, None] * w[None, :])
        dq = add_product(dq, tl.trans(dproducts), k)
        if parts_ptr is not None:
            dk = add_product(tl.zeros([BLOCK_N, SIZE], tl.float32), dproducts, q)
            store_rows(parts_ptr + row * count * DIM, dk, start, DIM, count, BLOCK_N, DIM, SIZE)
    store_rows(dq_ptr + query * heads * DIM, dq, 0, DIM, heads, BLOCK_H, DIM, SIZE)
    tl.store(dw_ptr + query * heads + head, round_to(dw, dw_ptr.dtype.element_ty), mask=own)


# --- scores of all keys, and the selection ---


@triton.jit
def _visible_range(ranges_ptr, query, queries, keys, CAUSAL: tl.constexpr):
    """First key of some queries and one past their last; queries past the last see none."""
    if ranges_ptr is not None:
        real = query < queries
        low = tl.maximum(tl.load(ranges_ptr + 2 * query, mask=real, other=0), 0)
        high = tl.minimum(tl.load(ranges_ptr + 2 * query + 1, mask=real, other=0), keys)
        return low, high
    else:
        high = query * 0 + keys
        if CAUSAL:
            high = tl.minimum(tl.maximum(query + (keys - queries) + 1, 0), keys)
        return query * 0, tl.where(query < queries, high, 0)


@triton.jit
def _indexer_all_scores_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    ranges_ptr,
    scores_ptr,
    q_strides,
    k_strides,
    w_strides,
    scores_stride,
    begin,
    queries,
    keys,
    heads,
    scale,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Scores of a tile of queries and a tile of keys.

    Program: BLOCK_M queries by BLOCK_N keys of one element of the batch to which all pointers point
    already; the first query is ``begin``.
    Reads its keys once, then q and w of one head after the other. Writes scores (query, key) fp32,
    whatever a query sees; a tile of which no query sees anything is left out.
    """
    tiles = (keys + BLOCK_N - 1) // BLOCK_N
    first, start = (tl.program_id(0) // tiles) * BLOCK_M, (tl.program_id(0) % tiles) * BLOCK_N
    row, col = first + tl.arange(0, BLOCK_M), start + tl.arange(0, BLOCK_N)
    low, high = _visible_range(ranges_ptr, begin + row, queries, keys, CAUSAL)
    if tl.max(tl.where((low < start + BLOCK_N) & (high > start) & (low < high), 1, 0)) == 0:
        return
    query = tl.cast(begin + first, tl.int64)
    k = load_rows(k_ptr, start, k_strides[1], keys, True, BLOCK_N, DIM, SIZE)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    rows, real = tl.arange(0, BLOCK_M), begin + row < queries
    w_ptr += query * w_strides[1] + rows.to(tl.int64) * w_strides[1]
    for head in range(heads):
        at = q_ptr + tl.cast(head, tl.int64) * q_strides[2]
        q = load_rows(at, begin + first, q_strides[1], queries, True, BLOCK_M, DIM, SIZE)
        w = tl.load(w_ptr + tl.cast(head, tl.int64) * w_strides[2], mask=real, other=0.0)
        total += _relu(product(q, tl.trans(k))) * w.to(tl.float32)[:, None]
    assume_rows(scores_ptr, scores_stride, BLOCK_M)
    scores_ptr += tl.cast(first, tl.int64) * scores_stride + start
    at = scores_ptr + (rows[:, None] * scores_stride + tl.arange(0, BLOCK_N)[None, :])
    tl.store(at, total * scale, mask=real[:, None] & (col < keys)[None, :])


@triton.jit
def _ordered_bits(s):
    """Integers in the order of fp32 numbers, all above 0 but that of -NaN; NaN is above all."""
    s = tl.where(s == s, s + 0.0, float("inf"))  # -0 becomes 0
    bits = s.to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (flipped.to(tl.int64) + 0x80000000).to(tl.uint32)


@triton.jit
def _digit(counts, rank, SHIFT: tl.constexpr):
    """The digit of the ``rank``-th highest number, and how many numbers of that digit count.

    Args:
        counts: How many numbers have each digit.
        rank: At least 1, at most their sum.
        SHIFT: Unused bits below the digit.
    """
    digit = tl.arange(0, 256)
    below = tl.cumsum(counts, 0)  # and itself
    above = tl.sum(counts, 0) - below
    here = (above < rank) & (above + counts >= rank)
    chosen = tl.sum(tl.where(here, digit, 0), 0)
    rest = rank - tl.sum(tl.where(here, above, 0), 0)
    return chosen.to(tl.uint32) << SHIFT, rest


@triton.jit
def _load_tile(scores_ptr, start, BLOCK: tl.constexpr):
    """A whole tile of a row, which is padded to whole tiles: loads without a mask are wide."""
    return tl.load(scores_ptr + tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK))


@triton.jit
def _count_digits(scores_ptr, low, high, prefix, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many scores of a range have each digit, of those that begin with ``prefix``."""
    counts = tl.zeros([256], tl.int32)
    lane = tl.arange(0, BLOCK)
    left = 0
    for start in tl.range(low // BLOCK * BLOCK, high, BLOCK):
        mask = (start + lane >= low) & (start + lane < high)
        bits = _ordered_bits(_load_tile(scores_ptr, start, BLOCK))
        if SHIFT < 24:
            mask = mask & ((bits >> (SHIFT + 8)) == (prefix >> (SHIFT + 8)))
        digit = tl.where(mask, ((bits >> SHIFT) & 255).to(tl.int32), 0)
        counts += tl.histogram(digit, 256).to(tl.int32)
        left += tl.sum(tl.where(mask, 0, 1), 0)  # those of others, which were counted as 0
    return counts - tl.where(tl.arange(0, 256) == 0, left, 0)


@triton.jit
def _indexer_select_kernel(
    scores_ptr,
    ranges_ptr,
    indices_ptr,
    top_scores_ptr,
    scores_stride,
    begin,
    queries,
    keys,
    count,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The highest scores of one query, by their digits of eight bits.

    Program: one query of one element of the batch to which all pointers point already; the first
    query is ``begin``. Rows of scores are padded to whole tiles, with any numbers.
    Reads the scores of the keys that the query sees: four times to find the lowest score that is
    selected, digit after digit, and once to write indices and scores of those above it, and of the
    first ones that equal it. All of them are selected where there are no more than ``count``.
    Writes (query, count), -1 and -inf after the last.
    """
    row = tl.program_id(0)
    low, high = _visible_range(ranges_ptr, begin + row, queries, keys, CAUSAL)
    scores_ptr += row.to(tl.int64) * scores_stride
    indices_ptr += (begin + row).to(tl.int64) * count
    top_scores_ptr += (begin + row).to(tl.int64) * count
    least = tl.full([], 0, tl.uint32)
    rest = count
    if high - low > count:
        for step in tl.static_range(4):
            counts = _count_digits(scores_ptr, low, high, least, 24 - 8 * step, BLOCK)
            digit, rest = _digit(counts, rest, 24 - 8 * step)
            least = least | digit
    lane = tl.arange(0, BLOCK)
    taken, equals = 0, 0
    for start in tl.range(low // BLOCK * BLOCK, high, BLOCK):
        mask = (start + lane >= low) & (start + lane < high)
        s = _load_tile(scores_ptr, start, BLOCK)
        bits = _ordered_bits(s)
        equal = mask & (bits == least)
        before = equals + tl.cumsum(equal.to(tl.int32), 0)
        chosen = (mask & (bits > least)) | (equal & (before <= rest))
        at = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(indices_ptr + at, start + lane, mask=chosen)
        tl.store(top_scores_ptr + at, s, mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), 0)
        equals += tl.sum(equal.to(tl.int32), 0)
    for start in tl.range(taken, count, BLOCK):
        at = start + lane
        tl.store(indices_ptr + at, at * 0 - 1, mask=at < count)
        tl.store(top_scores_ptr + at, at * 0.0 - float("inf"), mask=at < count)
