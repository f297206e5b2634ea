"""Depthwise causal convolutions on vector cores, plain and gated.

With w[k] the weight of the token k before, over tokens of one sequence:

    u[t] = bias + sum of w[k] x[t - k],  y = u, silu(u) or, with x = b v, c u
    du = dy, dy silu'(u) or dy c,  dx[t] = sum of w[k] du[t + k],  dw[k] = sum of du[t] x[t - k]

A program has a block of channels and goes through tokens in turn. So each token is read once: the
tokens before it, and the sums for them that later tokens add to, stay on chip. At the end of a
piece, backward goes on for the W - 1 tokens that its last sums wait for.

What says where sequences begin is the reach of a token: how many of the tokens before it belong to
its sequence, W - 1 at most. Nothing of other sequences is multiplied, so that their NaN stay
theirs. torch_npu has ``npu_masked_causal_conv1d`` for three weights, 64 channels and A5 alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.npu.common.launching import block_of, jitted, start
from liger_multi.dispatch.launch import device_info

WIDEST = 4  # weights a channel; a program keeps four vectors for each
LONGEST, SHORTEST = 256, 16  # tokens of a piece; each has W - 1 more at its seams
UNROLL = 4  # tokens of a turn of the loop of forward


# --- kernels ---


@triton.jit
def _read(x_ptr, t, low, high, stride, cols, col, GATED: tl.constexpr):
    """Input of the convolution at token t in fp32, zeros outside of [low, high)."""
    mask = col < tl.where((t >= low) & (t < high), cols, 0)
    x = tl.load(x_ptr + t * stride + col, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        x = x * tl.load(x_ptr + t * stride + 2 * cols + col, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _before(
    x_ptr,
    state_ptr,
    first,
    stride,
    cols,
    col,
    LAG: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):
    """Input of the LAG-th token before the first one; before the row the initial state or zeros."""
    t = first - LAG
    x = tl.zeros(col.shape, tl.float32)
    if LAG < WIDTH:
        x = _read(x_ptr, t, 0, first, stride, cols, col, GATED)
        if state_ptr is not None:
            early = col < tl.where(t < 0, cols, 0)
            at = state_ptr + (t + (WIDTH - 1)) * cols + col
            x += tl.load(at, mask=early, other=0.0).to(tl.float32)
    return x


@triton.jit
def _weight(weight_ptr, cols, col, LAG: tl.constexpr, WIDTH: tl.constexpr):
    """Weights of the LAG-th token before, of (WIDTH, cols); zeros if there is none."""
    w = tl.zeros(col.shape, tl.float32)
    if LAG < WIDTH:
        at = weight_ptr + (WIDTH - 1 - LAG) * cols + col
        w = tl.load(at, mask=col < cols, other=0.0).to(tl.float32)
    return w


@triton.jit
def _reach(reach_ptr, at):
    """How many tokens before one belong to its sequence; all of them without sequences."""
    reach = 0
    if reach_ptr is not None:
        reach = tl.load(reach_ptr + at)
    return reach


@triton.jit
def _within_reach(x, reach, reach_ptr, LAG: tl.constexpr, WIDTH: tl.constexpr):
    """``x`` where the LAG-th token before belongs to the same sequence, else zeros."""
    if LAG < WIDTH and reach_ptr is not None:
        x = tl.where(reach >= LAG, x, 0.0)
    return x


@triton.jit
def _add(u, w, x, LAG: tl.constexpr, WIDTH: tl.constexpr):
    """A term of the sum over lags."""
    if LAG < WIDTH:
        u = u + w * x
    return u


@triton.jit
def _store(ptr, value, at, mask):
    """Round the value to the tensor's dtype and store it."""
    tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)


