"""The scan of Mamba-2 by chunks of tokens: its kernels.

Of one head and chunk, S (N, P) the state before it, V = dt x the rows added to the state:

    G_i = the gates dt A summed from the first token of the chunk or sequence on,  e = exp(G)
    D_ij = exp(G_i - G_j) for i >= j of one sequence,  r = exp(G_last - G),  z = e_last
    y = (C B' D) V + e C S + skip x,  S' = z S + (r B)' V

and with dS' the gradient of S', where sums are over the heads of a group:

    dV = (C B' D)' dy + r B dS',  dS = z dS' + (e C)' dy,  E = dy V' D
    dC = (sum of E) B + sum of e dy S',  dB = (sum of E)' C + sum of r V dS''
    dG = rows of T - columns of T + e C (dy S')' - r B (V dS'')', T = E C B' below the diagonal, and
    of the last token the sums of r B (V dS'')' and of z S dS'; the gradient of a gate sums dG over
    later tokens

e is 0 outside of the sequence that S belongs to, r outside of the last token's, z where the chunk
has a boundary. Only states are passed from chunk to chunk; all else runs for all chunks at once,
with the products of B and C made once for the heads of a group. Pairs are held as (j, i), so that
no GEMM takes a transposed result of another: on Hopper, Triton up to 3.7.0 multiplies it wrongly.

What is not finite stays in its sequence as in gated_delta_rule_kernels.py.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.attention.attention_kernels import product
from liger_multi.backends.triton.common.rows import LOG2E, above, add_dot, round_to
from liger_multi.backends.triton.linear_attention.gated_delta_rule_kernels import (
    _after,
    _assume_heads,
    _before,
    _begins,
    _decays,
    _finite,
    _finite_rows,
    _fits,
    _flag,
    _gates_of,
    _not_gone,
    _numbers,
    _of_last,
    _of_state,
    _over,
    _plus,
    _square,
    _store_tile,
    _tile,
    _visible_pairs,
    _wrong_rows,
)

# --- step sizes and decays ---


@triton.jit
def _softplus(x):
    """``log(1 + exp(x))`` to the last digit, however small."""
    u = tl.exp2(-tl.abs(x) * LOG2E)
    more = 1.0 + u
    rest = tl.where(more == 1.0, u, tl.log(more) * (u / (more - 1.0)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def _raw_steps(dt_ptr, bias_ptr, start, stride, tokens, head, CHUNK: tl.constexpr):
    """Raw step sizes of a chunk plus their bias, before softplus and clamp."""
    raw = _numbers(dt_ptr, start, stride, tokens, CHUNK)
    if bias_ptr is not None:
        raw += tl.load(bias_ptr + head).to(tl.float32)
    return raw


@triton.jit
def _ssd_gates_kernel(
    dt_ptr,
    a_ptr,
    bias_ptr,
    first_ptr,
    gates_ptr,
    dt_steps,
    first_step,
    tokens,
    chunks,
    many,
    plane,
    low,
    high,
    SOFTPLUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step sizes and decays.

    Program: a chunk of one head.
    Reads raw step sizes, their bias and A. Writes five planes: e, r, two parts of G, and the step
    sizes, which are 0 past the last token.
    """
    pid = tl.program_id(0).to(tl.int64)
    chunk, stream = pid % chunks, pid // chunks
    batch, head = stream // many, stream % many
    start = (chunk * BLOCK).to(tl.int32)
    row = tl.arange(0, BLOCK)
    if first_ptr is not None:
        first_ptr += batch * first_step
    visible, begins = _visible_pairs(first_ptr, start, tokens, BLOCK)
    raw = _raw_steps(
        dt_ptr + batch * dt_steps[0] + head * dt_steps[2],
        bias_ptr,
        start,
        dt_steps[1],
        tokens,
        head,
        BLOCK,
    )
    steps = _softplus(raw) if SOFTPLUS else raw
    steps = tl.where(steps < low, low, tl.where(steps > high, high, steps))  # NaN stays NaN
    steps = tl.where(start + row < tokens, steps, 0.0)
    g = steps * tl.load(a_ptr + head).to(tl.float32)
    coarse, fine, e, r = _gates_of(g, visible, begins, start, first_ptr is not None, BLOCK)
    at = gates_ptr + pid * BLOCK + row
    tl.store(at, e)
    tl.store(at + plane, r)
    tl.store(at + 2 * plane, coarse)
    tl.store(at + 3 * plane, fine)
    tl.store(at + 4 * plane, steps)


