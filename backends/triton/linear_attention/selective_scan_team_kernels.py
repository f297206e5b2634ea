"""The selective scan of Mamba (arXiv:2312.00752) in one pass over whole sequences: its kernel.

Several threads, a team, share the states of a channel. So some sequences have threads for a whole
card without spans of tokens, whose ends are another pass. Of as many tokens as a team has threads,
each thread reads one, computes its step size and writes its result. It hands the step size to the
others, and gets their sums over states by exchanges.

B and C of a team's tokens are loaded a turn ahead: a token is little work for each thread, and a
load takes longer. Two channels a thread share them.

Neighbors hold the states of a channel, and its tokens: compilers choose the first for loads of A,
and the second (Triton 3.6) for tiles of which they do not know what is adjacent in memory: ``one``
is 1, which they must not know. Where they choose otherwise, they move tiles between threads.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.common.rows import (
    LOG2E,
    assume_cols,
    exp2_near,
    load_or,
    round_to,
)
from liger_multi.backends.triton.linear_attention.convolution_kernels import _append
from liger_multi.backends.triton.linear_attention.selective_scan_kernels import (
    _fetch_pairs,
    _load_begins,
    _silu,
    _step_sizes,
    _without,
)


@triton.jit
def _tile_at(ptr, stride, lane, token, one):
    """Pointers to channels of a team's tokens, one for each thread, if there is a tensor."""
    if ptr is None:
        return None
    else:
        return ptr + (token.to(tl.int64) * stride + lane * one)


@triton.jit
def _moved(tile, tokens, stride):
    """Pointers to tiles of later tokens."""
    return tile + tl.cast(tokens, tl.int64) * stride


@triton.jit
def _load_tiles(tile, stride, inside, TEAM: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr):
    """COUNT tiles of TEAM tokens each, zeros outside; none where there is no tensor."""
    tiles = ()
    if tile is not None:
        for i in tl.static_range(COUNT):
            at = _moved(tile, i * TEAM, stride)
            tiles = _append(tiles, tl.load(at) if EVEN else tl.load(at, mask=inside[i], other=0.0))
    return tiles


@triton.jit
def _load_teams(
    u, delta, z, strides, inside, TEAM: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr
):
    """Tiles of u, delta and z."""
    return (
        _load_tiles(u, strides[0], inside, TEAM, COUNT, EVEN),
        _load_tiles(delta, strides[1], inside, TEAM, COUNT, EVEN),
        _load_tiles(z, strides[2], inside, TEAM, COUNT, EVEN),
    )


@triton.jit
def _exist(first, token, lane, length, left, TEAM: tl.constexpr, COUNT: tl.constexpr):
    """Mask of COUNT tiles from token ``first`` on: whether token and channel exist."""
    masks = ()
    for i in tl.static_range(COUNT):
        masks = _append(masks, (lane < left) & (first + i * TEAM + token < length))
    return masks


