"""Attention with ranges of keys: kernels whose programs own a tile of queries.

A program passes over the blocks of keys that any of its queries sees, with a running softmax.
Backward does the same for the gradient of the queries. Blocks that no query of the tile sees are
skipped, not masked.
Source: Dao 2023 (arXiv:2307.08691).
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.attention.attention_loops import (
    forward_loop,
    load_rows,
    query_loop,
    store_rows,
)
from liger_multi.backends.triton.common.rows import LN2, LOG2E


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
    q_ptr, k_ptr, v_ptr, sinks_ptr, ranges_ptr, y_ptr, lse_ptr,
    q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    ranges_batch, blocks, heads, groups, queries, keys, scale, softcap,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention forward of one tile of queries, with a running softmax over the keys.

    Program: BLOCK_M queries of one head. Several heads may share one head of K and V (a group).
    Reads its queries once, then the blocks of K and V that any of them sees. Writes y in the order
    (batch, query, head) and lse, the natural log-sum-exp of the scores.
    A sink is a score without a value: it starts the maximum and the sum. A row that sees neither a
    key nor a sink gets y = 0 and lse = -inf.
    """
    block, head, batch = _place(blocks, heads, RANGES)
    group = head // (heads // groups)
    start = block * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + group * k_head
    v_ptr += batch * v_batch + group * v_head
    q = load_rows(q_ptr, start, q_stride, queries, True, BLOCK_M, DIM, SIZE)
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
        q, acc, top, total, start, ranges_ptr, k_ptr, v_ptr, k_stride, v_stride, queries, keys,
        scale, softcap, RANGES, CAUSAL, CAPPED, BLOCK_N, DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
    )  # fmt: skip
    some = total > 0.0
    total = tl.where(some, total, 1.0)
    lse = tl.where(some, (top + tl.log2(total)) * LN2, float("-inf"))
    tl.store(lse_ptr + (batch * heads + head) * queries + rows, lse, mask=rows < queries)
    y_ptr += (batch * queries * heads + head) * VALUE_DIM
    y = acc / total[:, None]
    store_rows(y_ptr, y, start, heads * VALUE_DIM, queries, BLOCK_M, VALUE_DIM, VALUE_SIZE)


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
    """Gradient of one tile of queries, and the sums of dy * y that other gradients need.

    Program: BLOCK_M queries of one head.
    Reads dy and y first, and writes their sum of products per row to ``inner_ptr``. The gradients
    of keys and sinks read it later. With ``dq_ptr``, it then reads q and lse, passes over K and V
    as forward does, and writes dq. Rows past the last query get lse = inf, so that their
    probabilities are 0.
    """
    block, head, batch = _place(blocks, heads, RANGES)
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
        dq = tl.zeros([BLOCK_M, SIZE], tl.float32)
        dq = query_loop(
            q, dy, dq, lse, inner, start, ranges_ptr, k_ptr, v_ptr, k_stride, v_stride, queries,
            keys, scale, softcap, RANGES, CAUSAL, CAPPED, BLOCK_N, DIM, SIZE, VALUE_DIM,
            VALUE_SIZE, STAGES,
        )  # fmt: skip
        dq_ptr += (batch * queries * heads + head) * DIM
        store_rows(dq_ptr, dq * scale, start, heads * DIM, queries, BLOCK_M, DIM, SIZE)
