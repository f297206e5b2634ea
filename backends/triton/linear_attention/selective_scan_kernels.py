"""The selective scan of Mamba (arXiv:2312.00752): its kernels.

Of one channel with N states, with decays a_t = exp(delta_t A), 0 where a sequence begins:

    h_t = a_t h_{t-1} + delta_t u_t B_t,  y_t = C_t . h_t + D u_t,  times silu(z_t)

and backward, where m_t = dy_t C_t + a_{t+1} m_{t+1} is the gradient of h_t, and dy that before the
gate:

    du = delta m . B + D dy,  dC = sum over channels of dy h,  dB = that of m delta u
    ddelta = u m . B + sum over states of m a h_{t-1} A,  dA = sum over t of m a h_{t-1} delta

A program owns some channels of one span of tokens, and passes over the tokens with a tile of states
in registers, states by channels. Programs of all spans run at the same time, in two passes. The
first starts every span from zeros and leaves its last state and the sum of its step sizes, S. The
decay of a whole span is exp(S A), so a short second kernel turns last states into states before
spans, which are kept for backward. The second pass starts from these.

Backward needs the gradient after every span as well, in the same form in reverse: its first pass
leaves the sum over t of (a_first ... a_t) dy_t C_t. It also leaves the state before every chunk of
tokens, from the states before spans. The second pass goes through the chunks from the last to the
first, and through parts of a chunk in the same way: it computes the states of a part again, keeps
them in registers, and goes through its tokens in reverse. Sums over channels leave as one partial
a program, sums over tokens as one a span; a second kernel adds them in a fixed order.

Of B and C, every thread reads all numbers of a token; they are side by side, and tiles of states
are adjacent, so that a compiler knows where the next one is. Rows are loaded a step ahead.

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
    fetch,
    load_or,
    of_thread,
    reciprocal_near,
    round_to,
)
from liger_multi.backends.triton.linear_attention.convolution_kernels import _append

# --- helpers of the kernels ---


@triton.jit
def _place(cols, spans, BLOCK: tl.constexpr):
    """Position of a program: sequence, span, block, first channel, and channels that are left."""
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
    """Write a tile (states, channels).

    After a loop, ``zero`` is not that of loads before it: a compiler would keep their addresses.
    """
    n = tl.arange(0, SIZE)
    mask = (n < DIM)[:, None] & (lane < left)[None, :]
    tl.store(ptr + (n[:, None] * cols + (lane + zero)[None, :]), value, mask=mask)


@triton.jit
def _in_tile(ptr, lane, zero, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The elements of a tile (states, channels) of its own: one address, and known distances."""
    return (ptr + (lane + zero))[None, :] + (tl.arange(0, SIZE) * BLOCK)[:, None]


@triton.jit
def _at_token(ptr, t, stride):
    """The row of token t."""
    return ptr + tl.cast(t, tl.int64) * stride


