"""The selective scan of Mamba (arXiv:2312.00752), token after token for a block of channels.

Of one channel, with decays a_t = exp(delta_t A), 0 where a segment begins, and a_0 of the initial
state:

    h_t = a_t h_{t-1} + delta_t u_t B_t,  y_t = C_t . h_t

and backward, where m_t = dy_t C_t + a_{t+1} m_{t+1} is the gradient of h_t:

    dA = sum of m_t a_t h_{t-1} delta_t,  ddelta_t = sum of m_t a_t h_{t-1} A + u_t m_t . B_t

A token is one operation on the states of all channels of a block. A scan by doubling has passes
over all states of a span for each power of two instead: 197 ms against 15 for 2048 tokens of 512
channels with 16 states on an EPYC core (2026-11). Blocks of channels and spans of tokens bound
memory. Backward keeps the state before every span, and computes the others again.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import BLOCK_BYTES, row_blocks, statistics_dtype
from liger_multi.reference.linear_attention.isolation import ON_HOST, where_true
from liger_multi.reference.linear_attention.state_space import (
    Gradients,
    Nine,
    StepSizes,
    gate_gradient,
    gated,
)

SPAN = 256  # tokens between the states that forward keeps for backward
CACHED = 2**20  # states of a span on a CPU, whose caches hold no more
LEAST = 16  # tokens of a span


class Block(NamedTuple):
    """Some sequences, and some of their channels."""

    batch: slice
    channels: slice


class Inputs(NamedTuple):
    """The tensors of a call, and its options."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    initial_state: Tensor | None
    first: Tensor | None
    sizes: StepSizes

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of all that is computed."""
        return statistics_dtype(self.u.dtype)

    def rows(self, x: Tensor, block: Block, part: slice) -> Tensor:
        """Tokens of a block of channels, ``(tokens, batch, channels)``."""
        return x[block.batch, part, block.channels].to(self.acc_dtype).transpose(0, 1).contiguous()

    def states(self, block: Block) -> Tensor:
        """The states before the first token, ``(batch, N, channels)``."""
        if self.initial_state is not None:
            return self.initial_state[block].to(self.acc_dtype).mT
        batch, channels = (s.stop - s.start for s in block)
        return self.u.new_zeros(batch, self.A.shape[1], channels, dtype=self.acc_dtype)


def _blocks(inputs: Inputs) -> tuple[list[Block], list[slice]]:
    """Blocks of channels, and spans of at least about as many tokens as there are spans."""
    (batch, length, width), size = inputs.u.shape, inputs.A.shape[1]
    states = BLOCK_BYTES // (5 * inputs.acc_dtype.itemsize)
    on_cpu = inputs.u.device.type in ("cpu", "meta")  # the meta device stands for a CPU here
    states = min(states, CACHED) if on_cpu else states
    tokens = max(LEAST, math.isqrt(length))
    blocks = [
        Block(b, d)
        for b in row_blocks(batch, width * size, max(1, states // tokens))
        for d in row_blocks(width, (b.stop - b.start) * size, max(1, states // tokens))
    ]
    if blocks:
        rows, channels = (s.stop - s.start for s in blocks[0])
        tokens = max(tokens, states // (rows * channels * size))
    spans = [slice(t, min(length, t + tokens)) for t in range(0, length, tokens)]
    return blocks, spans


def _pass(added: Tensor, decay: Tensor, state: Tensor, breaks: Tensor | None) -> Tensor:
    """Add a decayed state to ``added``, but not over a break."""
    return added.addcmul_(decay, state if breaks is None else state.masked_fill(breaks, 0))


class Span:
    """The tensors of a span. Axes: tokens, batch, states, channels."""

    def __init__(self, inputs: Inputs, block: Block, part: slice) -> None:
        acc_dtype = inputs.acc_dtype
        self.u, self.raw = (
            inputs.rows(inputs.u, block, part),
            inputs.rows(inputs.delta, block, part),
        )
        if inputs.delta_bias is not None:
            self.raw = self.raw + inputs.delta_bias[block.channels].to(acc_dtype)
        self.delta = inputs.sizes.of(self.raw)
        self.B, self.C = (
            x[block.batch, part].to(acc_dtype).transpose(0, 1) for x in (inputs.B, inputs.C)
        )
        self.A = inputs.A[block.channels].to(acc_dtype).mT.contiguous()
        self.decays = (self.delta.unsqueeze(2) * self.A).exp_()
        self.within: Tensor | None = None  # tokens at which no sequence begins
        self.breaks: list[Tensor | None] = [None] * (part.stop - part.start)
        if inputs.first is not None:
            first = inputs.first[block.batch] if inputs.first.shape[0] > 1 else inputs.first
            token = torch.arange(part.start, part.stop, device=first.device)
            begins = (first[:, part] == token.clamp(min=1)).mT[..., None, None]
            self.decays.masked_fill_(begins, 0)
            self.within, self.breaks = ~begins, self._breaks(begins)

    @staticmethod
    def _breaks(begins: Tensor) -> list[Tensor | None]:
        """Of every token which sequences begin there; None for no one, where a CPU can say so.

        Their decay of 0 would not stop a state that is not finite.
        """
        if begins.device.type not in ON_HOST:
            return list(begins.unbind(0))
        if begins.is_meta:
            return [None] * len(begins)
        has_break = begins.flatten(1).any(1).tolist()
        return [b if any_ else None for b, any_ in zip(begins.unbind(0), has_break, strict=True)]

    def forward(self, state: Tensor) -> Tensor:
        """States, that before the span first: one more than there are tokens."""
        states = state.new_empty(self.u.shape[0] + 1, *state.shape)
        states[0] = state
        torch.mul((self.delta * self.u).unsqueeze(2), self.B.unsqueeze(3), out=states[1:])
        by_token = states.unbind(0)
        for t, decay in enumerate(self.decays.unbind(0)):
            _pass(by_token[t + 1], decay, by_token[t], self.breaks[t])
        return states

    def outputs(self, states: Tensor) -> Tensor:
        """``C h`` of all tokens."""
        return (self.C.unsqueeze(2) @ states[1:]).squeeze(2)

    def reverse(self, dy: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the states after every token, and of the state before the span."""
        dstates = dy.unsqueeze(2) * self.C.unsqueeze(3)
        by_token, decays = dstates.unbind(0), self.decays.unbind(0)
        by_token[-1].add_(dstate)
        for t in reversed(range(1, len(decays))):
            _pass(by_token[t - 1], decays[t], by_token[t], self.breaks[t])
        return dstates, _pass(torch.zeros_like(dstate), decays[0], by_token[0], self.breaks[0])


