"""The gradients of keys and values: a tile of keys passes over the queries that see it.

The first tiles of keys may be global tokens, which every query sees. PARTS programs share such a
long loop and start first; their fp32 sums are added in order afterwards.
Source: Dao 2023 (arXiv:2307.08691).
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.attention.attention_loops import (
    add_product,
    load_bounds,
    load_rows,
    loop_over,
    place_of,
    product,
    score,
    store_rows,
)
from liger_multi.backends.triton.common.rows import LOG2E

SEGMENT = tl.constexpr(32)  # steps of one fp32 sum
SHARED = 2  # first tiles of keys whose queries several programs may share


@triton.jit
def _key_steps(
    k, v, dk, dv, place, q_ptr, dy_ptr, lse_ptr, inner_ptr, ranges_ptr, q_stride, dy_stride,
    queries, keys, now, end, steps, begin, first, last, begin2, first2, last2, scale, softcap,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add the queries of the loop steps ``[now, end)`` to the gradients of a tile of keys.

    Scores are transposed, keys by queries. Each step loads q, dy, lse and inner of a block of
    queries and computes p, dv += p dy, ds = p (v dy' - inner), and dk += ds q.
    """
    for step in tl.range(now, end, 1 if RANGES == 4 else BLOCK, num_stages=STAGES):
        start, masked, second = place_of(
            step, steps, begin, first, last, begin2, first2, last2, RANGES, BLOCK
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
                seen = (place[:, None] >= low[None, :]) & (place[:, None] < high[None, :])
                p = tl.where(seen, p, 0.0)
        dv = add_product(dv, p, dy)
        ds = p * (product(v, tl.trans(dy)) - inner[None, :])
        if CAPPED:
            ds = ds * (1.0 - t * t)
        dk = add_product(dk, ds, q)
    return dk, dv


@triton.jit
def _key_loop(
    k, v, dk, dv, place, q_ptr, dy_ptr, lse_ptr, inner_ptr, ranges_ptr, q_stride, dy_stride,
    queries, keys, now, end, steps, begin, first, last, begin2, first2, last2, scale, softcap,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add the queries of the loop steps ``[now, end)``, in segments where the dtype is fp32.

    Queries past the last have lse = inf, so that they add nothing. In fp32, every SEGMENT steps
    have sums of their own: one chain of 65,537 queries was 1.04 times the tolerance away on an
    H200.
    """
    if k.dtype == tl.float32:
        LONG: tl.constexpr = SEGMENT if RANGES == 4 else SEGMENT * BLOCK
        for part in range(now, end, LONG):
            dk_part, dv_part = _key_steps(
                k, v, tl.zeros_like(dk), tl.zeros_like(dv), place, q_ptr, dy_ptr, lse_ptr,
                inner_ptr, ranges_ptr, q_stride, dy_stride, queries, keys, part,
                tl.minimum(part + LONG, end), steps, begin, first, last, begin2, first2, last2,
                scale, softcap, RANGES, CAUSAL, CAPPED, BLOCK, DIM, SIZE, VALUE_DIM, VALUE_SIZE,
                STAGES,
            )  # fmt: skip
            dk += dk_part
            dv += dv_part
    else:
        dk, dv = _key_steps(
            k, v, dk, dv, place, q_ptr, dy_ptr, lse_ptr, inner_ptr, ranges_ptr, q_stride,
            dy_stride, queries, keys, now, end, steps, begin, first, last, begin2, first2, last2,
            scale, softcap, RANGES, CAUSAL, CAPPED, BLOCK, DIM, SIZE, VALUE_DIM, VALUE_SIZE, STAGES,
        )  # fmt: skip
    return dk, dv


@triton.jit
def _tile_bounds(tile_bounds_ptr, tile, tiles, BLOCK: tl.constexpr):
    """Tile bounds of one tile of keys, of one range, from the table of :mod:`.attention_spans`.

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
    q_ptr, k_ptr, v_ptr, dy_ptr, lse_ptr, inner_ptr, ranges_ptr, tile_bounds_ptr, parts_ptr, dk_ptr,
    dv_ptr, q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    dy_batch, dy_head, dy_stride,
    ranges_batch, tiles, heads, groups, queries, keys, scale, softcap,
    RANGES: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SHARED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
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
    k_ptr += batch * k_batch + group * k_head
    v_ptr += batch * v_batch + group * v_head
    k = load_rows(k_ptr, start, k_stride, keys, True, BLOCK_N, DIM, SIZE)
    v = load_rows(v_ptr, start, v_stride, keys, True, BLOCK_N, VALUE_DIM, VALUE_SIZE)
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
            k, v, dk, dv, place, q_ptr + batch * q_batch + head * q_head,
            dy_ptr + batch * dy_batch + head * dy_head, lse_ptr + here, inner_ptr + here,
            ranges_ptr, q_stride, dy_stride, queries, keys, now, end, steps, begin, first, last,
            begin2, first2, last2, scale, softcap, RANGES, CAUSAL, CAPPED, BLOCK_M, DIM, SIZE,
            VALUE_DIM, VALUE_SIZE, STAGES,
        )  # fmt: skip
    if PARTS > 1:
        if parts > 1:
            parts_ptr += pid.to(tl.int64) * BLOCK_N * (SIZE + VALUE_SIZE)
            store_rows(parts_ptr, dk, 0, SIZE, BLOCK_N, BLOCK_N, SIZE, SIZE)
            parts_ptr += BLOCK_N * SIZE
            store_rows(parts_ptr, dv, 0, VALUE_SIZE, BLOCK_N, BLOCK_N, VALUE_SIZE, VALUE_SIZE)
            return
    _store(dk, dv, dk_ptr, dv_ptr, scale, start, batch, group, groups, keys, BLOCK_N, DIM, SIZE,
           VALUE_DIM, VALUE_SIZE)  # fmt: skip


@triton.jit
def _store(
    dk, dv, dk_ptr, dv_ptr, scale, start, batch, group, groups, keys, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
):  # fmt: skip
    """Write dk, times the scale of the scores, and dv of a tile of keys; each where it is wanted.

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
    parts_ptr, tile_bounds_ptr, dk_ptr, dv_ptr, ranges_batch, tiles, groups, queries, keys, scale,
    DIM: tl.constexpr, SIZE: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
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
    _store(dk, dv, dk_ptr, dv_ptr, scale, tile * BLOCK_N, batch, group, groups, keys, BLOCK_N,
           DIM, SIZE, VALUE_DIM, VALUE_SIZE)  # fmt: skip