@jitted
def _conv_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    reach_ptr,
    y_ptr,
    x_batch,
    x_stride,
    length,
    cols,
    each,
    chunks,
    steps,
    pieces,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolution of ``each`` tokens at a time.

    Program: every num_programs-th piece, which is BLOCK channels of a chunk of tokens. Reads the
    W - 1 tokens before it, then token after token, and writes y (batch, length, cols). UNROLL
    tokens are one turn of the loop, between which the last three are copied.
    """
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        col = (piece % steps) * BLOCK + tl.arange(0, BLOCK)
        batch = tl.cast(piece // steps // chunks, tl.int64)
        first = (piece // steps) % chunks * each
        last = tl.minimum(first + each, length)
        row_ptr, before_ptr = x_ptr + batch * x_batch, None
        if state_ptr is not None:
            before_ptr = state_ptr + batch * (WIDTH - 1) * cols
        bias = tl.zeros([BLOCK], tl.float32)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        w0 = _weight(weight_ptr, cols, col, 0, WIDTH)
        w1 = _weight(weight_ptr, cols, col, 1, WIDTH)
        w2 = _weight(weight_ptr, cols, col, 2, WIDTH)
        w3 = _weight(weight_ptr, cols, col, 3, WIDTH)
        x1 = _before(row_ptr, before_ptr, first, x_stride, cols, col, 1, WIDTH=WIDTH, GATED=GATED)
        x2 = _before(row_ptr, before_ptr, first, x_stride, cols, col, 2, WIDTH=WIDTH, GATED=GATED)
        x3 = _before(row_ptr, before_ptr, first, x_stride, cols, col, 3, WIDTH=WIDTH, GATED=GATED)
        for at in range(first, last, UNROLL):
            for i in tl.static_range(UNROLL):
                t = tl.cast(at + i, tl.int64)
                x0 = _read(row_ptr, t, 0, last, x_stride, cols, col, GATED)
                reach = _reach(reach_ptr, batch * length + tl.minimum(t, length - 1))
                x1 = _within_reach(x1, reach, reach_ptr, 1, WIDTH)
                x2 = _within_reach(x2, reach, reach_ptr, 2, WIDTH)
                x3 = _within_reach(x3, reach, reach_ptr, 3, WIDTH)
                u = _add(bias + w0 * x0, w1, x1, 1, WIDTH)
                u = _add(_add(u, w2, x2, 2, WIDTH), w3, x3, 3, WIDTH)
                x3, x2, x1 = x2, x1, x0
                inside = col < tl.where(t < last, cols, 0)
                if SILU:
                    u = u * tl.sigmoid(u)
                if GATED:
                    c = tl.load(row_ptr + t * x_stride + cols + col, mask=inside, other=0.0)
                    u = u * c.to(tl.float32)
                _store(y_ptr, u, (batch * length + t) * cols + col, inside)


@triton.jit
def _write(
    dz,
    x_ptr,
    dx_ptr,
    dstate_ptr,
    t,
    low,
    high,
    stride,
    cols,
    col,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
):
    """Write the gradient dz of the input of token t, if that is in [low, high) or before the row.

    With gates, the input is b v: db = dz v and dv = dz b, which are read again.
    """
    inside = col < tl.where((t >= low) & (t < high), cols, 0)
    if dx_ptr is not None:
        if GATED:
            b = tl.load(x_ptr + t * stride + col, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(x_ptr + t * stride + 2 * cols + col, mask=inside, other=0.0)
            _store(dx_ptr, dz * v.to(tl.float32), t * 3 * cols + col, inside)
            _store(dx_ptr, dz * b, t * 3 * cols + 2 * cols + col, inside)
        else:
            _store(dx_ptr, dz, t * cols + col, inside)
    if dstate_ptr is not None:
        early = col < tl.where(t < 0, cols, 0)
        _store(dstate_ptr, dz, (t + (WIDTH - 1)) * cols + col, early)


@triton.jit
def _lag(done, w, x, p, d, du, mine, reach, reach_ptr, LAG: tl.constexpr, WIDTH: tl.constexpr):
    """The LAG-th token before: its sum p with this token's term, and d, the weight's sum.

    Returns what waits for the next token in its place, d, and the sum of the earliest token.
    """
    if LAG < WIDTH:
        reached = _within_reach(du, reach, reach_ptr, LAG, WIDTH)
        return done, d + mine * x, p + w * reached
    else:
        return p, d, done


@triton.jit
def _partial(out_ptr, value, part, cols, col, LAG: tl.constexpr, WIDTH: tl.constexpr):
    """Write a chunk's sum for the weights of the LAG-th token before."""
    if LAG < WIDTH and out_ptr is not None:
        at = (part * WIDTH + (WIDTH - 1 - LAG)) * cols + col
        tl.store(out_ptr + at, value, mask=col < cols)


