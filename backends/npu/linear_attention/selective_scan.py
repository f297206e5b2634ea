"""The selective scan of Mamba (arXiv:2312.00752) on vector cores.

Of one channel with N states, and decays a_t = exp(delta_t A):

    h_t = a_t h_{t-1} + delta_t u_t B_t,  y_t = C_t . h_t + D u_t, times silu(z_t)

and backward, where dy is the gradient of y before the gate, and m_t that of h_t:

    m_t = dy_t C_t + a_{t+1} m_{t+1},  s_t = m_t a_t h_{t-1},  dA = sum of s_t delta_t
    ddelta_t = s_t . A + u_t m_t . B_t,  du_t = delta_t m_t . B_t + D dy_t
    dB_t = sum of m_t delta_t u_t,  dC_t = sum of h_t dy_t over channels

A program has the states of some channels of a sequence, (N, channels), and goes from token to
token; what its channels add to dB and dC is summed over programs afterwards. h is no function of
later states, so backward goes through spans of tokens from the last one: one launch writes the
states before every span, then for each span one writes the states before its tokens, and one
goes back over them. Spans of sqrt(T) tokens keep the fewest states, 2 sqrt(T) of each channel.
The gradient of the state, and the sums dA, dD and that of delta_bias, pass from span to span.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.npu.common.launching import block_of, jitted, start
from liger_multi.dispatch.launch import device_info
from liger_multi.reference.linear_attention import selective_scan as reference
from liger_multi.reference.linear_attention.state_space import Nine

MOST = 128  # states of a channel
LEAST, SPAN = 32, 16  # channels of a program, and tokens of a span, at least

# --- kernels ---


@triton.jit
def _row(ptr, at, mask):
    """Some channels of a token in fp32."""
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _step(raw, SOFT: tl.constexpr):
    """Step size of the raw one: softplus, with log(1 + e) as log(w) e / (w - 1) of w = 1 + e."""
    if SOFT:
        e = tl.exp(-tl.abs(raw))
        w = 1.0 + e
        near = tl.where(w == 1.0, e, tl.log(w) * e / tl.where(w == 1.0, 1.0, w - 1.0))
        return tl.maximum(raw, 0.0) + near
    else:
        return raw


@triton.jit
def _begins(first_ptr, at, t):
    """Whether a sequence begins at token t; the first of all has the initial state."""
    begins = t < 0
    if first_ptr is not None:
        begins = (tl.load(first_ptr + at) == t) & (t > 0)
    return begins


@jitted
def _scan_forward_kernel(
    u_ptr,
    delta_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    z_ptr,
    bias_ptr,
    first_ptr,
    initial_ptr,
    y_ptr,
    states_ptr,
    final_ptr,
    u_batch,
    u_stride,
    delta_batch,
    delta_stride,
    z_batch,
    z_stride,
    first_batch,
    length,
    low,
    high,
    each,
    cols,
    size,
    steps,
    pieces,
    SOFT: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The recurrence over the tokens [low, high).

    Program: every num_programs-th piece, BLOCK / STATES channels of a sequence, with the state
    before token low from ``initial``, (batch, size, cols), or zeros. Writes y (batch, length,
    cols), the state before every ``each`` tokens, (batch, ceil((high - low) / each), size, cols),
    and that after the last one, those of which have a pointer.
    """
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        batch = tl.cast(piece // steps, tl.int64)
        col = (piece % steps) * (BLOCK // STATES) + tl.arange(0, BLOCK // STATES)
        n, mask = tl.arange(0, STATES), col < cols
        tile = n[:, None] * cols + col[None, :]
        inside = (n < size)[:, None] & mask[None, :]
        A = tl.load(A_ptr + tile, mask=inside, other=0.0)
        h = tl.zeros([STATES, BLOCK // STATES], tl.float32)
        if initial_ptr is not None:
            h = tl.load(initial_ptr + batch * size * cols + tile, mask=inside, other=0.0)
        bias = tl.zeros([BLOCK // STATES], tl.float32)
        if bias_ptr is not None:
            bias = _row(bias_ptr, col, mask)
        skip = tl.zeros([BLOCK // STATES], tl.float32)
        if D_ptr is not None:
            skip = _row(D_ptr, col, mask)
        spans = (high - low + each - 1) // each
        for s in range(spans):
            if states_ptr is not None:
                at_h = states_ptr + (batch * spans + s) * size * cols + tile
                tl.store(at_h, h, mask=inside)
            for i in range(low + s * each, tl.minimum(low + s * each + each, high)):
                t = tl.cast(i, tl.int64)
                u = _row(u_ptr, batch * u_batch + t * u_stride + col, mask)
                raw = _row(delta_ptr, batch * delta_batch + t * delta_stride + col, mask) + bias
                delta = _step(raw, SOFT)
                at_n = (batch * length + t) * size + n
                B = _row(B_ptr, at_n, n < size)
                if first_ptr is not None:
                    h = tl.where(_begins(first_ptr, batch * first_batch + t, t), 0.0, h)
                h = tl.exp(delta[None, :] * A) * h + (delta * u)[None, :] * B[:, None]
                if y_ptr is not None:
                    C = _row(C_ptr, at_n, n < size)
                    y = tl.sum(h * C[:, None], 0) + skip * u
                    if z_ptr is not None:
                        z = _row(z_ptr, batch * z_batch + t * z_stride + col, mask)
                        y = y * z * tl.sigmoid(z)
                    at_y = y_ptr + (batch * length + t) * cols + col
                    tl.store(at_y, y.to(y_ptr.dtype.element_ty), mask=mask)
        if final_ptr is not None:
            tl.store(final_ptr + batch * size * cols + tile, h, mask=inside)


@triton.jit
def _put(ptr, value, at, mask):
    """Round and write, if there is where."""
    if ptr is not None:
        tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum(ptr, value, at, mask):
    """Add to a sum that passes from launch to launch, if there is one."""
    if ptr is not None:
        tl.store(ptr + at, tl.load(ptr + at, mask=mask, other=0.0) + value, mask=mask)


@jitted
def _scan_reverse_kernel(
    dy_ptr,
    u_ptr,
    delta_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    z_ptr,
    bias_ptr,
    first_ptr,
    states_ptr,
    dstate_ptr,
    du_ptr,
    ddelta_ptr,
    dz_ptr,
    dA_ptr,
    dB_ptr,
    dC_ptr,
    dD_ptr,
    dbias_ptr,
    dy_batch,
    dy_stride,
    u_batch,
    u_stride,
    delta_batch,
    delta_stride,
    z_batch,
    z_stride,
    first_batch,
    length,
    low,
    high,
    cols,
    size,
    steps,
    pieces,
    SOFT: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of the tokens [low, high), from the last to the first.

    Program: as forward. Reads the states before these tokens, (batch, high - low, size, cols).
    ``dstate`` holds the gradient of the state after them, and gets that of the state before them.
    Writes du, ddelta and dz (batch, length, cols), adds to the sums dA (batch, size, cols), dD and
    dbias (batch, cols), and writes for its channels dB and dC, (batch, high - low, steps, size).
    """
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        batch = tl.cast(piece // steps, tl.int64)
        col = (piece % steps) * (BLOCK // STATES) + tl.arange(0, BLOCK // STATES)
        n, mask = tl.arange(0, STATES), col < cols
        tile = n[:, None] * cols + col[None, :]
        inside = (n < size)[:, None] & mask[None, :]
        A = tl.load(A_ptr + tile, mask=inside, other=0.0)
        m = tl.load(dstate_ptr + batch * size * cols + tile, mask=inside, other=0.0)
        bias = tl.zeros([BLOCK // STATES], tl.float32)
        skip, by_bias, by_skip = bias, bias, bias
        by_A = tl.zeros([STATES, BLOCK // STATES], tl.float32)
        if bias_ptr is not None:
            bias = _row(bias_ptr, col, mask)
        if D_ptr is not None:
            skip = _row(D_ptr, col, mask)
        for i in range(high - low):
            t = tl.cast(high - 1 - i, tl.int64)
            u = _row(u_ptr, batch * u_batch + t * u_stride + col, mask)
            raw = _row(delta_ptr, batch * delta_batch + t * delta_stride + col, mask) + bias
            up = _row(dy_ptr, batch * dy_batch + t * dy_stride + col, mask)
            delta = _step(raw, SOFT)
            at_n, at = (batch * length + t) * size + n, (batch * length + t) * cols + col
            B, C = _row(B_ptr, at_n, n < size), _row(C_ptr, at_n, n < size)
            at_h = (batch * (high - low) + t - low) * size * cols + tile
            h = tl.load(states_ptr + at_h, mask=inside, other=0.0)
            begins = _begins(first_ptr, batch * first_batch + t, t)
            if first_ptr is not None:
                h = tl.where(begins, 0.0, h)
            decay = tl.exp(delta[None, :] * A)
            kept = decay * h
            h = kept + (delta * u)[None, :] * B[:, None]
            if z_ptr is not None:
                z = _row(z_ptr, batch * z_batch + t * z_stride + col, mask)
                p = tl.sigmoid(z)
                if dz_ptr is not None:
                    y = tl.sum(h * C[:, None], 0) + skip * u
                    _put(dz_ptr, up * y * p * (1.0 + z * (1.0 - p)), at, mask)
                up = up * z * p
            m = m + up[None, :] * C[:, None]
            at_part = ((batch * (high - low) + t - low) * steps + piece % steps) * size + n
            if dC_ptr is not None:
                tl.store(dC_ptr + at_part, tl.sum(h * up[None, :], 1), mask=n < size)
            if dB_ptr is not None:
                tl.store(dB_ptr + at_part, tl.sum(m * (delta * u)[None, :], 1), mask=n < size)
            added = tl.sum(m * B[:, None], 0)
            through = m * kept
            if dA_ptr is not None:
                by_A += through * delta[None, :]
            if dD_ptr is not None:
                by_skip += up * u
            dsteps = tl.sum(through * A, 0) + u * added
            if SOFT:
                dsteps = dsteps * tl.sigmoid(raw)
            if dbias_ptr is not None:
                by_bias += dsteps
            _put(du_ptr, delta * added + skip * up, at, mask)
            _put(ddelta_ptr, dsteps, at, mask)
            m = decay * m
            if first_ptr is not None:
                m = tl.where(begins, 0.0, m)
        tl.store(dstate_ptr + batch * size * cols + tile, m, mask=inside)
        _sum(dA_ptr, by_A, batch * size * cols + tile, inside)
        _sum(dD_ptr, by_skip, batch * cols + col, mask)
        _sum(dbias_ptr, by_bias, batch * cols + col, mask)


# --- launchers ---


class Inputs(NamedTuple):
    """The tensors of a call as kernels take them, and the shape of their work.

    Attributes:
        u: Channels are adjacent, as those of delta and z.
        A: fp32 (N, D), so that channels are adjacent.
        block: Numbers of the states of a program.
        states: N, or the next power of two.
        steps: Programs that share the channels of a sequence.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Optional[Tensor]
    z: Optional[Tensor]
    bias: Optional[Tensor]
    first: Optional[Tensor]
    soft: bool
    block: int
    states: int
    steps: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sequences, states of a channel, channels."""
        return self.u.shape[0], *self.A.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Those of u, delta and z over sequences and tokens, and of first over sequences."""
        rows = [t for x in (self.u, self.delta, self.z) for t in _strides(x)]
        return *rows, 0 if self.first is None or len(self.first) == 1 else self.first.stride(0)

    def states_like(self, count: int = 1) -> Tensor:
        """Memory for so many states of all channels, (B, count, N, D)."""
        batch, size, cols = self.sizes
        return self.u.new_empty((batch, count, size, cols), dtype=torch.float32)


def _strides(x: Optional[Tensor]) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def shape_of(name: str, u: Tensor, size: int) -> tuple[int, int, int]:
    """Numbers of a program's states, the padded number of a channel's, and programs a sequence.

    Fewer channels where cores would have no work.
    """
    batch, _, cols = u.shape
    states, cores = max(2, triton.next_power_of_2(size)), device_info(u.device).cores
    widest = triton.next_power_of_2(cols)
    channels = min(block_of(name, u, states * widest) // states, widest)
    while channels > LEAST and batch * -(-cols // channels) < cores:
        channels //= 2
    return channels * states, states, -(-cols // channels)


def _given(
    name: str,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    z: Optional[Tensor],
    bias: Optional[Tensor],
    first: Optional[Tensor],
    soft: bool,
) -> Inputs:
    skip, bias = (None if x is None else x.contiguous() for x in (D, bias))
    return Inputs(
        _adjacent(u),
        _adjacent(delta),
        A.float().t().contiguous(),
        B.contiguous(),
        C.contiguous(),
        skip,
        None if z is None else _adjacent(z),
        bias,
        None if first is None else first.contiguous(),
        soft,
        *shape_of(name, u, A.shape[1]),
    )


def _run(
    inputs: Inputs,
    part: slice,
    each: int,
    initial: Optional[Tensor],
    y: Optional[Tensor],
    states: Optional[Tensor],
    final: Optional[Tensor],
) -> None:
    """One launch over some tokens."""
    batch, size, cols = inputs.sizes
    # what only y has belongs to no recurrence
    skip, z = (inputs.D, inputs.z) if y is not None else (None, None)
    pieces = batch * inputs.steps
    start(
        _scan_forward_kernel,
        pieces,
        inputs.u,
        inputs.delta,
        inputs.A,
        inputs.B,
        inputs.C,
        skip,
        z,
        inputs.bias,
        inputs.first,
        initial,
        y,
        states,
        final,
        *inputs.strides,
        inputs.u.shape[1],
        part.start,
        part.stop,
        each,
        cols,
        size,
        inputs.steps,
        pieces,
        SOFT=inputs.soft,
        STATES=inputs.states,
        BLOCK=inputs.block,
    )


def _across(state: Tensor) -> Tensor:
    """States ``(B, D, N)`` as (B, N, D) in fp32, or back."""
    return state.float().mT.contiguous()


def supports(A: Tensor) -> Optional[str]:
    """The states of a few channels must fit on chip."""
    if A.shape[1] > MOST:
        return f"takes up to {MOST} states of a channel, got {A.shape[1]}"
    return None


def forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    z: Optional[Tensor],
    delta_bias: Optional[Tensor],
    initial_state: Optional[Tensor],
    first: Optional[Tensor],
    delta_softplus: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch."""
    y = u.new_empty(u.shape)
    shape = (u.shape[0], *A.shape) if output_final_state else (0,)
    final = u.new_zeros(shape, dtype=torch.float32)
    initial = None if initial_state is None else _across(initial_state)
    kept = u.new_empty(reference.kept_shape(u, A), dtype=torch.float32)
    if not y.numel():
        last = final if initial is None or not output_final_state else _across(initial)
        return y, last, kept
    inputs = _given("scan_forward", u, delta, A, B, C, D, z, delta_bias, first, delta_softplus)
    room = inputs.states_like()[:, 0] if output_final_state else None
    each, states = (reference.SPAN, kept) if kept.numel() else (u.shape[1], None)
    _run(inputs, slice(0, u.shape[1]), each, initial, y, states, room)
    return y, final if room is None else _across(room), kept


class Sums(NamedTuple):
    """Gradients (B, ...) that pass from span to span, those that are needed."""

    A: Optional[Tensor]
    D: Optional[Tensor]
    bias: Optional[Tensor]


class TokenGradients(NamedTuple):
    """Gradients of every token, those that are needed."""

    u: Optional[Tensor]
    delta: Optional[Tensor]
    z: Optional[Tensor]
    B: Optional[Tensor]
    C: Optional[Tensor]


def _reverse(
    inputs: Inputs,
    dy: Tensor,
    part: slice,
    states: Tensor,
    dstate: Tensor,
    rows: TokenGradients,
    sums: Sums,
) -> None:
    """One launch over the tokens of a span, and sums over programs."""
    batch, size, cols = inputs.sizes
    pieces, count = batch * inputs.steps, part.stop - part.start
    shape = (batch, count, inputs.steps, size)
    by_b, by_c = (
        None if x is None else x.new_empty(shape, dtype=torch.float32) for x in (rows.B, rows.C)
    )
    start(
        _scan_reverse_kernel,
        pieces,
        dy,
        inputs.u,
        inputs.delta,
        inputs.A,
        inputs.B,
        inputs.C,
        inputs.D,
        inputs.z,
        inputs.bias,
        inputs.first,
        states,
        dstate,
        rows.u,
        rows.delta,
        rows.z,
        sums.A,
        by_b,
        by_c,
        sums.D,
        sums.bias,
        *_strides(dy),
        *inputs.strides,
        inputs.u.shape[1],
        part.start,
        part.stop,
        cols,
        size,
        inputs.steps,
        pieces,
        SOFT=inputs.soft,
        STATES=inputs.states,
        BLOCK=inputs.block,
    )
    for rows_gradient, parts in ((rows.B, by_b), (rows.C, by_c)):
        if rows_gradient is not None and parts is not None:
            rows_gradient[:, part] = parts.sum(2).to(rows_gradient.dtype)


def _over_spans(
    inputs: Inputs,
    dy: Tensor,
    initial: Optional[Tensor],
    dstate: Tensor,
    rows: TokenGradients,
    sums: Sums,
) -> None:
    """The states before every span, then the spans in reverse; dstate becomes that of the first."""
    length = inputs.u.shape[1]
    each = max(SPAN, math.isqrt(length))
    count = -(-length // each)
    before = inputs.states_like(count)
    _run(inputs, slice(0, length), each, initial, None, before, None)
    for i in reversed(range(count)):
        part = slice(i * each, min(i * each + each, length))
        states = inputs.states_like(part.stop - part.start)
        _run(inputs, part, 1, before[:, i].contiguous(), None, states, None)
        _reverse(inputs, dy, part, states, dstate, rows, sums)


def _summed(total: Optional[Tensor], like: Optional[Tensor], u: Tensor) -> Tensor:
    """A sum over sequences in the dtype of its tensor; empty if it is not needed."""
    if total is None or like is None:
        return (u if like is None else like).new_empty(0)
    return total.sum(0).to(like.dtype)


def backward(
    dy: Optional[Tensor],
    dfinal_state: Optional[Tensor],
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    z: Optional[Tensor],
    delta_bias: Optional[Tensor],
    initial_state: Optional[Tensor],
    first: Optional[Tensor],
    states: Tensor,
    delta_softplus: bool,
    needs_u: bool,
    needs_delta: bool,
    needs_A: bool,
    needs_B: bool,
    needs_C: bool,
    needs_D: bool,
    needs_z: bool,
    needs_delta_bias: bool,
    needs_initial_state: bool,
) -> Nine:
    """Two launches for every span of tokens."""
    inputs = _given("scan_reverse", u, delta, A, B, C, D, z, delta_bias, first, delta_softplus)
    (batch, size, cols), wide = inputs.sizes, torch.float32
    rows = TokenGradients(
        *(
            x.new_empty(x.shape) if needed and x is not None else None
            for x, needed in (
                (u, needs_u),
                (delta, needs_delta),
                (z, needs_z),
                (B, needs_B),
                (C, needs_C),
            )
        )
    )
    shapes = ((batch, size, cols), (batch, cols), (batch, cols))
    needs_sums = (needs_A, needs_D and D is not None, needs_delta_bias and delta_bias is not None)
    sums = Sums(
        *(
            u.new_zeros(shape, dtype=wide) if needed else None
            for shape, needed in zip(shapes, needs_sums, strict=True)
        )
    )
    dstate = u.new_zeros((batch, size, cols), dtype=wide)
    if dfinal_state is not None:
        dstate = _across(dfinal_state)
    if u.numel():
        initial = None if initial_state is None else _across(initial_state)
        up = torch.zeros_like(inputs.u) if dy is None else _adjacent(dy)
        _over_spans(inputs, up, initial, dstate, rows, sums)
    du, ddelta, dz, dB, dC = (
        (u if x is None else x).new_empty(0) if row_gradient is None else row_gradient
        for x, row_gradient in zip((u, delta, z, B, C), rows, strict=True)
    )
    dA = A.new_empty(0) if sums.A is None else sums.A.sum(0).t().contiguous().to(A.dtype)
    dinitial = u.new_empty(0)
    if initial_state is not None:
        dinitial = initial_state.new_empty(0)
        if needs_initial_state:
            dinitial = dstate.mT.contiguous().to(initial_state.dtype)
    dD, dbias = _summed(sums.D, D, u), _summed(sums.bias, delta_bias, u)
    return du, ddelta, dA, dB, dC, dD, dz, dbias, dinitial
