"""The selective scan of Mamba (arXiv:2312.00752): its kernels.

Of one channel with N states, with decays a_t = exp(delta_t A), 0 where a sequence begins:

    h_t = a_t h_{t-1} + delta_t u_t B_t,  y_t = C_t . h_t + D u_t,  times silu(z_t)

and backward, where m_t = dy_t C_t + a_{t+1} m_{t+1} is the gradient of h_t, and dy that before the
gate:

    du = delta m . B + D dy,  dC = sum over channels of dy h,  dB = that of m delta u
    ddelta = u m . B + sum over states of m a h_{t-1} A,  dA = sum over t of m a h_{t-1} delta

A program owns some channels of one sequence and goes through its tokens with a tile of states in
registers, channels by states: a thread has neighboring states of few channels, so that sums over
states pass few threads. Backward has the state before every chunk of tokens, which a pass of its
own has written. It goes through the chunks from the last to the first, and through parts of a chunk
in the same way: it computes the states of a part again, keeps them in registers, and goes through
its tokens in reverse. Sums over channels leave as one partial a program, sums over tokens as one a
sequence; a second kernel adds them in a fixed order.

Past the last token, steps are of size 0: they keep the state and its gradient.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.common.rows import (
    LN2,
    LOG2E,
    assume_cols,
    exp2_near,
    load_or,
    recomputed,
    sigmoid,
)
from liger_multi.backends.triton.linear_attention.convolution_kernels import (
    _append,
    _load_token,
    _store_token,
)
from liger_multi.backends.triton.linear_attention.ssd_scan_kernels import _softplus

# --- helpers of the kernels ---


@triton.jit
def _place(cols, BLOCK: tl.constexpr):
    """Of a program: its sequence, block of channels, first channel and channels to the end."""
    blocks = tl.cdiv(cols, BLOCK)
    assume_cols(cols)
    pid = tl.program_id(0)
    start = (pid % blocks) * BLOCK
    return (pid // blocks).to(tl.int64), pid % blocks, start, cols - start


@triton.jit
def _load_states(ptr, lane, left, DIM: tl.constexpr, SIZE: tl.constexpr):
    """A tile (channels, states) of a matrix of DIM columns, zeros where it has none."""
    n = tl.arange(0, SIZE)
    mask = (lane < left)[:, None] & (n < DIM)[None, :]
    at = lane[:, None] * DIM + n[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_states(ptr, value, lane, left, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Write a tile (channels, states)."""
    n = tl.arange(0, SIZE)
    mask = (lane < left)[:, None] & (n < DIM)[None, :]
    tl.store(ptr + (lane[:, None] * DIM + n[None, :]), value, mask=mask)


@triton.jit
def _put_token(ptr, at, value, t, length, stride, lane, left):
    """Write a row of token t, if there is a tensor and the token is one of ``length``."""
    if ptr is not None:
        _store_token(ptr + at, value, t, 0, length, stride, lane, left)


@triton.jit
def _load_tokens(ptr, first, stride, lane, length, left, COUNT: tl.constexpr):
    """Rows of COUNT tokens from ``first`` on, zeros past the last; none where there is no tensor.

    They are loaded before anything waits for one of them.
    """
    rows = ()
    if ptr is not None:
        for i in tl.static_range(COUNT):
            rows = _append(rows, _load_token(ptr, first + i, stride, lane, length, left))
    return rows


@triton.jit
def _load_gaps(first_ptr, first, length, COUNT: tl.constexpr):
    """-inf for those of COUNT tokens that begin a sequence, else 0.

    The first token of all has the initial state before it.
    """
    gaps = ()
    if first_ptr is not None:
        for i in tl.static_range(COUNT):
            t = first + i
            inside = (t > 0) & (t < length)
            begins = tl.load(first_ptr + t, mask=inside, other=-1) == t
            gaps = _append(gaps, tl.where(begins, -float("inf"), 0.0))
    return gaps


@triton.jit
def _step_size(raw, bias, inside, SOFTPLUS: tl.constexpr):
    """Step sizes of a token, 0 past the last one."""
    raw = raw.to(tl.float32) + bias
    steps = _softplus(raw) if SOFTPLUS else raw
    return tl.where(inside, steps, 0.0)


@triton.jit
def _decays(steps, a, gap, PACKED: tl.constexpr):
    """``exp(delta A)``, with A in units of log2, and 0 where a sequence begins."""
    power = steps[:, None] * a
    return exp2_near(power + gap if PACKED else power)


@triton.jit
def _advanced(state, steps, u, b, a, gap, PACKED: tl.constexpr):
    """The state after one more token."""
    return _decays(steps, a, gap, PACKED) * state + (steps * u)[:, None] * b[None, :]


@triton.jit
def _states_of(
    state, steps, u, b, a, gaps, PACKED: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr
):
    """The states before COUNT tokens of a chunk from its FIRST on, and after the last of them."""
    states = (state,)
    for i in tl.static_range(COUNT):
        state = _advanced(
            state, recomputed(steps[FIRST + i]), u[FIRST + i].to(tl.float32),
            b[FIRST + i].to(tl.float32), a, gaps[FIRST + i] if PACKED else 0.0, PACKED,
        )  # fmt: skip
        states = _append(states, state)
    return states