# --- the operator ---


def kept_shape(u: Tensor, A: Tensor) -> tuple[int, ...]:
    """Of the states before every SPAN tokens, ``(batch, spans, N, channels)``.

    One span has none: its state before is the initial one.
    """
    spans = -(-u.shape[1] // SPAN)
    return (u.shape[0], spans, A.shape[1], A.shape[0]) if spans > 1 else (0,)


def _before_gate(inputs: Inputs, span: Span, block: Block, states: Tensor) -> Tensor:
    y = span.outputs(states)
    return y if inputs.D is None else y + inputs.D[block.channels].to(y.dtype) * span.u


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
    """Some channels at a time, span after span."""
    sizes = StepSizes(delta_softplus)
    inputs = Inputs(
        u, delta, A, B, C, D, z, delta_bias, initial_state=initial_state, first=first, sizes=sizes
    )
    y = u.new_empty(u.shape)
    shape = (u.shape[0], *A.shape) if output_final_state else (0,)
    final_state = u.new_empty(shape, dtype=inputs.acc_dtype)
    states_of_spans = u.new_empty(kept_shape(u, A), dtype=inputs.acc_dtype)
    blocks, spans = _blocks(inputs)
    for block in blocks:
        state = inputs.states(block)
        for part in spans:
            span = Span(inputs, block, part)
            states = span.forward(state)
            y_part = _before_gate(inputs, span, block, states)
            y_part = gated(y_part, None if z is None else inputs.rows(z, block, part))
            y[block.batch, part, block.channels] = y_part.transpose(0, 1).to(y.dtype)
            for t in (
                range(-(-part.start // SPAN) * SPAN, part.stop, SPAN)
                if states_of_spans.numel()
                else ()
            ):
                states_of_spans[block.batch, t // SPAN, :, block.channels] = states[t - part.start]
            state = states[-1]
        if output_final_state:
            final_state[block] = state.mT
    return y, final_state, states_of_spans


def _add_span(
    total: Gradients,
    block: Block,
    part: slice,
    state: Tensor,
    dy: Tensor | None,
    dstate: Tensor,
) -> Tensor:
    """Add the gradients of a span; return that of the state before it."""
    inputs: Inputs = total.inputs
    span, rows = Span(inputs, block, part), (block.batch, part, block.channels)
    states = span.forward(state)
    up = torch.zeros_like(span.u) if dy is None else inputs.rows(dy, block, part)
    if inputs.z is not None:
        z = inputs.rows(inputs.z, block, part)
        if total.any("z"):
            y = _before_gate(inputs, span, block, states)
            total.put("z", rows, gate_gradient(up, y, z).transpose(0, 1))
        up = gated(up, z)
    dstates, dstate = span.reverse(up, dstate)
    for name, left, right in (("B", dstates, span.delta * span.u), ("C", states[1:], up)):
        if total.any(name):
            product = (left @ right.unsqueeze(3)).squeeze(3)
            total.add(name, (block.batch, part), product.transpose(0, 1))
    added = (span.B.unsqueeze(2) @ dstates).squeeze(2)  # gradient of delta u
    if total.any("u"):
        skip = 0 if inputs.D is None else inputs.D[block.channels].to(up.dtype) * up
        total.put("u", rows, (span.delta * added + skip).transpose(0, 1))
    if total.any("D"):
        total.add("D", block.channels, (up * span.u).sum((0, 1)))
    # gradient of the logarithm of decays
    through = where_true(dstates.mul_(span.decays).mul_(states[:-1]), span.within)
    if total.any("delta", "delta_bias"):
        dsteps = torch.addcmul((through * span.A).sum(2), span.u, added)
        raw = inputs.sizes.gradient(dsteps, span.raw)
        total.put("delta", rows, raw.transpose(0, 1))
        total.add("delta_bias", block.channels, raw.sum((0, 1)))
    if total.any("A"):
        total.add("A", block.channels, through.mul_(span.delta.unsqueeze(2)).sum((0, 1)).mT)
    return dstate


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
    """Some channels at a time: forward for the states before spans, then the spans in reverse.

    Its spans are others than those whose ``states`` forward kept.
    """
    sizes = StepSizes(delta_softplus)
    inputs = Inputs(
        u, delta, A, B, C, D, z, delta_bias, initial_state=initial_state, first=first, sizes=sizes
    )
    needs = {
        "u": needs_u,
        "delta": needs_delta,
        "A": needs_A,
        "B": needs_B,
        "C": needs_C,
        "D": needs_D,
        "z": needs_z,
        "delta_bias": needs_delta_bias,
        "initial_state": needs_initial_state,
    }
    total = Gradients(inputs, needs, "u delta z initial_state")
    blocks, spans = _blocks(inputs)
    for block in blocks:
        states_before = [inputs.states(block)]
        for part in spans[:-1]:
            states_before.append(Span(inputs, block, part).forward(states_before[-1])[-1].clone())
        dstate = torch.zeros_like(states_before[0])
        if dfinal_state is not None:
            dstate = dfinal_state[block].to(inputs.acc_dtype).mT
        for part in reversed(spans):
            dstate = _add_span(total, block, part, states_before.pop(), dy, dstate)
        total.put("initial_state", block, dstate.mT)
    grads: Nine = total.results()
    return grads
