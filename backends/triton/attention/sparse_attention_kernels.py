"""Attention over lists of keys: its kernels.

A program of forward owns one query and a block of its heads, which share the list. It gathers the
listed keys, a tile of them at a time, with a running softmax. So does backward of the queries.

A listed key is read by all heads of a query, but by few queries of those nearby. So the gradients
of keys are not summed by a program of each key, which would read all heads of every query that
lists it: 144 KiB for a key of 1 KiB. What a query gives to the keys that it lists is a GEMM over
its heads instead: of probabilities and gradients of scores, which backward of the queries writes
for some queries at a time, with dy and queries. :mod:`.pairs_of_lists` then adds up the parts of
every key in order.
Channels of a key are in two parts, each padded to a power of two: LEAD and REST. Without values of
their own (SHARED), the LEAD channels are the value.
Source: Dao 2023 (arXiv:2307.08691) for the running softmax.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.attention.attention_kernels import (
    add_product,
    product,
    store_rows,
)
from liger_multi.backends.triton.common.rows import LN2, LOG2E, add_dot, round_to


@triton.jit
def load_places(ptr, place, inside, stride, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Rows of DIM columns by their places, padded with zeros to SIZE; zeros where not inside.

    Rows may be far apart: offsets have 64 bits.
    """
    col = tl.arange(0, SIZE)
    at = ptr + (place.to(tl.int64) * stride)[:, None] + col[None, :]
    if DIM < SIZE:
        return tl.load(at, mask=inside[:, None] & (col < DIM)[None, :], other=0.0)
    return tl.load(at, mask=inside[:, None], other=0.0)


@triton.jit
def load_two(
    ptr,
    place,
    inside,
    stride,
    LEAD: tl.constexpr,
    LEAD_SIZE: tl.constexpr,
    REST: tl.constexpr,
    REST_SIZE: tl.constexpr,
):
    """Both parts of the channels of some rows; the second one is the first where REST is 0."""
    lead = load_places(ptr, place, inside, stride, LEAD, LEAD_SIZE)
    if REST > 0:
        return lead, load_places(ptr + LEAD, place, inside, stride, REST, REST_SIZE)
    else:
        return lead, lead


@triton.jit
def product_of_two(a, a_rest, b, b_rest, REST: tl.constexpr):
    """``a @ b'`` over both parts of the channels."""
    s = product(a, tl.trans(b))
    if REST > 0:
        s = add_dot(a_rest, tl.trans(b_rest), s)
    return s


@triton.jit
def load_list(indices_ptr, start, count, keys, BLOCK: tl.constexpr):
    """A tile of a list: places, and which of them are keys."""
    slot = start + tl.arange(0, BLOCK)
    place = tl.load(indices_ptr + slot, mask=slot < count, other=-1)
    return place, (place >= 0) & (place < keys)


