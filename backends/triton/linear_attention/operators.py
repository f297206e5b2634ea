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

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.backends.triton.common.rows import (
    assume_cols,
    cdiv,
    checked_cols,
    load_or,
    power_of_2,
    round_to,
    sigmoid,
    sum_partials,
    warps,
)
from liger_multi.dispatch.launch import DeviceInfo, launch_config

WIDEST = 8  # taps; a program's registers hold three vectors for each


# --- launch configuration ---

# H200, triton 3.6, bf16, 2026-11: 2x8192x8192 with 4 taps and silu takes 0.147 ms forward (0.166
# without loads two steps ahead) and 0.236 ms backward (0.295); 2x8192x2048 gated with 3 taps takes
# 0.067 ms and 0.135 ms, and loads ahead cost time there.


@dataclass(frozen=True)
class ConvolutionConfig:
    """``rows`` tokens by ``block`` channels a program; ``step`` tokens are loaded at a time."""

    rows: int
    step: int
    block: int
    num_warps: int
    stages: int


def _config(
    info: DeviceInfo, shape: tuple[int, int, int], each: int, threads: int, k: tuple[int, int, int]
) -> ConvolutionConfig:
    """``each`` channels a thread. Of k, fewer rows where sequences are short or programs few.

    Gradients of the initial state want at least WIDEST - 1 of them.
    """
    rows, length, cols = shape
    most, step, stages = k
    most = min(most, max(WIDEST, power_of_2(length)))
    block = min(power_of_2(cols), each * threads)
    while most > 16 and cdiv(rows, most) * cdiv(cols, block) < 2 * info.cores:
        most //= 2
    num_warps = warps(block // each, info.warp_size)
    return ConvolutionConfig(most, step, block, num_warps, stages)


def forward_config(
    info: DeviceInfo, rows: int, length: int, cols: int, width: int, element_bytes: int,
    packed: bool,
) -> ConvolutionConfig:  # fmt: skip
    """16 bytes a thread and token, 8 where many taps need registers; loads two steps ahead.

    Args:
        info: Limits of the device.
        rows: Tokens of all rows.
        length: Tokens of one row.
        cols: Channels.
        width: Taps of the filter.
        element_bytes: Of x, an element.
        packed: Whether there are ids.
    """
    each = max(1, (16 if width <= 4 else 8) // element_bytes)
    return _config(info, (rows, length, cols), each, 64, (64, 4, 3))


def backward_config(
    info: DeviceInfo, rows: int, length: int, cols: int, width: int, element_bytes: int,
    packed: bool,
) -> ConvolutionConfig:  # fmt: skip
    """8 bytes a thread, whose sums need registers; long chunks, each of which leaves a partial."""
    each = max(1, (8 if width <= 4 else 4) // element_bytes)
    return _config(info, (rows, length, cols), each, 256, (256, 2 if packed else 4, 3))


def gated_forward_config(
    info: DeviceInfo, rows: int, length: int, cols: int, width: int, element_bytes: int,
    packed: bool,
) -> ConvolutionConfig:  # fmt: skip
    """Three inputs: 8 bytes of each a thread, and short chunks."""
    return _config(info, (rows, length, cols), max(1, 8 // element_bytes), 128, (16, 8, 1))


def gated_backward_config(
    info: DeviceInfo, rows: int, length: int, cols: int, width: int, element_bytes: int,
    packed: bool,
) -> ConvolutionConfig:  # fmt: skip
    """Four inputs, and gates that wait as long as their gradients."""
    each = max(1, (8 if width <= 4 else 4) // element_bytes)
    return _config(info, (rows, length, cols), each, 256, (128, 1 if packed else 2, 1))


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
    """Write channels of token t, if it is at least ``low`` and below ``high``."""
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
    x_ptr, gate_ptr, state_ptr, ids_ptr, first, stride, lane, length, cols, left,
    WIDTH: tl.constexpr,
):  # fmt: skip
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
    made = ()
    for _ in tl.static_range(COUNT):
        made = _append(made, tl.zeros([BLOCK], tl.float32))
    return made


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
    x_ptr, weight_ptr, bias_ptr, state_ptr, ids_ptr, y_ptr, x_batch, x_stride, length, cols, chunks,
    WIDTH: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
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
        x_ptr, gate_ptr, state_ptr, ids_ptr, first, x_stride, lane, length, cols, left, WIDTH
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
    dy_ptr, x_ptr, weight_ptr, bias_ptr, state_ptr, ids_ptr, dx_ptr, dstate_ptr, dweight_ptr,
    dbias_ptr, dy_batch, dy_stride, x_batch, x_stride, length, cols, chunks, WIDTH: tl.constexpr,
    SILU: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
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
        x_ptr, None, state_ptr, ids_ptr, first, x_stride, lane, length, cols, left, WIDTH
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
                window, age, same[i], x[i], dy[i], weights, bias, ids_ptr is not None, SILU, WIDTH
            )
            if dweight_ptr is not None:
                dweight = _add_to_weights(dweight, du, window, WIDTH)
            dbias += du
            window = window[1:]
            pending = _write_complete(
                pending, du, weights, age, ids_ptr, dx_ptr, dstate_ptr, t, first, length, cols,
                lane, left, WIDTH,
            )  # fmt: skip
    _store_sums(dweight_ptr, dbias_ptr, dweight, dbias, chunk, start, lane, cols, left, WIDTH)
    if dx_ptr is not None:
        for i in tl.static_range(WIDTH - 1):
            t = first + (CHUNK + i)
            x_after = _load_token(x_ptr, t, x_stride, lane, length, left)
            dy_after = _load_token(dy_ptr, t, dy_stride, lane, length, left)
            same = _same_sequence(ids_ptr, t, length)
            window, age, du = _upstream(
                window, age, same, x_after, dy_after, weights, bias, ids_ptr is not None, SILU,
                WIDTH,
            )  # fmt: skip
            window = window[1:]
            pending = _write_complete(
                pending, du, weights, age, ids_ptr, dx_ptr, None, t, first, length, cols, lane,
                left, WIDTH,
            )  # fmt: skip


@triton.jit
def _upstream(
    window, age, same, x, dy, weights, bias, PACKED: tl.constexpr, SILU: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The window with the token x, its age in its sequence, and the gradient of u."""
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
def _write_complete(
    pending, du, weights, age, ids_ptr, dx_ptr, dstate_ptr, t, first, length, cols, lane,
    left, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add token t's terms, and write the gradient of the token that has all of its terms.

    It is one of the chunk, one of the initial state, or one that the chunk before writes. Returns
    the sums that are not complete.
    """
    sums = _add_to_tokens(pending, du, weights, age, ids_ptr is not None, WIDTH)
    done = t - (WIDTH - 1)
    if dx_ptr is not None:
        _store_token(dx_ptr, sums[0], done, first, length, cols, lane, left)
    if dstate_ptr is not None:
        _store_token(dstate_ptr, sums[0], t, 0, WIDTH - 1, cols, lane, left)
    return sums[1:]


@triton.jit
def _gated_convolution_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, ids_ptr, dx_ptr, dweight_ptr, dbias_ptr, dy_batch,
    dy_stride, x_batch, x_stride, length, cols, chunks, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
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
        v_ptr, x_ptr, None, ids_ptr, first, x_stride, lane, length, cols, left, WIDTH
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
                window, age, same[i], product, du, weights, bias, ids_ptr is not None, False, WIDTH
            )
            if dweight_ptr is not None:
                dweight = _add_to_weights(dweight, du, window, WIDTH)
            dbias += du
            if dx_ptr is not None:
                dc = upstream * _sum_taps(window, weights, bias, WIDTH)
                _store_token(dx_ptr + cols, dc, t, 0, length, 3 * cols, lane, left)
            sums = _add_to_tokens(pending, du, weights, age, ids_ptr is not None, WIDTH)
            _store_gates(
                dx_ptr, sums[0], bs[0], vs[0], t - (WIDTH - 1), first, last, cols, lane, left
            )
            window, bs, vs, pending = window[1:], bs[1:], vs[1:], sums[1:]
    _store_sums(dweight_ptr, dbias_ptr, dweight, dbias, chunk, start, lane, cols, left, WIDTH)
    if dx_ptr is not None:
        for i in tl.static_range(WIDTH - 1):
            t = first + (CHUNK + i)
            du = _load_token(dy_ptr, t, dy_stride, lane, length, left).to(tl.float32)
            du *= _load_token(x_ptr + cols, t, x_stride, lane, length, left).to(tl.float32)
            if ids_ptr is not None:
                age = tl.where(_same_sequence(ids_ptr, t, length), age + 1, 0)
            sums = _add_to_tokens(pending, du, weights, age, ids_ptr is not None, WIDTH)
            _store_gates(
                dx_ptr, sums[0], bs[i], vs[i], t - (WIDTH - 1), first, last, cols, lane, left
            )
            pending = sums[1:]


@triton.jit
def _store_gates(dx_ptr, dz, b, v, t, first, last, cols, lane, left):
    """Write db and dv of token t, if it is of the chunk."""
    if dx_ptr is not None:
        _store_token(dx_ptr, dz * v, t, first, last, 3 * cols, lane, left)
        _store_token(dx_ptr + 2 * cols, dz * b, t, first, last, 3 * cols, lane, left)


# --- launchers ---


class Arguments(NamedTuple):
    """What the kernels read beside x, as they take it."""

    weight: Tensor
    bias: Optional[Tensor]
    state: Optional[Tensor]
    ids: Optional[Tensor]


def _adjacent(x: Tensor) -> Tensor:
    """``(B, T, C)`` with adjacent channels; copied only where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _arguments(
    weight: Tensor, bias: Tensor | None, state: Tensor | None, ids: Tensor | None
) -> Arguments:
    return Arguments(weight.contiguous(), _dense(bias), _dense(state), _dense(ids))


def _programs(chunks: int, cols: int, width: int, k: ConvolutionConfig) -> int:
    checked_cols(cols * max(3, width))  # offsets in a token and in the weight fit into 32 bits
    return chunks * cdiv(cols, k.block)


def _forward(x: Tensor, given: Arguments, silu: bool, gated: bool) -> Tensor:
    batch, length, cols = x.shape
    cols, width = cols // 3 if gated else cols, given.weight.shape[1]
    y = x.new_empty((batch, length, cols))
    if y.numel():
        x = _adjacent(x)
        name = "gated_short_conv.forward" if gated else "causal_conv1d.forward"
        k = launch_config(
            name, gated_forward_config if gated else forward_config, x.device, rows=batch * length,
            length=length, cols=cols, width=width, element_bytes=x.element_size(),
            packed=given.ids is not None,
        )  # fmt: skip
        chunks = cdiv(length, k.rows)
        launch(
            _convolution_forward_kernel, _programs(batch * chunks, cols, width, k),
            (x, *given, y, x.stride(0), x.stride(1), length, cols, chunks),
            (width, silu, gated, k.rows, k.step, k.block, k.stages), k.num_warps,
        )  # fmt: skip
    return y


class _Partials:
    """fp32 sums of every program's tokens for the gradients of weight and bias."""

    def __init__(
        self, like: Tensor, weight: Tensor, bias: Tensor | None, needs_weight: bool,
        needs_bias: bool,
    ) -> None:  # fmt: skip
        self.like, self.of_weight, self.of_bias = like, weight, bias
        self.needs = (needs_weight, needs_bias and bias is not None)
        self.weight: Optional[Tensor] = None
        self.bias: Optional[Tensor] = None

    def make(self, programs: int) -> tuple[Optional[Tensor], Optional[Tensor]]:
        """Memory for so many programs of every channel."""
        made = [
            self.like.new_empty((programs, size), dtype=torch.float32) if needed else None
            for needed, size in zip(self.needs, (self.of_weight.numel(), len(self.of_weight)),
                                    strict=True)
        ]  # fmt: skip
        self.weight, self.bias = made
        return self.weight, self.bias

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Sums of all programs; zeros where there were none, empty where nobody needs them."""
        like = self.like if self.of_bias is None else self.of_bias
        dweight, dbias = self.of_weight.new_empty(0), like.new_empty(0)
        if self.needs[0]:
            shape = self.of_weight.shape
            dweight = self.of_weight.new_zeros(shape) if self.weight is None else (
                sum_partials(self.weight, self.of_weight.dtype).view(shape)
            )  # fmt: skip
        if self.needs[1]:
            dbias = like.new_zeros(like.shape) if self.bias is None else (
                sum_partials(self.bias, like.dtype)
            )  # fmt: skip
        return dweight, dbias


def _supports(weight: Tensor) -> str | None:
    if weight.shape[1] > WIDEST:
        return f"takes filters of up to {WIDEST} taps, got {weight.shape[1]}"
    return None


class CausalConv1d:
    """``y = u`` or ``silu(u)``."""

    supports = staticmethod(_supports)

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Optional[Tensor], initial_state: Optional[Tensor],
        segments: Optional[Tensor], activation: str,
    ) -> Tensor:  # fmt: skip
        """One launch."""
        given = _arguments(weight, bias, initial_state, segments)
        return _forward(x, given, activation == "silu", False)

    @staticmethod
    def backward(
        dy: Tensor, x: Tensor, weight: Tensor, bias: Optional[Tensor],
        initial_state: Optional[Tensor], segments: Optional[Tensor], activation: str,
        needs_x: bool, needs_weight: bool, needs_bias: bool, needs_initial_state: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """One launch, and one for every sum of partials."""
        (batch, length, cols), width = x.shape, weight.shape[1]
        dx, dstate = x.new_empty(x.shape if needs_x else 0), x.new_empty(0)
        if initial_state is not None:
            shape = initial_state.shape if needs_initial_state else (0,)
            made = initial_state.new_empty if x.numel() else initial_state.new_zeros
            dstate = made(shape)
        total = _Partials(x, weight, bias, needs_weight, needs_bias)
        if x.numel():
            dy, x = _adjacent(dy), _adjacent(x)
            given = _arguments(weight, bias, initial_state, segments)
            k = launch_config(
                "causal_conv1d.backward", backward_config, x.device, rows=batch * length,
                length=length, cols=cols, width=width, element_bytes=x.element_size(),
                packed=given.ids is not None,
            )  # fmt: skip
            chunks = cdiv(length, k.rows)
            outs = (dx if dx.numel() else None, dstate if dstate.numel() else None)
            strides = (dy.stride(0), dy.stride(1), x.stride(0), x.stride(1))
            launch(
                _convolution_backward_kernel,
                _programs(batch * chunks, cols, width, k),
                (dy, x, *given, *outs, *total.make(batch * chunks), *strides, length, cols, chunks),
                (width, activation == "silu", k.rows, k.step, k.block, k.stages), k.num_warps,
            )  # fmt: skip
        return dx, *total.gradients(), dstate


class GatedShortConv:
    """``y = c u`` of the convolution u of ``b v``."""

    supports = staticmethod(_supports)

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Optional[Tensor], segments: Optional[Tensor]
    ) -> Tensor:
        """One launch."""
        return _forward(x, _arguments(weight, bias, None, segments), False, True)

    @staticmethod
    def backward(
        dy: Tensor, x: Tensor, weight: Tensor, bias: Optional[Tensor],
        segments: Optional[Tensor], needs_x: bool, needs_weight: bool, needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """One launch, and one for every sum of partials."""
        (batch, length, cols), width = dy.shape, weight.shape[1]
        dx = x.new_empty(x.shape if needs_x else 0)
        total = _Partials(x, weight, bias, needs_weight, needs_bias)
        if x.numel():
            dy, x = _adjacent(dy), _adjacent(x)
            given = _arguments(weight, bias, None, segments)
            k = launch_config(
                "gated_short_conv.backward", gated_backward_config, x.device, rows=batch * length,
                length=length, cols=cols, width=width, element_bytes=x.element_size(),
                packed=given.ids is not None,
            )  # fmt: skip
            chunks = cdiv(length, k.rows)
            strides = (dy.stride(0), dy.stride(1), x.stride(0), x.stride(1))
            launch(
                _gated_convolution_backward_kernel,
                _programs(batch * chunks, cols, width, k),
                (dy, x, given.weight, given.bias, given.ids, dx if needs_x else None,
                 *total.make(batch * chunks), *strides, length, cols, chunks),
                (width, k.rows, k.step, k.block, k.stages), k.num_warps,
            )  # fmt: skip
        return dx, *total.gradients()


OPERATORS = {"causal_conv1d": CausalConv1d, "gated_short_conv": GatedShortConv}
