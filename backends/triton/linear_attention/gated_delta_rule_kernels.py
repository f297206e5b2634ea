"""The gated delta rule by chunks of tokens: its kernels.

Of one value head and chunk, S the state before it, Q = scale q and all of the shape (tokens, ...):

    G_i = the gates summed from the first token of the chunk or document on,  e = exp(G)
    D_ij = exp(G_i - G_j) for i >= j of one document,  r = exp(G_last - G),  z = e_last
    A = (I + L)^-1,  L = beta_i (k_i . k_j) D_ij below the diagonal,  P = (Q K') D
    N = A beta (V - e K S),  y = e Q S + P N,  S' = z S + (r K)' N

and with dS' the gradient of S':

    Y = A' (P' dy + r K dS'),  dV = beta Y,  dS = z dS' + (e Q)' dy - (beta e K)' Y
    dP = dy N',  E = dP D,  dL = -(Y N') below the diagonal,  M = dL D beta_i
    dQ = E K + e dy S',  dK = E' Q + r N dS'' + (M + M') K - beta e Y S'
    dbeta = rows of Y (V - e K S) + rows of dL (K K') D,  T = dP P below the diagonal + dL L
    dG = rows of T - columns of T + e Q (dy S')' - r K (N dS'')' - beta e K (Y S')', and of the
    last token the sums of r K (N dS'')' and of z S dS'; dg sums dG over later tokens

e is 0 outside of the document that S belongs to, r outside of the last token's, z where the chunk
has a boundary. No difference of large sums is formed for dg: T leaves out the diagonal.

A GEMM over tokens multiplies what documents have by the zeros between them, and 0 times NaN is NaN.
A pass over states shows this: what is not finite stays in the state to its end. Where a call has
several documents, kernels so flag the value heads in which something is not finite, and are
launched once more to do these again, ISOLATED: what is not finite is taken as 0 in a GEMM, rows
that see it become NaN, and masks replace what they hide. For the other heads, programs of the
second launch end at once. A call of one document has none of this.

One kernel prepares A, P and the gates of all chunks. One passes over the chunks of a block of
value columns with S in registers, one in reverse with dS. Two others run for all chunks at once.
Operands that are read the other way round come from memory: on Hopper, Triton up to 3.7.0
multiplies wrongly by a transposed result of another GEMM. q and k have the same strides: addresses
of their tiles are then the same registers.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.attention.attention_kernels import product
from liger_multi.backends.triton.common.rows import (
    INTERPRETED,
    LOG2E,
    add_dot,
    assume_rows,
    round_to,
    short_offsets,
)

NORM_EPS: tl.constexpr = tl.constexpr(1e-6)
GONE: tl.constexpr = tl.constexpr(-110.0)  # gates below have an exponential of 0 in fp32
STEPS: tl.constexpr = tl.constexpr(1024.0)  # sums of this part of 1 are exact in fp32

# --- tiles ---


@triton.jit
def _tile(
    ptr, start, stride, rows, column, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr
):
    """Load a tile: rows from ``start`` on and BLOCK columns from ``column`` on; zeros outside."""
    row, col = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    assume_rows(ptr, stride, ROWS)
    at = ptr + tl.cast(start, tl.int64) * stride + column + (row[:, None] * stride + col[None, :])
    mask = (start + row < rows)[:, None]
    if COLS % BLOCK != 0:
        mask = mask & (column + col < COLS)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _store_tile(ptr, value, start, stride, rows, column, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """Store what :func:`_tile` would load."""
    ROWS: tl.constexpr = value.shape[0]
    row, col = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    assume_rows(ptr, stride, ROWS)
    at = ptr + tl.cast(start, tl.int64) * stride + column + (row[:, None] * stride + col[None, :])
    mask = (start + row < rows)[:, None]
    if COLS % BLOCK != 0:
        mask = mask & (column + col < COLS)[None, :]
    tl.store(at, round_to(value, ptr.dtype.element_ty), mask=mask)


@triton.jit
def _assume_heads(heads, EACH: tl.constexpr):
    """Tell the compiler that tokens are short, of heads of EACH elements: ``supports`` sees to it.

    Then offsets within a chunk are known to need 32 bits.
    """
    if short_offsets():
        tl.assume(heads >= 0)
        tl.assume(heads <= 2**21 // EACH)


@triton.jit
def _square(ptr, SIZE: tl.constexpr):
    """Addresses of a contiguous square."""
    row = tl.arange(0, SIZE)
    return ptr + (row[:, None] * SIZE + row[None, :])


@triton.jit
def _numbers(ptr, start, stride, tokens, CHUNK: tl.constexpr):
    """A number of each token of a chunk in fp32, 0 past the last token."""
    row = tl.arange(0, CHUNK)
    at = ptr + tl.cast(start, tl.int64) * stride + row * stride
    return tl.load(at, mask=start + row < tokens, other=0.0).to(tl.float32)


@triton.jit
def _rstds(rstd_ptr, start, factor, NORMED: tl.constexpr, CHUNK: tl.constexpr):
    """What rows of a chunk are multiplied by: ``factor``, over their norm where NORMED."""
    if NORMED:
        return tl.load(rstd_ptr + start + tl.arange(0, CHUNK)) * factor
    return tl.zeros([CHUNK], tl.float32) + factor


@triton.jit
def _visible_pairs(first_ptr, start, tokens, CHUNK: tl.constexpr):
    """Pairs (i, j) of a chunk with i not before j, of one document; where it begins, for each i.

    Rows past the last token belong to its document.
    """
    row = tl.arange(0, CHUNK)
    visible = row[:, None] >= row[None, :]
    begins = row * 0
    if first_ptr is not None:
        begins = tl.load(first_ptr + tl.minimum(start + row, tokens - 1))
        visible = visible & (begins[:, None] <= (start + row)[None, :])
    return visible, begins


# --- several documents ---


@triton.jit
def _finite(x):
    """``x`` with 0 for what is not finite."""
    wide = x.to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(x.dtype)


@triton.jit
def _fits(x, dtype: tl.constexpr):
    """Whether fp32 numbers are finite, and stay so in a dtype."""
    if dtype == tl.float16:
        return tl.abs(x) < 65520.0
    elif dtype == tl.bfloat16:
        return tl.abs(x) < 3.3961775292304884e38
    else:
        return tl.abs(x) < float("inf")


@triton.jit
def _wrong_rows(is_fine):
    """1 for rows of a tile of which something is not fine, 0 for the others."""
    return tl.max(tl.where(is_fine, 0, 1), 1)


@triton.jit
def _finite_rows(x):
    """``x`` with 0 for what is not finite, and rows that had it."""
    wide = x.to(tl.float32)
    is_fine = tl.abs(wide) < float("inf")
    return tl.where(is_fine, wide, 0.0).to(x.dtype), _wrong_rows(is_fine)


@triton.jit
def _flag(ptr, x, lost=None):
    """Write 1 if something of a tile is not finite, or a row lost."""
    wrong = tl.max(_wrong_rows(tl.abs(x) < float("inf")), 0)
    if lost is not None:
        wrong += tl.max(lost, 0)
    tl.store(ptr, 1, mask=wrong > 0)


@triton.jit
def _begins(first_ptr, start, tokens, CHUNK: tl.constexpr):
    """In which row of the chunk the document of each row begins, below 0 if before it.

    The first token of all has the initial state, as if its document had begun before.
    """
    row = tl.arange(0, CHUNK)
    first = tl.load(first_ptr + tl.minimum(start + row, tokens - 1))
    return tl.where(first == 0, -1, tl.maximum(first - start, -1)).to(tl.int32)


@triton.jit
def _last_begin(begins, CHUNK: tl.constexpr):
    """Where the document of the last row begins."""
    return tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, begins, 0), 0)


@triton.jit
def _bits(rows, CHUNK: tl.constexpr):
    """An integer with a bit for each row of a chunk that is not 0."""
    bit = tl.full([CHUNK], 1, tl.int64) << tl.arange(0, CHUNK).to(tl.int64)
    return tl.sum(tl.where(rows != 0, bit, 0), 0)


@triton.jit
def _after(wrong, begins, CHUNK: tl.constexpr):
    """Rows of which a wrong one of their document is not after them."""
    one = tl.full([CHUNK], 1, tl.int64)
    till = (one << tl.arange(0, CHUNK).to(tl.int64)) * 2 - 1
    before = (one << tl.maximum(begins, 0).to(tl.int64)) - 1
    return (_bits(wrong, CHUNK) & till & ~before) != 0


@triton.jit
def _before(wrong, begins, CHUNK: tl.constexpr):
    """Rows of which a wrong one of their document is not before them."""
    row = tl.arange(0, CHUNK)
    bit = tl.full([CHUNK], 1, tl.int64) << row.to(tl.int64)
    later = _bits(row == begins, CHUNK) & ~(bit * 2 - 1)
    following = later & -later  # the first row of the next document
    return (_bits(wrong, CHUNK) & (following - 1) & ~(bit - 1)) != 0


@triton.jit
def _not_gone(x, decay):
    """``x``, 0 where nothing is left by its decay: it may be of another document."""
    return tl.where(decay == 0.0, 0.0, x)


@triton.jit
def _of_state(x, begins):
    """Rows of the document of the state before the chunk, 0 for the others."""
    return tl.where((begins < 0)[:, None], x, tl.zeros_like(x))


@triton.jit
def _of_last(x, begins, CHUNK: tl.constexpr):
    """Rows of the document of the state after the chunk, 0 for the others."""
    return tl.where((begins == _last_begin(begins, CHUNK))[:, None], x, tl.zeros_like(x))


@triton.jit
def _over(x, begins, CHUNK: tl.constexpr):
    """What passes from the state before the chunk to the one after it: nothing over a boundary."""
    return tl.where(_last_begin(begins, CHUNK) < 0, x, 0.0)


# --- gates ---


@triton.jit
def _gates_of(g, visible, begins, start, SEVERAL: tl.constexpr, CHUNK: tl.constexpr):
    """Both parts of G, e and r, from the gates of a chunk; SEVERAL documents may be in it."""
    g = tl.where(g < GONE, GONE, g)
    large = tl.floor(g * STEPS) * (1.0 / STEPS)
    coarse = tl.sum(tl.where(visible, large[None, :], 0.0), 1)
    fine = tl.sum(tl.where(visible, (g - large)[None, :], 0.0), 1)
    end = tl.arange(0, CHUNK) == CHUNK - 1
    rest = tl.sum(tl.where(end, coarse, 0.0), 0) - coarse
    rest += tl.sum(tl.where(end, fine, 0.0), 0) - fine
    e, r = tl.exp2((coarse + fine) * LOG2E), tl.exp2(rest * LOG2E)
    if SEVERAL:
        e = tl.where(begins < tl.maximum(start, 1), e, 0.0)
        r = tl.where(begins == tl.sum(tl.where(end, begins, 0), 0), r, 0.0)
    return coarse, fine, e, r


@triton.jit
def _decays(coarse, fine, visible):
    """D, from both parts of the sums of gates."""
    apart = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return tl.exp2(tl.where(visible, apart * LOG2E, -float("inf")))


@triton.jit
def _folded(x, by, FOLD: tl.constexpr):
    """Rows and their factors; with FOLD they are multiplied here, and the factors are 1.

    In float16 it must be so: a factor of a short row would leave the range in a product with
    others.
    """
    if FOLD:
        return round_to(x.to(tl.float32) * by[:, None], x.dtype), by * 0.0 + 1.0
    return x, by


@triton.jit
def _plus(total, a, b):
    """``total + a @ b`` in fp32; both factors have one dtype."""
    if INTERPRETED and b.dtype == tl.bfloat16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _solve_product(a, b, EXACT: tl.constexpr):
    """A product of fp32 matrices; to 16 bits of each factor, unless EXACT.

    Two bf16 numbers hold 16 bits, and matrix units take them as they lie; of TF32 the second factor
    would have to be transposed on chip.
    """
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    else:
        a_near, b_near = round_to(a, tl.bfloat16), round_to(b, tl.bfloat16)
        a_rest = round_to(a - a_near.to(tl.float32), tl.bfloat16)
        b_rest = round_to(b - b_near.to(tl.float32), tl.bfloat16)
        return _plus(_plus(product(a_near, b_rest), a_rest, b_near), a_near, b_near)


@triton.jit
def _unit_inverse(lower, EXACT: tl.constexpr, CHUNK: tl.constexpr):
    """(I + L)^-1 of a strictly lower L, by blocks of 2, 4, 8 and so on.

    With the inverses A of both diagonal blocks, the block below the diagonal is -A L A.
    """
    row = tl.arange(0, CHUNK)
    i, j = row[:, None], row[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, lower, 0.0)
    size: tl.constexpr = CHUNK
    for power in tl.static_range(1, 6):
        if 2**power < size:
            between = (i // 2 ** (power + 1) == j // 2 ** (power + 1)) & (
                i // 2**power != j // 2**power
            )
            below = tl.where(between, lower, 0.0)
            inverse -= _solve_product(inverse, _solve_product(below, inverse, EXACT), EXACT)
    return inverse


@triton.jit
def _isolated_inverse(lower, begins, EXACT: tl.constexpr, CHUNK: tl.constexpr):
    """:func:`_unit_inverse` of several documents; NaN in rows that see one which is not finite."""
    row = tl.arange(0, CHUNK)
    i, j = row[:, None], row[None, :]
    lower, wrong = _finite_rows(lower)
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, lower, 0.0)
    size: tl.constexpr = CHUNK
    for power in tl.static_range(1, 6):
        if 2**power < size:
            between = (i // 2 ** (power + 1) == j // 2 ** (power + 1)) & (
                i // 2**power != j // 2**power
            )
            below = tl.where(between, lower, 0.0)
            read, more = _finite_rows(_solve_product(below, inverse, EXACT))
            wrong = tl.maximum(wrong, more)
            inverse, more = _finite_rows(inverse - _solve_product(inverse, read, EXACT))
            wrong = tl.maximum(wrong, more)
    return inverse, _after(wrong, begins, CHUNK)


@triton.jit
def _spoiled(square, rows, begins, CHUNK: tl.constexpr):
    """A square of pairs with NaN in some rows, where they see others."""
    row = tl.arange(0, CHUNK)
    visible = (row[:, None] >= row[None, :]) & (row[None, :] >= begins[:, None])
    return tl.where(rows[:, None] & visible, float("nan"), square)


# --- what needs no state ---


@triton.jit
def _delta_rule_chunks_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    first_ptr,
    inverse_ptr,
    scores_ptr,
    gates_ptr,
    rstd_ptr,
    flags_ptr,
    k_steps,
    g_steps,
    beta_steps,
    first_step,
    sizes,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ISOLATED: tl.constexpr,
):
    """A, P, the gates and norms of every chunk.

    Program: a chunk of one value head; those of a key head are neighbors.
    Reads q, k, g and beta. Writes A and P, each (CHUNK, CHUNK); e, r and two parts of G, in planes
    of ``gates_ptr``; and, in the first head of a group, 1 / norm of the rows of q and of k. A flag
    if A is not finite.
    """
    tokens, chunks, heads, plane, rstd_plane = sizes
    NORMED: tl.constexpr = rstd_ptr is not None
    pid = tl.program_id(0).to(tl.int64)
    member, chunk = pid % GROUP, (pid // GROUP) % chunks
    key_head = pid // GROUP // chunks
    batch, head = key_head // heads, key_head % heads
    value_head = head * GROUP + member
    if ISOLATED:
        if tl.load(flags_ptr + batch * heads * GROUP + value_head) == 0:
            return
    start = (chunk * CHUNK).to(tl.int32)
    row = tl.arange(0, CHUNK)
    q = _tile(q_ptr + batch * k_steps[0] + head * k_steps[2], start, k_steps[1], tokens, 0,
              CHUNK, DIM, SIZE)  # fmt: skip
    k = _tile(
        k_ptr + batch * k_steps[0] + head * k_steps[2],
        start,
        k_steps[1],
        tokens,
        0,
        CHUNK,
        DIM,
        SIZE,
    )
    q_scale = tl.zeros([CHUNK], tl.float32) + scale
    k_scale = tl.zeros([CHUNK], tl.float32) + 1.0
    if NORMED:
        wide, other = q.to(tl.float32), k.to(tl.float32)
        q_rstd = tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPS)
        k_rstd = tl.rsqrt(tl.sum(other * other, 1) + NORM_EPS)
        if member == 0:
            at = rstd_ptr + key_head * chunks * CHUNK + start + row
            tl.store(at, q_rstd)
            tl.store(at + rstd_plane, k_rstd)
        q_scale *= q_rstd
        k_scale *= k_rstd
    g = _numbers(
        g_ptr + batch * g_steps[0] + value_head * g_steps[2], start, g_steps[1], tokens, CHUNK
    )
    beta = _numbers(
        beta_ptr + batch * beta_steps[0] + value_head * beta_steps[2],
        start,
        beta_steps[1],
        tokens,
        CHUNK,
    )
    if first_ptr is not None:
        first_ptr += batch * first_step
    visible, begins = _visible_pairs(first_ptr, start, tokens, CHUNK)
    coarse, fine, e, r = _gates_of(g, visible, begins, start, first_ptr is not None, CHUNK)
    whole = (batch * heads * GROUP + value_head) * chunks + chunk
    at = gates_ptr + whole * CHUNK + row
    tl.store(at, e)
    tl.store(at + plane, r)
    tl.store(at + 2 * plane, coarse)
    tl.store(at + 3 * plane, fine)
    decay = _decays(coarse, fine, visible)
    dtype = inverse_ptr.dtype.element_ty
    p = product(q, tl.trans(k)) * decay * q_scale[:, None] * k_scale[None, :]
    if first_ptr is not None:
        p = tl.where(visible, p, 0.0)
    tl.store(_square(scores_ptr + whole * CHUNK * CHUNK, CHUNK), round_to(p, dtype))
    lower = product(k, tl.trans(k)) * decay * (beta * k_scale)[:, None] * k_scale[None, :]
    lower = tl.where(row[:, None] > row[None, :], lower, 0.0)
    if first_ptr is not None:
        lower = tl.where(visible, lower, 0.0)
    if ISOLATED:
        near = _begins(first_ptr, start, tokens, CHUNK)
        a, spoiled = _isolated_inverse(lower, near, dtype == tl.float32, CHUNK)
        a = _spoiled(a, spoiled, near, CHUNK)
    else:
        a = _unit_inverse(lower, dtype == tl.float32, CHUNK)
        if flags_ptr is not None:
            _flag(flags_ptr + batch * heads * GROUP + value_head, a)
    tl.store(_square(inverse_ptr + whole * CHUNK * CHUNK, CHUNK), round_to(a, dtype))


# --- states ---


@triton.jit
def _causal_product(a, rows, wrong, by, begins, dtype: tl.constexpr, CHUNK: tl.constexpr):
    """``a @ rows``, rows of what each sees, with NaN where it sees a wrong one.

    One that is not finite is wrong, too, or not so in ``dtype``, times ``by`` if that is not None.
    """
    is_fine = _fits(rows, dtype)
    wrong = tl.maximum(wrong, _wrong_rows(is_fine))
    product_of_fine = product(a, round_to(tl.where(is_fine, rows, 0.0), dtype))
    used = product_of_fine if by is None else product_of_fine * by[:, None]
    wrong = tl.maximum(wrong, _wrong_rows(_fits(used, dtype)))
    return tl.where(_after(wrong, begins, CHUNK)[:, None], float("nan"), product_of_fine)


@triton.jit
def _read(x, state, decay, PACKED: tl.constexpr):
    """``x @ state``; where a call is PACKED, 0 in rows to which nothing is left by their decay."""
    rows = product(x, state)
    if PACKED:
        rows = _not_gone(rows, decay[:, None])
    return rows


@triton.jit
def _isolated_outputs(y, p, n, dtype: tl.constexpr):
    """``y + p @ n``, with NaN where n is: its other numbers fit into ``dtype``."""
    near = round_to(tl.where(n == n, n, 0.0), dtype)
    return tl.where(n == n, _plus(y, p, near), n)


@triton.jit
def _anticausal_product(a, rows, wrong, begins, dtype: tl.constexpr, CHUNK: tl.constexpr):
    """``a @ rows``, rows of what sees each, with NaN where a wrong one sees it.

    One that is not finite is wrong, too.
    """
    is_fine = _fits(rows, dtype)
    wrong = tl.maximum(wrong, _wrong_rows(is_fine))
    product_of_fine = product(a, round_to(tl.where(is_fine, rows, 0.0), dtype))
    return tl.where(_before(wrong, begins, CHUNK)[:, None], float("nan"), product_of_fine)


@triton.jit
def _columns_of(heads, SHAPE: tl.constexpr):
    """Where a program is that has BLOCK columns of one value head.

    Returns the first column; the value head among those of all sequences; how many a sequence has;
    and the sequence, its key head and its value head.
    """
    GROUP: tl.constexpr = SHAPE[0]
    VALUE: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[4]
    blocks: tl.constexpr = (VALUE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0).to(tl.int64)
    column, stream = (pid % blocks).to(tl.int32) * BLOCK, pid // blocks
    _assume_heads(heads, GROUP * VALUE)
    many = heads * GROUP
    batch, value_head = stream // many, stream % many
    return column, stream, many, batch, value_head // GROUP, value_head


@triton.jit(do_not_specialize=["chunks"])  # a loop that is always a loop
def _delta_rule_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    first_ptr,
    inverse_ptr,
    scores_ptr,
    gates_ptr,
    rstd_ptr,
    flags_ptr,
    initial_ptr,
    y_ptr,
    final_ptr,
    states_ptr,
    values_ptr,
    strides,
    first_step,
    sizes,
    chunks,
    scale,
    SHAPE: tl.constexpr,
    STAGES: tl.constexpr,
    ISOLATED: tl.constexpr,
):
    """Pass over the chunks with the state in registers.

    Program: BLOCK columns of v of one value head, chunk after chunk.
    Reads k, v, A and gates, for y also q and P. Writes y (batch, tokens, heads, VALUE) and the last
    state, or the state before every chunk and N, if there is room; a flag if one is not finite.
    """
    k_steps, v_steps, beta_steps = strides[0:3], strides[3:6], strides[6:9]
    tokens, heads, plane, rstd_plane = sizes
    DIM: tl.constexpr = SHAPE[1]
    SIZE: tl.constexpr = SHAPE[2]
    VALUE: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[4]
    CHUNK: tl.constexpr = SHAPE[5]
    NORMED: tl.constexpr = rstd_ptr is not None
    column, stream, many, batch, head, value_head = _columns_of(heads, SHAPE)
    if ISOLATED:
        if tl.load(flags_ptr + stream) == 0:
            return
    row = tl.arange(0, CHUNK)
    k_ptr += batch * k_steps[0] + head * k_steps[2]
    v_ptr += batch * v_steps[0] + value_head * v_steps[2]
    beta_ptr += batch * beta_steps[0] + value_head * beta_steps[2]
    gates_ptr += stream * chunks * CHUNK
    inverse_ptr += stream * chunks * CHUNK * CHUNK
    if NORMED:
        rstd_ptr += (batch * heads + head) * chunks * CHUNK
    if y_ptr is not None:
        q_ptr += batch * k_steps[0] + head * k_steps[2]
        scores_ptr += stream * chunks * CHUNK * CHUNK
        y_ptr += (batch * tokens * many + value_head) * VALUE
    if values_ptr is not None:
        values_ptr += stream * tokens * VALUE
        states_ptr += stream * chunks * DIM * VALUE
    dtype = k_ptr.dtype.element_ty
    state = tl.zeros([SIZE, BLOCK], tl.float32)
    if initial_ptr is not None:
        state += _tile(initial_ptr + stream * DIM * VALUE, 0, VALUE, DIM, column, SIZE, VALUE,
                       BLOCK).to(tl.float32)  # fmt: skip
    lost = tl.zeros([CHUNK], tl.int32)
    for chunk in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        start = chunk * CHUNK
        place = tl.cast(start, tl.int64)
        k = _tile(k_ptr, start, k_steps[1], tokens, 0, CHUNK, DIM, SIZE)
        v = _tile(v_ptr, start, v_steps[1], tokens, column, CHUNK, VALUE, BLOCK).to(tl.float32)
        a = tl.load(_square(inverse_ptr + place * CHUNK, CHUNK))
        beta = _numbers(beta_ptr, start, beta_steps[1], tokens, CHUNK)
        e, r = tl.load(gates_ptr + start + row), tl.load(gates_ptr + plane + start + row)
        z = tl.load(gates_ptr + start + CHUNK - 1)
        by = _rstds(rstd_ptr, rstd_plane + start, 1.0, NORMED, CHUNK)
        k, by = _folded(k, by, NORMED and dtype == tl.float16)
        if ISOLATED:
            begins = _begins(first_ptr + batch * first_step, start, tokens, CHUNK)
            by = _finite(by)
            k, wrong = _finite_rows(k)
        narrow = round_to(state, dtype)
        if values_ptr is not None:
            at = states_ptr + tl.cast(chunk, tl.int64) * DIM * VALUE
            _store_tile(at, state, 0, VALUE, DIM, column, VALUE, BLOCK)
        read, left = product(k, narrow), (e * by)[:, None]
        if ISOLATED:
            right = (v - _of_state(read, begins) * left) * beta[:, None]
            n = _causal_product(a, right, wrong, None, begins, dtype, CHUNK)
        else:
            n = product(a, round_to((v - read * left) * beta[:, None], dtype))
        if values_ptr is not None:
            _store_tile(values_ptr, n, start, VALUE, tokens, column, VALUE, BLOCK)
        if y_ptr is not None:
            q = _tile(q_ptr, start, k_steps[1], tokens, 0, CHUNK, DIM, SIZE)
            p = tl.load(_square(scores_ptr + place * CHUNK, CHUNK))
            q_by = _rstds(rstd_ptr, start, scale, NORMED, CHUNK)
            y = _read(q, narrow, e, flags_ptr is not None) * (e * q_by)[:, None]
            if ISOLATED:
                y = _isolated_outputs(_of_state(y, begins), p, n, dtype)
            else:
                y = _plus(y, p, round_to(n, dtype))
            _store_tile(y_ptr, y, start, many * VALUE, tokens, column, VALUE, BLOCK)
        if ISOLATED:
            n, state = _of_last(n, begins, CHUNK), _over(state, begins, CHUNK)
        elif flags_ptr is not None and dtype == tl.float16:
            lost = tl.maximum(lost, _wrong_rows(_fits(n, dtype)))
        state = _plus(state * z, tl.trans(k), round_to(n * (r * by)[:, None], dtype))
    if flags_ptr is not None:
        _flag(flags_ptr + stream, state, lost)
    if final_ptr is not None:
        _store_tile(final_ptr + stream * DIM * VALUE, state, 0, VALUE, DIM, column, VALUE, BLOCK)


@triton.jit(do_not_specialize=["chunks"])  # a loop that is always a loop
def _delta_rule_reverse_kernel(
    dy_ptr,
    q_ptr,
    k_ptr,
    beta_ptr,
    first_ptr,
    inverse_ptr,
    scores_ptr,
    gates_ptr,
    rstd_ptr,
    flags_ptr,
    dfinal_ptr,
    solved_ptr,
    dstates_ptr,
    dinitial_ptr,
    strides,
    first_step,
    sizes,
    chunks,
    scale,
    SHAPE: tl.constexpr,
    STAGES: tl.constexpr,
    ISOLATED: tl.constexpr,
):
    """Pass over the chunks in reverse with the gradient of the state in registers.

    Program: BLOCK columns of v of one value head, from the last chunk to the first.
    Reads dy, q, k, A, P and gates. Writes the gradient of the state after every chunk; Y (batch,
    tokens, heads, VALUE); at the end the gradient of the first state; a flag if it is not finite.
    """
    dy_steps, k_steps, beta_steps = strides[0:3], strides[3:6], strides[6:9]
    tokens, heads, plane, rstd_plane = sizes
    DIM: tl.constexpr = SHAPE[1]
    SIZE: tl.constexpr = SHAPE[2]
    VALUE: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[4]
    CHUNK: tl.constexpr = SHAPE[5]
    NORMED: tl.constexpr = rstd_ptr is not None
    column, stream, many, batch, head, value_head = _columns_of(heads, SHAPE)
    if ISOLATED:
        if tl.load(flags_ptr + stream) == 0:
            return
        first_ptr += batch * first_step
    row = tl.arange(0, CHUNK)
    q_ptr += batch * k_steps[0] + head * k_steps[2]
    k_ptr += batch * k_steps[0] + head * k_steps[2]
    dy_ptr += batch * dy_steps[0] + value_head * dy_steps[2]
    beta_ptr += batch * beta_steps[0] + value_head * beta_steps[2]
    gates_ptr += stream * chunks * CHUNK
    inverse_ptr += stream * chunks * CHUNK * CHUNK
    scores_ptr += stream * chunks * CHUNK * CHUNK
    dstates_ptr += stream * chunks * DIM * VALUE
    solved_ptr += (batch * tokens * many + value_head) * VALUE
    if NORMED:
        rstd_ptr += (batch * heads + head) * chunks * CHUNK
    dtype = k_ptr.dtype.element_ty
    dstate = tl.zeros([SIZE, BLOCK], tl.float32)
    if dfinal_ptr is not None:
        dstate += _tile(dfinal_ptr + stream * DIM * VALUE, 0, VALUE, DIM, column, SIZE, VALUE,
                        BLOCK).to(tl.float32)  # fmt: skip
    dstates_ptr += tl.cast(chunks - 1, tl.int64) * DIM * VALUE
    _store_tile(dstates_ptr, dstate, 0, VALUE, DIM, column, VALUE, BLOCK)
    for step in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        chunk = chunks - 1 - step
        start = chunk * CHUNK
        place = tl.cast(start, tl.int64)
        q = _tile(q_ptr, start, k_steps[1], tokens, 0, CHUNK, DIM, SIZE)
        k = _tile(k_ptr, start, k_steps[1], tokens, 0, CHUNK, DIM, SIZE)
        dy = _tile(dy_ptr, start, dy_steps[1], tokens, column, CHUNK, VALUE, BLOCK)
        a = tl.load(_square(inverse_ptr + place * CHUNK, CHUNK))
        p = tl.load(_square(scores_ptr + place * CHUNK, CHUNK))
        beta = _numbers(beta_ptr, start, beta_steps[1], tokens, CHUNK)
        e, r = tl.load(gates_ptr + start + row), tl.load(gates_ptr + plane + start + row)
        z = tl.load(gates_ptr + start + CHUNK - 1)
        by = _rstds(rstd_ptr, rstd_plane + start, 1.0, NORMED, CHUNK)
        q_by = _rstds(rstd_ptr, start, scale, NORMED, CHUNK)
        k, by = _folded(k, by, NORMED and dtype == tl.float16)
        q, q_by = _folded(q, q_by, NORMED and dtype == tl.float16)
        if ISOLATED:
            begins = _begins(first_ptr, start, tokens, CHUNK)
            by, q_by = _finite(by), _finite(q_by)
            k, wrong = _finite_rows(k)
            q, more = _finite_rows(q)
            wrong = tl.maximum(wrong, more)
            dy, more = _finite_rows(dy)
            wrong = tl.maximum(wrong, more)
        dn = product(k, round_to(dstate, dtype)) * (r * by)[:, None]
        own = dy.to(tl.float32) * (e * q_by)[:, None]
        if ISOLATED:
            dn, own = _of_last(dn, begins, CHUNK), _of_state(own, begins)
            dstate = _over(dstate, begins, CHUNK)
        dstate = _plus(dstate * z, tl.trans(q), round_to(own, dtype))
        dn = _plus(dn, tl.trans(p), dy)
        if ISOLATED:
            y = _anticausal_product(tl.trans(a), dn, wrong, begins, dtype, CHUNK)
        else:
            y = product(tl.trans(a), round_to(dn, dtype))
        _store_tile(solved_ptr, y, start, many * VALUE, tokens, column, VALUE, BLOCK)
        x = y * (beta * e * by)[:, None]
        if ISOLATED:
            x = _of_state(x, begins)
        dstate = add_dot(tl.trans(k), round_to(-x, dtype), dstate)
        dstates_ptr -= DIM * VALUE
        rows = tl.where(chunk > 0, DIM, 0)
        _store_tile(dstates_ptr, dstate, 0, VALUE, rows, column, VALUE, BLOCK)
    if flags_ptr is not None:
        _flag(flags_ptr + stream, dstate)
    if dinitial_ptr is not None:
        at = dinitial_ptr + stream * DIM * VALUE
        _store_tile(at, dstate, 0, VALUE, DIM, column, VALUE, BLOCK)


# --- gradients, all chunks at once ---


@triton.jit
def _delta_rule_pairs_kernel(
    dy_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    first_ptr,
    values_ptr,
    solved_ptr,
    gates_ptr,
    rstd_ptr,
    scores_ptr,
    inverse_ptr,
    sums_ptr,
    dy_steps,
    k_steps,
    v_steps,
    beta_steps,
    first_step,
    sizes,
    scale,
    SHAPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of pairs of tokens.

    Program: a chunk of one value head. It sums dP and Y N' over blocks of value columns.
    Reads dy, N, Y, q, k, v and gates. Writes E in the place of P, M in that of A, and in two planes
    of ``sums_ptr`` what pairs and v give to dG and to dbeta.
    """
    tokens, chunks, heads, plane, rstd_plane = sizes
    GROUP: tl.constexpr = SHAPE[0]
    DIM: tl.constexpr = SHAPE[1]
    SIZE: tl.constexpr = SHAPE[2]
    VALUE: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[4]
    CHUNK: tl.constexpr = SHAPE[5]
    NORMED: tl.constexpr = rstd_ptr is not None
    pid = tl.program_id(0).to(tl.int64)
    member, chunk = pid % GROUP, (pid // GROUP) % chunks
    key_head = pid // GROUP // chunks
    batch, head = key_head // heads, key_head % heads
    _assume_heads(heads, GROUP * VALUE)
    many = heads * GROUP
    value_head = head * GROUP + member
    stream = batch * many + value_head
    start = (chunk * CHUNK).to(tl.int32)
    row = tl.arange(0, CHUNK)
    dy_ptr += batch * dy_steps[0] + value_head * dy_steps[2]
    v_ptr += batch * v_steps[0] + value_head * v_steps[2]
    values_ptr += stream * tokens * VALUE
    solved_ptr += (batch * tokens * many + value_head) * VALUE
    dp = tl.zeros([CHUNK, CHUNK], tl.float32)
    dlower = tl.zeros([CHUNK, CHUNK], tl.float32)
    from_v = tl.zeros([CHUNK], tl.float32)
    for column in tl.range(0, VALUE, BLOCK, num_stages=STAGES):
        dy = _tile(dy_ptr, start, dy_steps[1], tokens, column, CHUNK, VALUE, BLOCK)
        v = _tile(v_ptr, start, v_steps[1], tokens, column, CHUNK, VALUE, BLOCK)
        n = _tile(values_ptr, start, VALUE, tokens, column, CHUNK, VALUE, BLOCK)
        y = _tile(solved_ptr, start, many * VALUE, tokens, column, CHUNK, VALUE, BLOCK)
        dp = _plus(dp, dy, tl.trans(n))
        dlower = _plus(dlower, y, tl.trans(n))
        from_v += tl.sum(y.to(tl.float32) * v.to(tl.float32), 1)
    k = _tile(k_ptr + batch * k_steps[0] + head * k_steps[2], start, k_steps[1], tokens, 0,
              CHUNK, DIM, SIZE)  # fmt: skip
    if NORMED:
        rstd_ptr += key_head * chunks * CHUNK
    by = _rstds(rstd_ptr, rstd_plane + start, 1.0, NORMED, CHUNK)
    q_by = _rstds(rstd_ptr, start, scale, NORMED, CHUNK)
    beta = _numbers(
        beta_ptr + batch * beta_steps[0] + value_head * beta_steps[2],
        start,
        beta_steps[1],
        tokens,
        CHUNK,
    )
    if first_ptr is not None:
        first_ptr += batch * first_step
    visible, _ = _visible_pairs(first_ptr, start, tokens, CHUNK)
    whole = stream * chunks + chunk
    at = gates_ptr + whole * CHUNK + row
    decay = _decays(tl.load(at + 2 * plane), tl.load(at + 3 * plane), visible)
    below = row[:, None] > row[None, :]
    PACKED: tl.constexpr = first_ptr is not None
    if PACKED:
        below = below & visible
    dlower = tl.where(below, -dlower, 0.0)
    inner = product(k, tl.trans(k)) * decay * by[:, None] * by[None, :]
    if PACKED:
        inner = tl.where(below, inner, 0.0)
    from_pairs = tl.sum(dlower * inner, 1)
    through = dlower * inner * beta[:, None]
    mixed = dlower * decay * beta[:, None]
    if PACKED:
        through, mixed = tl.where(below, through, 0.0), tl.where(below, mixed, 0.0)
    dtype = inverse_ptr.dtype.element_ty
    tl.store(_square(inverse_ptr + whole * CHUNK * CHUNK, CHUNK), round_to(mixed, dtype))
    dp *= decay
    if PACKED:
        dp = tl.where(visible, dp, 0.0)
    tl.store(_square(scores_ptr + whole * CHUNK * CHUNK, CHUNK), round_to(dp, dtype))
    q = _tile(q_ptr + batch * k_steps[0] + head * k_steps[2], start, k_steps[1], tokens, 0,
              CHUNK, DIM, SIZE)  # fmt: skip
    scores = product(q, tl.trans(k)) * q_by[:, None] * by[None, :]
    through += tl.where(below, dp * scores, 0.0)
    at = sums_ptr + whole * CHUNK + row
    tl.store(at, tl.sum(through, 1) - tl.sum(through, 0))
    tl.store(at + plane, from_v + from_pairs)


@triton.jit
def _times_states(
    ptr,
    states,
    start,
    stride,
    tokens,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The product of a chunk's rows of VALUE columns with a state: x S', (CHUNK, SIZE)."""
    acc = tl.zeros([CHUNK, SIZE], tl.float32)
    for column in tl.range(0, VALUE, BLOCK, num_stages=STAGES):
        x = _tile(ptr, start, stride, tokens, column, CHUNK, VALUE, BLOCK)
        s = _tile(states, 0, VALUE, DIM, column, SIZE, VALUE, BLOCK)
        acc = _plus(acc, x, tl.trans(s))
    return acc


@triton.jit
def _norm_gradient(dx, x, rstd):
    """Gradient of x for ``x / norm``; ``dx`` is the gradient of the quotient."""
    y = x.to(tl.float32) * rstd[:, None]
    return (dx - y * tl.sum(y * dx, 1)[:, None]) * rstd[:, None]


@triton.jit
def _delta_rule_queries_kernel(
    dy_ptr,
    q_ptr,
    k_ptr,
    states_ptr,
    gates_ptr,
    rstd_ptr,
    scores_ptr,
    sums_ptr,
    dq_ptr,
    dy_steps,
    k_steps,
    sizes,
    scale,
    SHAPE: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Gradients of q.

    Program: a chunk of one key head, with the value heads of its group one after another.
    Reads dy, q, k, S, E and gates. Adds what y takes from states to the sums for dG, and writes dq,
    summed over the group in fp32.
    """
    tokens, chunks, heads, rstd_plane = sizes[0], sizes[1], sizes[2], sizes[4]
    GROUP: tl.constexpr = SHAPE[0]
    DIM: tl.constexpr = SHAPE[1]
    SIZE: tl.constexpr = SHAPE[2]
    VALUE: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[4]
    CHUNK: tl.constexpr = SHAPE[5]
    NORMED: tl.constexpr = rstd_ptr is not None
    pid = tl.program_id(0).to(tl.int64)
    chunk, key_head = pid % chunks, pid // chunks
    batch, head = key_head // heads, key_head % heads
    _assume_heads(heads, GROUP * VALUE)
    many = heads * GROUP
    start = (chunk * CHUNK).to(tl.int32)
    row = tl.arange(0, CHUNK)
    q_ptr += batch * k_steps[0] + head * k_steps[2]
    k_ptr += batch * k_steps[0] + head * k_steps[2]
    if NORMED:
        rstd_ptr += key_head * chunks * CHUNK
    dq = tl.zeros([CHUNK, SIZE], tl.float32)
    for member in tl.range(0, GROUP, disable_licm=True):
        value_head = head * GROUP + member
        whole = (batch * many + value_head) * chunks + chunk
        of_states = _times_states(
            dy_ptr + batch * dy_steps[0] + value_head * dy_steps[2],
            states_ptr + whole * DIM * VALUE,
            start,
            dy_steps[1],
            tokens,
            DIM=DIM,
            SIZE=SIZE,
            VALUE=VALUE,
            BLOCK=BLOCK,
            CHUNK=CHUNK,
            STAGES=STAGES,
        )
        q = _tile(q_ptr, start, k_steps[1], tokens, 0, CHUNK, DIM, SIZE).to(tl.float32)
        e = tl.load(gates_ptr + whole * CHUNK + row)
        by = _rstds(rstd_ptr, start, scale, NORMED, CHUNK)
        if PACKED:
            of_states = _not_gone(of_states, e[:, None])
        at = sums_ptr + whole * CHUNK + row
        tl.store(at, tl.load(at) + e * by * tl.sum(q * of_states, 1))
        dq += of_states * e[:, None]
        k = _tile(k_ptr, start, k_steps[1], tokens, 0, CHUNK, DIM, SIZE)
        k, _ = _folded(k, _rstds(rstd_ptr, rstd_plane + start, 1.0, NORMED, CHUNK), NORMED)
        if PACKED:
            k = _finite(k)
        dq += product(tl.load(_square(scores_ptr + whole * CHUNK * CHUNK, CHUNK)), k)
    dq *= scale
    if NORMED:
        q = _tile(q_ptr, start, k_steps[1], tokens, 0, CHUNK, DIM, SIZE)
        dq = _norm_gradient(dq, q, _rstds(rstd_ptr, start, 1.0, NORMED, CHUNK))
    dq_ptr += (batch * tokens * heads + head) * DIM
    _store_tile(dq_ptr, dq, start, heads * DIM, tokens, 0, DIM, SIZE)


@triton.jit
def _products_of_states(
    states,
    dstates,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of S dS' over all elements."""
    kept = tl.zeros([SIZE], tl.float32)
    for column in tl.range(0, VALUE, BLOCK):
        s = _tile(states, 0, VALUE, DIM, column, SIZE, VALUE, BLOCK).to(tl.float32)
        ds = _tile(dstates, 0, VALUE, DIM, column, SIZE, VALUE, BLOCK).to(tl.float32)
        kept += tl.sum(s * ds, 1)
    return tl.sum(kept, 0)


@triton.jit
def _times_pairs(
    q_ptr,
    k_ptr,
    rstd_ptr,
    pairs_ptr,
    mixed_ptr,
    start,
    step,
    tokens,
    plane,
    scale,
    NORMED: tl.constexpr,
    PACKED: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """``E' Q + (M + M') K`` of a chunk, half of its rows at a time.

    A loop for each: Triton gives the first of two GEMMs with one sum to fewer warps.
    """
    HALF: tl.constexpr = CHUNK // 2 if CHUNK > 32 else 16
    row, half = tl.arange(0, CHUNK), tl.arange(0, HALF)
    acc = tl.zeros([CHUNK, SIZE], tl.float32)
    for part in tl.range(0, CHUNK, HALF):
        q = _tile(q_ptr, start + part, step, tokens, 0, HALF, DIM, SIZE)
        q, _ = _folded(q, _rstds(rstd_ptr, start + part, scale, NORMED, HALF), True)
        if PACKED:
            q = _finite(q)
        pairs = tl.load(pairs_ptr + ((part + half)[:, None] * CHUNK + row[None, :]))
        acc = _plus(acc, tl.trans(pairs), q)
    for part in tl.range(0, CHUNK, HALF):
        k = _tile(k_ptr, start + part, step, tokens, 0, HALF, DIM, SIZE)
        k, _ = _folded(k, _rstds(rstd_ptr, plane + start + part, 1.0, NORMED, HALF), NORMED)
        if PACKED:
            k = _finite(k)
        columns = tl.load(mixed_ptr + (row[:, None] * CHUNK + (part + half)[None, :]))
        rows = tl.load(mixed_ptr + ((part + half)[:, None] * CHUNK + row[None, :]))
        mixed = columns.to(tl.float32) + tl.trans(rows).to(tl.float32)
        acc = add_dot(round_to(mixed, k.dtype), k, acc)
    return acc


@triton.jit
def _delta_rule_keys_kernel(
    q_ptr,
    k_ptr,
    beta_ptr,
    states_ptr,
    dstates_ptr,
    values_ptr,
    solved_ptr,
    gates_ptr,
    rstd_ptr,
    scores_ptr,
    inverse_ptr,
    sums_ptr,
    dk_ptr,
    k_steps,
    beta_steps,
    sizes,
    scale,
    SHAPE: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Gradients of k and v.

    Program: a chunk of one key head, with the value heads of its group one after another.
    Reads q, k, S, dS', N, Y, E, M and gates. Adds what states give to the sums for dG and dbeta.
    Writes dv in the place of Y, and at the end dk, summed over the group in fp32.
    """
    tokens, chunks, heads, plane, rstd_plane = sizes
    GROUP: tl.constexpr = SHAPE[0]
    DIM: tl.constexpr = SHAPE[1]
    SIZE: tl.constexpr = SHAPE[2]
    VALUE: tl.constexpr = SHAPE[3]
    BLOCK: tl.constexpr = SHAPE[4]
    CHUNK: tl.constexpr = SHAPE[5]
    NORMED: tl.constexpr = rstd_ptr is not None
    pid = tl.program_id(0).to(tl.int64)
    chunk, key_head = pid % chunks, pid // chunks
    batch, head = key_head // heads, key_head % heads
    _assume_heads(heads, GROUP * VALUE)
    many = heads * GROUP
    start = (chunk * CHUNK).to(tl.int32)
    row = tl.arange(0, CHUNK)
    q_ptr += batch * k_steps[0] + head * k_steps[2]
    k_ptr += batch * k_steps[0] + head * k_steps[2]
    if NORMED:
        rstd_ptr += key_head * chunks * CHUNK
    dk = tl.zeros([CHUNK, SIZE], tl.float32)
    for member in tl.range(0, GROUP, disable_licm=True):
        value_head = head * GROUP + member
        stream = batch * many + value_head
        whole = stream * chunks + chunk
        states, dstates = states_ptr + whole * DIM * VALUE, dstates_ptr + whole * DIM * VALUE
        by = _rstds(rstd_ptr, rstd_plane + start, 1.0, NORMED, CHUNK)
        beta = _numbers(beta_ptr + batch * beta_steps[0] + value_head * beta_steps[2], start,
                        beta_steps[1], tokens, CHUNK)  # fmt: skip
        at = gates_ptr + whole * CHUNK
        e, r, z = tl.load(at + row), tl.load(at + plane + row), tl.load(at + CHUNK - 1)
        address = solved_ptr + (batch * tokens * many + value_head) * VALUE
        through = _times_states(
            address, states, start, many * VALUE, tokens, DIM=DIM, SIZE=SIZE, VALUE=VALUE,
            BLOCK=BLOCK, CHUNK=CHUNK, STAGES=STAGES,
        )  # fmt: skip
        if PACKED:
            through = _not_gone(through, e[:, None])
        k = _tile(k_ptr, start, k_steps[1], tokens, 0, CHUNK, DIM, SIZE)
        read = e * by * tl.sum(k.to(tl.float32) * through, 1)
        dk -= through * (beta * e)[:, None]
        through = _times_states(
            values_ptr + stream * tokens * VALUE, dstates, start, VALUE, tokens, DIM=DIM, SIZE=SIZE,
            VALUE=VALUE, BLOCK=BLOCK, CHUNK=CHUNK, STAGES=STAGES,
        )  # fmt: skip
        k = _tile(k_ptr, start, k_steps[1], tokens, 0, CHUNK, DIM, SIZE)
        if PACKED:
            through = _not_gone(through, r[:, None])
        pushed = r * by * tl.sum(k.to(tl.float32) * through, 1)
        if PACKED:
            pushed = _not_gone(pushed, r)
        dk += through * r[:, None]
        last = tl.sum(pushed, 0)
        passed = z * _products_of_states(states, dstates, DIM, SIZE, VALUE, BLOCK)
        if PACKED:
            passed = _not_gone(passed, z)
        last += passed
        at = sums_ptr + whole * CHUNK + row
        last = tl.where(row == CHUNK - 1, last, 0.0)
        tl.store(at, tl.load(at) + last - pushed - beta * read)
        tl.store(at + plane, tl.load(at + plane) - read)
        for column in tl.range(0, VALUE, BLOCK):
            y = _tile(address, start, many * VALUE, tokens, column, CHUNK, VALUE, BLOCK)
            y = y.to(tl.float32) * beta[:, None]
            _store_tile(address, y, start, many * VALUE, tokens, column, VALUE, BLOCK)
        dk += _times_pairs(
            q_ptr, k_ptr, rstd_ptr, scores_ptr + whole * CHUNK * CHUNK,
            inverse_ptr + whole * CHUNK * CHUNK, start, k_steps[1], tokens, plane=rstd_plane,
            scale=scale, NORMED=NORMED, PACKED=PACKED, DIM=DIM, SIZE=SIZE, CHUNK=CHUNK,
        )  # fmt: skip
    if NORMED:
        k = _tile(k_ptr, start, k_steps[1], tokens, 0, CHUNK, DIM, SIZE)
        dk = _norm_gradient(dk, k, _rstds(rstd_ptr, rstd_plane + start, 1.0, NORMED, CHUNK))
    dk_ptr += (batch * tokens * heads + head) * DIM
    _store_tile(dk_ptr, dk, start, heads * DIM, tokens, 0, DIM, SIZE)


@triton.jit
def _delta_rule_gates_kernel(
    sums_ptr,
    first_ptr,
    dg_ptr,
    dbeta_ptr,
    first_step,
    tokens,
    chunks,
    many,
    plane,
    BLOCK: tl.constexpr,
):
    """Gradients of gates and beta.

    Program: a chunk of one value head.
    Reads the sums for dG and dbeta. Writes dbeta, and dg, the sum over later tokens of the chunk.
    """
    pid = tl.program_id(0).to(tl.int64)
    chunk, stream = pid % chunks, pid // chunks
    batch, head = stream // many, stream % many
    start = (chunk * BLOCK).to(tl.int32)
    row = tl.arange(0, BLOCK)
    if first_ptr is not None:
        first_ptr += batch * first_step
    visible, _ = _visible_pairs(first_ptr, start, tokens, BLOCK)
    dsums = tl.load(sums_ptr + pid * BLOCK + row)
    dbeta = tl.load(sums_ptr + plane + pid * BLOCK + row)
    dg = tl.sum(tl.where(visible, dsums[:, None], 0.0), 0)
    at, mask = (batch * tokens + start) * many + head + row * many, start + row < tokens
    tl.store(dg_ptr + at, round_to(dg, dg_ptr.dtype.element_ty), mask=mask)
    tl.store(dbeta_ptr + at, round_to(dbeta, dbeta_ptr.dtype.element_ty), mask=mask)
