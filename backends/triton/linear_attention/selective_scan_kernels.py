"""The selective scan of Mamba (arXiv:2312.00752): its kernels.

Of one channel with N states, with decays a_t = exp(delta_t A), 0 where a sequence begins:

    h_t = a_t h_{t-1} + delta_t u_t B_t,  y_t = C_t . h_t + D u_t,  times silu(z_t)

and backward, where m_t = dy_t C_t + a_{t+1} m_{t+1} is the gradient of h_t, and dy that before the
gate:

    du = delta m . B + D dy,  dC = sum over channels of dy h,  dB = that of m delta u
    ddelta = u m . B + sum over states of m a h_{t-1} A,  dA = sum over t of m a h_{t-1} delta

A program owns some channels of one span of tokens, and passes over the tokens with a tile of states
in registers, states by channels. Where spans are shorter than the sequence, programs of all spans
run at the same time, in two passes. The first starts every span from zeros and leaves its last
state and the sum of its step sizes, S. The decay of a whole span is exp(S A), so a short second
kernel turns last states into states before spans. The second pass starts from these.

Backward needs the gradient after every span as well, in the same form in reverse: the first pass
leaves the sum over t of (a_first ... a_t) dy_t C_t. It also leaves the state before every chunk of
tokens. Its state before the span was zero; the true one, h, adds exp(S A) h, with S up to the
chunk. The second pass goes through the chunks from the last to the first, and through parts of a
chunk in the same way: it computes the states of a part again, keeps them in registers, and goes
through its tokens in reverse. Sums over channels leave as one partial a program, sums over tokens
as one a span; a second kernel adds them in a fixed order.

A thread holds all states of a channel, so sums over states and functions of step sizes take no
other thread. Compilers choose that layout for tiles of neighboring channels that they cannot load
by more than one element: offsets contain a 0 that they do not know (``zero``).

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
    reciprocal_near,
)
from liger_multi.backends.triton.linear_attention.convolution_kernels import (
    _append,
    _store_token,
)

# --- helpers of the kernels ---


@triton.jit
def _place(cols, spans, BLOCK: tl.constexpr):
    """Of a program: its sequence, span, block, first channel, and channels to the end."""
    blocks = tl.cdiv(cols, BLOCK)
    assume_cols(cols)
    pid = tl.program_id(0)
    rest = pid // blocks
    start = (pid % blocks) * BLOCK
    return (rest // spans).to(tl.int64), rest % spans, pid % blocks, start, cols - start


@triton.jit
def _load_states(ptr, lane, left, cols, zero, DIM: tl.constexpr, SIZE: tl.constexpr):
    """A tile (states, channels) of a matrix (DIM, cols), zeros where it has none."""
    n = tl.arange(0, SIZE)
    mask = (n < DIM)[:, None] & (lane < left)[None, :]
    at = n[:, None] * cols + (lane + zero)[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_states(ptr, value, lane, left, cols, zero, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Write a tile (states, channels)."""
    n = tl.arange(0, SIZE)
    mask = (n < DIM)[:, None] & (lane < left)[None, :]
    tl.store(ptr + (n[:, None] * cols + (lane + zero)[None, :]), value, mask=mask)


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
        ptr += first * stride
        for i in tl.static_range(COUNT):
            limit = tl.where(first + i < length, left, 0)
            rows = _append(rows, tl.load(ptr + lane, mask=lane < limit, other=0.0))
            ptr += stride
    return rows


@triton.jit
def _load_numbers(ptr, t, stride, n, length, DIM: tl.constexpr):
    """B or C of token t; past the last one, that of the last."""
    return tl.load(ptr + tl.minimum(t, length - 1) * stride + n, mask=n < DIM, other=0.0)


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
def _passes(first_ptr, begin, end):
    """0 where a state before token ``begin`` reaches the one before ``end``, else -inf.

    It does not where a sequence begins between them. ``first_ptr`` has the first token of the
    sequence of every token.
    """
    if first_ptr is None:
        return 0.0
    else:
        of_last = tl.load(first_ptr + end - 1, mask=end > begin, other=0)
        return tl.where(of_last > tl.maximum(begin - 1, 0), -float("inf"), 0.0)


