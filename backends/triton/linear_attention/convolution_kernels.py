"""Depthwise causal convolutions (arXiv:2312.00752), plain and gated as in LFM2 (arXiv:2511.23404).

    u[t] = bias + sum over k < W of w[k] * x[t - (W - 1) + k],  y = u or silu(u)
    du = dy * silu'(u),  dx[t] = sum over k of w[k] * du[t + (W - 1) - k],
    dw[k] = sum over t of du[t] * x[t - (W - 1) + k],  dbias = sum of du

Gated, with b, c and v side by side: x = b * v, y = c * u; du = dy * c, dc = dy * u, db = dx * v and
dv = dx * b. Terms whose two tokens are of different sequences are left out.

A program owns some channels of a chunk of tokens and goes through the tokens one after the other. A
thread holds neighboring channels of a token, so that nothing passes between threads. The last W - 1
tokens are in registers, and in backward the last W - 1 sums of dx as well: token t adds its terms
to those of t - W + 1 to t, of which the first is then complete. So a token is loaded once and its
activation computed once, but for the W - 1 tokens where chunks meet. u is computed again in
backward. Sums for the weight leave as one fp32 partial a program, which a second kernel adds in a
fixed order.
"""

import triton
import triton.language as tl

from liger_multi.backends.triton.common.rows import (
    assume_cols,
    load_or,
    round_to,
    sigmoid,
)

# --- helpers of the kernels ---


@triton.jit
def _append(values, value):
    """A tuple of vectors, one of each token or weight, with one more."""
    return values + (value,)


@triton.jit
def _load_token(ptr, t, stride, lane, length, left):
    """Channels of token t, zeros outside of the row.

    The mask is a comparison with a scalar limit, which keeps loads of 16 bytes.
    """
    limit = tl.where((t >= 0) & (t < length), left, 0)
    return tl.load(ptr + t * stride + lane, mask=lane < limit, other=0.0)


@triton.jit
def _store_token(ptr, value, t, low, high, stride, lane, left):
    """Write channels of token t, if there is a tensor and t is in [low, high)."""
    if ptr is not None:
        limit = tl.where((t >= low) & (t < high), left, 0)
        tl.store(ptr + t * stride + lane, round_to(value, ptr.dtype.element_ty), mask=lane < limit)


@triton.jit
def _load_filter(weight_ptr, lane, left, WIDTH: tl.constexpr):
    """The WIDTH weights of every channel, in fp32."""
    weights = ()
    for k in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + (lane * WIDTH + k), mask=lane < left, other=0.0)
        weights = _append(weights, weight.to(tl.float32))
    return weights


@triton.jit
def _same_sequence(ids_ptr, t, length):
    """Whether token t and the one before it are of one sequence; nothing begins with a row.

    What precedes a row's first token is its initial state.
    """
    if ids_ptr is None:
        return t == t
    else:
        inside = (t > 0) & (t < length)
        now = tl.load(ids_ptr + t, mask=inside, other=0)
        return now == tl.load(ids_ptr + t - 1, mask=inside, other=0)


@triton.jit
def _of_sequence(window, same, COUNT: tl.constexpr):
    """The tokens of a window, all zero where a sequence begins. NaN does not pass."""
    kept = ()
    for k in tl.static_range(COUNT):
        kept = _append(kept, tl.where(same, window[k], 0.0))
    return kept


@triton.jit
def _load_before(
    x_ptr,
    gate_ptr,
    state_ptr,
    ids_ptr,
    first,
    stride,
    lane,
    length,
    cols,
    left,
    WIDTH: tl.constexpr,
):
    """The WIDTH - 1 tokens before ``first``, and how many of them its predecessor's sequence has.

    Those before the row come from the initial state, or are zeros. Returns the window of inputs of
    the convolution and the number.
    """
    window = ()
    age = tl.cast(first, tl.int32) * 0
    for k in tl.static_range(WIDTH - 1):
        t = first + (k - (WIDTH - 1))
        x = _load_token(x_ptr, t, stride, lane, length, left).to(tl.float32)
        if gate_ptr is not None:
            x *= _load_token(gate_ptr, t, stride, lane, length, left).to(tl.float32)
        if state_ptr is not None:
            early = lane < tl.where(t < 0, left, 0)
            at = state_ptr + (t + (WIDTH - 1)) * cols + lane
            x += tl.load(at, mask=early, other=0.0).to(tl.float32)
        if ids_ptr is not None and k > 0:
            same = _same_sequence(ids_ptr, t, length)
            window = _of_sequence(window, same, k)
            age = tl.where(same, age + 1, 0)
        window = _append(window, x)
    return window, age


@triton.jit
def _sum_taps(window, weights, bias, WIDTH: tl.constexpr):
    """``bias + sum of weight * token``, in fp32 and in the order of the tokens."""
    total = bias
    for k in tl.static_range(WIDTH):
        total += window[k] * weights[k]
    return total