@triton.jit
def _load_pairs(ptr, n, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """B and C of COUNT tokens."""
    bs, cs = (), ()
    for i in tl.static_range(COUNT):
        bs = _append(bs, tl.load(ptr + (2 * SIZE * i + n)))
        cs = _append(cs, tl.load(ptr + (2 * SIZE * i + SIZE + n)))
    return bs, cs


@triton.jit
def _of_token(x, i: tl.constexpr, TEAM: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr):
    """Row i of a tile (TEAM, channels), for all states (states, channels)."""
    row = tl.gather(x, tl.full([TEAM, BLOCK], i, tl.int32), 0)
    return tl.reshape(
        tl.broadcast_to(row[:, None, :], (TEAM, STATES, BLOCK)), (TEAM * STATES, BLOCK)
    )


@triton.jit
def _exchanged(parts, token, FAR: tl.constexpr, TEAM: tl.constexpr, BLOCK: tl.constexpr):
    """FAR tiles of twice as many: of rows FAR apart, each gives what the other keeps."""
    upper = (token & FAR) != 0
    partner = tl.broadcast_to(token ^ FAR, (TEAM, BLOCK))
    halves = ()
    for i in tl.static_range(FAR):
        received = tl.gather(tl.where(upper, parts[i], parts[i + FAR]), partner, 0)
        halves = _append(halves, tl.where(upper, parts[i + FAR], parts[i]) + received)
    return halves


@triton.jit
def _team_sums(parts, token, TEAM: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over the rows of TEAM tiles (TEAM, channels): row i has that of tile i.

    TEAM is 2 to the power of LEVELS.
    """
    for level in tl.static_range(LEVELS):
        parts = _exchanged(parts, token, TEAM >> (level + 1), TEAM, BLOCK)
    return parts[0]


@triton.jit(do_not_specialize=["steps", "zero"])  # a loop that is always a loop
def _selective_scan_team_kernel(
    u_ptr,
    delta_ptr,
    a_ptr,
    pairs_ptr,
    skip_ptr,
    z_ptr,
    bias_ptr,
    initial_ptr,
    first_ptr,
    y_ptr,
    final_ptr,
    before_ptr,
    row_strides,
    extents,
    steps,
    zero,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK: tl.constexpr,
    TEAMS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Results of all tokens, and the states before spans of SPAN tokens.

    Program: BLOCK channels of one sequence, TEAM threads each; TEAM times COUNT tokens a step.
    Reads all inputs, rows a step ahead, A and the first state (batch, channels, DIM), B and C of
    one step more than there are. Writes y, the last state in the form of the first, and the states
    before spans, (batch, spans, DIM, channels).
    """
    length, cols, spans = extents
    TEAM: tl.constexpr = TEAMS[0]
    LEVELS: tl.constexpr = TEAMS[1]
    COUNT: tl.constexpr = TEAMS[2]
    SPAN: tl.constexpr = TEAMS[3]
    STATES: tl.constexpr = SIZE // TEAM
    TOKENS: tl.constexpr = TEAM * COUNT
    blocks = tl.cdiv(cols, BLOCK)
    assume_cols(cols)
    batch, start = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks) * BLOCK
    left, one = cols - start, zero + 1
    token, lane, n = tl.arange(0, TEAM)[:, None], tl.arange(0, BLOCK)[None, :], tl.arange(0, SIZE)
    strides = row_strides[5], row_strides[6], row_strides[8]
    u_at = _tile_at(u_ptr + batch * row_strides[0] + start, strides[0], lane, token, one)
    delta_at = _tile_at(delta_ptr + batch * row_strides[1] + start, strides[1], lane, token, one)
    y_at = _tile_at(y_ptr + batch * length * cols + start, cols, lane, token, one)
    z_at = u_at
    if z_ptr is not None:
        z_at = _tile_at(z_ptr + batch * row_strides[3] + start, strides[2], lane, token, one)
    if first_ptr is not None:
        first_ptr += batch * row_strides[4]
    pairs_ptr += batch * (steps + 1) * (TOKENS * 2 * SIZE)
    states = (lane < left) & (n < DIM)[:, None]
    in_row, in_column = lane * DIM + n[:, None], n[:, None] * cols + (lane + zero)
    a = tl.load(a_ptr + start * DIM + in_row, mask=states, other=0.0).to(tl.float32) * LOG2E
    skip = load_or(skip_ptr, start + lane, lane < left, 0.0)
    bias = load_or(bias_ptr, start + lane, lane < left, 0.0)
    state = tl.zeros([SIZE, BLOCK], tl.float32)
    if initial_ptr is not None:
        initial_ptr += (batch * cols + start) * DIM
        state += tl.load(initial_ptr + in_row, mask=states, other=0.0).to(tl.float32)
    exist = _exist(0, token, lane, length, left, TEAM, COUNT)
    u, raw, z = _load_teams(u_at, delta_at, z_at, strides, exist, TEAM, COUNT, EVEN)
    bs, cs = _load_pairs(pairs_ptr, n, SIZE, TEAM)
    for step in tl.range(0, steps):
        first, on = step * TOKENS, tl.where(step + 1 < steps, TOKENS, 0)
        begins = _load_begins(first_ptr, first, length, TOKENS)
        _fetch_pairs(pairs_ptr + TOKENS * 2 * SIZE, SIZE, TOKENS)
        u_at, delta_at = _moved(u_at, on, strides[0]), _moved(delta_at, on, strides[1])
        if z_ptr is not None:
            z_at = _moved(z_at, on, strides[2])
        later = _exist(first + on, token, lane, length, left, TEAM, COUNT)
        next_u, next_raw, next_z = _load_teams(
            u_at, delta_at, z_at, strides, later, TEAM, COUNT, EVEN
        )
        if before_ptr is not None:
            if first % SPAN == 0:
                at = (batch * spans + first // SPAN) * cols * DIM + start
                tl.store(before_ptr + at + in_column, state, mask=states)
        for j in tl.static_range(COUNT):
            sizes = _step_sizes(raw[j], bias, True if EVEN else exist[j], SOFTPLUS)
            now, parts = u[j].to(tl.float32), ()
            added = sizes * now
            later_b, later_c = _load_pairs(pairs_ptr + (j + 1) * (TEAM * 2 * SIZE), n, SIZE, TEAM)
            for i in tl.static_range(TEAM):
                b, c = bs[i][:, None], cs[i][:, None]
                state = _without(begins, j * TEAM + i, state, first_ptr is not None)
                decays = exp2_near(_of_token(sizes, i, TEAM, STATES, BLOCK) * a)
                state = decays * state + _of_token(added, i, TEAM, STATES, BLOCK) * b
                part = tl.sum(tl.reshape(state * c, (TEAM, STATES, BLOCK)), 1)
                parts = _append(parts, part)
            bs, cs = later_b, later_c
            y = _team_sums(parts, token, TEAM, LEVELS, BLOCK) + skip * now
            if z_ptr is not None:
                y *= _silu(z[j])
            y, at = round_to(y, y_ptr.dtype.element_ty), _moved(y_at, j * TEAM, cols)
            tl.store(at, y, mask=None if EVEN else exist[j])
        pairs_ptr += TOKENS * 2 * SIZE
        y_at = _moved(y_at, TOKENS, cols)
        u, raw, z, exist = next_u, next_raw, next_z, later
    if final_ptr is not None:
        final_ptr += (batch * cols + start) * DIM
        tl.store(final_ptr + in_row, state, mask=states)