@jitted
def _conv_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    reach_ptr,
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
    each,
    chunks,
    steps,
    pieces,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of ``each`` tokens at a time, and of what stands before a row.

    Program: every num_programs-th piece, BLOCK channels of a chunk of tokens. Goes through its
    tokens and the W - 1 after them, computes u again, and keeps in p1, p2 and p3 the sums for the
    last tokens that are not complete. Writes dx and dstate, (batch, length, cols) and (batch, W -
    1, cols), and for every chunk of a row partial sums of dweight (W, cols) and dbias (cols).
    """
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        col = (piece % steps) * BLOCK + tl.arange(0, BLOCK)
        part = tl.cast(piece // steps, tl.int64)
        batch = part // chunks
        first = (piece // steps) % chunks * each
        last = tl.minimum(first + each, length)
        row_ptr, before_ptr, out_ptr, early_ptr = x_ptr + batch * x_batch, None, None, None
        if dx_ptr is not None:
            out_ptr = dx_ptr + batch * length * cols * (3 if GATED else 1)
        if dstate_ptr is not None:
            early_ptr = dstate_ptr + batch * (WIDTH - 1) * cols
        if state_ptr is not None:
            before_ptr = state_ptr + batch * (WIDTH - 1) * cols
        bias = tl.zeros([BLOCK], tl.float32)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        w0 = _weight(weight_ptr, cols, col, 0, WIDTH)
        w1 = _weight(weight_ptr, cols, col, 1, WIDTH)
        w2 = _weight(weight_ptr, cols, col, 2, WIDTH)
        w3 = _weight(weight_ptr, cols, col, 3, WIDTH)
        x1 = _before(row_ptr, before_ptr, first, x_stride, cols, col, 1, WIDTH=WIDTH, GATED=GATED)
        x2 = _before(row_ptr, before_ptr, first, x_stride, cols, col, 2, WIDTH=WIDTH, GATED=GATED)
        x3 = _before(row_ptr, before_ptr, first, x_stride, cols, col, 3, WIDTH=WIDTH, GATED=GATED)
        zeros = tl.zeros([BLOCK], tl.float32)
        p1, p2, p3 = zeros, zeros, zeros
        d0, d1, d2, d3, total = zeros, zeros, zeros, zeros, zeros
        for at in range(first, last + (WIDTH - 1)):
            t = tl.cast(at, tl.int64)
            x0 = _read(row_ptr, t, 0, length, x_stride, cols, col, GATED)
            reach = _reach(reach_ptr, batch * length + tl.minimum(t, length - 1))
            x1 = _within_reach(x1, reach, reach_ptr, 1, WIDTH)
            x2 = _within_reach(x2, reach, reach_ptr, 2, WIDTH)
            x3 = _within_reach(x3, reach, reach_ptr, 3, WIDTH)
            u = _add(bias + w0 * x0, w1, x1, 1, WIDTH)
            u = _add(_add(u, w2, x2, 2, WIDTH), w3, x3, 3, WIDTH)
            own = col < tl.where(t < last, cols, 0)
            up_ptr = dy_ptr + batch * dy_batch
            du = _read(up_ptr, t, 0, length, dy_stride, cols, col, False)
            if SILU:
                p = tl.sigmoid(u)
                du = du * p * (1.0 + u * (1.0 - p))
            if GATED:
                if dx_ptr is not None:
                    _store(out_ptr, du * u, (t * 3 + 1) * cols + col, own)
                du = du * _read(row_ptr + cols, t, 0, length, x_stride, cols, col, False)
            mine = tl.where(own, du, 0.0)
            total += mine
            d0 += mine * x0
            p1, d1, done = _lag(
                w0 * du, w1, x1, p1, d1, du, mine, reach, reach_ptr=reach_ptr, LAG=1, WIDTH=WIDTH
            )
            p2, d2, done = _lag(
                done, w2, x2, p2, d2, du, mine, reach, reach_ptr=reach_ptr, LAG=2, WIDTH=WIDTH
            )
            p3, d3, done = _lag(
                done, w3, x3, p3, d3, du, mine, reach, reach_ptr=reach_ptr, LAG=3, WIDTH=WIDTH
            )
            x3, x2, x1 = x2, x1, x0
            _write(
                done,
                row_ptr,
                out_ptr,
                early_ptr,
                t - (WIDTH - 1),
                first,
                last,
                x_stride,
                cols=cols,
                col=col,
                WIDTH=WIDTH,
                GATED=GATED,
            )
        _partial(dweight_ptr, d0, part, cols, col, 0, WIDTH)
        _partial(dweight_ptr, d1, part, cols, col, 1, WIDTH)
        _partial(dweight_ptr, d2, part, cols, col, 2, WIDTH)
        _partial(dweight_ptr, d3, part, cols, col, 3, WIDTH)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + part * cols + col, total, mask=col < cols)


# --- launchers ---


class Pieces(NamedTuple):
    """Tokens of a chunk, chunks of a row, blocks of channels, and pieces of work."""

    each: int
    chunks: int
    steps: int
    pieces: int


def pieces(batch: int, length: int, cols: int, block: int, cores: int) -> Pieces:
    """Chunks of LONGEST tokens, of fewer where cores would have no work, of SHORTEST at least."""
    steps, tokens = -(-cols // block), LONGEST
    while tokens > SHORTEST and batch * -(-length // tokens) * steps < 2 * cores:
        tokens //= 2
    chunks = -(-length // tokens)
    return Pieces(tokens, chunks, steps, batch * chunks * steps)


def reach_of(ids: Tensor | None, width: int) -> Tensor | None:
    """How many tokens before each, ``width - 1`` at most, belong to its sequence; (B, T) int32.

    What stands before a row belongs to the row's first sequence.
    """
    if ids is None:
        return None
    length = ids.shape[1]
    same_sequence = ids.new_ones((ids.shape[0], width + length - 1), dtype=torch.int32)
    same_sequence[:, width:] = ids[:, 1:] == ids[:, :-1]
    reach = torch.zeros_like(ids, dtype=torch.int32)
    run = torch.ones_like(reach)
    for lag in range(width - 1):
        run = run * same_sequence[:, width - 1 - lag : width - 1 - lag + length]
        reach = reach + run
    return reach


class Arguments(NamedTuple):
    """What the kernels read in addition to x, in the form that they take."""

    weight: Tensor
    bias: Tensor | None
    state: Tensor | None
    reach: Tensor | None

    @property
    def width(self) -> int:
        """Weights of a channel."""
        return self.weight.shape[0]


def arguments(
    weight: Tensor, bias: Tensor | None, state: Tensor | None, ids: Tensor | None
) -> Arguments:
    """What the kernels read in addition to x, in the form that they take."""
    bias, state = (None if t is None else t.contiguous() for t in (bias, state))
    return Arguments(weight.t().contiguous(), bias, state, reach_of(ids, weight.shape[1]))


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def convolve(x: Tensor, args: Arguments, silu: bool, gated: bool) -> Tensor:
    """The convolution in one launch, with its activation or its gates."""
    batch, length, cols = x.shape
    cols = cols // 3 if gated else cols
    y = x.new_empty((batch, length, cols))
    if y.numel():
        x = _adjacent(x)
        block = block_of("conv_forward", x, cols)
        work = pieces(batch, length, cols, block, device_info(x.device).cores)
        start(
            _conv_forward_kernel,
            work.pieces,
            x,
            *args,
            y,
            x.stride(0),
            x.stride(1),
            length,
            cols,
            *work,
            WIDTH=args.width,
            SILU=silu,
            GATED=gated,
            UNROLL=UNROLL,
            BLOCK=block,
        )
    return y


def _gradients(
    dy: Tensor,
    x: Tensor,
    args: Arguments,
    dx: Tensor | None,
    dstate: Tensor | None,
    silu: bool,
    gated: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Write dx and dstate; return the gradients of weight (W, C) and bias in fp32, if needed."""
    dy, x, (batch, length, cols) = _adjacent(dy), _adjacent(x), dy.shape
    block = block_of("conv_backward", x, cols)
    work = pieces(batch, length, cols, block, device_info(x.device).cores)
    parts = batch * work.chunks
    shapes = ((parts, args.width, cols), (parts, cols))
    sums = [
        x.new_empty(shape, dtype=torch.float32) if is_needed else None
        for shape, is_needed in zip(shapes, (needs_weight, needs_bias), strict=True)
    ]
    start(
        _conv_backward_kernel,
        work.pieces,
        dy,
        x,
        *args,
        dx,
        dstate,
        *sums,
        dy.stride(0),
        dy.stride(1),
        x.stride(0),
        x.stride(1),
        length,
        cols,
        *work,
        WIDTH=args.width,
        SILU=silu,
        GATED=gated,
        BLOCK=block,
    )
    dweight, dbias = (None if s is None else s.sum(0) for s in sums)
    return dweight, dbias