@triton.jit
def _add_to_weights(sums, du, window, WIDTH: tl.constexpr):
    """Add one token's terms to the sums for the weights."""
    added = ()
    for k in tl.static_range(WIDTH):
        added = _append(added, sums[k] + du * window[k])
    return added


@triton.jit
def _add_to_tokens(pending, du, weights, age, PACKED: tl.constexpr, WIDTH: tl.constexpr):
    """Add one token's terms to the sums of dx of it and the WIDTH - 1 tokens before it.

    The token's sequence has ``age`` tokens before it. The first of the sums is complete.
    """
    sums = ()
    for k in tl.static_range(WIDTH):
        term = du * weights[k]
        if PACKED:
            term = tl.where(age >= WIDTH - 1 - k, term, 0.0)
        if k < WIDTH - 1:
            term += pending[k]
        sums = _append(sums, term)
    return sums


@triton.jit
def _zeros(BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """Vectors of zeros."""
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = _append(zeros, tl.zeros([BLOCK], tl.float32))
    return zeros


@triton.jit
def _store_sums(
    dweight_ptr, dbias_ptr, dweight, dbias, row, start, lane, cols, left, WIDTH: tl.constexpr
):
    """The partial sums of one program, in its row of the partials."""
    at = row.to(tl.int64) * cols + start
    if dweight_ptr is not None:
        dweight_ptr += at * WIDTH
        for k in tl.static_range(WIDTH):
            tl.store(dweight_ptr + (lane * WIDTH + k), dweight[k], mask=lane < left)
    if dbias_ptr is not None:
        dbias_ptr += at
        tl.store(dbias_ptr + lane, dbias, mask=lane < left)


# --- kernels ---


@triton.jit
def _convolution_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    ids_ptr,
    y_ptr,
    x_batch,
    x_stride,
    length,
    cols,
    chunks,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Convolution of a chunk of tokens, with silu or between two gates.

    Program: CHUNK tokens by BLOCK channels; those that share tokens have neighboring ids. Reads the
    weights, the WIDTH - 1 tokens before the chunk, then STEP tokens at a time; GATED: of x, which
    is b, c and v side by side. Writes y.
    """
    tiles = tl.cdiv(cols, BLOCK)
    assume_cols(cols)
    chunk = tl.program_id(0) // tiles
    batch, first = (chunk // chunks).to(tl.int64), (chunk % chunks).to(tl.int64) * CHUNK
    start, lane = (tl.program_id(0) % tiles) * BLOCK, tl.arange(0, BLOCK)
    left = cols - start
    x_ptr += batch * x_batch + start
    y_ptr += batch * length * cols + start
    gate_ptr = None
    if GATED:
        gate_ptr, x_ptr = x_ptr, x_ptr + 2 * cols
    if state_ptr is not None:
        state_ptr += batch * (WIDTH - 1) * cols + start
    if ids_ptr is not None:
        ids_ptr += batch * length
    weights = _load_filter(weight_ptr + start * WIDTH, lane, left, WIDTH)
    bias = load_or(bias_ptr, start + lane, lane < left, 0.0)
    window, _ = _load_before(
        x_ptr,
        gate_ptr,
        state_ptr,
        ids_ptr,
        first,
        x_stride,
        lane,
        length,
        cols=cols,
        left=left,
        WIDTH=WIDTH,
    )
    for past in tl.range(0, CHUNK, STEP, num_stages=STAGES):
        x, b, c, same = (), (), (), ()
        for i in tl.static_range(STEP):
            t = first + past + i
            x = _append(x, _load_token(x_ptr, t, x_stride, lane, length, left))
            if GATED:
                b = _append(b, _load_token(gate_ptr, t, x_stride, lane, length, left))
                c = _append(c, _load_token(gate_ptr + cols, t, x_stride, lane, length, left))
            same = _append(same, _same_sequence(ids_ptr, t, length))
        for i in tl.static_range(STEP):
            t = first + past + i
            now = tl.cast(x[i], tl.float32)
            if GATED:
                now *= b[i].to(tl.float32)
            if ids_ptr is not None:
                window = _of_sequence(window, same[i], WIDTH - 1)
            window = _append(window, now)
            u = _sum_taps(window, weights, bias, WIDTH)
            window = window[1:]
            if SILU:
                u *= sigmoid(u)
            if GATED:
                u *= c[i].to(tl.float32)
            _store_token(y_ptr, u, t, 0, length, cols, lane, left)


@triton.jit
def _convolution_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    ids_ptr,
    dx_ptr,
    dstate_ptr,
    dweight_ptr,
    dbias_ptr,
    dy_batch,
    dy_stride,
    x_batch,
    x_stride,
    length,
    cols,
    chunks,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of x and the initial state, and partial sums of those of weight and bias.

    Program: as forward's. Goes through the CHUNK tokens of its own and the WIDTH - 1 after it,
    which add to gradients of the chunk's last tokens. At token t it computes u and du, adds to the
    sums for the weights (of the chunk's own tokens), and writes dx of token t - (WIDTH - 1).
    """
    tiles = tl.cdiv(cols, BLOCK)
    assume_cols(cols)
    chunk = tl.program_id(0) // tiles
    batch, first = (chunk // chunks).to(tl.int64), (chunk % chunks).to(tl.int64) * CHUNK
    start, lane = (tl.program_id(0) % tiles) * BLOCK, tl.arange(0, BLOCK)
    left = cols - start
    dy_ptr += batch * dy_batch + start
    x_ptr += batch * x_batch + start
    if dx_ptr is not None:
        dx_ptr += batch * length * cols + start
    if state_ptr is not None:
        state_ptr += batch * (WIDTH - 1) * cols + start
    if dstate_ptr is not None:
        dstate_ptr += batch * (WIDTH - 1) * cols + start
    if ids_ptr is not None:
        ids_ptr += batch * length
    weights = _load_filter(weight_ptr + start * WIDTH, lane, left, WIDTH)
    bias = load_or(bias_ptr, start + lane, lane < left, 0.0)
    window, age = _load_before(
        x_ptr,
        None,
        state_ptr,
        ids_ptr,
        first,
        x_stride,
        lane,
        length,
        cols=cols,
        left=left,
        WIDTH=WIDTH,
    )
    pending, dweight = _zeros(BLOCK, WIDTH - 1), _zeros(BLOCK, WIDTH)
    dbias = tl.zeros([BLOCK], tl.float32)
    for past in tl.range(0, CHUNK, STEP, num_stages=STAGES):
        x, dy, same = (), (), ()
        for i in tl.static_range(STEP):
            t = first + past + i
            x = _append(x, _load_token(x_ptr, t, x_stride, lane, length, left))
            dy = _append(dy, _load_token(dy_ptr, t, dy_stride, lane, length, left))
            same = _append(same, _same_sequence(ids_ptr, t, length))
        for i in tl.static_range(STEP):
            t = first + past + i
            window, age, du = _upstream(
                window, age, same[i], x[i], dy[i], weights, bias, ids_ptr is not None, SILU=SILU
            )
            if dweight_ptr is not None:
                dweight = _add_to_weights(dweight, du, window, WIDTH)
            dbias += du
            window = window[1:]
            sums = _add_to_tokens(pending, du, weights, age, ids_ptr is not None, WIDTH)
            _store_token(dx_ptr, sums[0], t - (WIDTH - 1), first, length, cols, lane, left)
            _store_token(dstate_ptr, sums[0], t, 0, WIDTH - 1, cols, lane, left)
            pending = sums[1:]
    _store_sums(
        dweight_ptr, dbias_ptr, dweight, dbias, chunk, start, lane, cols, left=left, WIDTH=WIDTH
    )
    if dx_ptr is not None:
        for i in tl.static_range(WIDTH - 1):
            t = first + (CHUNK + i)
            x_after = _load_token(x_ptr, t, x_stride, lane, length, left)
            dy_after = _load_token(dy_ptr, t, dy_stride, lane, length, left)
            same = _same_sequence(ids_ptr, t, length)
            window, age, du = _upstream(
                window, age, same, x_after, dy_after, weights, bias, ids_ptr is not None, SILU=SILU
            )
            window = window[1:]
            sums = _add_to_tokens(pending, du, weights, age, ids_ptr is not None, WIDTH)
            _store_token(dx_ptr, sums[0], t - (WIDTH - 1), first, length, cols, lane, left)
            pending = sums[1:]


@triton.jit
def _upstream(
    window,
    age,
    same,
    x,
    dy,
    weights,
    bias,
    PACKED: tl.constexpr,
    SILU: tl.constexpr,
):
    """The window with the token x, its age in its sequence, and the gradient of u."""
    WIDTH: tl.constexpr = len(weights)
    if PACKED:
        window = _of_sequence(window, same, WIDTH - 1)
        age = tl.where(same, age + 1, 0)
    window = _append(window, x.to(tl.float32))
    du = dy.to(tl.float32)
    if SILU:
        u = _sum_taps(window, weights, bias, WIDTH)
        p = sigmoid(u)
        du *= p * (1.0 + u * (1.0 - p))
    return window, age, du


@triton.jit
def _gated_convolution_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    dy_batch,
    dy_stride,
    x_batch,
    x_stride,
    length,
    cols,
    chunks,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of b, c and v side by side, and partial sums of those of weight and bias.

    Program and order: as :func:`_convolution_backward_kernel`. At token t it writes dc of t, and
    db and dv of token t - (WIDTH - 1), whose b and v it has kept as long.
    """
    tiles = tl.cdiv(cols, BLOCK)
    assume_cols(cols)
    chunk = tl.program_id(0) // tiles
    batch, first = (chunk // chunks).to(tl.int64), (chunk % chunks).to(tl.int64) * CHUNK
    last = tl.minimum(first + CHUNK, length)
    start, lane = (tl.program_id(0) % tiles) * BLOCK, tl.arange(0, BLOCK)
    left = cols - start
    dy_ptr += batch * dy_batch + start
    x_ptr += batch * x_batch + start
    if dx_ptr is not None:
        dx_ptr += batch * length * (3 * cols) + start
    if ids_ptr is not None:
        ids_ptr += batch * length
    weights = _load_filter(weight_ptr + start * WIDTH, lane, left, WIDTH)
    bias = load_or(bias_ptr, start + lane, lane < left, 0.0)
    v_ptr = x_ptr + 2 * cols
    window, age = _load_before(
        v_ptr,
        x_ptr,
        None,
        ids_ptr,
        first,
        x_stride,
        lane,
        length,
        cols=cols,
        left=left,
        WIDTH=WIDTH,
    )
    # b and v of tokens before the chunk are not needed again
    bs, vs = _zeros(BLOCK, WIDTH - 1), _zeros(BLOCK, WIDTH - 1)
    pending, dweight = _zeros(BLOCK, WIDTH - 1), _zeros(BLOCK, WIDTH)
    dbias = tl.zeros([BLOCK], tl.float32)
    for past in tl.range(0, CHUNK, STEP, num_stages=STAGES):
        b, c, v, dy, same = (), (), (), (), ()
        for i in tl.static_range(STEP):
            t = first + past + i
            b = _append(b, _load_token(x_ptr, t, x_stride, lane, length, left))
            c = _append(c, _load_token(x_ptr + cols, t, x_stride, lane, length, left))
            v = _append(v, _load_token(v_ptr, t, x_stride, lane, length, left))
            dy = _append(dy, _load_token(dy_ptr, t, dy_stride, lane, length, left))
            same = _append(same, _same_sequence(ids_ptr, t, length))
        for i in tl.static_range(STEP):
            t = first + past + i
            bs, vs = _append(bs, b[i].to(tl.float32)), _append(vs, v[i].to(tl.float32))
            product, upstream = bs[WIDTH - 1] * vs[WIDTH - 1], dy[i].to(tl.float32)
            du = upstream * c[i].to(tl.float32)
            window, age, du = _upstream(
                window, age, same[i], product, du, weights, bias, ids_ptr is not None, SILU=False
            )
            if dweight_ptr is not None:
                dweight = _add_to_weights(dweight, du, window, WIDTH)
            dbias += du
            if dx_ptr is not None:
                dc = upstream * _sum_taps(window, weights, bias, WIDTH)
                _store_token(dx_ptr + cols, dc, t, 0, length, 3 * cols, lane, left)
            sums = _add_to_tokens(pending, du, weights, age, ids_ptr is not None, WIDTH)
            _store_gates(
                dx_ptr, sums[0], (bs[0], vs[0]), t - (WIDTH - 1), (first, last), cols, lane, left
            )
            window, bs, vs, pending = window[1:], bs[1:], vs[1:], sums[1:]
    _store_sums(
        dweight_ptr, dbias_ptr, dweight, dbias, chunk, start, lane, cols, left=left, WIDTH=WIDTH
    )
    if dx_ptr is not None:
        for i in tl.static_range(WIDTH - 1):
            t = first + (CHUNK + i)
            du = _load_token(dy_ptr, t, dy_stride, lane, length, left).to(tl.float32)
            du *= _load_token(x_ptr + cols, t, x_stride, lane, length, left).to(tl.float32)
            if ids_ptr is not None:
                age = tl.where(_same_sequence(ids_ptr, t, length), age + 1, 0)
            sums = _add_to_tokens(pending, du, weights, age, ids_ptr is not None, WIDTH)
            _store_gates(
                dx_ptr, sums[0], (bs[i], vs[i]), t - (WIDTH - 1), (first, last), cols, lane, left
            )
            pending = sums[1:]


@triton.jit
def _store_gates(dx_ptr, dz, gates, t, bounds, cols, lane, left):
    """Write db and dv of token t, if it is of the chunk; ``gates`` are b and v."""
    if dx_ptr is not None:
        _store_token(dx_ptr, dz * gates[1], t, bounds[0], bounds[1], 3 * cols, lane, left)
        _store_token(
            dx_ptr + 2 * cols, dz * gates[0], t, bounds[0], bounds[1], 3 * cols, lane, left
        )
