"""Kimi delta attention by chunks of tokens: its kernels.

Of one value head and chunk, S the state before it, Q = scale q and all of the shape (tokens, ...),
gates of every channel:

    G_i = the gates summed from the first token of the chunk on,  e = exp(G),  z = e_last
    r = exp(G_last - G),  P_ij = sum_c Q_ic K_jc exp(G_ic - G_jc) for i >= j of one document
    B_ij = the same of K_ic for i > j,  A = (I + beta B)^-1,  C = (I + B beta)^-1 = I - B A beta
    N = C (V - (e K) S),  y = (e Q) S + P beta N,  S' = z S + (r K)' beta N

and with dS' the gradient of S':

    Y = A' (P' dy + (r K) dS'),  dV = beta Y,  dS = z dS' + (e Q)' dy - (e K)' dV
    dP = dy N' beta,  M = -dV N' beta below the diagonal,  dbeta = rows of Y N

e is 0 outside of the document that S belongs to, r outside of the last token's, z where the chunk
has a boundary.

exp(-G_j) alone leaves the range of numbers. So blocks of 2, 4, 8 rows and so on are halved, and a
token i of the lower half meets a token j of the upper half by the sum at the upper half's last row:

    P_ij = sum_c X_ic Y_jc,  X = Q D,  Y = K D,  D = exp(-|G - G_middle|)

No factor is above 1, and the levels' pairs make up all pairs below the diagonal. Back through one
level, dP, M of its pairs alone, and X and Y as they were rounded:

    dQ += D (dP Y),  dK += D (M Y + dP' X + M' Y),  dG += X (dP Y) + Y (M Y - dP' X - M' Y)

and dg sums dG over later tokens. What a pair of tokens adds for one of them it takes for the other,
to the last bit of each term, so that the sum before both is 0 in fp32, however large the pair's
score is; the diagonal takes no part. dG of e Q and e K is summed likewise, that of r K over earlier
tokens.

G is kept on a grid on which differences are exact in fp32, in units of log 2: strong gates take no
digits from others. For fp32 tensors a second plane keeps the rests.

One kernel prepares gates and e Q, e K, r K; one P, C and A; one passes over the chunks of a block
of value columns with S in registers, one in reverse with dS. Others run for all chunks at once: dP,
M and dbeta; dQ; dK and dg; and dq and dk of all value heads of a group.
As in gated_delta_rule_kernels.py, operands that are read the other way round come from memory, and
what is not finite stays in its document, where a call has several. A gate that is not finite makes
its token's key so; it and one above 0 flag the value head.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.attention.attention_kernels import product
from liger_multi.backends.triton.common.rows import LOG2E, add_dot, round_to
from liger_multi.backends.triton.linear_attention.gated_delta_rule_kernels import (
    NORM_EPS,
    _anticausal_product,
    _assume_heads,
    _before,
    _begins,
    _causal_product,
    _columns_of,
    _finite,
    _finite_rows,
    _flag,
    _isolated_inverse,
    _norm_gradient,
    _numbers,
    _of_last,
    _of_state,
    _over,
    _plus,
    _rstds,
    _solve_product,
    _spoiled,
    _square,
    _store_tile,
    _tile,
    _unit_inverse,
    _visible_pairs,
    _wrong_rows,
)

# gates below are as good as -infinity, and 1 / the grid of their sums, of 64 rows below 2^24 steps
GONE: tl.constexpr = tl.constexpr(-64.0)
STEPS: tl.constexpr = tl.constexpr(4096.0)
EXACT_GONE: tl.constexpr = tl.constexpr(-160.0)  # fp32 has no smaller power of 2
EXACT_STEPS: tl.constexpr = tl.constexpr(1024.0)

# --- gates ---


@triton.jit
def _sums(g, PACKED: tl.constexpr, EXACT: tl.constexpr):
    """Both parts of the sums of gates over the rows, in units of log 2; on the grid and rests.

    Where a call is PACKED, gates that are not finite, or whose exponential is not, are taken as 0,
    and the sum at their token is NaN.
    """
    gone: tl.constexpr = EXACT_GONE if EXACT else GONE
    steps: tl.constexpr = EXACT_STEPS if EXACT else STEPS
    g = g * LOG2E
    g = tl.where(g < gone, gone, g)
    if PACKED:
        finite = tl.where(g < 128.0, g, 0.0)
        large = tl.floor(finite * steps) * (1.0 / steps)
        sums = tl.cumsum(large, 0)
        return tl.where(g < 128.0, sums, float("nan")), tl.cumsum(finite - large, 0)
    large = tl.floor(g * steps) * (1.0 / steps)
    return tl.cumsum(large, 0), tl.cumsum(g - large, 0)


@triton.jit
def _last_row(x, CHUNK: tl.constexpr):
    """The last row of a tile."""
    return tl.sum(tl.where((tl.arange(0, CHUNK) == CHUNK - 1)[:, None], x, 0.0), 0)


@triton.jit
def _last(x, CHUNK: tl.constexpr):
    """The last of a chunk's integers."""
    return tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, x, 0), 0)


@triton.jit
def _near_ends(first_ptr, start, tokens, CHUNK: tl.constexpr):
    """Rows of the document of the state before the chunk, and of the chunk's last row."""
    _, begins = _visible_pairs(first_ptr, start, tokens, CHUNK)
    return begins < tl.maximum(start, 1), begins == _last(begins, CHUNK)