# --- kernels ---


@triton.jit(do_not_specialize=["chunks"])  # a loop that is always a loop
def _selective_scan_forward_kernel(
    u_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, skip_ptr, z_ptr, bias_ptr, initial_ptr, first_ptr, y_ptr,
    final_ptr, states_ptr, u_steps, delta_steps, b_steps, c_steps, z_steps, first_step, length,
    cols, chunks, DIM: tl.constexpr, SIZE: tl.constexpr, SOFTPLUS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Results of all tokens, or the states before chunks.

    Program: BLOCK channels of one sequence, chunk after chunk.
    Reads all inputs, a chunk ahead. Writes y and the last state, or without y the state before
    every chunk.
    """
    batch, _, start, left = _place(cols, BLOCK)
    lane, n = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    u_ptr += batch * u_steps[0] + start
    delta_ptr += batch * delta_steps[0] + start
    b_ptr += batch * b_steps[0]
    if y_ptr is not None:
        c_ptr += batch * c_steps[0]
        y_ptr += batch * length * cols + start
    if z_ptr is not None:
        z_ptr += batch * z_steps[0] + start
    if first_ptr is not None:
        first_ptr += batch * first_step
    a = _load_states(a_ptr + start * DIM, lane, left, DIM, SIZE) * LOG2E
    skip = load_or(skip_ptr, start + lane, lane < left, 0.0)
    bias = load_or(bias_ptr, start + lane, lane < left, 0.0)
    state = tl.zeros([BLOCK, SIZE], tl.float32)
    if initial_ptr is not None:
        at = initial_ptr + (batch * cols + start) * DIM
        state += _load_states(at, lane, left, DIM, SIZE)
    origin = batch * 0
    u = _load_tokens(u_ptr, origin, u_steps[1], lane, length, left, CHUNK)
    raw = _load_tokens(delta_ptr, origin, delta_steps[1], lane, length, left, CHUNK)
    b = _load_tokens(b_ptr, origin, b_steps[1], n, length, DIM, CHUNK)
    for chunk in tl.range(0, chunks):
        first = origin + chunk * CHUNK
        gaps = _load_gaps(first_ptr, first, length, CHUNK)
        if y_ptr is not None:
            c = _load_tokens(c_ptr, first, c_steps[1], n, length, DIM, CHUNK)
        else:
            at = states_ptr + ((batch * chunks + chunk) * cols + start) * DIM
            _store_states(at, state, lane, left, DIM, SIZE)
        z = _load_tokens(z_ptr, first, z_steps[1], lane, length, left, CHUNK)
        after = first + CHUNK
        next_u = _load_tokens(u_ptr, after, u_steps[1], lane, length, left, CHUNK)
        next_raw = _load_tokens(delta_ptr, after, delta_steps[1], lane, length, left, CHUNK)
        next_b = _load_tokens(b_ptr, after, b_steps[1], n, length, DIM, CHUNK)
        for i in tl.static_range(CHUNK):
            t = first + i
            steps = _step_size(raw[i], bias, t < length, SOFTPLUS)
            now = u[i].to(tl.float32)
            state = _advanced(
                state, steps, now, b[i].to(tl.float32), a,
                gaps[i] if first_ptr is not None else 0.0, first_ptr is not None,
            )  # fmt: skip
            if y_ptr is not None:
                y = tl.sum(state * c[i].to(tl.float32)[None, :], 1) + skip * now
                if z_ptr is not None:
                    gate = z[i].to(tl.float32)
                    y *= gate * sigmoid(gate)
                _store_token(y_ptr, y, t, 0, length, cols, lane, left)
        u, raw, b = next_u, next_raw, next_b
    if final_ptr is not None:
        at = final_ptr + (batch * cols + start) * DIM
        _store_states(at, state, lane, left, DIM, SIZE)


@triton.jit
def _through_gate(dy, z, h, c, skip, u):
    """Gradients of y before the gate, and of z."""
    gate, p = z.to(tl.float32), sigmoid(z.to(tl.float32))
    y = tl.sum(h * c, 1) + skip * u
    return dy * gate * p, dy * y * p * (1.0 + gate * (1.0 - p))


@triton.jit(do_not_specialize=["chunks"])  # a loop that is always a loop
def _selective_scan_backward_kernel(
    u_ptr, dy_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, skip_ptr, z_ptr, bias_ptr, first_ptr, states_ptr,
    dfinal_ptr, du_ptr, ddelta_ptr, dz_ptr, da_ptr, db_ptr, dc_ptr, dskip_ptr, dbias_ptr,
    dinitial_ptr, dy_steps, u_steps, delta_steps, b_steps, c_steps, z_steps, first_step, length,
    cols, chunks, batches, DIM: tl.constexpr, SIZE: tl.constexpr, SOFTPLUS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """All gradients.

    Program: BLOCK channels of one sequence, from its last chunk to the first.
    Reads all inputs and the states before chunks. Writes du, ddelta and dz; the channels' part of
    dB and dC, (blocks, batch, tokens, DIM); the sequence's part of dA, (batch, channels, DIM), and
    of the gradients of D and the bias, (batch, channels); and the gradient of the first state.
    """
    batch, block, start, left = _place(cols, BLOCK)
    lane, n = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    rows = batch * length * cols + start
    whole = (batch * cols + start) * DIM
    parts = (block.to(tl.int64) * batches + batch) * length * DIM
    dy_ptr += batch * dy_steps[0] + start
    u_ptr += batch * u_steps[0] + start
    delta_ptr += batch * delta_steps[0] + start
    b_ptr += batch * b_steps[0]
    c_ptr += batch * c_steps[0]
    if z_ptr is not None:
        z_ptr += batch * z_steps[0] + start
    if first_ptr is not None:
        first_ptr += batch * first_step
    a = _load_states(a_ptr + start * DIM, lane, left, DIM, SIZE) * LOG2E
    skip = load_or(skip_ptr, start + lane, lane < left, 0.0)
    bias = load_or(bias_ptr, start + lane, lane < left, 0.0)
    carry, da = tl.zeros([BLOCK, SIZE], tl.float32), tl.zeros([BLOCK, SIZE], tl.float32)
    dskip, dbias = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if dfinal_ptr is not None:
        carry += _load_states(dfinal_ptr + whole, lane, left, DIM, SIZE)
    for step in tl.range(0, chunks):
        chunk = chunks - 1 - step
        first = batch * 0 + chunk * CHUNK
        at = states_ptr + ((batch * chunks + chunk) * cols + start) * DIM
        u = _load_tokens(u_ptr, first, u_steps[1], lane, length, left, CHUNK)
        raw = _load_tokens(delta_ptr, first, delta_steps[1], lane, length, left, CHUNK)
        b = _load_tokens(b_ptr, first, b_steps[1], n, length, DIM, CHUNK)
        gaps = _load_gaps(first_ptr, first, length, CHUNK)
        sizes = ()
        for i in tl.static_range(CHUNK):
            sizes = _append(sizes, _step_size(raw[i], bias, first + i < length, SOFTPLUS))
        for early in tl.static_range(CHUNK - KEPT, -1, -KEPT):
            state = _load_states(at, lane, left, DIM, SIZE)
            before = _states_of(state, sizes, u, b, a, gaps, first_ptr is not None, 0, early)
            h = _states_of(before[early], sizes, u, b, a, gaps, first_ptr is not None, early, KEPT)
            begin = first + early
            c = _load_tokens(c_ptr, begin, c_steps[1], n, length, DIM, KEPT)
            z = _load_tokens(z_ptr, begin, z_steps[1], lane, length, left, KEPT)
            dy = _load_tokens(dy_ptr, begin, dy_steps[1], lane, length, left, KEPT)
            for i in tl.static_range(early + KEPT - 1, early - 1, -1):
                t = first + i
                now, up = u[i].to(tl.float32), dy[i - early].to(tl.float32)
                into, out = b[i].to(tl.float32), c[i - early].to(tl.float32)
                if z_ptr is not None:
                    up, dz = _through_gate(
                        up, z[i - early], h[i + 1 - early], out[None, :], skip, now
                    )
                    _put_token(dz_ptr, rows, dz, t, length, cols, lane, left)
                m = carry + up[:, None] * out[None, :]
                dc = tl.sum(up[:, None] * h[i + 1 - early], 0)
                _put_token(dc_ptr, parts, dc, t, length, DIM, n, DIM)
                steps = recomputed(sizes[i])  # kept decays would take as much room as states
                db = tl.sum(m * (steps * now)[:, None], 0)
                _put_token(db_ptr, parts, db, t, length, DIM, n, DIM)
                added = tl.sum(m * into[None, :], 1)  # gradient of delta u
                du = steps * added + skip * up
                _put_token(du_ptr, rows, du, t, length, cols, lane, left)
                dskip += up * now
                carry = m * _decays(
                    steps, a, gaps[i] if first_ptr is not None else 0.0, first_ptr is not None
                )
                through = carry * h[i - early]  # gradient of the logarithm of decays
                da += through * steps[:, None]
                dsteps = tl.sum(through * a, 1) * LN2 + now * added
                if SOFTPLUS:
                    dsteps *= sigmoid(raw[i].to(tl.float32) + bias)
                dbias += tl.where(t < length, dsteps, 0.0)
                _put_token(ddelta_ptr, rows, dsteps, t, length, cols, lane, left)
    if dinitial_ptr is not None:
        _store_states(dinitial_ptr + whole, carry, lane, left, DIM, SIZE)
    if da_ptr is not None:
        _store_states(da_ptr + whole, da, lane, left, DIM, SIZE)
    _put_token(dskip_ptr, start, dskip, batch, batches, cols, lane, left)
    _put_token(dbias_ptr, start, dbias, batch, batches, cols, lane, left)