@triton.jit
def _steps_and_slopes(raw, bias, inside, SOFTPLUS: tl.constexpr):
    """Step sizes of a token, 0 past the last one, and their derivatives.

    With u = exp(-|x|), softplus is max(x, 0) + log(1 + u). With s = u / (2 + u), at most 1/3, the
    logarithm is 2 atanh(s), a polynomial in s^2 to 4e-9: it keeps its digits however small u is.
    """
    x = raw.to(tl.float32) + bias
    slopes = x * 0.0 + 1.0
    if SOFTPLUS:
        u = exp2_near(-tl.abs(x) * LOG2E)
        s = u * reciprocal_near(2.0 + u)
        q = s * s
        odd = 0.40024852752 + q * (0.27961418032 + q * 0.28174656629)
        odd = 2.0 + q * (0.66666316986 + q * odd)
        half = reciprocal_near(1.0 + u)
        slopes = tl.where(x < 0.0, u * half, half)
        x = tl.maximum(x, 0.0) + s * odd
    return tl.where(inside, x, 0.0), slopes


@triton.jit
def _step_sizes(raw, bias, inside, SOFTPLUS: tl.constexpr):
    """Step sizes of a token, 0 past the last one."""
    steps, _ = _steps_and_slopes(raw, bias, inside, SOFTPLUS)
    return steps


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) to 4 ulp."""
    return reciprocal_near(1.0 + exp2_near(x * -LOG2E))


@triton.jit
def _silu(x):
    """X sigmoid(x) of a row, in fp32."""
    wide = x.to(tl.float32)
    return wide * _sigmoid(wide)


@triton.jit
def _decays(steps, a, gap, PACKED: tl.constexpr):
    """``exp(delta A)``, with A in units of log2, and 0 where a sequence begins."""
    power = steps[None, :] * a
    return exp2_near(power + gap if PACKED else power)


# --- kernels ---


@triton.jit(do_not_specialize=["chunks", "zero"])  # a loop that is always a loop
def _selective_scan_states_kernel(
    u_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, dy_ptr, z_ptr, bias_ptr, initial_ptr, first_ptr,
    ends_ptr, sums_ptr, states_ptr, reached_ptr, dends_ptr, dy_steps, u_steps, delta_steps,
    b_steps, c_steps, z_steps, first_step, length, cols, spans, chunks, zero, DIM: tl.constexpr,
    SIZE: tl.constexpr, SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """What spans leave, and the states before their chunks.

    Program: BLOCK channels of a span of one sequence, ``chunks`` chunks of PARTS times STEP tokens.
    Reads u, delta, A, B and the bias; C, dy and z for the gradient. Writes what there are tensors
    for. Of spans: the last state and the gradient of the one before them, (batch, spans, DIM,
    channels), and the sum of step sizes, (batch, spans, channels). Of chunks, the states before
    them, (batch, spans, chunks, DIM, channels), and the sum of step sizes since the span began.
    """
    batch, span, _, start, left = _place(cols, spans, BLOCK)
    lane, n = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    origin = span.to(tl.int64) * chunks * PARTS * STEP
    u_ptr += batch * u_steps[0] + start
    delta_ptr += batch * delta_steps[0] + start
    b_ptr += batch * b_steps[0]
    if dy_ptr is not None:
        dy_ptr += batch * dy_steps[0] + start
        c_ptr += batch * c_steps[0]
        if z_ptr is not None:
            z_ptr += batch * z_steps[0] + start
    if first_ptr is not None:
        first_ptr += batch * first_step
    a = _load_states(a_ptr + start, lane, left, cols, zero, DIM, SIZE) * LOG2E
    bias = load_or(bias_ptr, start + lane, lane < left, 0.0)
    state = tl.zeros([SIZE, BLOCK], tl.float32)
    if initial_ptr is not None:
        given = initial_ptr + batch * cols * DIM + start
        state += _load_states(given, lane, left, cols, zero, DIM, SIZE)
    total = tl.zeros([BLOCK], tl.float32)
    through, dstate = tl.full([SIZE, BLOCK], 1.0, tl.float32), tl.zeros([SIZE, BLOCK], tl.float32)
    place = batch * spans + span
    for step in tl.range(0, chunks * PARTS):
        first = origin + step * STEP
        u = _load_tokens(u_ptr, first, u_steps[1], lane, length, left, STEP)
        raw = _load_tokens(delta_ptr, first, delta_steps[1], lane, length, left, STEP)
        gaps = _load_gaps(first_ptr, first, length, STEP)
        if dy_ptr is not None:
            dy = _load_tokens(dy_ptr, first, dy_steps[1], lane, length, left, STEP)
            z = _load_tokens(z_ptr, first, z_steps[1], lane, length, left, STEP)
        if states_ptr is not None:
            if step % PARTS == 0:
                here = (place * chunks + step // PARTS) * cols
                again = cols + zero * step  # else offsets of all states would be kept in registers
                _store_states(
                    states_ptr + (here * DIM + start), state, lane, left, again, zero, DIM, SIZE
                )
                if reached_ptr is not None:
                    tl.store(reached_ptr + (here + start) + lane, total, mask=lane < left)
        for i in tl.static_range(STEP):
            steps = _step_sizes(raw[i], bias, first + i < length, SOFTPLUS)
            gap = gaps[i] if first_ptr is not None else 0.0
            decays = _decays(steps, a, gap, first_ptr is not None)
            b = _load_numbers(b_ptr, first + i, b_steps[1], n, length, DIM)
            state = decays * state + (steps * u[i].to(tl.float32))[None, :] * b[:, None]
            total += steps
            if dy_ptr is not None:
                up = dy[i].to(tl.float32)
                if z_ptr is not None:
                    up *= _silu(z[i])
                through *= decays
                c = _load_numbers(c_ptr, first + i, c_steps[1], n, length, DIM)
                dstate += through * (up[None, :] * c[:, None])
    at = place * cols * DIM + start
    if ends_ptr is not None:
        _store_states(ends_ptr + at, state, lane, left, cols, zero, DIM, SIZE)
        tl.store(sums_ptr + (place * cols + start) + lane, total, mask=lane < left)
    if dends_ptr is not None:
        _store_states(dends_ptr + at, dstate, lane, left, cols, zero, DIM, SIZE)


@triton.jit
def _selective_scan_join_kernel(
    ends_ptr, sums_ptr, a_ptr, given_ptr, first_ptr, first_step, length, cols, spans, tokens,
    DIM: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """From what spans leave to what is before them; with REVERSE, gradients after them.

    Program: BLOCK elements of (DIM, channels) of one sequence, span after span of ``tokens``.
    Reads A, the sums of step sizes, and the state before the first span (after the last), (batch,
    channels, DIM). Reads and overwrites (batch, spans, DIM, channels).
    """
    blocks = tl.cdiv(cols * DIM, BLOCK)
    pid = tl.program_id(0)
    batch = (pid // blocks).to(tl.int64)
    element = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask, channel = element < cols * DIM, element % cols
    a = tl.load(a_ptr + element, mask=mask, other=0.0).to(tl.float32) * LOG2E
    state = load_or(given_ptr, batch * cols * DIM + element, mask, 0.0)
    if first_ptr is not None:
        first_ptr += batch * first_step
    for step in tl.range(0, spans):
        span = spans - 1 - step if REVERSE else step
        at = ends_ptr + (batch * spans + span) * cols * DIM + element
        left = tl.load(at, mask=mask, other=0.0)
        total = tl.load(sums_ptr + (batch * spans + span) * cols + channel, mask=mask, other=0.0)
        begin = span.to(tl.int64) * tokens
        passes = _passes(first_ptr, begin, tl.minimum(begin + tokens, length))
        tl.store(at, state, mask=mask)
        state = exp2_near(total * a + passes) * state + left


@triton.jit(do_not_specialize=["chunks", "zero"])  # a loop that is always a loop
def _selective_scan_forward_kernel(
    u_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, skip_ptr, z_ptr, bias_ptr, initial_ptr, before_ptr,
    first_ptr, y_ptr, final_ptr, u_steps, delta_steps, b_steps, c_steps, z_steps, first_step,
    length, cols, spans, chunks, zero, DIM: tl.constexpr, SIZE: tl.constexpr,
    SOFTPLUS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Results of all tokens.

    Program: BLOCK channels of a span of one sequence, ``chunks`` chunks of tokens.
    Reads all inputs, a chunk ahead, and the state before the span, (batch, spans, DIM, channels),
    or before the sequence, (batch, channels, DIM). Writes y and the last state.
    """
    batch, span, _, start, left = _place(cols, spans, BLOCK)
    lane, n = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    origin = span.to(tl.int64) * chunks * CHUNK
    u_ptr += batch * u_steps[0] + start
    delta_ptr += batch * delta_steps[0] + start
    b_ptr += batch * b_steps[0]
    c_ptr += batch * c_steps[0]
    y_ptr += batch * length * cols + start
    if z_ptr is not None:
        z_ptr += batch * z_steps[0] + start
    if first_ptr is not None:
        first_ptr += batch * first_step
    a = _load_states(a_ptr + start, lane, left, cols, zero, DIM, SIZE) * LOG2E
    skip = load_or(skip_ptr, start + lane, lane < left, 0.0)
    bias = load_or(bias_ptr, start + lane, lane < left, 0.0)
    state = tl.zeros([SIZE, BLOCK], tl.float32)
    whole = batch * cols * DIM + start
    if before_ptr is not None:
        at = before_ptr + (batch * spans + span) * cols * DIM + start
        state += _load_states(at, lane, left, cols, zero, DIM, SIZE)
    elif initial_ptr is not None:
        state += _load_states(initial_ptr + whole, lane, left, cols, zero, DIM, SIZE)
    u = _load_tokens(u_ptr, origin, u_steps[1], lane, length, left, CHUNK)
    raw = _load_tokens(delta_ptr, origin, delta_steps[1], lane, length, left, CHUNK)
    z = _load_tokens(z_ptr, origin, z_steps[1], lane, length, left, CHUNK)
    for chunk in tl.range(0, chunks):
        first = origin + chunk * CHUNK
        after = first + CHUNK
        gaps = _load_gaps(first_ptr, first, length, CHUNK)
        next_u = _load_tokens(u_ptr, after, u_steps[1], lane, length, left, CHUNK)
        next_raw = _load_tokens(delta_ptr, after, delta_steps[1], lane, length, left, CHUNK)
        next_z = _load_tokens(z_ptr, after, z_steps[1], lane, length, left, CHUNK)
        for i in tl.static_range(CHUNK):
            t = first + i
            steps = _step_sizes(raw[i], bias, t < length, SOFTPLUS)
            now = u[i].to(tl.float32)
            gap = gaps[i] if first_ptr is not None else 0.0
            decays = _decays(steps, a, gap, first_ptr is not None)
            b = _load_numbers(b_ptr, t, b_steps[1], n, length, DIM)
            c = _load_numbers(c_ptr, t, c_steps[1], n, length, DIM)
            state = decays * state + (steps * now)[None, :] * b[:, None]
            y = tl.sum(state * c[:, None], 0) + skip * now
            if z_ptr is not None:
                y *= _silu(z[i])
            _store_token(y_ptr, y, t, 0, length, cols, lane, left)
        u, raw, z = next_u, next_raw, next_z
    if final_ptr is not None:
        if span == spans - 1:
            _store_states(final_ptr + whole, state, lane, left, cols, zero, DIM, SIZE)