@triton.jit
def _put_tokens(
    ptr,
    at,
    rows,
    first,
    stride,
    lane,
    length,
    left,
    BACK: tl.constexpr,
    COUNT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Write rows of COUNT tokens from ``first`` on, if there is a tensor; BACK: in reverse.

    ``at`` is where it has the first of them.
    """
    if ptr is not None:
        ptr += at
        for i in tl.static_range(COUNT):
            row = round_to(rows[COUNT - 1 - i if BACK else i], ptr.dtype.element_ty)
            if EVEN:
                tl.store(ptr + lane, row)
            else:
                tl.store(ptr + lane, row, mask=lane < tl.where(first + i < length, left, 0))
            ptr += stride


@triton.jit
def _load_tokens(ptr, stride, first, lane, length, left, COUNT: tl.constexpr, EVEN: tl.constexpr):
    """Rows of COUNT tokens from ``first`` on, zeros past the last; none where there is no tensor.

    They are loaded before anything waits for one of them. EVEN says that all tokens and channels
    exist.
    """
    rows = ()
    if ptr is not None:
        ptr = _at_token(ptr, first, stride)
        for i in tl.static_range(COUNT):
            if EVEN:
                row = tl.load(ptr + lane)
            else:
                limit = tl.where(first + i < length, left, 0)
                row = tl.load(ptr + lane, mask=lane < limit, other=0.0)
            rows = _append(rows, row)
            ptr += stride
    return rows


@triton.jit
def _load_step(ptrs, strides, first, lane, length, left, COUNT: tl.constexpr, EVEN: tl.constexpr):
    """Rows of COUNT tokens of u, delta, dy and z, to which ``ptrs`` point."""
    u = _load_tokens(ptrs[0], strides[0], first, lane, length, left, COUNT, EVEN)
    raw = _load_tokens(ptrs[1], strides[1], first, lane, length, left, COUNT, EVEN)
    dy = _load_tokens(ptrs[2], strides[2], first, lane, length, left, COUNT, EVEN)
    z = _load_tokens(ptrs[3], strides[3], first, lane, length, left, COUNT, EVEN)
    return u, raw, dy, z


@triton.jit
def _own(ptr, zero):
    """A pointer that all threads share, as a number of each thread: it stays in its registers.

    NVIDIA's assembler keeps shared addresses in registers of the warp, which loads cannot take with
    a distance: it copied both halves of them for every load of B or C (Triton 3.6).
    """
    return ptr + 32 * of_thread(zero)  # as aligned as before


@triton.jit
def _fetch_pairs(pairs_ptr, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """Ask for B and C of COUNT tokens from ``pairs_ptr`` on."""
    FLOATS: tl.constexpr = COUNT * 2 * SIZE
    LINES: tl.constexpr = triton.next_power_of_2((FLOATS + 31) // 32)
    fetch(pairs_ptr + 32 * tl.arange(0, LINES))


@triton.jit
def _fetch_rows(ptr, first, stride, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """Ask for rows of COUNT tokens from ``first`` on: both halves of BLOCK channels."""
    if ptr is not None:
        i = tl.arange(0, 2 * triton.next_power_of_2(COUNT))
        token = tl.minimum(first + i // 2, first + COUNT - 1).to(tl.int64)
        fetch(ptr + (token * stride + (i % 2) * (BLOCK // 2)))


@triton.jit
def _fetch_all_rows(ptrs, first, strides, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """The same of u, delta, dy and z."""
    _fetch_rows(ptrs[0], first, strides[0], BLOCK, COUNT)
    _fetch_rows(ptrs[1], first, strides[1], BLOCK, COUNT)
    _fetch_rows(ptrs[2], first, strides[2], BLOCK, COUNT)
    _fetch_rows(ptrs[3], first, strides[3], BLOCK, COUNT)


@triton.jit
def _load_begins(first_ptr, first, length, COUNT: tl.constexpr):
    """Whether each of COUNT tokens begins a sequence; nothing where there is only one.

    The first token of all has the initial state before it.
    """
    begins = ()
    if first_ptr is not None:
        for i in tl.static_range(COUNT):
            t = first + i
            inside = (t > 0) & (t < length)
            begins = _append(begins, tl.load(first_ptr + t, mask=inside, other=-1) == t)
    return begins


@triton.jit
def _without(begins, i: tl.constexpr, x, PACKED: tl.constexpr):
    """X, or zeros where a sequence begins at token i of ``begins``.

    A decay of 0 would not stop a NaN or inf of the sequence before.
    """
    if PACKED:
        return tl.where(begins[i], 0.0, x)
    else:
        return x


@triton.jit
def _passes(first_ptr, begin, end):
    """Whether a state before token ``begin`` reaches the one before ``end``.

    It does not where a sequence begins between them. ``first_ptr`` has the first token of the
    sequence of every token.
    """
    if first_ptr is None:
        return True
    else:
        of_last = tl.load(first_ptr + end - 1, mask=end > begin, other=0)
        return of_last <= tl.maximum(begin - 1, 0)


@triton.jit
def _steps_and_slopes(raw, bias, inside, SOFTPLUS: tl.constexpr):
    """Step sizes of a token, 0 past the last one, and their derivatives.

    With u = exp(-|x|), softplus is max(x, 0) + log(1 + u). The logarithm is u times a polynomial,
    to 3e-8 of it: it keeps its digits however small u is, and takes no reciprocal.
    """
    x = raw.to(tl.float32) + bias
    slopes = x * 0.0 + 1.0
    if SOFTPLUS:
        u = exp2_near(-tl.abs(x) * LOG2E)
        p = -0.02950524012 + u * 0.005232693703
        p = 0.191060079 + u * (-0.1366324728 + u * (0.07822596093 + u * p))
        p = -0.4999949315 + u * (0.333190969 + u * (-0.2484298267 + u * p))
        p = 0.9999999699 + u * p
        half = reciprocal_near(1.0 + u)
        slopes = tl.where(x < 0.0, u * half, half)
        x = tl.maximum(x, 0.0) + u * p
    return x if inside is True else tl.where(inside, x, 0.0), slopes


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
def _decays(steps, a):
    """``exp(delta A)``, with A in units of log2."""
    return exp2_near(steps[None, :] * a)


# --- kernels ---

TOGETHER = tl.constexpr(8)  # spans whose ends are loaded at a time


@triton.jit(do_not_specialize=["chunks", "zero"])  # a loop that is always a loop
def _selective_scan_states_kernel(
    u_ptr,
    delta_ptr,
    a_ptr,
    pairs_ptr,
    dy_ptr,
    z_ptr,
    bias_ptr,
    before_ptr,
    first_ptr,
    ends_ptr,
    sums_ptr,
    states_ptr,
    dends_ptr,
    row_strides,
    extents,
    chunks,
    zero,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
):
    """What spans leave, and the states before their chunks.

    Program: BLOCK channels of one of the first ``active`` spans of a sequence, ``chunks`` chunks of
    PARTS times STEP tokens.
    Reads u, delta, A, B and the bias; C, dy and z for the gradient; a step ahead. Starts from the
    states before spans, (batch, spans, DIM, channels), or from zeros. Writes what there are tensors
    for. Of spans: the last state and the gradient of the one before them, of that shape, and the
    sum of step sizes, (batch, spans, channels). Of chunks, the states before them, (batch, spans,
    blocks, chunks) tiles.
    """
    PARTS: tl.constexpr = TILE[0]
    STEP: tl.constexpr = TILE[1]
    length, cols, spans, active = extents
    batch, span, block, start, left = _place(cols, active, BLOCK)
    lane, n = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    place = batch * spans + span
    tile = place * tl.cdiv(cols, BLOCK) + block
    tokens = chunks * (PARTS * STEP)
    origin = span * tokens
    u_ptr += batch * row_strides[0] + start
    delta_ptr += batch * row_strides[1] + start
    pairs_ptr += place * tokens * (2 * SIZE)
    pairs_ptr = _own(pairs_ptr, zero) if dy_ptr is None else pairs_ptr
    if dy_ptr is not None:
        dy_ptr += batch * row_strides[2] + start
        if z_ptr is not None:
            z_ptr += batch * row_strides[3] + start
    if first_ptr is not None:
        first_ptr += batch * row_strides[4]
    a = _load_states(a_ptr + start, lane, left, cols, zero, DIM, SIZE) * LOG2E
    bias = load_or(bias_ptr, start + lane, lane < left, 0.0)
    state = tl.zeros([SIZE, BLOCK], tl.float32)
    if before_ptr is not None:
        state_ptr = before_ptr + place * cols * DIM + start
        state += _load_states(state_ptr, lane, left, cols, zero, DIM, SIZE)
    through, dstate = tl.full([SIZE, BLOCK], 1.0, tl.float32), tl.zeros([SIZE, BLOCK], tl.float32)
    total, reached = tl.zeros([BLOCK], tl.float32), zero == 0  # by gradients before the span
    ptrs = (u_ptr, delta_ptr, dy_ptr, z_ptr if dy_ptr is not None else None)
    strides = row_strides[5:9]
    if AHEAD < 3:
        u, raw, dy, z = _load_step(ptrs, strides, origin, lane, length, left, STEP, EVEN)
    for step in tl.range(0, chunks * PARTS):
        first = origin + step * STEP
        after = tl.minimum(first + STEP, origin + tokens - STEP)
        begins = _load_begins(first_ptr, first, length, STEP)
        if AHEAD > 0:
            _fetch_pairs(pairs_ptr + (after - first) * (2 * SIZE), SIZE, STEP)
        at = after if AHEAD < 3 else first
        next_u, next_raw, next_dy, next_z = _load_step(
            ptrs, strides, at, lane, length, left, STEP, EVEN
        )
        if AHEAD > 2:
            u, raw, dy, z = next_u, next_raw, next_dy, next_z
            _fetch_all_rows(ptrs, after, strides, BLOCK, STEP)
        if states_ptr is not None:
            if step % PARTS == 0:
                chunk = step // PARTS
                chunk_ptr = states_ptr + (tile * chunks + chunk) * (SIZE * BLOCK)
                tl.store(_in_tile(chunk_ptr, lane, zero, SIZE, BLOCK), state)
        for i in tl.static_range(STEP):
            steps = _step_sizes(raw[i], bias, EVEN or first + i < length, SOFTPLUS)
            decays = _decays(steps, a)
            b = tl.load(pairs_ptr + (2 * SIZE * i + n))
            state = _without(begins, i, state, first_ptr is not None)
            state = decays * state + (steps * u[i].to(tl.float32))[None, :] * b[:, None]
            total += steps
            if dy_ptr is not None:
                up = dy[i].to(tl.float32)
                if z_ptr is not None:
                    up *= _silu(z[i])
                through *= decays
                c = tl.load(pairs_ptr + (2 * SIZE * i + SIZE + n))
                added = dstate + through * (up[None, :] * c[:, None])
                if first_ptr is not None:
                    reached = reached & ~begins[i]
                    dstate = tl.where(reached, added, dstate)
                else:
                    dstate = added
        pairs_ptr += 2 * SIZE * STEP
        if AHEAD < 3:
            u, raw, dy, z = next_u, next_raw, next_dy, next_z
    whole, later = place * cols * DIM + start, zero * chunks
    if sums_ptr is not None:
        tl.store(sums_ptr + (place * cols + start) + lane, total, mask=lane < left)
    if ends_ptr is not None:
        _store_states(ends_ptr + whole, state, lane, left, cols, later, DIM, SIZE)
    if dends_ptr is not None:
        _store_states(dends_ptr + whole, dstate, lane, left, cols, later, DIM, SIZE)


@triton.jit
def _selective_scan_join_kernel(
    ends_ptr,
    sums_ptr,
    a_ptr,
    boundary_ptr,
    first_ptr,
    first_step,
    length,
    cols,
    spans,
    tokens,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """From what spans leave to what is before them; with REVERSE, gradients after them.

    Program: BLOCK numbers of the states (DIM, channels) of one sequence, span after span of
    ``tokens``. It waits once for what TOGETHER spans left. Reads A, the sums of step sizes, and the
    state before the first span (after the last), (batch, DIM, channels). Reads and overwrites what
    spans left, (batch, spans, DIM, channels).
    """
    many = cols * DIM
    blocks = tl.cdiv(many, BLOCK)
    pid = tl.program_id(0)
    batch = (pid // blocks).to(tl.int64)
    element = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside, channel = element < many, element % cols
    a = tl.load(a_ptr + element, mask=inside, other=0.0).to(tl.float32) * LOG2E
    state = load_or(boundary_ptr, batch * many + element, inside, 0.0)
    if first_ptr is not None:
        first_ptr += batch * first_step
    for begun in tl.range(0, spans, TOGETHER):
        ends = ()
        for i in tl.static_range(TOGETHER):
            step = tl.minimum(begun + i, spans - 1)
            span = batch * spans + (spans - 1 - step if REVERSE else step)
            left = tl.load(ends_ptr + span * many + element, mask=inside, other=0.0)
            total = tl.load(sums_ptr + span * cols + channel, mask=inside, other=0.0)
            ends = _append(ends, (left, total))
        for i in tl.static_range(TOGETHER):
            left, total = ends[i]
            limit = tl.where(begun + i < spans, many, 0)
            step = tl.minimum(begun + i, spans - 1)
            span = spans - 1 - step if REVERSE else step
            begin = span * tokens
            passes = _passes(first_ptr, begin, tl.minimum(begin + tokens, length))
            at = ends_ptr + (batch * spans + span) * many + element
            tl.store(at, state, mask=element < limit)
            state *= exp2_near(total * a)
            if first_ptr is not None:
                state = tl.where(passes, state, 0.0)
            state += left


@triton.jit(do_not_specialize=["chunks", "zero"])  # a loop that is always a loop
def _selective_scan_forward_kernel(
    u_ptr,
    delta_ptr,
    a_ptr,
    pairs_ptr,
    skip_ptr,
    z_ptr,
    bias_ptr,
    before_ptr,
    first_ptr,
    y_ptr,
    final_ptr,
    row_strides,
    extents,
    chunks,
    zero,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Results of all tokens.

    Program: BLOCK channels of a span of one sequence, ``chunks`` chunks of tokens.
    Reads all inputs, a chunk ahead, and the state before the span, (batch, spans, DIM, channels).
    Writes y and the last state.
    """
    length, cols, spans = extents
    batch, span, _, start, left = _place(cols, spans, BLOCK)
    lane, n = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    place = batch * spans + span
    origin = span * chunks * CHUNK
    u_ptr += batch * row_strides[0] + start
    delta_ptr += batch * row_strides[1] + start
    pairs_ptr = _own(pairs_ptr + place * chunks * (CHUNK * 2 * SIZE), zero)
    y_ptr += batch * length * cols + start
    if z_ptr is not None:
        z_ptr += batch * row_strides[3] + start
    if first_ptr is not None:
        first_ptr += batch * row_strides[4]
    a = _load_states(a_ptr + start, lane, left, cols, zero, DIM, SIZE) * LOG2E
    skip = load_or(skip_ptr, start + lane, lane < left, 0.0)
    bias = load_or(bias_ptr, start + lane, lane < left, 0.0)
    state = tl.zeros([SIZE, BLOCK], tl.float32)
    if before_ptr is not None:
        state_ptr = before_ptr + place * cols * DIM + start
        state += _load_states(state_ptr, lane, left, cols, zero, DIM, SIZE)
    strides = row_strides[5:9]
    ptrs = (u_ptr, delta_ptr, None, z_ptr)
    if AHEAD < 3:
        u, raw, _none, z = _load_step(ptrs, strides, origin, lane, length, left, CHUNK, EVEN)
    for chunk in tl.range(0, chunks):
        first = origin + chunk * CHUNK
        after = tl.minimum(first + CHUNK, origin + (chunks - 1) * CHUNK)
        begins = _load_begins(first_ptr, first, length, CHUNK)
        if AHEAD > 0:
            _fetch_pairs(pairs_ptr + (after - first) * (2 * SIZE), SIZE, CHUNK)
        at = after if AHEAD < 3 else first
        next_u, next_raw, _none, next_z = _load_step(
            ptrs, strides, at, lane, length, left, CHUNK, EVEN
        )
        if AHEAD > 2:
            u, raw, z = next_u, next_raw, next_z
            _fetch_all_rows(ptrs, after, strides, BLOCK, CHUNK)
        rows = ()  # written last: a load after a store would wait for it
        for i in tl.static_range(CHUNK):
            steps = _step_sizes(raw[i], bias, EVEN or first + i < length, SOFTPLUS)
            now = u[i].to(tl.float32)
            decays = _decays(steps, a)
            b = tl.load(pairs_ptr + (2 * SIZE * i + n))
            c = tl.load(pairs_ptr + (2 * SIZE * i + SIZE + n))
            state = _without(begins, i, state, first_ptr is not None)
            state = decays * state + (steps * now)[None, :] * b[:, None]
            y = tl.sum(state * c[:, None], 0) + skip * now
            if z_ptr is not None:
                y *= _silu(z[i])
            rows = _append(rows, y)
        row = tl.cast(first, tl.int64) * cols
        _put_tokens(
            y_ptr, row, rows, first, cols, lane, length, left, BACK=False, COUNT=CHUNK, EVEN=EVEN
        )
        pairs_ptr += 2 * SIZE * CHUNK
        if AHEAD < 3:
            u, raw, z = next_u, next_raw, next_z
    if final_ptr is not None:
        if span == spans - 1:
            last_ptr, later = final_ptr + batch * cols * DIM + start, zero * chunks
            _store_states(last_ptr, state, lane, left, cols, later, DIM, SIZE)


@triton.jit
def _states_of(
    state,
    u,
    raw,
    bias,
    a,
    begins,
    pairs_ptr,
    first,
    length,
    n,
    SIZE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    PACKED: tl.constexpr,
    COUNT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The states before COUNT tokens from ``first`` on and after the last, sizes and slopes.

    And the decays of the last token.
    """
    states, sizes, slopes = (state,), (), ()
    for i in tl.static_range(COUNT):
        steps, slope = _steps_and_slopes(raw[i], bias, EVEN or first + i < length, SOFTPLUS)
        decays = _decays(steps, a)
        b = tl.load(pairs_ptr + (2 * SIZE * i + n))
        state = _without(begins, i, state, PACKED)
        state = decays * state + (steps * u[i].to(tl.float32))[None, :] * b[:, None]
        states, sizes = _append(states, state), _append(sizes, steps)
        slopes = _append(slopes, slope)
    return states, sizes, slopes, decays


@triton.jit
def _exchanged(x, factor, lane, ROWS: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr):
    """Half of the rows of a tile (2 ROWS, BLOCK) times factors, summed over columns FAR apart.

    Columns with the bit FAR keep the second half of the rows, others the first: each of a pair
    gives the other what it does not keep.
    """
    low, high = tl.split(tl.permute(tl.reshape(x, (2, ROWS, BLOCK)), (1, 2, 0)))
    upper = ((lane & FAR) != 0)[None, :]
    partner = tl.broadcast_to((lane ^ FAR)[None, :], (ROWS, BLOCK))
    received = tl.gather(tl.where(upper, low, high) * factor, partner, 1)
    return tl.where(upper, high, low) * factor + received


@triton.jit
def _channel_sums(x, factor, lane, SIZE: tl.constexpr, BLOCK: tl.constexpr, EXCHANGE: tl.constexpr):
    """Sums over the channels of a tile (states, channels) times factors, a column after the other.

    By tl.sum, all threads would get each of the sums, from five exchanges a state (of 32 threads).
    Where threads exchange halves of what is left, the number of states is halved with every step.
    """
    LEFT: tl.constexpr = SIZE >> EXCHANGE  # rows that stay: other threads have them
    MANY: tl.constexpr = 1 << EXCHANGE
    if EXCHANGE:
        x = _exchanged(x, factor[None, :], lane, SIZE // 2, BLOCK, BLOCK // 2)
        for half in tl.static_range(1, EXCHANGE):
            x = _exchanged(x, 1.0, lane, SIZE >> (half + 1), BLOCK, BLOCK >> (half + 1))
    else:
        x *= factor[None, :]
    return tl.sum(tl.reshape(x, (LEFT, MANY, BLOCK // MANY)), 2)


@triton.jit
def _put_sums(ptr, sums, SIZE: tl.constexpr, EXCHANGE: tl.constexpr):
    """Store the result of :func:`_channel_sums`."""
    LEFT: tl.constexpr = SIZE >> EXCHANGE
    column = tl.arange(0, 1 << EXCHANGE)[None, :]
    tl.store(ptr + tl.arange(0, LEFT)[:, None] + LEFT * column, sums)


@triton.jit
def _put_all_sums(ptr, at, db, dc, SIZE: tl.constexpr, EXCHANGE: tl.constexpr, COUNT: tl.constexpr):
    """Write sums for dB and dC of COUNT tokens, the last of which is first."""
    if ptr is not None:
        ptr += at
        for i in tl.static_range(COUNT):
            _put_sums(ptr + 2 * SIZE * i, db[COUNT - 1 - i], SIZE, EXCHANGE)
            _put_sums(ptr + (2 * SIZE * i + SIZE), dc[COUNT - 1 - i], SIZE, EXCHANGE)


@triton.jit
def _states_again(
    state,
    ptrs,
    strides,
    first_ptr,
    pairs_ptr,
    first,
    part,
    bias,
    a,
    lane,
    n,
    length,
    left,
    SIZE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    COUNT: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The state before a part of a chunk: ``part`` times COUNT tokens on from ``first``."""
    for _part in tl.range(0, part):
        u = _load_tokens(ptrs[0], strides[0], first, lane, length, left, COUNT, EVEN)
        raw = _load_tokens(ptrs[1], strides[1], first, lane, length, left, COUNT, EVEN)
        begins = _load_begins(first_ptr, first, length, COUNT)
        h, _, _, _ = _states_of(
            state,
            u,
            raw,
            bias,
            a,
            begins,
            pairs_ptr,
            first,
            length=length,
            n=n,
            SIZE=SIZE,
            SOFTPLUS=SOFTPLUS,
            PACKED=first_ptr is not None,
            COUNT=COUNT,
            EVEN=EVEN,
        )
        state = h[COUNT]
        first += COUNT
        pairs_ptr += COUNT * 2 * SIZE
    return state


@triton.jit
def _through_gate(dy, z, h, c, skip, u):
    """Gradients of y before the gate, and of z."""
    gate = z.to(tl.float32)
    p = _sigmoid(gate)
    y = tl.sum(h * c, 0) + skip * u
    return dy * gate * p, dy * y * p * (1.0 + gate * (1.0 - p))


@triton.jit
def _back(
    carry,
    sums,
    states,
    u,
    dy,
    z,
    begins,
    pairs_ptr,
    a,
    skip,
    lane,
    n,
    first,
    length,
    zero,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    PACKED: tl.constexpr,
    SUMMED: tl.constexpr,
    EXCHANGE: tl.constexpr,
    EVEN: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
):
    """Back through the tokens FROM down to TO of a part.

    ``carry`` is what reaches a token's state from later ones, ``sums`` those over tokens for dA, dD
    and the bias, ``decays`` those of token FROM. Returns both of them, and rows of the tokens.
    """
    h, sizes, slopes, decays = states
    da, dskip, dbias = sums
    du, ddelta, dz, db, dc = (), (), (), (), ()
    for i in tl.static_range(FROM, TO - 1, -1):
        now, up = u[i].to(tl.float32), dy[i].to(tl.float32)
        into = tl.load(pairs_ptr + (2 * SIZE * i + n))[:, None]
        out = tl.load(pairs_ptr + (2 * SIZE * i + SIZE + n))[:, None]
        if GATED:
            up, of_gate = _through_gate(up, z[i], h[i + 1], out, skip, now)
            dz = _append(dz, of_gate)
        m = carry + up[None, :] * out
        if SUMMED:
            dc = _append(dc, _channel_sums(h[i + 1], up, lane, SIZE, BLOCK, EXCHANGE))
            db = _append(db, _channel_sums(m, sizes[i] * now, lane, SIZE, BLOCK, EXCHANGE))
        added = tl.sum(m * into, 0)  # gradient of delta u
        du = _append(du, sizes[i] * added + skip * up)
        dskip += up * now
        if i < FROM:  # computed again: kept decays would take as much room as states
            decays = _decays(sizes[i] * (zero + 1), a)
        carry = _without(begins, i, m * decays, PACKED)
        # gradient of the logarithm of decays; what the state is without is not kept beside it
        through = _without(begins, i, carry * h[i], PACKED)
        da += through * sizes[i][None, :]
        dsteps = (tl.sum(through * a, 0) * LN2 + now * added) * slopes[i]
        dbias += dsteps if EVEN else tl.where(first + i < length, dsteps, 0.0)
        ddelta = _append(ddelta, dsteps)
    return carry, (da, dskip, dbias), (du, ddelta, dz, db, dc)


@triton.jit
def _fetch_earlier(
    states_ptr,
    tile,
    pairs_ptr,
    index,
    ptrs,
    strides,
    origin,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    KEPT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Ask for what steps after that of part ``index`` load.

    The tile of states of the next step; by AHEAD, also B and C of a chunk of tokens before the
    part, and rows of the tokens that are a chunk before it.
    """
    earlier = tile + tl.maximum(index - 1, 0) // PARTS
    LINES: tl.constexpr = SIZE * BLOCK // 32 if SIZE * BLOCK > 32 else 1
    line = 32 * tl.arange(0, LINES)
    fetch(states_ptr + earlier * (SIZE * BLOCK) + line)
    ahead = tl.maximum(index - PARTS, 0) * KEPT
    if AHEAD > 0:
        _fetch_pairs(pairs_ptr + ahead * (2 * SIZE), SIZE, PARTS * KEPT)
    if AHEAD > 1:
        at = origin + ahead
        _fetch_all_rows(ptrs, at, strides, BLOCK, KEPT)


@triton.jit
def _put_all(
    ptrs, rows, grads, t, cols, lane, length, left, COUNT: tl.constexpr, EVEN: tl.constexpr
):
    """Write du, ddelta and dz of COUNT tokens from t on; ``rows`` is the first of the sequence."""
    at = rows + tl.cast(t, tl.int64) * cols
    _put_tokens(
        ptrs[0], at, grads[0], t, cols, lane, length, left, BACK=True, COUNT=COUNT, EVEN=EVEN
    )
    _put_tokens(
        ptrs[1], at, grads[1], t, cols, lane, length, left, BACK=True, COUNT=COUNT, EVEN=EVEN
    )
    _put_tokens(
        ptrs[2], at, grads[2], t, cols, lane, length, left, BACK=True, COUNT=COUNT, EVEN=EVEN
    )


@triton.jit
def _put_span_sums(
    da_ptr,
    dskip_ptr,
    dbias_ptr,
    sums,
    place,
    start,
    cols,
    lane,
    left,
    later,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Write a span's sums over tokens: dA, and the gradients of D and of the bias."""
    at = place * cols + start
    _put_tokens(dskip_ptr, at, (sums[1],), 0, cols, lane, 1, left, BACK=False, COUNT=1, EVEN=EVEN)
    _put_tokens(dbias_ptr, at, (sums[2],), 0, cols, lane, 1, left, BACK=False, COUNT=1, EVEN=EVEN)
    if da_ptr is not None:
        of_a = da_ptr + (place * cols * DIM + start)
        _store_states(of_a, sums[0], lane, left, cols, later, DIM, SIZE)


@triton.jit
def _skip_and_bias(skip_ptr, bias_ptr, channel, mask):
    """Load D and the bias of channels, 0 where there are none."""
    return load_or(skip_ptr, channel, mask, 0.0), load_or(bias_ptr, channel, mask, 0.0)


@triton.jit(do_not_specialize=["chunks", "zero"])  # a loop that is always a loop
def _selective_scan_backward_kernel(
    u_ptr,
    dy_ptr,
    delta_ptr,
    a_ptr,
    pairs_ptr,
    skip_ptr,
    z_ptr,
    bias_ptr,
    first_ptr,
    states_ptr,
    after_ptr,
    du_ptr,
    ddelta_ptr,
    dz_ptr,
    da_ptr,
    dpairs_ptr,
    dskip_ptr,
    dbias_ptr,
    dinitial_ptr,
    row_strides,
    extents,
    chunks,
    zero,
    SHAPE: tl.constexpr,
):
    """All gradients.

    Program: BLOCK channels of a span of one sequence, from its last chunk to the first.
    Reads all inputs, tiles of states before chunks, and gradients after spans, (batch, spans, DIM,
    channels). Writes du, ddelta, dz, the gradient of the first state, (batch, DIM, channels), and
    parts of sums: of dB and dC (blocks, batch, tokens, 2, SIZE), of dA (batch, spans, DIM,
    channels), of dD and that of the bias (batch, spans, channels).
    """
    length, cols, spans, batches = extents
    DIM: tl.constexpr = SHAPE[0]
    SIZE: tl.constexpr = SHAPE[1]
    BLOCK: tl.constexpr = SHAPE[3]
    PARTS: tl.constexpr = SHAPE[4]
    KEPT: tl.constexpr = SHAPE[5]
    EVEN: tl.constexpr = SHAPE[8]
    COUNT: tl.constexpr = 2 if KEPT % 2 == 0 else 1  # tokens written together: more take registers
    batch, span, block, start, left = _place(cols, spans, BLOCK)
    lane, n = tl.arange(0, BLOCK), tl.arange(0, SIZE)
    place = batch * spans + span
    tile = place * tl.cdiv(cols, BLOCK) + block
    tokens = chunks * (PARTS * KEPT)
    origin, rows = span * tokens, batch * length * cols + start
    of_pairs = (block.to(tl.int64) * batches * spans + place) * tokens * (2 * SIZE)
    dy_ptr += batch * row_strides[2] + start
    u_ptr += batch * row_strides[0] + start
    delta_ptr += batch * row_strides[1] + start
    pairs_ptr += place * tokens * (2 * SIZE)
    strides = row_strides[5:9]
    if z_ptr is not None:
        z_ptr += batch * row_strides[3] + start
    if first_ptr is not None:
        first_ptr += batch * row_strides[4]
    a = _load_states(a_ptr + start, lane, left, cols, zero, DIM, SIZE) * LOG2E
    skip, bias = _skip_and_bias(skip_ptr, bias_ptr, start + lane, lane < left)
    carry, none = tl.zeros([SIZE, BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    sums = (carry, none, none)
    if after_ptr is not None:
        state_ptr = after_ptr + place * cols * DIM + start
        carry += _load_states(state_ptr, lane, left, cols, zero, DIM, SIZE)
    ptrs, dtoken_ptrs = (u_ptr, delta_ptr, dy_ptr, z_ptr), (du_ptr, ddelta_ptr, dz_ptr)
    before = origin + tokens - KEPT
    ahead = _load_step(ptrs, strides, before, lane, length, left, KEPT, EVEN)
    for step in tl.range(0, chunks * PARTS):
        index = chunks * PARTS - 1 - step  # of a part
        part, first = index % PARTS, origin + index * KEPT
        u, raw, dy, z = ahead
        at_ptr = pairs_ptr + index * (KEPT * 2 * SIZE)
        chunk_ptr = states_ptr + (tile * chunks + index // PARTS) * (SIZE * BLOCK)
        state = tl.load(_in_tile(chunk_ptr, lane, zero, SIZE, BLOCK))
        _fetch_earlier(
            states_ptr, tile * chunks, pairs_ptr, index, ptrs, strides, origin, SIZE=SIZE,
            BLOCK=BLOCK, PARTS=PARTS, KEPT=KEPT, AHEAD=SHAPE[7],
        )  # fmt: skip
        state = _states_again(
            state, ptrs, strides, first_ptr, at_ptr - part * (KEPT * 2 * SIZE), first - part * KEPT,
            part, bias, a=a, lane=lane, n=n, length=length, left=left, SIZE=SIZE, SOFTPLUS=SHAPE[2],
            COUNT=KEPT, EVEN=EVEN,
        )  # fmt: skip
        begins = _load_begins(first_ptr, first, length, KEPT)
        h, sizes, slopes, decays = _states_of(
            state, u, raw, bias, a, begins, at_ptr, first, length=length, n=n, SIZE=SIZE,
            SOFTPLUS=SHAPE[2], PACKED=first_ptr is not None, COUNT=KEPT, EVEN=EVEN,
        )  # fmt: skip
        before = tl.maximum(first - KEPT, origin)
        ahead = _load_step(ptrs, strides, before, lane, length, left, KEPT, EVEN)
        for last in tl.static_range(KEPT - 1, -1, -COUNT):
            if last < KEPT - 1:
                decays = _decays(sizes[last] * (zero + 1), a)
            carry, sums, grads = _back(
                carry, sums, (h, sizes, slopes, decays), u, dy, z, begins, at_ptr, a=a, skip=skip,
                lane=lane, n=n, first=first, length=length, zero=zero, SIZE=SIZE, BLOCK=BLOCK,
                GATED=z_ptr is not None, PACKED=first_ptr is not None,
                SUMMED=dpairs_ptr is not None, EXCHANGE=SHAPE[6], EVEN=EVEN, FROM=last,
                TO=last - COUNT + 1,
            )  # fmt: skip
            t = first + (last - COUNT + 1)
            _put_all(dtoken_ptrs, rows, grads, t, cols, lane, length, left, COUNT=COUNT, EVEN=EVEN)
            at = of_pairs + (t - origin) * (2 * SIZE)
            _put_all_sums(dpairs_ptr, at, grads[3], grads[4], SIZE, SHAPE[6], COUNT)
    _put_span_sums(da_ptr, dskip_ptr, dbias_ptr, sums, place, start, cols, lane, left=left,
                   later=zero * chunks, DIM=DIM, SIZE=SIZE, EVEN=EVEN)  # fmt: skip
    if dinitial_ptr is not None:
        if span == 0:
            of_states = dinitial_ptr + batch * cols * DIM + start
            _store_states(of_states, carry, lane, left, cols, zero * chunks, DIM, SIZE)