@triton.jit
def _total(sums_ptr, plane, row, EXACT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Sums of gates up to the given rows, and the rests that fp32 tensors have."""
    at = sums_ptr + (row[:, None] * SIZE + tl.arange(0, WIDTH)[None, :])
    coarse = tl.load(at)
    if EXACT:
        return coarse, tl.load(at + plane)
    return coarse, coarse * 0.0


@triton.jit
def _apart(
    sums_ptr, plane, later, earlier, EXACT: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Gates between rows: two vectors of rows, of which each has its counterpart."""
    coarse, fine = _total(sums_ptr, plane, later, EXACT, SIZE, WIDTH)
    other, rest = _total(sums_ptr, plane, earlier, EXACT, SIZE, WIDTH)
    return (coarse - other) + (fine - rest)


@triton.jit
def _decay(
    sums_ptr,
    plane,
    level,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """D of a level: the decay between each row and the middle of its block."""
    row = tl.arange(0, CHUNK)
    middle = ((row >> (level + 1)) << (level + 1)) + (1 << level) - 1
    apart = _apart(sums_ptr, plane, row, middle, EXACT, SIZE, WIDTH)
    return tl.exp2(tl.where((row > middle)[:, None], apart, -apart))


@triton.jit
def _meet(level, CHUNK: tl.constexpr):
    """Pairs of a level: row i in the lower half of a block, j in its upper half.

    Two numbers, of every row and of every column, agree: pairs of rows take no registers then that
    a loop over levels would keep.
    """
    half = tl.arange(0, CHUNK) >> level
    lower, upper = tl.where(half % 2 == 1, half, -1), tl.where(half % 2 == 0, half + 1, -2)
    return lower, upper


@triton.jit
def _scaled(
    ptr,
    rstd_ptr,
    start,
    step,
    tokens,
    channel,
    factor,
    NORMED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Rows of q or k in fp32, over their norm where NORMED, times a factor."""
    x = _tile(ptr, start, step, tokens, channel, CHUNK, DIM, WIDTH).to(tl.float32)
    return x * _rstds(rstd_ptr, start, factor, NORMED, CHUNK)[:, None]


# --- what needs no state ---


@triton.jit
def _kimi_delta_gates_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    first_ptr,
    sums_ptr,
    queries_ptr,
    keys_ptr,
    kept_ptr,
    z_ptr,
    rstd_ptr,
    flags_ptr,
    k_steps,
    g_steps,
    first_step,
    sizes,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Gates of every chunk, and q and k with them.

    Program: a chunk of one value head; those of a key head are neighbors.
    Reads q, k and g. Writes G in planes of ``sums_ptr``; e Q, e K and r K, each (CHUNK, DIM); z
    (SIZE); in the first head of a group, 1 / norm of the rows of q and of k; and a flag if a gate
    is not finite, or above 0.
    """
    tokens, chunks, heads, plane, rstd_plane = sizes
    NORMED: tl.constexpr = rstd_ptr is not None
    pid = tl.program_id(0).to(tl.int64)
    member, chunk = pid % GROUP, (pid // GROUP) % chunks
    key_head = pid // GROUP // chunks
    batch, head = key_head // heads, key_head % heads
    _assume_heads(heads, GROUP * DIM)
    value_head = head * GROUP + member
    start = (chunk * CHUNK).to(tl.int32)
    row, col = tl.arange(0, CHUNK), tl.arange(0, SIZE)
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    whole = (batch * heads * GROUP + value_head) * chunks + chunk
    g = _tile(g_ptr + batch * g_steps[0] + value_head * g_steps[2], start, g_steps[1], tokens, 0,
              CHUNK, DIM, SIZE).to(tl.float32)  # fmt: skip
    if first_ptr is not None:
        above = tl.max(tl.max(tl.where(g <= 0.0, 0, 1), 1), 0)  # or NaN
        tl.store(flags_ptr + batch * heads * GROUP + value_head, 1, mask=above > 0)
    coarse, fine = _sums(g, first_ptr is not None, EXACT)
    at = sums_ptr + whole * CHUNK * SIZE + (row[:, None] * SIZE + col[None, :])
    if EXACT:
        tl.store(at + tl.cast(plane, tl.int64) * SIZE, fine)
    else:
        coarse += tl.floor(fine * STEPS + 0.5) * (1.0 / STEPS)
        fine = tl.zeros([CHUNK, SIZE], tl.float32)
    tl.store(at, coarse)
    end, rest = _last_row(coarse, CHUNK), _last_row(fine, CHUNK)
    z = tl.exp2(end + rest)
    if first_ptr is not None:
        begun, last = _near_ends(first_ptr + batch * first_step, start, tokens, CHUNK)
        z = tl.where(_last(begun.to(tl.int32), CHUNK) > 0, z, 0.0)
    tl.store(z_ptr + whole * SIZE + col, z)
    rstd_ptr = rstd_ptr + (key_head * chunks * CHUNK + start) if NORMED else rstd_ptr
    at = whole * CHUNK * DIM
    tl.debug_barrier()  # q and k are loaded after gates have left: fewer registers
    q = _tile(q_ptr + batch * k_steps[0] + head * k_steps[2], start, k_steps[1], tokens, 0,
              CHUNK, DIM, SIZE).to(tl.float32)  # fmt: skip
    if NORMED:
        rstd = tl.rsqrt(tl.sum(q * q, 1) + NORM_EPS)
        if member == 0:
            tl.store(rstd_ptr + row, rstd)
        q *= rstd[:, None]
    e = tl.exp2(coarse + fine)
    address = queries_ptr + at
    q = q * scale * e
    if first_ptr is not None:
        q = tl.where(begun[:, None], q, 0.0)
    _store_tile(address, q, 0, DIM, CHUNK, 0, DIM, SIZE)
    tl.debug_barrier()
    k = _tile(
        k_ptr + batch * k_steps[0] + head * k_steps[2],
        start,
        k_steps[1],
        tokens,
        0,
        CHUNK,
        DIM,
        SIZE,
    ).to(tl.float32)
    if NORMED:
        rstd = tl.rsqrt(tl.sum(k * k, 1) + NORM_EPS)
        if member == 0:
            tl.store(rstd_ptr + rstd_plane + row, rstd)
        k *= rstd[:, None]
    address = keys_ptr + at
    read = k * e
    if first_ptr is not None:
        read = tl.where(begun[:, None], read, 0.0)
    _store_tile(address, read, 0, DIM, CHUNK, 0, DIM, SIZE)
    r = tl.exp2((end[None, :] - coarse) + (rest[None, :] - fine))
    address = kept_ptr + at
    kept = k * r
    if first_ptr is not None:
        kept = tl.where(last[:, None], kept, 0.0)
    _store_tile(address, kept, 0, DIM, CHUNK, 0, DIM, SIZE)


@triton.jit
def _kimi_delta_scores_kernel(
    q_ptr,
    k_ptr,
    beta_ptr,
    first_ptr,
    sums_ptr,
    rstd_ptr,
    scores_ptr,
    solve_ptr,
    adjoint_ptr,
    flags_ptr,
    k_steps,
    beta_steps,
    first_step,
    sizes,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
    ISOLATED: tl.constexpr,
):
    """P and C of every chunk.

    Program: a chunk of one value head, WIDTH channels at a time; those of a key head are neighbors.
    Reads q, k, beta and G. Writes P and C, and A where there is room for it, (CHUNK, CHUNK) each;
    and a flag if C is not finite.
    """
    tokens, chunks, heads, plane, rstd_plane = sizes
    NORMED: tl.constexpr = rstd_ptr is not None
    pid = tl.program_id(0).to(tl.int64)
    member, chunk = pid % GROUP, (pid // GROUP) % chunks
    key_head = pid // GROUP // chunks
    batch, head = key_head // heads, key_head % heads
    _assume_heads(heads, GROUP * DIM)
    value_head = head * GROUP + member
    if ISOLATED:
        if tl.load(flags_ptr + batch * heads * GROUP + value_head) == 0:
            return
    start = (chunk * CHUNK).to(tl.int32)
    row = tl.arange(0, CHUNK)
    i, j = row[:, None], row[None, :]
    dtype = q_ptr.dtype.element_ty
    whole = (batch * heads * GROUP + value_head) * chunks + chunk
    sums_ptr += whole * CHUNK * SIZE
    if NORMED:
        rstd_ptr += key_head * chunks * CHUNK
    at = batch * k_steps[0] + head * k_steps[2]
    k_rstd_ptr = rstd_ptr + rstd_plane if NORMED else rstd_ptr
    p = tl.zeros([CHUNK, CHUNK], tl.float32)
    b = tl.zeros([CHUNK, CHUNK], tl.float32)
    rest = tl.cast(plane, tl.int64) * SIZE
    for channel in tl.range(0, SIZE, WIDTH, num_stages=1):
        q = _scaled(
            q_ptr + at, rstd_ptr, start, k_steps[1], tokens, channel, scale, NORMED=NORMED, DIM=DIM,
            WIDTH=WIDTH, CHUNK=CHUNK,
        )  # fmt: skip
        k = _scaled(
            k_ptr + at,
            k_rstd_ptr,
            start,
            k_steps[1],
            tokens,
            channel,
            1.0,
            NORMED=NORMED,
            DIM=DIM,
            WIDTH=WIDTH,
            CHUNK=CHUNK,
        )
        p += tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
        for level in tl.range(0, LEVELS, num_stages=1, disable_licm=True):
            decay = _decay(sums_ptr + channel, rest, level, dtype == tl.float32, SIZE, WIDTH, CHUNK)
            x, y = round_to(q * decay, dtype), round_to(k * decay, dtype)
            lower, upper = _meet(level, CHUNK)
            meet = lower[:, None] == upper[None, :]
            p += tl.where(meet, product(x, tl.trans(y)), 0.0)
            b += tl.where(meet, product(y, tl.trans(y)), 0.0)
    if first_ptr is not None:
        first_ptr += batch * first_step
        visible, _ = _visible_pairs(first_ptr, start, tokens, CHUNK)
        p, b = tl.where(visible, p, 0.0), tl.where(visible, b, 0.0)
    tl.store(_square(scores_ptr + whole * CHUNK * CHUNK, CHUNK), round_to(p, dtype))
    beta = _numbers(
        beta_ptr + batch * beta_steps[0] + value_head * beta_steps[2],
        start,
        beta_steps[1],
        tokens,
        CHUNK,
    )
    if ISOLATED:
        begins = _begins(first_ptr, start, tokens, CHUNK)
        a, spoiled = _isolated_inverse(b * beta[:, None], begins, dtype == tl.float32, CHUNK)
        own = _spoiled(a, spoiled, begins, CHUNK)
    else:
        a = _unit_inverse(b * beta[:, None], dtype == tl.float32, CHUNK)
        own = a
    if adjoint_ptr is not None:
        tl.store(_square(adjoint_ptr + whole * CHUNK * CHUNK, CHUNK), round_to(own, dtype))
    if ISOLATED:
        c = _solve_product(b, a, dtype == tl.float32) * beta[None, :]
        c = tl.where(i == j, 1.0, 0.0) - tl.where((i > j) & (j >= begins[:, None]), c, 0.0)
        c = _spoiled(c, spoiled, begins, CHUNK)
    else:
        c = tl.where(i == j, 1.0, 0.0) - _solve_product(b, a, dtype == tl.float32) * beta[None, :]
        if flags_ptr is not None:
            _flag(flags_ptr + batch * heads * GROUP + value_head, c)
    tl.store(_square(solve_ptr + whole * CHUNK * CHUNK, CHUNK), round_to(c, dtype))


# --- states ---


@triton.jit(do_not_specialize=["chunks"])  # a loop that is always a loop
def _kimi_delta_forward_kernel(
    v_ptr,
    beta_ptr,
    first_ptr,
    queries_ptr,
    keys_ptr,
    kept_ptr,
    z_ptr,
    scores_ptr,
    solve_ptr,
    flags_ptr,
    initial_ptr,
    y_ptr,
    final_ptr,
    states_ptr,
    values_ptr,
    v_steps,
    beta_steps,
    first_step,
    sizes,
    chunks,
    SHAPE: tl.constexpr,
    STAGES: tl.constexpr,
    ISOLATED: tl.constexpr,
):
    """Pass over the chunks with the state in registers.

    Program: BLOCK columns of v of one value head, chunk after chunk.
    Reads v, beta, e K, r K, z and C, and for y also e Q and P. Writes what it is given room for: y
    (batch, tokens, heads, VALUE) and the last state; or the state before every chunk, and N; and a
    flag if one is not finite.
    """
    tokens, heads = sizes[0:2]
    DIM: tl.constexpr = SHAPE[1]
    SIZE: tl.constexpr = SHAPE[2]
    VALUE: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[4]
    CHUNK: tl.constexpr = SHAPE[5]
    column, stream, many, batch, _key_head, value_head = _columns_of(heads, SHAPE)
    v_ptr += batch * v_steps[0] + value_head * v_steps[2]
    beta_ptr += batch * beta_steps[0] + value_head * beta_steps[2]
    keys_ptr += stream * chunks * CHUNK * DIM
    kept_ptr += stream * chunks * CHUNK * DIM
    solve_ptr += stream * chunks * CHUNK * CHUNK
    z_ptr += stream * chunks * SIZE
    if y_ptr is not None:
        queries_ptr += stream * chunks * CHUNK * DIM
        scores_ptr += stream * chunks * CHUNK * CHUNK
        y_ptr += (batch * tokens * many + value_head) * VALUE
    if values_ptr is not None:
        values_ptr += stream * tokens * VALUE
        states_ptr += stream * chunks * DIM * VALUE
    if ISOLATED:
        if tl.load(flags_ptr + stream) == 0:
            return
        first_ptr += batch * first_step
    dtype = v_ptr.dtype.element_ty
    padded = chunks * CHUNK
    state = tl.zeros([SIZE, BLOCK], tl.float32)
    if initial_ptr is not None:
        state += _tile(initial_ptr + stream * DIM * VALUE, 0, VALUE, DIM, column, SIZE, VALUE,
                       BLOCK).to(tl.float32)  # fmt: skip
    lost = tl.zeros([CHUNK], tl.int32)
    for chunk in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        start = chunk * CHUNK
        place = tl.cast(start, tl.int64)
        keys = _tile(keys_ptr, start, DIM, padded, 0, CHUNK, DIM, SIZE)
        v = _tile(v_ptr, start, v_steps[1], tokens, column, CHUNK, VALUE, BLOCK).to(tl.float32)
        c = tl.load(_square(solve_ptr + place * CHUNK, CHUNK))
        beta = _numbers(beta_ptr, start, beta_steps[1], tokens, CHUNK)
        kept = _tile(kept_ptr, start, DIM, padded, 0, CHUNK, DIM, SIZE)
        z = tl.load(z_ptr + chunk * SIZE + tl.arange(0, SIZE))
        narrow = round_to(state, dtype)
        if values_ptr is not None:
            at = states_ptr + tl.cast(chunk, tl.int64) * DIM * VALUE
            _store_tile(at, state, 0, VALUE, DIM, column, VALUE, BLOCK)
        read = product(keys, narrow)
        if ISOLATED:
            begins = _begins(first_ptr, start, tokens, CHUNK)
            n = _causal_product(c, v - _of_state(read, begins), lost, beta, begins, dtype, CHUNK)
        else:
            n = product(c, round_to(v - read, dtype))
        if values_ptr is not None:
            _store_tile(values_ptr, n, start, VALUE, tokens, column, VALUE, BLOCK)
        n = round_to(n * beta[:, None], dtype)
        if y_ptr is not None:
            queries = _tile(queries_ptr, start, DIM, padded, 0, CHUNK, DIM, SIZE)
            p = tl.load(_square(scores_ptr + place * CHUNK, CHUNK))
            y = product(queries, narrow)
            if ISOLATED:
                near, _ = _finite_rows(n)
                y = tl.where(n == n, add_dot(p, near, _of_state(y, begins)), float("nan"))
            else:
                y = add_dot(p, n, y)
            _store_tile(y_ptr, y, start, many * VALUE, tokens, column, VALUE, BLOCK)
        if ISOLATED:
            n, state = _of_last(n, begins, CHUNK), _over(state, begins, CHUNK)
        elif flags_ptr is not None and dtype == tl.float16:
            lost = tl.maximum(lost, _wrong_rows(tl.abs(n.to(tl.float32)) < float("inf")))
        state = _plus(state * z[:, None], tl.trans(kept), n)
    if flags_ptr is not None:
        _flag(flags_ptr + stream, state, lost)
    if final_ptr is not None:
        _store_tile(final_ptr + stream * DIM * VALUE, state, 0, VALUE, DIM, column, VALUE, BLOCK)


@triton.jit(do_not_specialize=["chunks"])  # a loop that is always a loop
def _kimi_delta_reverse_kernel(
    dy_ptr,
    beta_ptr,
    first_ptr,
    queries_ptr,
    keys_ptr,
    kept_ptr,
    z_ptr,
    scores_ptr,
    adjoint_ptr,
    values_ptr,
    flags_ptr,
    dfinal_ptr,
    dv_ptr,
    dstates_ptr,
    dbeta_ptr,
    dinitial_ptr,
    dy_steps,
    beta_steps,
    first_step,
    sizes,
    chunks,
    SHAPE: tl.constexpr,
    STAGES: tl.constexpr,
    ISOLATED: tl.constexpr,
):
    """Pass over the chunks in reverse with the gradient of the state in registers.

    Program: BLOCK columns of v of one value head, from the last chunk to the first.
    Reads dy, beta, e Q, e K, r K, z, P, A and N. Writes the gradient of the state after every
    chunk; dv; what these columns give to dbeta, in fp32; at the end the gradient of the first
    state; and a flag if it is not finite.
    """
    tokens, heads, plane = sizes[0:3]
    DIM: tl.constexpr = SHAPE[1]
    SIZE: tl.constexpr = SHAPE[2]
    VALUE: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[4]
    CHUNK: tl.constexpr = SHAPE[5]
    column, stream, many, batch, _key_head, value_head = _columns_of(heads, SHAPE)
    dy_ptr += batch * dy_steps[0] + value_head * dy_steps[2]
    beta_ptr += batch * beta_steps[0] + value_head * beta_steps[2]
    queries_ptr += stream * chunks * CHUNK * DIM
    keys_ptr += stream * chunks * CHUNK * DIM
    kept_ptr += stream * chunks * CHUNK * DIM
    adjoint_ptr += stream * chunks * CHUNK * CHUNK
    scores_ptr += stream * chunks * CHUNK * CHUNK
    z_ptr += stream * chunks * SIZE
    dstates_ptr += stream * chunks * DIM * VALUE
    values_ptr += stream * tokens * VALUE
    dbeta_ptr += (column // BLOCK).to(tl.int64) * plane + stream * chunks * CHUNK
    dv_ptr += (batch * tokens * many + value_head) * VALUE
    if ISOLATED:
        if tl.load(flags_ptr + stream) == 0:
            return
        first_ptr += batch * first_step
    dtype = dy_ptr.dtype.element_ty
    padded = chunks * CHUNK
    dstate = tl.zeros([SIZE, BLOCK], tl.float32)
    if dfinal_ptr is not None:
        dstate += _tile(
            dfinal_ptr + stream * DIM * VALUE, 0, VALUE, DIM, column, SIZE, VALUE, BLOCK
        ).to(tl.float32)
    dstates_ptr += tl.cast(chunks - 1, tl.int64) * DIM * VALUE
    _store_tile(dstates_ptr, dstate, 0, VALUE, DIM, column, VALUE, BLOCK)
    for step in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        chunk = chunks - 1 - step
        start = chunk * CHUNK
        place = tl.cast(start, tl.int64)
        kept = _tile(kept_ptr, start, DIM, padded, 0, CHUNK, DIM, SIZE)
        dy = _tile(dy_ptr, start, dy_steps[1], tokens, column, CHUNK, VALUE, BLOCK)
        p = tl.load(_square(scores_ptr + place * CHUNK, CHUNK))
        a = tl.load(_square(adjoint_ptr + place * CHUNK, CHUNK))
        beta = _numbers(beta_ptr, start, beta_steps[1], tokens, CHUNK)
        z = tl.load(z_ptr + chunk * SIZE + tl.arange(0, SIZE))
        queries = _tile(queries_ptr, start, DIM, padded, 0, CHUNK, DIM, SIZE)
        keys = _tile(keys_ptr, start, DIM, padded, 0, CHUNK, DIM, SIZE)
        dn = product(kept, round_to(dstate, dtype))
        if ISOLATED:
            begins = _begins(first_ptr, start, tokens, CHUNK)
            dy, wrong = _finite_rows(dy)
            dn = add_dot(tl.trans(p), dy, _of_last(dn, begins, CHUNK))
            y = _anticausal_product(tl.trans(a), dn, wrong, begins, dtype, CHUNK)
        else:
            dn = add_dot(tl.trans(p), dy, dn)
            y = product(tl.trans(a), round_to(dn, dtype))
        n = _tile(values_ptr, start, VALUE, tokens, column, CHUNK, VALUE, BLOCK)
        tl.store(dbeta_ptr + start + tl.arange(0, CHUNK), tl.sum(y * n.to(tl.float32), 1))
        dv = y * beta[:, None]
        _store_tile(dv_ptr, dv, start, many * VALUE, tokens, column, VALUE, BLOCK)
        if ISOLATED:
            dy, dv = _of_state(dy, begins), _of_state(dv, begins)
            dstate = _over(dstate, begins, CHUNK)
        dstate = _plus(dstate * z[:, None], tl.trans(queries), dy)
        dstate = add_dot(tl.trans(keys), round_to(-dv, dtype), dstate)
        dstates_ptr -= DIM * VALUE
        rows = tl.where(chunk > 0, DIM, 0)
        _store_tile(dstates_ptr, dstate, 0, VALUE, rows, column, VALUE, BLOCK)
    if flags_ptr is not None:
        _flag(flags_ptr + stream, dstate)
    if dinitial_ptr is not None:
        _store_tile(
            dinitial_ptr + stream * DIM * VALUE, dstate, 0, VALUE, DIM, column, VALUE, BLOCK
        )


# --- gradients, all chunks at once ---


@triton.jit
def _kimi_delta_pairs_kernel(
    dy_ptr,
    beta_ptr,
    first_ptr,
    values_ptr,
    dv_ptr,
    pairs_ptr,
    mixed_ptr,
    partial_ptr,
    dbeta_ptr,
    parts,
    dy_steps,
    beta_steps,
    first_step,
    sizes,
    SHAPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of pairs of tokens, and of beta.

    Program: a chunk of one value head. It sums dy N' and dV N' over blocks of value columns.
    Reads dy, N, dv, beta and the parts of dbeta. Writes dP, M and dbeta.
    """
    tokens, chunks, heads, plane = sizes[0:4]
    GROUP: tl.constexpr = SHAPE[0]
    VALUE: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[4]
    CHUNK: tl.constexpr = SHAPE[5]
    pid = tl.program_id(0).to(tl.int64)
    chunk, stream = pid % chunks, pid // chunks
    _assume_heads(heads, GROUP * VALUE)
    many = heads * GROUP
    batch, value_head = stream // many, stream % many
    start = (chunk * CHUNK).to(tl.int32)
    row = tl.arange(0, CHUNK)
    dy_ptr += batch * dy_steps[0] + value_head * dy_steps[2]
    values_ptr += stream * tokens * VALUE
    dv_ptr += (batch * tokens * many + value_head) * VALUE
    dp = tl.zeros([CHUNK, CHUNK], tl.float32)
    mixed = tl.zeros([CHUNK, CHUNK], tl.float32)
    for column in tl.range(0, VALUE, BLOCK, num_stages=STAGES):
        dy = _tile(dy_ptr, start, dy_steps[1], tokens, column, CHUNK, VALUE, BLOCK)
        n = _tile(values_ptr, start, VALUE, tokens, column, CHUNK, VALUE, BLOCK)
        dv = _tile(dv_ptr, start, many * VALUE, tokens, column, CHUNK, VALUE, BLOCK)
        dp = _plus(dp, dy, tl.trans(n))
        mixed = _plus(mixed, dv, tl.trans(n))
    if first_ptr is not None:
        first_ptr += batch * first_step
    visible, _ = _visible_pairs(first_ptr, start, tokens, CHUNK)
    beta = _numbers(
        beta_ptr + batch * beta_steps[0] + value_head * beta_steps[2],
        start,
        beta_steps[1],
        tokens,
        CHUNK,
    )
    whole = (stream * chunks + chunk) * CHUNK
    dtype = pairs_ptr.dtype.element_ty
    dp = tl.where(visible, dp * beta[None, :], 0.0)
    tl.store(_square(pairs_ptr + whole * CHUNK, CHUNK), round_to(dp, dtype))
    mixed = tl.where(visible & (row[:, None] > row[None, :]), mixed * -beta[None, :], 0.0)
    tl.store(_square(mixed_ptr + whole * CHUNK, CHUNK), round_to(mixed, dtype))
    dbeta = tl.zeros([CHUNK], tl.float32)
    for part in range(parts):
        dbeta += tl.load(partial_ptr + part * plane + whole + row)
    at = dbeta_ptr + (batch * tokens + start + row) * many + value_head
    tl.store(at, round_to(dbeta, dbeta_ptr.dtype.element_ty), mask=start + row < tokens)


@triton.jit
def _of_level(ptr, level, ACROSS: tl.constexpr, CHUNK: tl.constexpr):
    """A square of the pairs of a level, 0 elsewhere; ACROSS is the other way round."""
    row = tl.arange(0, CHUNK)
    lower, upper = _meet(level, CHUNK)
    if ACROSS:
        pairs = tl.load(ptr + (row[None, :] * CHUNK + row[:, None]))
        return tl.where(lower[None, :] == upper[:, None], pairs, 0.0)
    pairs = tl.load(ptr + (row[:, None] * CHUNK + row[None, :]))
    return tl.where(lower[:, None] == upper[None, :], pairs, 0.0)


@triton.jit
def _level_rows(
    q_ptr,
    k_ptr,
    rstd_ptr,
    sums_ptr,
    start,
    step,
    tokens,
    channel,
    plane,
    rstd_plane,
    scale,
    level,
    ISOLATED: tl.constexpr,
    NORMED: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """X, Y and D of a level; finite where documents are ISOLATED."""
    dtype = q_ptr.dtype.element_ty
    k_rstd_ptr = rstd_ptr + rstd_plane if NORMED else rstd_ptr
    decay = _decay(sums_ptr, plane, level, dtype == tl.float32, SIZE, WIDTH, CHUNK)
    k = _scaled(
        k_ptr,
        k_rstd_ptr,
        start,
        step,
        tokens,
        channel,
        1.0,
        NORMED=NORMED,
        DIM=DIM,
        WIDTH=WIDTH,
        CHUNK=CHUNK,
    )
    q = _scaled(
        q_ptr,
        rstd_ptr,
        start,
        step,
        tokens,
        channel,
        scale,
        NORMED=NORMED,
        DIM=DIM,
        WIDTH=WIDTH,
        CHUNK=CHUNK,
    )
    x, y = round_to(q * decay, dtype), round_to(k * decay, dtype)
    if ISOLATED:
        x, y, decay = _finite(x), _finite(y), _finite(decay)
    return x, y, decay


@triton.jit
def _diagonal(
    pairs_ptr,
    ptr,
    rstd_ptr,
    start,
    step,
    tokens,
    channel,
    factor,
    NORMED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Rows of q or k times the diagonal of dP."""
    own = tl.load(pairs_ptr + tl.arange(0, CHUNK) * (CHUNK + 1)).to(tl.float32)
    x = _scaled(
        ptr,
        rstd_ptr,
        start,
        step,
        tokens,
        channel,
        factor,
        NORMED=NORMED,
        DIM=DIM,
        WIDTH=WIDTH,
        CHUNK=CHUNK,
    )
    return own[:, None] * x


@triton.jit
def _gathered(pairs, x, dtype: tl.constexpr):
    """``pairs @ x`` of a matrix of zeros and ones, and fp32 numbers; to 16 bits but for fp32."""
    if dtype == tl.float32:
        return tl.dot(pairs.to(tl.float32), x, input_precision="ieee")
    else:
        near = round_to(x, tl.bfloat16)
        ones = round_to(pairs.to(tl.float32), tl.bfloat16)
        return _plus(product(ones, round_to(x - near.to(tl.float32), tl.bfloat16)), ones, near)


@triton.jit
def _times_states(
    ptr,
    states,
    start,
    stride,
    tokens,
    channel,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows of VALUE columns of a chunk times channels of a state: x S'."""
    acc = tl.zeros([CHUNK, WIDTH], tl.float32)
    for column in tl.range(0, VALUE, BLOCK, num_stages=STAGES):
        x = _tile(ptr, start, stride, tokens, column, CHUNK, VALUE, BLOCK)
        s = _tile(states, channel, VALUE, DIM, column, WIDTH, VALUE, BLOCK)
        acc = _plus(acc, x, tl.trans(s))
    return acc


@triton.jit
def _of_other_launch(flag, ISOLATED: tl.constexpr):
    """Whether a head is not of this launch: the one of ISOLATED documents takes those flagged."""
    if ISOLATED:
        return flag == 0
    else:
        return flag != 0


@triton.jit
def _from_states(
    dv_ptr,
    values_ptr,
    states_ptr,
    dstates_ptr,
    start,
    dv_step,
    tokens,
    channel,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows of a chunk times channels of the states, dV S' and N dS'', and the sums of S dS'."""
    from_v = tl.zeros([CHUNK, WIDTH], tl.float32)
    from_n = tl.zeros([CHUNK, WIDTH], tl.float32)
    kept = tl.zeros([WIDTH], tl.float32)
    for column in tl.range(0, VALUE, BLOCK, num_stages=STAGES):
        dv = _tile(dv_ptr, start, dv_step, tokens, column, CHUNK, VALUE, BLOCK)
        s = _tile(states_ptr, channel, VALUE, DIM, column, WIDTH, VALUE, BLOCK)
        from_v = _plus(from_v, dv, tl.trans(s))
        n = _tile(values_ptr, start, VALUE, tokens, column, CHUNK, VALUE, BLOCK)
        ds = _tile(dstates_ptr, channel, VALUE, DIM, column, WIDTH, VALUE, BLOCK)
        from_n = _plus(from_n, n, tl.trans(ds))
        kept += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    return from_v, from_n, kept


@triton.jit
def _to_start(
    sums_ptr,
    first_ptr,
    start,
    tokens,
    plane,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The decays e."""
    coarse, fine = _total(sums_ptr, plane, tl.arange(0, CHUNK), EXACT, SIZE, WIDTH)
    e = tl.exp2(coarse + fine)
    if first_ptr is not None:
        begun, _ = _near_ends(first_ptr, start, tokens, CHUNK)
        e = tl.where(begun[:, None], e, 0.0)
    return e


@triton.jit
def _to_end(
    sums_ptr,
    first_ptr,
    start,
    tokens,
    plane,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The decays r."""
    coarse, fine = _total(sums_ptr, plane, tl.arange(0, CHUNK), EXACT, SIZE, WIDTH)
    at = sums_ptr + (CHUNK - 1) * SIZE + tl.arange(0, WIDTH)
    rest = tl.load(at)[None, :] - coarse
    if EXACT:
        rest += tl.load(at + plane)[None, :] - fine
    r = tl.exp2(rest)
    if first_ptr is not None:
        _, last = _near_ends(first_ptr, start, tokens, CHUNK)
        r = tl.where(last[:, None], r, 0.0)
    return r


@triton.jit
def _to_later(dsums, first_ptr, start, tokens, dtype: tl.constexpr, CHUNK: tl.constexpr):
    """The gradient of gates from that of their sums: over later tokens of the document."""
    row = tl.arange(0, CHUNK)
    later = row[:, None] <= row[None, :]
    if first_ptr is not None:
        begins = tl.load(first_ptr + tl.minimum(start + row, tokens - 1))
        later = later & (begins[None, :] <= (start + row)[:, None])
        dsums, wrong = _finite_rows(dsums)
        wrong = _before(wrong, _begins(first_ptr, start, tokens, CHUNK), CHUNK)
        return tl.where(wrong[:, None], float("nan"), _gathered(later, dsums, dtype))
    return _gathered(later, dsums, dtype)


@triton.jit
def _channels_of(heads, chunks, SHAPE: tl.constexpr, WIDTH: tl.constexpr):
    """Where a program is that has WIDTH channels of a chunk of one value head.

    Returns the first channel; the chunk among those of all value heads, and of its own; how many
    value heads a sequence has; and the sequence, its key head and its value head.
    """
    GROUP: tl.constexpr = SHAPE[0]
    steps: tl.constexpr = SHAPE[2] // WIDTH
    pid = tl.program_id(0).to(tl.int64)
    channel, whole = (pid % steps).to(tl.int32) * WIDTH, pid // steps
    DIM: tl.constexpr = SHAPE[1]
    VALUE: tl.constexpr = SHAPE[3]
    _assume_heads(heads, GROUP * (VALUE if VALUE > DIM else DIM))
    many = heads * GROUP
    batch, value_head = whole // chunks // many, whole // chunks % many
    return channel, whole, whole % chunks, many, batch, value_head // GROUP, value_head


@triton.jit
def _kimi_delta_queries_kernel(
    dy_ptr,
    q_ptr,
    k_ptr,
    first_ptr,
    states_ptr,
    sums_ptr,
    queries_ptr,
    rstd_ptr,
    pairs_ptr,
    dq_ptr,
    dsums_ptr,
    flags_ptr,
    dy_steps,
    k_steps,
    first_step,
    sizes,
    scale,
    SHAPE: tl.constexpr,
    STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
    ISOLATED: tl.constexpr,
):
    """Gradients of Q, and what they give to dG.

    Program: WIDTH channels of a chunk of one value head; those of a chunk are neighbors.
    Reads dy, q, k, S, G, e Q and dP. Writes both in fp32. One of two launches takes a flagged head.
    """
    tokens, chunks, heads, plane, rstd_plane = sizes
    DIM: tl.constexpr = SHAPE[1]
    SIZE: tl.constexpr = SHAPE[2]
    VALUE: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[4]
    CHUNK: tl.constexpr = SHAPE[5]
    NORMED: tl.constexpr = rstd_ptr is not None
    channel, whole, chunk, _many, batch, head, value_head = _channels_of(
        heads, chunks, SHAPE, WIDTH
    )
    stream, start = whole // chunks, (chunk * CHUNK).to(tl.int32)
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    q_ptr += batch * k_steps[0] + head * k_steps[2]
    k_ptr += batch * k_steps[0] + head * k_steps[2]
    if NORMED:
        rstd_ptr += (batch * heads + head) * chunks * CHUNK
    k_rstd_ptr = rstd_ptr + rstd_plane if NORMED else rstd_ptr
    if flags_ptr is not None:
        if _of_other_launch(tl.load(flags_ptr + stream), ISOLATED):
            return
    PACKED: tl.constexpr = first_ptr is not None
    if PACKED:
        first_ptr += batch * first_step
    sums_ptr += whole * CHUNK * SIZE + channel
    pairs_ptr += whole * CHUNK * CHUNK
    rest = tl.cast(plane, tl.int64) * SIZE
    dq = _times_states(
        dy_ptr + batch * dy_steps[0] + value_head * dy_steps[2], states_ptr + whole * DIM * VALUE,
        start, dy_steps[1], tokens, channel, DIM=DIM, WIDTH=WIDTH, VALUE=VALUE, BLOCK=BLOCK,
        CHUNK=CHUNK, STAGES=STAGES,
    )  # fmt: skip
    if PACKED:
        dq = _of_state(dq, _begins(first_ptr, start, tokens, CHUNK))
    at = queries_ptr + whole * CHUNK * DIM
    dsums = dq * _tile(at, 0, DIM, CHUNK, channel, CHUNK, DIM, WIDTH)
    dq *= _to_start(sums_ptr, first_ptr, start, tokens, rest, EXACT, SIZE, WIDTH=WIDTH, CHUNK=CHUNK)
    dq += _diagonal(
        pairs_ptr, k_ptr, k_rstd_ptr, start, k_steps[1], tokens, channel, 1.0, NORMED=NORMED,
        DIM=DIM, WIDTH=WIDTH, CHUNK=CHUNK,
    )  # fmt: skip
    for level in tl.range(0, LEVELS, num_stages=1, disable_licm=True):
        x, y, decay = _level_rows(
            q_ptr,
            k_ptr,
            rstd_ptr,
            sums_ptr,
            start,
            k_steps[1],
            tokens,
            channel,
            plane=rest,
            rstd_plane=rstd_plane,
            scale=scale,
            level=level,
            ISOLATED=ISOLATED,
            NORMED=NORMED,
            DIM=DIM,
            SIZE=SIZE,
            WIDTH=WIDTH,
            CHUNK=CHUNK,
        )
        of_level = product(_of_level(pairs_ptr, level, False, CHUNK), y)
        dq += of_level * decay
        dsums += of_level * x.to(tl.float32)
    at = whole * CHUNK * SIZE + channel
    _store_tile(dq_ptr + at, dq, 0, SIZE, CHUNK, 0, WIDTH, WIDTH)
    _store_tile(dsums_ptr + at, dsums, 0, SIZE, CHUNK, 0, WIDTH, WIDTH)


@triton.jit
def _kimi_delta_keys_kernel(
    q_ptr,
    k_ptr,
    beta_ptr,
    first_ptr,
    states_ptr,
    dstates_ptr,
    values_ptr,
    dv_ptr,
    sums_ptr,
    keys_ptr,
    kept_ptr,
    z_ptr,
    rstd_ptr,
    pairs_ptr,
    mixed_ptr,
    dk_ptr,
    dg_ptr,
    flags_ptr,
    strides,
    sizes,
    scale,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    ISOLATED: tl.constexpr,
):
    """Gradients of K and g.

    Program: WIDTH channels of a chunk of one value head; those of a chunk are neighbors.
    Reads q, k, S, dS', N, dv, G, e K, r K, z, dP and M. Writes dg, and in the place of what Q gives
    to dG the gradient of K in fp32. One of two launches takes a flagged head.
    """
    k_steps, beta_steps, first_step = strides[0:3], strides[3:6], strides[6]
    tokens, chunks, heads, plane, rstd_plane = sizes
    DIM: tl.constexpr = SHAPE[1]
    SIZE: tl.constexpr = SHAPE[2]
    VALUE: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[4]
    CHUNK: tl.constexpr = SHAPE[5]
    WIDTH: tl.constexpr = TILE[1]
    NORMED: tl.constexpr = rstd_ptr is not None
    channel, whole, chunk, many, batch, head, value_head = _channels_of(heads, chunks, SHAPE, WIDTH)
    stream, start = whole // chunks, (chunk * CHUNK).to(tl.int32)
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    q_ptr += batch * k_steps[0] + head * k_steps[2]
    k_ptr += batch * k_steps[0] + head * k_steps[2]
    if NORMED:
        rstd_ptr += (batch * heads + head) * chunks * CHUNK
    if flags_ptr is not None:
        if _of_other_launch(tl.load(flags_ptr + stream), ISOLATED):
            return
    PACKED: tl.constexpr = first_ptr is not None
    if PACKED:
        first_ptr += batch * first_step
    sums_ptr += whole * CHUNK * SIZE + channel
    pairs_ptr += whole * CHUNK * CHUNK
    mixed_ptr += whole * CHUNK * CHUNK
    dk_ptr += whole * CHUNK * SIZE + channel
    rest = tl.cast(plane, tl.int64) * SIZE
    dk, back, through = _from_states(
        dv_ptr + (batch * tokens * many + value_head) * VALUE, values_ptr + stream * tokens * VALUE,
        states_ptr + whole * DIM * VALUE, dstates_ptr + whole * DIM * VALUE, start, many * VALUE,
        tokens, channel, DIM=DIM, WIDTH=WIDTH, VALUE=VALUE, BLOCK=BLOCK, CHUNK=CHUNK,
        STAGES=TILE[0],
    )  # fmt: skip
    back *= _numbers(beta_ptr + batch * beta_steps[0] + value_head * beta_steps[2], start,
                      beta_steps[1], tokens, CHUNK)[:, None]  # fmt: skip
    if PACKED:
        begins = _begins(first_ptr, start, tokens, CHUNK)
        dk, back = _of_state(dk, begins), _of_last(back, begins, CHUNK)
        through = _over(through, begins, CHUNK)
    through *= tl.load(z_ptr + whole * SIZE + channel + tl.arange(0, WIDTH))
    at = whole * CHUNK * DIM
    dsums = -back * _tile(kept_ptr + at, 0, DIM, CHUNK, channel, CHUNK, DIM, WIDTH)
    through -= tl.sum(dsums, 0)
    dsums += tl.where((tl.arange(0, CHUNK) == CHUNK - 1)[:, None], through[None, :], 0.0)
    dsums -= dk * _tile(keys_ptr + at, 0, DIM, CHUNK, channel, CHUNK, DIM, WIDTH)
    dsums += _tile(dk_ptr, 0, SIZE, CHUNK, 0, CHUNK, WIDTH, WIDTH)
    dk *= -_to_start(sums_ptr, first_ptr, start, tokens, rest, EXACT, SIZE, WIDTH, CHUNK=CHUNK)
    dk += back * _to_end(sums_ptr, first_ptr, start, tokens, rest, EXACT, SIZE, WIDTH, CHUNK=CHUNK)
    dk += _diagonal(
        pairs_ptr, q_ptr, rstd_ptr, start, k_steps[1], tokens, channel, scale, NORMED=NORMED,
        DIM=DIM, WIDTH=WIDTH, CHUNK=CHUNK,
    )  # fmt: skip
    for level in tl.range(0, TILE[2], num_stages=1, disable_licm=True):
        x, y, decay = _level_rows(
            q_ptr, k_ptr, rstd_ptr, sums_ptr, start, k_steps[1], tokens, channel, plane=rest,
            rstd_plane=rstd_plane, scale=scale, level=level, ISOLATED=ISOLATED, NORMED=NORMED,
            DIM=DIM, SIZE=SIZE, WIDTH=WIDTH, CHUNK=CHUNK,
        )  # fmt: skip
        back = product(_of_level(mixed_ptr, level, False, CHUNK), y)
        dk += back * decay
        dsums += back * y.to(tl.float32)
        back = product(_of_level(pairs_ptr, level, True, CHUNK), x)
        dk += back * decay
        dsums -= back * y.to(tl.float32)
        # not added to the sum before: Triton gives the first of two such GEMMs to fewer warps
        back = product(_of_level(mixed_ptr, level, True, CHUNK), y)
        dk += back * decay
        dsums -= back * y.to(tl.float32)
    tl.debug_barrier()  # other threads have read what is written over
    _store_tile(dk_ptr, dk, 0, SIZE, CHUNK, 0, WIDTH, WIDTH)
    dg = _to_later(dsums, first_ptr, start, tokens, q_ptr.dtype.element_ty, CHUNK)
    dg_ptr += (batch * tokens * many + value_head) * DIM
    _store_tile(dg_ptr, dg, start, many * DIM, tokens, channel, DIM, WIDTH)


@triton.jit
def _kimi_delta_norms_kernel(
    q_ptr,
    k_ptr,
    rstd_ptr,
    from_q_ptr,
    from_k_ptr,
    dq_ptr,
    dk_ptr,
    k_steps,
    sizes,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Gradients of q and k.

    Program: a chunk of one key head.
    Reads q, k and the gradients of their rows, which it sums over the group. Writes dq and dk.
    """
    tokens, chunks, heads, rstd_plane = sizes[0], sizes[1], sizes[2], sizes[4]
    NORMED: tl.constexpr = rstd_ptr is not None
    pid = tl.program_id(0).to(tl.int64)
    chunk, key_head = pid % chunks, pid // chunks
    batch, head = key_head // heads, key_head % heads
    _assume_heads(heads, GROUP * DIM)
    start = (chunk * CHUNK).to(tl.int32)
    at = batch * k_steps[0] + head * k_steps[2]
    if NORMED:
        rstd_ptr += key_head * chunks * CHUNK
    dq = tl.zeros([CHUNK, SIZE], tl.float32)
    dk = tl.zeros([CHUNK, SIZE], tl.float32)
    for member in range(GROUP):
        whole = ((key_head * GROUP + member) * chunks + chunk) * CHUNK * SIZE
        dq += _tile(from_q_ptr + whole, 0, SIZE, CHUNK, 0, CHUNK, SIZE, SIZE)
        dk += _tile(from_k_ptr + whole, 0, SIZE, CHUNK, 0, CHUNK, SIZE, SIZE)
    dq *= scale
    if NORMED:
        q = _tile(q_ptr + at, start, k_steps[1], tokens, 0, CHUNK, DIM, SIZE)
        k = _tile(k_ptr + at, start, k_steps[1], tokens, 0, CHUNK, DIM, SIZE)
        dq = _norm_gradient(dq, q, _rstds(rstd_ptr, start, 1.0, NORMED, CHUNK))
        dk = _norm_gradient(dk, k, _rstds(rstd_ptr, rstd_plane + start, 1.0, NORMED, CHUNK))
    at = (batch * tokens * heads + head) * DIM
    _store_tile(dq_ptr + at, dq, start, heads * DIM, tokens, 0, DIM, SIZE)
    _store_tile(dk_ptr + at, dk, start, heads * DIM, tokens, 0, DIM, SIZE)