def supports(x: Tensor, weight: Tensor) -> str | None:
    """Why a filter is refused, or None."""
    if weight.shape[1] > WIDEST:
        return f"takes filters of up to {WIDEST} weights a channel, got {weight.shape[1]}"
    if x.shape[1] * max(x.stride(1), x.shape[2]) >= 2**31:
        return f"takes sequences of fewer than 2^31 elements, got {tuple(x.shape)}"
    return None


def _filled(t: Tensor) -> Tensor | None:
    return t if t.numel() else None


def gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    ids: Tensor | None,
    silu: bool,
    gated: bool,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and state; empty tensors if not needed."""
    needs_x, needs_weight, needs_bias, needs_state = needs
    needs_bias = needs_bias and bias is not None
    tensor = x if bias is None else bias
    dx, dstate = x.new_empty(x.shape if needs_x else 0), x.new_empty(0)
    if state is not None:
        dstate = state.new_zeros(state.shape if needs_state else 0)
    dweight = weight.new_zeros(weight.shape if needs_weight else 0)
    dbias = tensor.new_zeros(tensor.shape if needs_bias else 0)
    if dy.numel() and any((needs_x, needs_weight, needs_bias, needs_state)):
        args = arguments(weight, bias, state, ids)
        buffers = (_filled(dx), _filled(dstate))
        by_weight, by_bias = _gradients(
            dy, x, args, *buffers, silu, gated, needs_weight, needs_bias
        )
        dweight = dweight if by_weight is None else by_weight.t().to(weight.dtype)
        dbias = dbias if by_bias is None else by_bias.to(tensor.dtype)
    return dx, dweight.contiguous(), dbias, dstate
