"""Attention with ranges of keys: one kernel forward, two backward, no atomic sums.

A tile of queries walks over the blocks of keys that any of its rows sees, with a running softmax;
backward does the same for the gradient of the queries, and a tile of keys walks over the queries of
all heads that share it. Work of tiles that see little is skipped, not masked.
Source: Dao 2023 (arXiv:2307.08691).
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.attention_walks import (
    forward_walk,
    key_walk,
    load_bounds,
    load_rows,
    query_walk,
    whole_blocks,
)  # fmt: skip
from liger_multi.backends.triton.common import LN2, LOG2E, assume_rows, round_to


@triton.jit
def _place(blocks, heads):
    """The block (the last ones, which see most, come first), head and batch of this program."""
    pid = tl.program_id(0)
    rest = pid // blocks
    return blocks - 1 - pid % blocks, (rest % heads).to(tl.int64), (rest // heads).to(tl.int64)


@triton.jit
def _store_rows(
    ptr, value, start, stride, count, ROWS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr
):
    row, col = tl.arange(0, ROWS), tl.arange(0, SIZE)
    mask = (start + row < count)[:, None] & (col < DIM)[None, :]
    assume_rows(ptr, stride, ROWS)
    ptr += tl.cast(start, tl.int64) * stride
    at = ptr + (row[:, None] * stride + col[None, :])
    tl.store(at, round_to(value, ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, ranges_ptr, y_ptr, lse_ptr,
    q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    ranges_batch, blocks, heads, groups, queries, keys, scale, softcap,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block, head, batch = _place(blocks, heads)
    group = head // (heads // groups)
    start = block * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + group * k_head
    v_ptr += batch * v_batch + group * v_head
    q = load_rows(q_ptr, start, q_stride, queries, True, BLOCK_M, DIM, SIZE)
    if RANGES > 0:
        ranges_ptr += batch * ranges_batch
    low, high = load_bounds(ranges_ptr, rows, queries, keys, RANGES, CAUSAL, 0)
    begin, first, last, end = whole_blocks(low, high, BLOCK_N)
    acc = tl.zeros([BLOCK_M, VALUE_SIZE], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        top = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E + total
        total += 1.0
    if RANGES > 0:
        acc, top, total = forward_walk(
            q, acc, top, total, low, high, k_ptr, v_ptr, k_stride, v_stride, keys,
            begin, tl.minimum(first, end), scale, softcap, CAPPED, True, BLOCK_N,
            DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
        )  # fmt: skip
    acc, top, total = forward_walk(
        q, acc, top, total, low, high, k_ptr, v_ptr, k_stride, v_stride, keys, first, last,
        scale, softcap, CAPPED, False, BLOCK_N, DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
    )  # fmt: skip
    acc, top, total = forward_walk(
        q, acc, top, total, low, high, k_ptr, v_ptr, k_stride, v_stride, keys, last, end,
        scale, softcap, CAPPED, True, BLOCK_N, DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
    )  # fmt: skip
    if RANGES == 4:
        low, high = load_bounds(ranges_ptr, rows, queries, keys, RANGES, CAUSAL, 1)
        begin, end = tl.min(tl.where(low < high, low, keys)), tl.max(tl.where(low < high, high, 0))
        acc, top, total = forward_walk(
            q, acc, top, total, low, high, k_ptr, v_ptr, k_stride, v_stride, keys, begin, end,
            scale, softcap, CAPPED, True, BLOCK_N, DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
        )  # fmt: skip
    some = total > 0.0
    total = tl.where(some, total, 1.0)
    lse = tl.where(some, (top + tl.log2(total)) * LN2, float("-inf"))
    tl.store(lse_ptr + (batch * heads + head) * queries + rows, lse, mask=rows < queries)
    y_ptr += (batch * queries * heads + head) * VALUE_DIM
    y = acc / total[:, None]
    _store_rows(y_ptr, y, start, heads * VALUE_DIM, queries, BLOCK_M, VALUE_DIM, VALUE_SIZE)


@triton.jit
def _attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, dy_ptr, y_ptr, lse_ptr, ranges_ptr, dq_ptr, inner_ptr,
    q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    dy_batch, dy_head, dy_stride, y_batch, y_head, y_stride,
    ranges_batch, blocks, heads, groups, queries, keys, scale, softcap,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block, head, batch = _place(blocks, heads)
    group = head // (heads // groups)
    start = block * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    dy_ptr += batch * dy_batch + head * dy_head
    y_ptr += batch * y_batch + head * y_head
    dy = load_rows(dy_ptr, start, dy_stride, queries, True, BLOCK_M, VALUE_DIM, VALUE_SIZE)
    y = load_rows(y_ptr, start, y_stride, queries, True, BLOCK_M, VALUE_DIM, VALUE_SIZE)
    inner = tl.sum(dy.to(tl.float32) * y.to(tl.float32), axis=1)
    here = (batch * heads + head) * queries + rows
    tl.store(inner_ptr + here, inner, mask=rows < queries)
    if dq_ptr is not None:
        lse = tl.load(lse_ptr + here, mask=rows < queries, other=float("inf")) * LOG2E
        q_ptr += batch * q_batch + head * q_head
        k_ptr += batch * k_batch + group * k_head
        v_ptr += batch * v_batch + group * v_head
        q = load_rows(q_ptr, start, q_stride, queries, True, BLOCK_M, DIM, SIZE)
        if RANGES > 0:
            ranges_ptr += batch * ranges_batch
        low, high = load_bounds(ranges_ptr, rows, queries, keys, RANGES, CAUSAL, 0)
        begin, first, last, end = whole_blocks(low, high, BLOCK_N)
        dq = tl.zeros([BLOCK_M, SIZE], tl.float32)
        if RANGES > 0:
            dq = query_walk(
                q, dy, dq, lse, inner, low, high, k_ptr, v_ptr, k_stride, v_stride, keys,
                begin, tl.minimum(first, end), scale, softcap, CAPPED, True, BLOCK_N,
                DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
            )  # fmt: skip
        dq = query_walk(
            q, dy, dq, lse, inner, low, high, k_ptr, v_ptr, k_stride, v_stride, keys, first, last,
            scale, softcap, CAPPED, False, BLOCK_N, DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
        )  # fmt: skip
        dq = query_walk(
            q, dy, dq, lse, inner, low, high, k_ptr, v_ptr, k_stride, v_stride, keys, last, end,
            scale, softcap, CAPPED, True, BLOCK_N, DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
        )  # fmt: skip
        if RANGES == 4:
            low, high = load_bounds(ranges_ptr, rows, queries, keys, RANGES, CAUSAL, 1)
            begin = tl.min(tl.where(low < high, low, keys))
            end = tl.max(tl.where(low < high, high, 0))
            dq = query_walk(
                q, dy, dq, lse, inner, low, high, k_ptr, v_ptr, k_stride, v_stride, keys,
                begin, end, scale, softcap, CAPPED, True, BLOCK_N,
                DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
            )  # fmt: skip
        dq_ptr += (batch * queries * heads + head) * DIM
        _store_rows(dq_ptr, dq * scale, start, heads * DIM, queries, BLOCK_M, DIM, SIZE)


@triton.jit
def _reach(spans_ptr, place, queries, keys, BLOCK_M: tl.constexpr):
    """From which whole block to which query any may see the keys of this tile."""
    begin = tl.min(tl.load(spans_ptr, mask=place < keys, other=queries))
    end = tl.max(tl.load(spans_ptr + keys, mask=place < keys, other=0))
    return begin // BLOCK_M * BLOCK_M, end


@triton.jit
def _attention_backward_keys_kernel(
    q_ptr, k_ptr, v_ptr, dy_ptr, lse_ptr, inner_ptr, ranges_ptr, spans_ptr, dk_ptr, dv_ptr,
    q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    dy_batch, dy_head, dy_stride,
    ranges_batch, blocks, heads, groups, queries, keys, scale, softcap,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # spans_ptr: which queries may see each key, (batch, ranges, first and last, keys)
    block, group, batch = _place(blocks, groups)
    shared = heads // groups
    start = (blocks - 1 - block) * BLOCK_N
    place = start + tl.arange(0, BLOCK_N)
    k_ptr += batch * k_batch + group * k_head
    v_ptr += batch * v_batch + group * v_head
    k = load_rows(k_ptr, start, k_stride, keys, True, BLOCK_N, DIM, SIZE)
    v = load_rows(v_ptr, start, v_stride, keys, True, BLOCK_N, VALUE_DIM, VALUE_SIZE)
    begin, masked, end = 0, 0, queries
    if RANGES > 0:
        spans_ptr += ranges_batch // queries * batch * keys + place  # or one for all
        ranges_ptr += batch * ranges_batch
        begin, end = _reach(spans_ptr, place, queries, keys, BLOCK_M)
        masked = end
    elif CAUSAL:
        begin = tl.maximum(start - (keys - queries), 0) // BLOCK_M * BLOCK_M
        masked = tl.maximum(start + BLOCK_N - 1 - (keys - queries), 0)
        masked = tl.minimum((masked + BLOCK_M - 1) // BLOCK_M * BLOCK_M, tl.maximum(end, begin))
    dk = tl.zeros([BLOCK_N, SIZE], tl.float32)
    dv = tl.zeros([BLOCK_N, VALUE_SIZE], tl.float32)
    for h in range(shared):
        head = group * shared + h
        q_at = q_ptr + batch * q_batch + head * q_head
        dy_at = dy_ptr + batch * dy_batch + head * dy_head
        lse_at = lse_ptr + (batch * heads + head) * queries
        inner_at = inner_ptr + (batch * heads + head) * queries
        if CAUSAL or RANGES > 0:
            dk, dv = key_walk(
                k, v, dk, dv, place, q_at, dy_at, lse_at, inner_at, ranges_ptr, q_stride,
                dy_stride, queries, keys, begin, masked, scale, softcap, RANGES,
                CAUSAL, 0, CAPPED, True, BLOCK_M, DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
            )  # fmt: skip
        if RANGES == 0:
            dk, dv = key_walk(
                k, v, dk, dv, place, q_at, dy_at, lse_at, inner_at, ranges_ptr, q_stride,
                dy_stride, queries, keys, masked, end, scale, softcap, RANGES, CAUSAL, 0, CAPPED,
                False, BLOCK_M, DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
            )  # fmt: skip
        if RANGES == 4:
            begin2, end2 = _reach(spans_ptr + 2 * keys, place, queries, keys, BLOCK_M)
            dk, dv = key_walk(
                k, v, dk, dv, place, q_at, dy_at, lse_at, inner_at, ranges_ptr, q_stride,
                dy_stride, queries, keys, begin2, end2, scale, softcap, RANGES, CAUSAL, 1,
                CAPPED, True, BLOCK_M, DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
            )  # fmt: skip
    if dk_ptr is not None:
        dk_ptr += (batch * keys * groups + group) * DIM
        _store_rows(dk_ptr, dk * scale, start, groups * DIM, keys, BLOCK_N, DIM, SIZE)
    if dv_ptr is not None:
        dv_ptr += (batch * keys * groups + group) * VALUE_DIM
        _store_rows(dv_ptr, dv, start, groups * VALUE_DIM, keys, BLOCK_N, VALUE_DIM, VALUE_SIZE)