@triton.jit
def _end_of_list(indices_ptr, count, BLOCK: tl.constexpr):
    """One past the last slot that holds a key: indexers put absent slots (-1) last."""
    end = 0
    for start in range(0, count, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        place = tl.load(indices_ptr + slot, mask=slot < count, other=-1)
        end = tl.maximum(end, tl.max(tl.where(place >= 0, slot + 1, 0), 0))
    return end


@triton.jit
def _place_of_query(heads, groups, queries, BLOCK_H: tl.constexpr):
    """First head, group, query and batch of a program; programs of one query are adjacent."""
    shared = heads // groups
    blocks = (shared + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    block, rest = pid % blocks, pid // blocks
    group, row = rest % groups, rest // groups
    return (
        block * BLOCK_H,
        shared,
        group,
        (row % queries).to(tl.int64),
        (row // queries).to(tl.int64),
    )


@triton.jit
def _sparse_attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices_ptr,
    y_ptr,
    lse_ptr,
    strides,
    sizes,
    scale,
    LEAD: tl.constexpr,
    LEAD_SIZE: tl.constexpr,
    REST: tl.constexpr,
    REST_SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    LIST: tl.constexpr,
):
    """Attention forward of one query over its list.

    Program: BLOCK_H heads of one query, of one head of keys. Strides go from one element of the
    batch, head and row to the next.
    Reads the queries once, then the listed keys and values, BLOCK_N at a time. Without ``v_ptr``,
    the LEAD channels are the values. Writes y in the order (batch, query, head) and lse (batch,
    head, query). A query without keys gets y = 0 and lse = -inf; one whose list names a key that
    does not exist gets NaN.
    """
    q_strides = strides[0:3]
    k_strides = strides[3:6]
    v_strides = strides[6:9]
    list_strides = strides[9:12]
    heads, groups, queries, keys, count = sizes
    first, shared, group, query, batch = _place_of_query(heads, groups, queries, BLOCK_H)
    row = tl.arange(0, BLOCK_H)
    own = first + row < shared
    head = group * shared + first + row
    q_ptr += batch * q_strides[0] + query * q_strides[2]
    k_ptr += batch * k_strides[0] + group.to(tl.int64) * k_strides[1]
    if v_ptr is not None:
        v_ptr += batch * v_strides[0] + group.to(tl.int64) * v_strides[1]
    indices_ptr += batch * list_strides[0] + group * list_strides[1] + query * list_strides[2]
    q, q_rest = load_two(q_ptr, head, own, q_strides[1], LEAD, LEAD_SIZE, REST, REST_SIZE)
    acc = tl.zeros([BLOCK_H, VALUE_SIZE], tl.float32)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    end = _end_of_list(indices_ptr, count, LIST)
    for start in tl.range(0, end, BLOCK_N, num_stages=STAGES):
        place, inside = load_list(indices_ptr, start, count, keys, BLOCK_N)
        k, k_rest = load_two(k_ptr, place, inside, k_strides[2], LEAD, LEAD_SIZE, REST, REST_SIZE)
        s = product_of_two(q, q_rest, k, k_rest, REST) * (scale * LOG2E)
        s = tl.where(inside[None, :], s, float("-inf"))
        s = tl.where((place >= keys)[None, :], float("nan"), s)
        new = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(p, axis=1)
        if v_ptr is None:
            acc = add_product(acc * decay[:, None], p, k)
        else:
            v = load_places(v_ptr, place, inside, v_strides[2], VALUE, VALUE_SIZE)
            acc = add_product(acc * decay[:, None], p, v)
        top = new
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    lse = tl.where(none, float("-inf"), (top + tl.log2(total)) * LN2)
    tl.store(lse_ptr + (batch * heads + head) * queries + query, lse, mask=own)
    y_ptr += ((batch * queries + query) * heads + group * shared) * VALUE
    y = acc / total[:, None]
    store_rows(y_ptr, y, first, VALUE, shared, BLOCK_H, VALUE, VALUE_SIZE)


@triton.jit
def _sparse_attention_backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices_ptr,
    dy_ptr,
    y_ptr,
    lse_ptr,
    dq_ptr,
    p_ptr,
    ds_ptr,
    strides,
    sizes,
    scale,
    LEAD: tl.constexpr,
    LEAD_SIZE: tl.constexpr,
    REST: tl.constexpr,
    REST_SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    LIST: tl.constexpr,
):
    """Gradient of the heads of one query, and what gradients of keys are made of.

    Program: as in forward; the first query is ``begin``.
    Reads dy, y, q and lse once, then the listed keys. With ``dq_ptr``, it writes dq in the order
    (batch, query, head); with ``p_ptr``, probabilities and gradients of scores before ``scale``, in
    the order (query, group, slot, head) from ``begin`` on, but for tiles after the last key.
    """
    q_strides = strides[0:3]
    k_strides = strides[3:6]
    v_strides = strides[6:9]
    list_strides = strides[9:12]
    dy_strides = strides[12:15]
    y_strides = strides[15:18]
    begin, heads, groups, queries, keys, count = sizes
    first, shared, group, place, batch = _place_of_query(heads, groups, queries, BLOCK_H)
    query = begin + place
    row = tl.arange(0, BLOCK_H)
    own = first + row < shared
    head = group * shared + first + row
    dy_ptr += batch * dy_strides[0] + query * dy_strides[2]
    y_ptr += batch * y_strides[0] + query * y_strides[2]
    dy = load_places(dy_ptr, head, own, dy_strides[1], VALUE, VALUE_SIZE)
    y = load_places(y_ptr, head, own, y_strides[1], VALUE, VALUE_SIZE)
    inner = tl.sum(dy.to(tl.float32) * y.to(tl.float32), axis=1)
    here = (batch * heads + head) * queries + query
    lse = tl.load(lse_ptr + here, mask=own, other=float("inf")) * LOG2E
    q_ptr += batch * q_strides[0] + query * q_strides[2]
    k_ptr += batch * k_strides[0] + group.to(tl.int64) * k_strides[1]
    if v_ptr is not None:
        v_ptr += batch * v_strides[0] + group.to(tl.int64) * v_strides[1]
    indices_ptr += batch * list_strides[0] + group * list_strides[1] + query * list_strides[2]
    q, q_rest = load_two(q_ptr, head, own, q_strides[1], LEAD, LEAD_SIZE, REST, REST_SIZE)
    dq = tl.zeros([BLOCK_H, LEAD_SIZE], tl.float32)
    dq_rest = tl.zeros([BLOCK_H, REST_SIZE], tl.float32)
    end = _end_of_list(indices_ptr, count, LIST)
    for start in tl.range(0, end, BLOCK_N, num_stages=STAGES):
        at, inside = load_list(indices_ptr, start, count, keys, BLOCK_N)
        k, k_rest = load_two(k_ptr, at, inside, k_strides[2], LEAD, LEAD_SIZE, REST, REST_SIZE)
        s = product_of_two(q, q_rest, k, k_rest, REST) * (scale * LOG2E)
        p = tl.where((at >= 0)[None, :], tl.exp2(s - lse[:, None]), 0.0)
        if v_ptr is None:
            dp = product(dy, tl.trans(k))
        else:
            v = load_places(v_ptr, at, inside, v_strides[2], VALUE, VALUE_SIZE)
            dp = product(dy, tl.trans(v))
        ds = p * (dp - inner[:, None])
        if p_ptr is not None:
            slot = start + tl.arange(0, BLOCK_N)
            pair = ((place * groups + group) * count + slot)[None, :] * shared
            pair += (first + row)[:, None]
            mask = own[:, None] & (slot < count)[None, :]
            tl.store(p_ptr + pair, round_to(p, p_ptr.dtype.element_ty), mask=mask)
            tl.store(ds_ptr + pair, round_to(ds, ds_ptr.dtype.element_ty), mask=mask)
        if dq_ptr is not None:
            dq = add_product(dq, ds, k)
            if REST > 0:
                dq_rest = add_product(dq_rest, ds, k_rest)
    if dq_ptr is not None:
        dq_ptr += ((batch * queries + query) * heads + group * shared) * (LEAD + REST)
        store_rows(dq_ptr, dq * scale, first, LEAD + REST, shared, BLOCK_H, LEAD, LEAD_SIZE)
        if REST > 0:
            dq_ptr += LEAD
            dq_rest *= scale
            store_rows(dq_ptr, dq_rest, first, LEAD + REST, shared, BLOCK_H, REST, REST_SIZE)


@triton.jit
def _place_of_tile(pid, groups, count, BLOCK_N: tl.constexpr):
    """First slot, group and query of a program; programs of one query are adjacent."""
    tiles = (count + BLOCK_N - 1) // BLOCK_N
    tile, rest = pid % tiles, pid // tiles
    return tile * BLOCK_N, rest % groups, (rest // groups).to(tl.int64)


@triton.jit
def _add_heads(
    total,
    pairs_ptr,
    x_ptr,
    x_stride,
    slot,
    col,
    count,
    shared,
    COLS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``total + pairs @ x`` of pairs (slot, head) and rows of heads, of which some columns."""
    for first in tl.range(0, shared, BLOCK_H, num_stages=STAGES):
        head = first + tl.arange(0, BLOCK_H)
        at = pairs_ptr + (slot[:, None] * shared + head[None, :])
        mask = (slot < count)[:, None] & (head < shared)[None, :]
        pairs = tl.load(at, mask=mask, other=0.0)
        at = x_ptr + (head.to(tl.int64) * x_stride)[:, None] + col[None, :]
        mask = (head < shared)[:, None] & ((col >= 0) & (col < COLS))[None, :]
        total += product(pairs, tl.load(at, mask=mask, other=0.0))
    return total


@triton.jit
def _sparse_attention_keys_kernel(
    p_ptr,
    ds_ptr,
    q_ptr,
    dy_ptr,
    indices_ptr,
    parts_ptr,
    q_strides,
    dy_strides,
    list_strides,
    begin,
    groups,
    shared,
    count,
    scale,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What queries give to the gradients of the keys and values that they list.

    Program: BLOCK_N slots by BLOCK_C columns of one query, of one head of keys, of one element of
    the batch to which q, dy and lists point already; the first query is ``begin``. Columns are
    those of the key, then of the value, which is added to the first ones where it is SHARED. Reads
    probabilities and gradients of scores, (query, group, slot, head) from ``begin`` on, with dy and
    q of the heads. Writes fp32 rows in the order (query, group, slot). A tile without keys is
    skipped, because the rows of absent slots are never read.
    """
    WIDTH: tl.constexpr = DIM if SHARED else DIM + VALUE
    COLUMNS: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    start, group, row = _place_of_tile(pid // COLUMNS, groups, count, BLOCK_N)
    query = begin + row
    slot, col = start + tl.arange(0, BLOCK_N), (pid % COLUMNS) * BLOCK_C + tl.arange(0, BLOCK_C)
    indices_ptr += group * list_strides[1] + query * list_strides[2]
    place = tl.load(indices_ptr + slot, mask=slot < count, other=-1)
    if tl.max(place, 0) < 0:
        return
    first = group.to(tl.int64) * shared
    pair = (row * groups + group) * count * shared
    total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    if (pid % COLUMNS) * BLOCK_C < DIM:
        q_ptr += query * q_strides[2] + first * q_strides[1]
        total = _add_heads(
            total,
            ds_ptr + pair,
            q_ptr,
            q_strides[1],
            slot,
            col,
            count,
            shared,
            COLS=DIM,
            BLOCK_H=BLOCK_H,
            STAGES=STAGES,
        )
        total *= scale
    value = col if SHARED else col - DIM
    if (tl.max(value, 0) >= 0) & (tl.min(value, 0) < VALUE):
        dy_ptr += query * dy_strides[2] + first * dy_strides[1]
        total = _add_heads(
            total,
            p_ptr + pair,
            dy_ptr,
            dy_strides[1],
            slot,
            value,
            count,
            shared,
            COLS=VALUE,
            BLOCK_H=BLOCK_H,
            STAGES=STAGES,
        )
    parts_ptr += ((row * groups + group) * count + start) * WIDTH
    at = parts_ptr + (tl.arange(0, BLOCK_N)[:, None] * WIDTH + col[None, :])
    tl.store(at, total, mask=(slot < count)[:, None] & (col < WIDTH)[None, :])


@triton.jit
def _sparse_attention_weights_kernel(
    q_ptr,
    k_ptr,
    indices_ptr,
    lse_ptr,
    weights_ptr,
    q_strides,
    k_strides,
    list_strides,
    heads,
    groups,
    lists,
    queries,
    keys,
    count,
    scale,
    LEAD: tl.constexpr,
    LEAD_SIZE: tl.constexpr,
    REST: tl.constexpr,
    REST_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The mean over heads of the probabilities of listed keys.

    Program: BLOCK_N listed keys of one query; its heads are all that share the list, which may be
    those of several heads of keys.
    Reads lse and, for every head of keys, the listed keys and its queries. Writes weights (batch,
    list, query, slot); 0 where absent.
    """
    start, which, at = _place_of_tile(tl.program_id(0), lists, count, BLOCK_N)
    query, batch, shared = at % queries, at // queries, heads // groups
    q_ptr += batch * q_strides[0] + query * q_strides[2]
    k_ptr += batch * k_strides[0]
    indices_ptr += batch * list_strides[0] + which * list_strides[1] + query * list_strides[2]
    place, inside = load_list(indices_ptr, start, count, keys, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    each = groups // lists
    for group in range(which * each, (which + 1) * each):
        k, k_rest = load_two(
            k_ptr + tl.cast(group, tl.int64) * k_strides[1],
            place,
            inside,
            k_strides[2],
            LEAD,
            LEAD_SIZE,
            REST,
            REST_SIZE,
        )
        for first in range(0, shared, BLOCK_H):
            lane = first + tl.arange(0, BLOCK_H)
            own, head = lane < shared, group * shared + lane
            q, q_rest = load_two(q_ptr, head, own, q_strides[1], LEAD, LEAD_SIZE, REST, REST_SIZE)
            here = (batch * heads + head) * queries + query
            lse = tl.load(lse_ptr + here, mask=own, other=float("inf")) * LOG2E
            s = product_of_two(k, k_rest, q, q_rest, REST) * (scale * LOG2E)
            total += tl.sum(tl.exp2(s - lse[None, :]), axis=1)
    total = tl.where(place < 0, 0.0, total / (each * shared))
    slot = start + tl.arange(0, BLOCK_N)
    weights_ptr += ((batch * lists + which) * queries + query) * count
    tl.store(weights_ptr + slot, total, mask=slot < count)
