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
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.npu.common.launching import block_of, jitted, start
from liger_multi.dispatch.launch import device_info
from liger_multi.reference.linear_attention import selective_scan as reference
from liger_multi.reference.linear_attention.state_space import Nine

FEWEST, MOST = 16, 128  # states of a channel: fewer are padded, as blocks are those of models
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


@triton.jit
def _put(ptr, value, at, mask):
    """Round the value and store it; without a pointer, do nothing."""
    if ptr is not None:
        tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)


@jitted
def _scan_forward_kernel(
    u_ptr,
    delta_ptr,
    A_ptr,
    BC_ptr,
    channel_ptr,
    z_ptr,
    first_ptr,
    state_ptr,
    y_ptr,
    states_ptr,
    z_stride,
    length,
    low,
    high,
    each,
    cols,
    size,
    pieces,
    SOFT: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The recurrence over the tokens [low, high).

    Program: every num_programs-th piece, BLOCK / STATES channels of a sequence. ``state``,
    (batch, size, cols), is the one before token low, and gets that after the last one. Writes y
    (batch, length, cols) and the state before every ``each`` tokens, (batch,
    ceil((high - low) / each), size, cols), those of which have a pointer.
    """
    steps = tl.cdiv(cols, BLOCK // STATES)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        batch = tl.cast(piece // steps, tl.int64)
        col = (piece % steps) * (BLOCK // STATES) + tl.arange(0, BLOCK // STATES)
        n, mask = tl.arange(0, STATES), col < cols
        tile = n[:, None] * cols + col[None, :]
        inside = (n < size)[:, None] & mask[None, :]
        A = tl.load(A_ptr + tile, mask=inside, other=0.0)
        h = tl.load(state_ptr + batch * size * cols + tile, mask=inside, other=0.0)
        skip, bias = _row(channel_ptr, col, mask), _row(channel_ptr, cols + col, mask)
        spans = (high - low + each - 1) // each
        for s in range(spans):
            if states_ptr is not None:
                at_h = states_ptr + (batch * spans + s) * size * cols + tile
                tl.store(at_h, h, mask=inside)
            for i in range(low + s * each, tl.minimum(low + s * each + each, high)):
                t = tl.cast(i, tl.int64)
                row = batch * length + t
                at = row * cols + col
                u = _row(u_ptr, at, mask)
                delta = _step(_row(delta_ptr, at, mask) + bias, SOFT)
                B = _row(BC_ptr, row * 2 * size + n, n < size)
                if first_ptr is not None:
                    h = tl.where(_begins(first_ptr, row, t), 0.0, h)
                h = tl.exp(delta[None, :] * A) * h + (delta * u)[None, :] * B[:, None]
                if y_ptr is not None:
                    C = _row(BC_ptr, (row * 2 + 1) * size + n, n < size)
                    y = tl.sum(h * C[:, None], 0) + skip * u
                    if z_ptr is not None:
                        z = _row(z_ptr, row * z_stride + col, mask)
                        y = y * z * tl.sigmoid(z)
                    _put(y_ptr, y, at, mask)
        tl.store(state_ptr + batch * size * cols + tile, h, mask=inside)


@triton.jit
def _add(ptr, value, at, mask):
    """Add to a sum that passes from launch to launch."""
    tl.store(ptr + at, tl.load(ptr + at, mask=mask, other=0.0) + value, mask=mask)


@jitted
def _scan_reverse_kernel(
    dy_ptr,
    u_ptr,
    delta_ptr,
    A_ptr,
    BC_ptr,
    channel_ptr,
    z_ptr,
    first_ptr,
    states_ptr,
    carry_ptr,
    du_ptr,
    ddelta_ptr,
    dz_ptr,
    dBC_ptr,
    z_stride,
    length,
    low,
    high,
    cols,
    size,
    pieces,
    SOFT: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of the tokens [low, high), from the last to the first.

    Program: as forward. Reads the states before these tokens, (batch, high - low, size, cols).
    ``carry`` (batch, 2 size + 2, cols) holds the gradient of the state after them, which becomes
    that of the state before them, and sums that are added to: dA, dD and dbias. Writes du, ddelta
    and dz (batch, length, cols), and for its channels dB beside dC, (batch, high - low, steps,
    2 size).
    """
    steps = tl.cdiv(cols, BLOCK // STATES)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        batch = tl.cast(piece // steps, tl.int64)
        col = (piece % steps) * (BLOCK // STATES) + tl.arange(0, BLOCK // STATES)
        n, mask = tl.arange(0, STATES), col < cols
        tile = n[:, None] * cols + col[None, :]
        inside = (n < size)[:, None] & mask[None, :]
        carry = carry_ptr + batch * (2 * size + 2) * cols
        A = tl.load(A_ptr + tile, mask=inside, other=0.0)
        m = tl.load(carry + tile, mask=inside, other=0.0)
        skip, bias = _row(channel_ptr, col, mask), _row(channel_ptr, cols + col, mask)
        by_bias = tl.zeros([BLOCK // STATES], tl.float32)
        by_skip = by_bias
        by_A = tl.zeros([STATES, BLOCK // STATES], tl.float32)
        for i in range(high - low):
            t = tl.cast(high - 1 - i, tl.int64)
            row, within = batch * length + t, batch * (high - low) + t - low
            at = row * cols + col
            u, up = _row(u_ptr, at, mask), _row(dy_ptr, at, mask)
            raw = _row(delta_ptr, at, mask) + bias
            delta = _step(raw, SOFT)
            B = _row(BC_ptr, row * 2 * size + n, n < size)
            C = _row(BC_ptr, (row * 2 + 1) * size + n, n < size)
            h = tl.load(states_ptr + within * size * cols + tile, mask=inside, other=0.0)
            begins = _begins(first_ptr, row, t)
            if first_ptr is not None:
                h = tl.where(begins, 0.0, h)
            decay = tl.exp(delta[None, :] * A)
            kept = decay * h
            h = kept + (delta * u)[None, :] * B[:, None]
            if z_ptr is not None:
                z = _row(z_ptr, row * z_stride + col, mask)
                p = tl.sigmoid(z)
                if dz_ptr is not None:
                    y = tl.sum(h * C[:, None], 0) + skip * u
                    _put(dz_ptr, up * y * p * (1.0 + z * (1.0 - p)), at, mask)
                up = up * z * p
            m = m + up[None, :] * C[:, None]
            at_part = (within * steps + piece % steps) * 2 * size + n
            _put(dBC_ptr, tl.sum(m * (delta * u)[None, :], 1), at_part, n < size)
            _put(dBC_ptr, tl.sum(h * up[None, :], 1), at_part + size, n < size)
            added = tl.sum(m * B[:, None], 0)
            through = m * kept
            dsteps = tl.sum(through * A, 0) + u * added
            if SOFT:
                dsteps = dsteps * tl.sigmoid(raw)
            by_A += through * delta[None, :]
            by_skip += up * u
            by_bias += dsteps
            _put(du_ptr, delta * added + skip * up, at, mask)
            _put(ddelta_ptr, dsteps, at, mask)
            m = decay * m
            if first_ptr is not None:
                m = tl.where(begins, 0.0, m)
        tl.store(carry + tile, m, mask=inside)
        _add(carry, by_A, size * cols + tile, inside)
        _add(carry, by_skip, 2 * size * cols + col, mask)
        _add(carry, by_bias, (2 * size + 1) * cols + col, mask)


# --- launchers ---


class Inputs(NamedTuple):
    """The tensors of a call as kernels take them, and the shape of their work.

    Attributes:
        u: Contiguous, as delta is.
        A: fp32 (N, D), so that channels are adjacent.
        BC: B beside C, (B, T, 2 N).
        channel: D and delta_bias in fp32, (2, D); 0 for what is not given.
        z: Rows at equal distances, such as a slice of a projection's result.
        first: As many rows as sequences.
        block: Numbers of the states of a program.
        states: N, or the next power of two that is at least 16.
        steps: Programs that share the channels of a sequence.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    BC: Tensor
    channel: Tensor
    z: Tensor | None
    first: Tensor | None
    soft: bool
    block: int
    states: int
    steps: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sequences, states of a channel, channels."""
        return self.u.shape[0], *self.A.shape

    def buffer(self, count: int) -> Tensor:
        """Room for so many rows of all channels in fp32, (B, count, D)."""
        return self.u.new_empty((len(self.u), count, self.u.shape[2]), dtype=torch.float32)


def _in_rows(x: Tensor) -> Tensor:
    """``(B, T, D)`` whose rows have one distance and adjacent channels."""
    has_row_layout = x.stride(2) == 1 and x.stride(0) == x.shape[1] * x.stride(1)
    return x if has_row_layout else x.contiguous()


def shape_of(name: str, u: Tensor, size: int) -> tuple[int, int, int]:
    """Numbers of a program's states, the padded number of a channel's, and programs a sequence.

    Fewer channels where cores would have no work.
    """
    batch, _, cols = u.shape
    states, cores = max(FEWEST, triton.next_power_of_2(size)), device_info(u.device).cores
    widest = triton.next_power_of_2(cols)
    channels = block_of(name, u, states * widest, smallest=1) // states
    while channels > LEAST and batch * -(-cols // channels) < cores:
        channels //= 2
    return channels * states, states, -(-cols // channels)


def _inputs_of(
    name: str,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    first: Tensor | None,
    soft: bool,
) -> Inputs:
    channel = u.new_zeros((2, u.shape[2]), dtype=torch.float32)
    for row, x in zip(channel, (D, bias), strict=True):
        if x is not None:
            row.copy_(x)
    return Inputs(
        u.contiguous(),
        delta.contiguous(),
        A.float().t().contiguous(),
        torch.cat((B, C), -1),
        channel,
        None if z is None else _in_rows(z),
        None if first is None else first.expand(len(u), -1).contiguous(),
        soft,
        *shape_of(name, u, A.shape[1]),
    )


def _run(
    inputs: Inputs,
    part: slice,
    each: int,
    state: Tensor,
    y: Tensor | None,
    states: Tensor | None,
) -> None:
    """One launch over some tokens; the state becomes that after them."""
    batch, size, cols = inputs.sizes
    pieces = batch * inputs.steps
    start(
        _scan_forward_kernel,
        pieces,
        inputs.u,
        inputs.delta,
        inputs.A,
        inputs.BC,
        inputs.channel,
        None if y is None else inputs.z,  # the gate belongs to no recurrence
        first_ptr=inputs.first,
        state_ptr=state,
        y_ptr=y,
        states_ptr=states,
        z_stride=0 if inputs.z is None else inputs.z.stride(1),
        length=inputs.u.shape[1],
        low=part.start,
        high=part.stop,
        each=each,
        cols=cols,
        size=size,
        pieces=pieces,
        SOFT=inputs.soft,
        STATES=inputs.states,
        BLOCK=inputs.block,
    )


def _state_by_channels(state: Tensor | None, u: Tensor, size: int) -> Tensor:
    """A copy of states ``(B, D, N)`` as (B, N, D) in fp32, or zeros."""
    transposed = u.new_zeros((u.shape[0], size, u.shape[2]), dtype=torch.float32)
    return transposed if state is None else transposed.copy_(state.mT)


def supports(A: Tensor) -> str | None:
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
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    first: Tensor | None,
    delta_softplus: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch."""
    y = u.new_empty(u.shape)
    states_of_spans = u.new_empty(reference.kept_shape(u, A), dtype=torch.float32)
    state = _state_by_channels(initial_state, u, A.shape[1])
    if y.numel():
        inputs = _inputs_of(
            "scan_forward",
            u,
            delta,
            A,
            B,
            C,
            D,
            z,
            bias=delta_bias,
            first=first,
            soft=delta_softplus,
        )
        each, states = (
            (reference.SPAN, states_of_spans) if states_of_spans.numel() else (u.shape[1], None)
        )
        _run(inputs, slice(0, u.shape[1]), each, state, y, states)
    return y, state.mT.contiguous() if output_final_state else state.new_empty(0), states_of_spans


class TokenGradients(NamedTuple):
    """Gradients of every token; those of u, delta and z are None where they are not needed."""

    u: Tensor | None
    delta: Tensor | None
    z: Tensor | None
    BC: Tensor


def _reverse(
    inputs: Inputs, dy: Tensor, part: slice, states: Tensor, carry: Tensor, rows: TokenGradients
) -> None:
    """One launch over the tokens of a span, and sums over programs."""
    batch, size, cols = inputs.sizes
    pieces, count = batch * inputs.steps, part.stop - part.start
    shares = carry.new_empty((batch, count, inputs.steps, 2 * size))
    start(
        _scan_reverse_kernel,
        pieces,
        dy,
        inputs.u,
        inputs.delta,
        inputs.A,
        inputs.BC,
        inputs.channel,
        z_ptr=inputs.z,
        first_ptr=inputs.first,
        states_ptr=states,
        carry_ptr=carry,
        du_ptr=rows.u,
        ddelta_ptr=rows.delta,
        dz_ptr=rows.z,
        dBC_ptr=shares,
        z_stride=0 if inputs.z is None else inputs.z.stride(1),
        length=inputs.u.shape[1],
        low=part.start,
        high=part.stop,
        cols=cols,
        size=size,
        pieces=pieces,
        SOFT=inputs.soft,
        STATES=inputs.states,
        BLOCK=inputs.block,
    )
    rows.BC[:, part] = shares.sum(2)


def _over_spans(
    inputs: Inputs, dy: Tensor, initial: Tensor, carry: Tensor, rows: TokenGradients
) -> None:
    """The states before every span, then the spans in reverse."""
    length, size = inputs.u.shape[1], inputs.A.shape[0]
    each = max(SPAN, math.isqrt(length))
    count = -(-length // each)
    states_before = inputs.buffer(count * size)
    _run(inputs, slice(0, length), each, initial, None, states_before)
    for i in reversed(range(count)):
        part = slice(i * each, min(i * each + each, length))
        states = inputs.buffer((part.stop - part.start) * size)
        state = states_before[:, i * size : (i + 1) * size].contiguous()
        _run(inputs, part, 1, state, None, states)
        _reverse(inputs, dy, part, states, carry, rows)


def backward(
    dy: Tensor | None,
    dfinal_state: Tensor | None,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    first: Tensor | None,
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
    inputs = _inputs_of(
        "scan_reverse", u, delta, A, B, C, D, z, bias=delta_bias, first=first, soft=delta_softplus
    )
    batch, size, cols = inputs.sizes
    du, ddelta, dz = (
        x.new_empty(x.shape) if gradient_of and x is not None else None
        for x, gradient_of in ((u, needs_u), (delta, needs_delta), (z, needs_z))
    )
    rows = TokenGradients(du, ddelta, dz, u.new_zeros(inputs.BC.shape, dtype=torch.float32))
    carry = u.new_zeros((batch, 2 * size + 2, cols), dtype=torch.float32)
    if dfinal_state is not None:
        carry[:, :size] = dfinal_state.mT
    if u.numel():
        up = torch.zeros_like(inputs.u) if dy is None else dy.contiguous()
        _over_spans(inputs, up, _state_by_channels(initial_state, u, size), carry, rows)
    sums, (dB, dC) = carry[:, size:].sum(0), rows.BC.chunk(2, -1)

    def gradient_of(gradient: Tensor | None, tensor: Tensor | None, need: bool = True) -> Tensor:
        """The gradient in its tensor's dtype; empty if there is none or it is not needed."""
        if gradient is None or tensor is None or not need:
            return (u if tensor is None else tensor).new_empty(0)
        return gradient.to(tensor.dtype).contiguous()

    return (
        gradient_of(du, u),
        gradient_of(ddelta, delta),
        gradient_of(sums[:size].t(), A, needs_A),
        gradient_of(dB, B, needs_B),
        gradient_of(dC, C, needs_C),
        gradient_of(sums[size], D, needs_D),
        gradient_of(dz, z),
        gradient_of(sums[size + 1], delta_bias, needs_delta_bias),
        gradient_of(carry[:, :size].mT, initial_state, needs_initial_state),
    )