@triton.jit
def _states_of(
    state, u, raw, bias, a, gaps, b_ptr, b_step, first, length, n, DIM: tl.constexpr,
    SOFTPLUS: tl.constexpr, PACKED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The states before COUNT tokens from ``first`` on and after the last, sizes and slopes."""
    states, sizes, slopes = (state,), (), ()
    for i in tl.static_range(COUNT):
        steps, slope = _steps_and_slopes(raw[i], bias, first + i < length, SOFTPLUS)
        decays = _decays(steps, a, gaps[i] if PACKED else 0.0, PACKED)
        b = _load_numbers(b_ptr, first + i, b_step, n, length, DIM)
        state = decays * state + (steps * u[i].to(tl.float32))[None, :] * b[:, None]
        states, sizes = _append(states, state), _append(sizes, steps)
        slopes = _append(slopes, slope)
    return states, sizes, slopes


@triton.jit
def _states_before(
    states_ptr, reached_ptr, before_ptr, first_ptr, at, of_span, origin, first, length, a, start,
    lane, left, cols, zero, DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The states before a chunk: as the first pass left them, and what came from before the span.

    ``at`` is the chunk's place among numbers of chunks and channels.
    """
    state = _load_states(states_ptr + (at * DIM + start), lane, left, cols, zero, DIM, SIZE)
    if before_ptr is not None:
        total = load_or(reached_ptr + (at + start), lane, lane < left, 0.0)
        passes = _passes(first_ptr, origin, tl.minimum(first, length))
        h = _load_states(before_ptr + of_span, lane, left, cols, zero, DIM, SIZE)
        state += exp2_near(total[None, :] * a + passes) * h
    return state


@triton.jit
def _exchanged(x, factor, lane, ROWS: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr):
    """Half of the rows of a tile (2 ROWS, BLOCK) times factors, summed over columns FAR apart.

    Columns with the bit FAR keep the second half of the rows, others the first: each of a pair
    gives the other what it does not keep.
    """
    low, high = tl.split(tl.permute(tl.reshape(x, (2, ROWS, BLOCK)), (1, 2, 0)))
    upper = ((lane & FAR) != 0)[None, :]
    partner = tl.broadcast_to((lane ^ FAR)[None, :], (ROWS, BLOCK))
    given = tl.gather(tl.where(upper, low, high) * factor, partner, 1)
    return tl.where(upper, high, low) * factor + given


@triton.jit
def _put_sums(
    ptr, at, x, factor, t, length, lane, DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    EXCHANGE: tl.constexpr,
):  # fmt: skip
    """Write sums over the channels of a tile (states, channels) times factors: a row of token t.

    By tl.sum, all threads would get each of the sums, from five exchanges a state (of 32 threads).
    Where threads exchange halves of what is left, the number of states is halved with every step.
    """
    if ptr is not None:
        LEFT: tl.constexpr = SIZE >> EXCHANGE  # rows that stay: other threads have them
        MANY: tl.constexpr = 1 << EXCHANGE
        if EXCHANGE:
            x = _exchanged(x, factor[None, :], lane, SIZE // 2, BLOCK, BLOCK // 2)
            for half in tl.static_range(1, EXCHANGE):
                x = _exchanged(x, 1.0, lane, SIZE >> (half + 1), BLOCK, BLOCK >> (half + 1))
        else:
            x *= factor[None, :]
        sums = tl.sum(tl.reshape(x, (LEFT, MANY, BLOCK // MANY)), 2)
        n = tl.arange(0, LEFT)[:, None] + LEFT * tl.arange(0, MANY)[None, :]
        tl.store(ptr + at + t * DIM + n, sums, mask=n < tl.where(t < length, DIM, 0))


@triton.jit
def _through_gate(dy, z, h, c, skip, u):
    """Gradients of y before the gate, and of z."""
    gate = z.to(tl.float32)
    p = _sigmoid(gate)
    y = tl.sum(h * c, 0) + skip * u
    return dy * gate * p, dy * y * p * (1.0 + gate * (1.0 - p))


@triton.jit(do_not_specialize=["chunks", "zero"])  # a loop that is always a loop
def _selective_scan_backward_kernel(
    u_ptr, dy_ptr, delta_ptr, a_ptr, b_ptr, c_ptr, skip_ptr, z_ptr, bias_ptr, first_ptr, states_ptr,
    reached_ptr, before_ptr, after_ptr, du_ptr, ddelta_ptr, dz_ptr, da_ptr, db_ptr, dc_ptr,
    dskip_ptr, dbias_ptr, dinitial_ptr, dy_steps, u_steps, delta_steps, b_steps, c_steps, z_steps,
    first_step, length, cols, spans, chunks, batches, zero, DIM: tl.constexpr, SIZE: tl.constexpr,
    SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, KEPT: tl.constexpr,
    EXCHANGE: tl.constexpr,
):  # fmt: skip
    """All gradients.

    Program: BLOCK channels of a span of one sequence, from its last chunk to the first.
    Reads all inputs, the states before chunks and spans, and the gradients after spans. Writes du,
    ddelta, dz, and the gradient of the first state, (batch, DIM, channels); the channels' part of
    dB and dC, (blocks, batch, tokens, DIM); the span's part of dA, (batch, spans, DIM, channels),
    and of the gradients of D and the bias, (batch, spans, channels).
    """
    batch, span, block, start, left = _place(cols, spans, BLOCK)
    lane, n = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    rows, place = batch * length * cols + start, batch * spans + span
    origin = span.to(tl.int64) * chunks * PARTS * KEPT
    dy_ptr += batch * dy_steps[0] + start
    u_ptr += batch * u_steps[0] + start
    delta_ptr += batch * delta_steps[0] + start
    b_ptr += batch * b_steps[0]
    c_ptr += batch * c_steps[0]
    parts = (block.to(tl.int64) * batches + batch) * length * DIM
    if z_ptr is not None:
        z_ptr += batch * z_steps[0] + start
    if first_ptr is not None:
        first_ptr += batch * first_step
    a = _load_states(a_ptr + start, lane, left, cols, zero, DIM, SIZE) * LOG2E
    skip = load_or(skip_ptr, start + lane, lane < left, 0.0)
    bias = load_or(bias_ptr, start + lane, lane < left, 0.0)
    carry, da = tl.zeros([SIZE, BLOCK], tl.float32), tl.zeros([SIZE, BLOCK], tl.float32)
    dskip, dbias = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    of_span = place * cols * DIM + start
    if after_ptr is not None:
        carry += _load_states(after_ptr + of_span, lane, left, cols, zero, DIM, SIZE)
    for step in tl.range(0, chunks * PARTS):
        chunk, part = (chunks * PARTS - 1 - step) // PARTS, PARTS - 1 - step % PARTS
        first = origin + chunk * PARTS * KEPT
        at = (place * chunks + chunk) * cols
        again = cols + zero * step  # else offsets of all states would be kept in registers
        state = _states_before(
            states_ptr, reached_ptr, before_ptr, first_ptr, at, of_span, origin, first, length, a,
            start, lane, left, again, zero, DIM, SIZE,
        )  # fmt: skip
        for _ in tl.range(0, part):
            u = _load_tokens(u_ptr, first, u_steps[1], lane, length, left, KEPT)
            raw = _load_tokens(delta_ptr, first, delta_steps[1], lane, length, left, KEPT)
            gaps = _load_gaps(first_ptr, first, length, KEPT)
            h, sizes, slopes = _states_of(
                state, u, raw, bias, a, gaps, b_ptr, b_steps[1], first, length, n, DIM, SOFTPLUS,
                first_ptr is not None, KEPT,
            )  # fmt: skip
            state = h[KEPT]
            first += KEPT
        u = _load_tokens(u_ptr, first, u_steps[1], lane, length, left, KEPT)
        raw = _load_tokens(delta_ptr, first, delta_steps[1], lane, length, left, KEPT)
        dy = _load_tokens(dy_ptr, first, dy_steps[1], lane, length, left, KEPT)
        z = _load_tokens(z_ptr, first, z_steps[1], lane, length, left, KEPT)
        gaps = _load_gaps(first_ptr, first, length, KEPT)
        h, sizes, slopes = _states_of(
            state, u, raw, bias, a, gaps, b_ptr, b_steps[1], first, length, n, DIM, SOFTPLUS,
            first_ptr is not None, KEPT,
        )  # fmt: skip
        for i in tl.static_range(KEPT - 1, -1, -1):
            t = first + i
            now, up = u[i].to(tl.float32), dy[i].to(tl.float32)
            into = _load_numbers(b_ptr, t, b_steps[1], n, length, DIM)[:, None]
            out = _load_numbers(c_ptr, t, c_steps[1], n, length, DIM)[:, None]
            if z_ptr is not None:
                up, dz = _through_gate(up, z[i], h[i + 1], out, skip, now)
                _put_token(dz_ptr, rows, dz, t, length, cols, lane, left)
            _put_sums(dc_ptr, parts, h[i + 1], up, t, length, lane, DIM, SIZE, BLOCK, EXCHANGE)
            m = carry + up[None, :] * out
            _put_sums(db_ptr, parts, m, sizes[i] * now, t, length, lane, DIM, SIZE, BLOCK, EXCHANGE)
            added = tl.sum(m * into, 0)  # gradient of delta u
            _put_token(du_ptr, rows, sizes[i] * added + skip * up, t, length, cols, lane, left)
            dskip += up * now
            gap = gaps[i] if first_ptr is not None else 0.0
            # computed again: kept decays would take as much room as states
            carry = m * _decays(sizes[i] * (zero + 1), a, gap, first_ptr is not None)
            through = carry * h[i]  # gradient of the logarithm of decays
            da += through * sizes[i][None, :]
            dsteps = (tl.sum(through * a, 0) * LN2 + now * added) * slopes[i]
            dbias += tl.where(t < length, dsteps, 0.0)
            _put_token(ddelta_ptr, rows, dsteps, t, length, cols, lane, left)
    if dinitial_ptr is not None:
        if span == 0:
            at = dinitial_ptr + batch * cols * DIM + start
            _store_states(at, carry, lane, left, cols, zero, DIM, SIZE)
    if da_ptr is not None:
        _store_states(da_ptr + of_span, da, lane, left, cols, zero, DIM, SIZE)
    _put_token(dskip_ptr, start, dskip, place, place + 1, cols, lane, left)
    _put_token(dbias_ptr, start, dbias, place, place + 1, cols, lane, left)