@triton.jit
def _ssd_steps_kernel(
    dt_ptr,
    a_ptr,
    bias_ptr,
    first_ptr,
    gates_ptr,
    sums_ptr,
    ddt_ptr,
    of_heads_ptr,
    dt_steps,
    first_step,
    tokens,
    chunks,
    many,
    plane,
    low,
    high,
    PARTS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of raw step sizes, of A and of the bias.

    Program: a chunk of one head.
    Reads what the kernel of the step sizes reads, and the sums of :func:`_part_of_states`. Writes
    the gradient of the raw step sizes (batch, tokens, heads), and in two planes of
    ``of_heads_ptr`` what the chunk gives to A and to the bias.
    """
    pid = tl.program_id(0).to(tl.int64)
    chunk, stream = pid % chunks, pid // chunks
    batch, head = stream // many, stream % many
    start = (chunk * BLOCK).to(tl.int32)
    row = tl.arange(0, BLOCK)
    if first_ptr is not None:
        first_ptr += batch * first_step
    visible, _ = _visible_pairs(first_ptr, start, tokens, BLOCK)
    at = sums_ptr + pid * BLOCK + row
    dsteps, dsums = tl.load(at), tl.load(at + plane)
    for part in tl.static_range(2, PARTS + 2):
        dsums += tl.load(at + part * plane)
    dg = tl.sum(tl.where(visible, dsums[:, None], 0.0), 0)
    dsteps += dg * tl.load(a_ptr + head).to(tl.float32)
    raw = _raw_steps(
        dt_ptr + batch * dt_steps[0] + head * dt_steps[2],
        bias_ptr,
        start,
        dt_steps[1],
        tokens,
        head,
        BLOCK,
    )
    free = _softplus(raw) if SOFTPLUS else raw
    clamped = above(free, high) | above(-free, -low)
    dsteps = tl.where((start + row < tokens) & ~clamped, dsteps, 0.0)
    if SOFTPLUS:
        dsteps *= tl.sigmoid(raw)
    at_steps = (batch * tokens + start) * many + head + row * many
    tl.store(
        ddt_ptr + at_steps, round_to(dsteps, ddt_ptr.dtype.element_ty), mask=start + row < tokens
    )
    steps = tl.load(gates_ptr + 4 * plane + pid * BLOCK + row)
    tl.store(of_heads_ptr + pid, tl.sum(dg * steps, 0))
    tl.store(of_heads_ptr + tl.num_programs(0) + pid, tl.sum(dsteps, 0))


# --- states, chunk after chunk ---


@triton.jit
def _columns_of_head(chunks, groups, GROUP: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """Position of a program of a pass over states: first column, stream, sequence, group, head."""
    blocks: tl.constexpr = (VALUE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0).to(tl.int64)
    column, stream = (pid % blocks).to(tl.int32) * BLOCK, pid // blocks
    _assume_heads(groups, GROUP * VALUE)
    many = groups * GROUP
    batch, head = stream // many, stream % many
    return column, stream, batch, head // GROUP, head


@triton.jit(do_not_specialize=["chunks"])  # a loop that is always a loop
def _ssd_states_kernel(
    x_ptr,
    b_ptr,
    first_ptr,
    gates_ptr,
    initial_ptr,
    states_ptr,
    final_ptr,
    flags_ptr,
    x_steps,
    b_steps,
    first_step,
    tokens,
    chunks,
    groups,
    plane,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    ISOLATED: tl.constexpr,
):
    """Pass over the chunks with the state in registers.

    Program: BLOCK columns of the state of one head, chunk after chunk.
    Reads B, x and gates. Writes the state before every chunk, the last one, and a flag if that is
    not finite.
    """
    column, stream, batch, group, head = _columns_of_head(chunks, groups, GROUP, VALUE, BLOCK)
    row = tl.arange(0, CHUNK)
    b_ptr += batch * b_steps[0] + group * b_steps[2]
    x_ptr += batch * x_steps[0] + head * x_steps[2]
    gates_ptr += stream * chunks * CHUNK
    states_ptr += stream * chunks * DIM * VALUE
    if ISOLATED:
        if tl.load(flags_ptr + stream) == 0:
            return
        first_ptr += batch * first_step
    state = tl.zeros([SIZE, BLOCK], tl.float32)
    if initial_ptr is not None:
        state += _tile(
            initial_ptr + stream * DIM * VALUE, 0, VALUE, DIM, column, SIZE, VALUE, BLOCK
        ).to(tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        start = chunk * CHUNK
        b = _tile(b_ptr, start, b_steps[1], tokens, 0, CHUNK, DIM, SIZE)
        x = _tile(x_ptr, start, x_steps[1], tokens, column, CHUNK, VALUE, BLOCK)
        r, z = tl.load(gates_ptr + plane + start + row), tl.load(gates_ptr + start + CHUNK - 1)
        steps = tl.load(gates_ptr + 4 * plane + start + row)
        at = states_ptr + tl.cast(chunk, tl.int64) * DIM * VALUE
        _store_tile(at, state, 0, VALUE, DIM, column, VALUE, BLOCK)
        rows = x.to(tl.float32) * (r * steps)[:, None]
        if ISOLATED:
            begins = _begins(first_ptr, start, tokens, CHUNK)
            b, rows = _of_last(b, begins, CHUNK), _of_last(rows, begins, CHUNK)
            state = _over(state, begins, CHUNK)
        state = _plus(state * z, tl.trans(b), round_to(rows, b.dtype))
    if flags_ptr is not None:
        _flag(flags_ptr + stream, state)
    if final_ptr is not None:
        _store_tile(final_ptr + stream * DIM * VALUE, state, 0, VALUE, DIM, column, VALUE, BLOCK)


@triton.jit(do_not_specialize=["chunks"])  # a loop that is always a loop
def _ssd_reverse_kernel(
    dy_ptr,
    c_ptr,
    first_ptr,
    gates_ptr,
    dfinal_ptr,
    dstates_ptr,
    dinitial_ptr,
    flags_ptr,
    dy_steps,
    c_steps,
    first_step,
    tokens,
    chunks,
    groups,
    plane,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    ISOLATED: tl.constexpr,
):
    """Pass over the chunks in reverse with the gradient of the state in registers.

    Program: BLOCK columns of the state of one head, from the last chunk to the first.
    Reads dy, C and gates. Writes the gradient of the state after every chunk, that of the first,
    and a flag if that is not finite.
    """
    column, stream, batch, group, head = _columns_of_head(chunks, groups, GROUP, VALUE, BLOCK)
    row = tl.arange(0, CHUNK)
    c_ptr += batch * c_steps[0] + group * c_steps[2]
    dy_ptr += batch * dy_steps[0] + head * dy_steps[2]
    gates_ptr += stream * chunks * CHUNK
    dstates_ptr += stream * chunks * DIM * VALUE
    if ISOLATED:
        if tl.load(flags_ptr + stream) == 0:
            return
        first_ptr += batch * first_step
    dstate = tl.zeros([SIZE, BLOCK], tl.float32)
    if dfinal_ptr is not None:
        dstate += _tile(
            dfinal_ptr + stream * DIM * VALUE, 0, VALUE, DIM, column, SIZE, VALUE, BLOCK
        ).to(tl.float32)
    for step in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        chunk = chunks - 1 - step
        start = chunk * CHUNK
        c = _tile(c_ptr, start, c_steps[1], tokens, 0, CHUNK, DIM, SIZE)
        dy = _tile(dy_ptr, start, dy_steps[1], tokens, column, CHUNK, VALUE, BLOCK)
        e, z = tl.load(gates_ptr + start + row), tl.load(gates_ptr + start + CHUNK - 1)
        at = dstates_ptr + tl.cast(chunk, tl.int64) * DIM * VALUE
        _store_tile(at, dstate, 0, VALUE, DIM, column, VALUE, BLOCK)
        own = dy.to(tl.float32) * e[:, None]
        if ISOLATED:
            begins = _begins(first_ptr, start, tokens, CHUNK)
            c, own = _of_state(c, begins), _of_state(own, begins)
            dstate = _over(dstate, begins, CHUNK)
        dstate = _plus(dstate * z, tl.trans(c), round_to(own, c.dtype))
    if flags_ptr is not None:
        _flag(flags_ptr + stream, dstate)
    if dinitial_ptr is not None:
        _store_tile(
            dinitial_ptr + stream * DIM * VALUE, dstate, 0, VALUE, DIM, column, VALUE, BLOCK
        )


# --- all chunks at once ---


@triton.jit
def _decays_of(gates_ptr, plane, first_ptr, start, tokens, CHUNK: tl.constexpr):
    """D of a chunk as (j, i), with the sums of gates of ``gates_ptr``, and pairs that it is of."""
    row = tl.arange(0, CHUNK)
    coarse, fine = tl.load(gates_ptr + 2 * plane + row), tl.load(gates_ptr + 3 * plane + row)
    visible = row[:, None] <= row[None, :]
    if first_ptr is not None:
        begins = tl.load(first_ptr + tl.minimum(start + row, tokens - 1))
        visible = visible & (begins[None, :] <= (start + row)[:, None])
    apart = (coarse[None, :] - coarse[:, None]) + (fine[None, :] - fine[:, None])
    return tl.exp2(tl.where(visible, apart * LOG2E, -float("inf"))), visible


@triton.jit
def _skipped(skip_ptr, head, column, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """What columns of x are multiplied by for y."""
    col = column + tl.arange(0, BLOCK)
    return tl.load(skip_ptr + head * VALUE + col, mask=col < VALUE, other=0.0)[None, :]


@triton.jit(do_not_specialize=["members"])  # a loop that is always a loop
def _ssd_outputs_kernel(
    x_ptr,
    b_ptr,
    c_ptr,
    skip_ptr,
    first_ptr,
    gates_ptr,
    states_ptr,
    y_ptr,
    x_steps,
    b_steps,
    c_steps,
    first_step,
    tokens,
    chunks,
    groups,
    plane,
    members,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Results of all tokens.

    Program: a chunk of one group, its heads one after another.
    Reads x, B, C, gates and states. Writes y (batch, tokens, heads, VALUE).
    """
    pid = tl.program_id(0).to(tl.int64)
    chunk, stream = pid % chunks, pid // chunks
    batch, group = stream // groups, stream % groups
    _assume_heads(groups, GROUP * VALUE)
    many = groups * GROUP
    start = (chunk * CHUNK).to(tl.int32)
    row = tl.arange(0, CHUNK)
    if first_ptr is not None:
        first_ptr += batch * first_step
    b = _tile(
        b_ptr + batch * b_steps[0] + group * b_steps[2],
        start,
        b_steps[1],
        tokens,
        0,
        CHUNK,
        DIM,
        SIZE,
    )
    c = _tile(
        c_ptr + batch * c_steps[0] + group * c_steps[2],
        start,
        c_steps[1],
        tokens,
        0,
        CHUNK,
        DIM,
        SIZE,
    )
    scores = product(c, tl.trans(b))
    for member in tl.range(0, members, num_stages=STAGES, disable_licm=True):
        head = group * GROUP + member
        whole = (batch * many + head) * chunks + chunk
        at = gates_ptr + whole * CHUNK
        e, steps = tl.load(at + row), tl.load(at + 4 * plane + row)
        coarse, fine = tl.load(at + 2 * plane + row), tl.load(at + 3 * plane + row)
        visible, _ = _visible_pairs(first_ptr, start, tokens, CHUNK)
        p = scores * _decays(coarse, fine, visible)
        if first_ptr is not None:
            p = tl.where(visible, p, 0.0)
            begins = _begins(first_ptr, start, tokens, CHUNK)
        p = round_to(p, c.dtype)
        for column in tl.static_range(0, VALUE, BLOCK):
            x = _tile(
                x_ptr + batch * x_steps[0] + head * x_steps[2],
                start,
                x_steps[1],
                tokens,
                column,
                CHUNK,
                VALUE,
                BLOCK,
            ).to(tl.float32)
            s = _tile(states_ptr + whole * DIM * VALUE, 0, VALUE, DIM, column, SIZE, VALUE, BLOCK)
            y = product(c, s) * e[:, None]
            if first_ptr is not None:
                rows = x * steps[:, None]
                is_fine = _fits(rows, c.dtype)
                rows = round_to(tl.where(is_fine, rows, 0.0), c.dtype)
                y = _plus(_of_state(y, begins), p, rows)
                wrong = _after(_wrong_rows(is_fine), begins, CHUNK)
                y = tl.where(wrong[:, None], float("nan"), y)
            else:
                y = _plus(y, p, round_to(x * steps[:, None], c.dtype))
            if skip_ptr is not None:
                y += x * _skipped(skip_ptr, head, column, VALUE, BLOCK)
            tile_ptr = y_ptr + (batch * tokens * many + head) * VALUE
            _store_tile(tile_ptr, y, start, many * VALUE, tokens, column, VALUE, BLOCK)


@triton.jit(do_not_specialize=["members"])  # a loop that is always a loop
def _ssd_pairs_kernel(
    dy_ptr,
    x_ptr,
    b_ptr,
    c_ptr,
    skip_ptr,
    first_ptr,
    gates_ptr,
    dstates_ptr,
    dx_ptr,
    pairs_ptr,
    sums_ptr,
    dskips_ptr,
    flags_ptr,
    strides,
    sizes,
    members,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    ISOLATED: tl.constexpr,
):
    """Gradients of x, and of pairs of tokens.

    Program: a chunk of one group, its heads one after another.
    Reads dy, x, B, C, gates and the gradients of states. Writes dx; the sum of E over the heads, as
    (j, i); in two planes of ``sums_ptr`` what rows give to step sizes and pairs to dG; and what the
    chunk gives to the gradient of skip (chunks, VALUE). Flags the group's first head if the sum of
    E is not finite.
    """
    dy_steps, x_steps, b_steps, c_steps = strides[0:3], strides[3:6], strides[6:9], strides[9:12]
    tokens, chunks, groups, plane = sizes
    pid = tl.program_id(0).to(tl.int64)
    chunk, stream = pid % chunks, pid // chunks
    batch, group = stream // groups, stream % groups
    _assume_heads(groups, GROUP * VALUE)
    many = groups * GROUP
    if ISOLATED:
        if tl.load(flags_ptr + batch * many + group * GROUP) == 0:
            return
    start = (chunk * CHUNK).to(tl.int32)
    row = tl.arange(0, CHUNK)
    if first_ptr is not None:
        first_ptr += batch * strides[12]
    b_ptr += batch * b_steps[0] + group * b_steps[2]
    b = _tile(b_ptr, start, b_steps[1], tokens, 0, CHUNK, DIM, SIZE)
    c = _tile(c_ptr + batch * c_steps[0] + group * c_steps[2], start, c_steps[1], tokens, 0,
              CHUNK, DIM, SIZE)  # fmt: skip
    scores = product(b, tl.trans(c))
    shared = tl.zeros([CHUNK, CHUNK], tl.float32)
    for member in tl.range(0, members, num_stages=STAGES, disable_licm=True):
        head = group * GROUP + member
        whole = (batch * many + head) * chunks + chunk
        at = gates_ptr + whole * CHUNK
        r, steps = tl.load(at + plane + row), tl.load(at + 4 * plane + row)
        decay, visible = _decays_of(at, plane, first_ptr, start, tokens, CHUNK)
        p = scores * decay
        if first_ptr is not None:
            p = tl.where(visible, p, 0.0)
        p = round_to(p, b_ptr.dtype.element_ty)
        dpairs = tl.zeros([CHUNK, CHUNK], tl.float32)
        dsteps = tl.zeros([CHUNK], tl.float32)
        for column in tl.static_range(0, VALUE, BLOCK):
            dy = _tile(dy_ptr + batch * dy_steps[0] + head * dy_steps[2], start, dy_steps[1],
                       tokens, column, CHUNK, VALUE, BLOCK)  # fmt: skip
            x = _tile(x_ptr + batch * x_steps[0] + head * x_steps[2], start, x_steps[1], tokens,
                      column, CHUNK, VALUE, BLOCK).to(tl.float32)  # fmt: skip
            ds = _tile(dstates_ptr + whole * DIM * VALUE, 0, VALUE, DIM, column, SIZE, VALUE, BLOCK)
            b = _tile(b_ptr, start, b_steps[1], tokens, 0, CHUNK, DIM, SIZE)
            drows = product(b, ds)
            if first_ptr is not None:
                drows = _not_gone(drows, r[:, None])
            drows *= r[:, None]
            if ISOLATED:
                near, wrong = _finite_rows(dy)
                wrong = _before(wrong, _begins(first_ptr, start, tokens, CHUNK), CHUNK)
                drows = tl.where(wrong[:, None], float("nan"), _plus(drows, p, near))
            else:
                drows = _plus(drows, p, dy)
            dsteps += tl.sum(drows * x, 1)
            dpairs = add_dot(round_to(x * steps[:, None], b.dtype), tl.trans(dy), dpairs)
            dx, wide = drows * steps[:, None], dy.to(tl.float32)
            if skip_ptr is not None:
                dx += wide * _skipped(skip_ptr, head, column, VALUE, BLOCK)
            if dskips_ptr is not None:
                col = column + tl.arange(0, BLOCK)
                tl.store(dskips_ptr + whole * VALUE + col, tl.sum(wide * x, 0), mask=col < VALUE)
            tile_ptr = dx_ptr + (batch * tokens * many + head) * VALUE
            _store_tile(tile_ptr, dx, start, many * VALUE, tokens, column, VALUE, BLOCK)
        decay, visible = _decays_of(
            at, plane, first_ptr, start, tokens, CHUNK
        )  # loaded again, to save registers
        dpairs *= decay
        if first_ptr is not None:
            dpairs = tl.where(visible, dpairs, 0.0)
        shared += dpairs
        through = tl.where(row[:, None] < row[None, :], dpairs * scores, 0.0)
        if first_ptr is not None:
            through = tl.where(visible, through, 0.0)
        at = sums_ptr + whole * CHUNK + row
        tl.store(at, dsteps)
        tl.store(at + plane, tl.sum(through, 0) - tl.sum(through, 1))
    if flags_ptr is not None:
        _flag(flags_ptr + batch * many + group * GROUP, shared)
    whole = pid * CHUNK * CHUNK
    tl.store(_square(pairs_ptr + whole, CHUNK), round_to(shared, pairs_ptr.dtype.element_ty))


@triton.jit
def _part_of_states(sums_ptr, plane, DIM: tl.constexpr, SIZE: tl.constexpr):
    """The first row of states of a program, its number among those with it, and its sums for dG.

    Each part of the rows has a plane of sums, after one for step sizes and one of pairs.
    """
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (DIM + SIZE - 1) // SIZE
    part = pid % parts
    return (part * SIZE).to(tl.int32), pid // parts, sums_ptr + (2 + part) * plane


@triton.jit(do_not_specialize=["members"])  # a loop that is always a loop
def _ssd_groups_kernel(
    dy_ptr,
    x_ptr,
    b_ptr,
    c_ptr,
    gates_ptr,
    states_ptr,
    dstates_ptr,
    pairs_ptr,
    sums_ptr,
    db_ptr,
    dc_ptr,
    strides,
    sizes,
    members,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Gradients of B and C.

    Program: SIZE rows of states of a chunk of one group, its heads one after another.
    Reads dy, x, B, C, gates, states, their gradients and the sum of E. Writes dB, dC, and what
    states give to dG.
    """
    dy_steps, x_steps, b_steps, c_steps = strides[0:3], strides[3:6], strides[6:9], strides[9:12]
    tokens, chunks, groups, plane = sizes
    first, pid, sums_ptr = _part_of_states(sums_ptr, plane, DIM, SIZE)
    chunk, stream = pid % chunks, pid // chunks
    batch, group = stream // groups, stream % groups
    _assume_heads(groups, GROUP * VALUE)
    many = groups * GROUP
    start = (chunk * CHUNK).to(tl.int32)
    row = tl.arange(0, CHUNK)
    b_ptr += batch * b_steps[0] + group * b_steps[2]
    c_ptr += batch * c_steps[0] + group * c_steps[2]
    db, dc = tl.zeros([CHUNK, SIZE], tl.float32), tl.zeros([CHUNK, SIZE], tl.float32)
    for member in tl.range(0, members, num_stages=STAGES, disable_licm=True):
        head = group * GROUP + member
        whole = (batch * many + head) * chunks + chunk
        at = gates_ptr + whole * CHUNK
        e, r, z = tl.load(at + row), tl.load(at + plane + row), tl.load(at + CHUNK - 1)
        steps = tl.load(at + 4 * plane + row)
        read, kept = tl.zeros([CHUNK, SIZE], tl.float32), tl.zeros([CHUNK, SIZE], tl.float32)
        passed = tl.zeros([SIZE], tl.float32)
        for column in tl.static_range(0, VALUE, BLOCK):
            dy = _tile(
                dy_ptr + batch * dy_steps[0] + head * dy_steps[2],
                start,
                dy_steps[1],
                tokens,
                column,
                CHUNK,
                VALUE,
                BLOCK,
            )
            s = _tile(
                states_ptr + whole * DIM * VALUE, first, VALUE, DIM, column, SIZE, VALUE, BLOCK
            )
            read = add_dot(dy, tl.trans(s), read)
            x = _tile(
                x_ptr + batch * x_steps[0] + head * x_steps[2],
                start,
                x_steps[1],
                tokens,
                column,
                CHUNK,
                VALUE,
                BLOCK,
            ).to(tl.float32)
            ds = _tile(
                dstates_ptr + whole * DIM * VALUE, first, VALUE, DIM, column, SIZE, VALUE, BLOCK
            )
            kept = add_dot(round_to(x * steps[:, None], ds.dtype), tl.trans(ds), kept)
            passed += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
        if PACKED:
            read, kept = _not_gone(read, e[:, None]), _not_gone(kept, r[:, None])
        c = _tile(c_ptr, start, c_steps[1], tokens, first, CHUNK, DIM, SIZE)
        own = e * tl.sum(c.to(tl.float32) * read, 1)
        dc += read * e[:, None]
        b = _tile(b_ptr, start, b_steps[1], tokens, first, CHUNK, DIM, SIZE)
        pushed = r * tl.sum(b.to(tl.float32) * kept, 1)
        db += kept * r[:, None]
        if PACKED:
            pushed, passed = _not_gone(pushed, r), _not_gone(passed, z)
        last = tl.sum(pushed, 0) + z * tl.sum(passed, 0)
        at = sums_ptr + whole * CHUNK + row
        tl.store(at, own - pushed + tl.where(row == CHUNK - 1, last, 0.0))
    pairs = tl.load(_square(pairs_ptr + pid * CHUNK * CHUNK, CHUNK))
    c = _tile(c_ptr, start, c_steps[1], tokens, first, CHUNK, DIM, SIZE)
    if PACKED:
        c = _finite(c)
    db += product(pairs, c)
    b = _tile(b_ptr, start, b_steps[1], tokens, first, CHUNK, DIM, SIZE)
    if PACKED:
        b = _finite(b)
    dc += product(tl.trans(pairs), b)
    offset = (batch * tokens * groups + group) * DIM
    _store_tile(db_ptr + offset, db, start, groups * DIM, tokens, first, DIM, SIZE)
    _store_tile(dc_ptr + offset, dc, start, groups * DIM, tokens, first, DIM, SIZE)
