"""The selective scan of Mamba (arXiv:2312.00752), token after token for a block of channels.

Of one channel, with decays a_t = exp(delta_t A), 0 where a segment begins, and a_0 of the initial
state:

    h_t = a_t h_{t-1} + delta_t u_t B_t,  y_t = C_t . h_t

and backward, where m_t = dy_t C_t + a_{t+1} m_{t+1} is the gradient of h_t:

    dA = sum of m_t a_t h_{t-1} delta_t,  ddelta_t = sum of m_t a_t h_{t-1} A + u_t m_t . B_t

A token is one operation on the states of all channels of a block. A scan by doubling has a pass
over the states of the span for each power of two instead (CPU, 2048 tokens, 512 channels of 16
states: 10 ms against SCAN_MS). Decays and states of a span stay in a processor's cache. Backward
keeps the state before every span, and computes the others again.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import BLOCK_BYTES, row_blocks, statistics_dtype
from liger_multi.reference.linear_attention.state_space import StepSizes, gate_gradient, gated

CACHED = 2**19  # states of a span on a CPU
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
    D: Optional[Tensor]
    z: Optional[Tensor]
    delta_bias: Optional[Tensor]
    initial_state: Optional[Tensor]
    first: Optional[Tensor]
    sizes: StepSizes

    @property
    def kind(self) -> torch.dtype:
        """The dtype of all that is computed."""
        return statistics_dtype(self.u.dtype)

    def rows(self, x: Tensor, block: Block, part: slice) -> Tensor:
        """Tokens of a block of channels, ``(tokens, batch, channels)``."""
        return x[block.batch, part, block.channels].to(self.kind).transpose(0, 1)

    def states(self, block: Block) -> Tensor:
        """The states before the first token, ``(batch, N, channels)``."""
        if self.initial_state is not None:
            return self.initial_state[block].to(self.kind).mT
        batch, channels = (s.stop - s.start for s in block)
        return self.u.new_zeros(batch, self.A.shape[1], channels, dtype=self.kind)


def _blocks(given: Inputs) -> tuple[list[Block], list[slice]]:
    """Blocks of channels, and spans of at least about as many tokens as there are spans."""
    (batch, length, width), size = given.u.shape, given.A.shape[1]
    states = BLOCK_BYTES // (5 * given.kind.itemsize)
    states = min(states, CACHED) if given.u.device.type == "cpu" else states
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


class Span:
    """The tensors of a span. Axes: tokens, batch, states, channels."""

    def __init__(self, given: Inputs, block: Block, part: slice) -> None:
        kind = given.kind
        self.u, self.raw = given.rows(given.u, block, part), given.rows(given.delta, block, part)
        if given.delta_bias is not None:
            self.raw = self.raw + given.delta_bias[block.channels].to(kind)
        self.delta = given.sizes.of(self.raw)
        self.B, self.C = (x[block.batch, part].to(kind).transpose(0, 1) for x in (given.B, given.C))
        self.A = given.A[block.channels].to(kind).mT.contiguous()
        self.decays = (self.delta.unsqueeze(2) * self.A).exp_()
        if given.first is not None:
            first = given.first[block.batch] if given.first.shape[0] > 1 else given.first
            place = torch.arange(part.start, part.stop, device=first.device)
            begins = (first[:, part] == place.clamp(min=1)).mT[..., None, None]
            self.decays.masked_fill_(begins, 0)

    def forward(self, state: Tensor) -> Tensor:
        """States, that before the span first: one more than there are tokens."""
        states = state.new_empty(self.u.shape[0] + 1, *state.shape)
        states[0] = state
        torch.mul((self.delta * self.u).unsqueeze(2), self.B.unsqueeze(3), out=states[1:])
        after = states.unbind(0)
        for t, decay in enumerate(self.decays.unbind(0)):
            after[t + 1].addcmul_(decay, after[t])
        return states

    def outputs(self, states: Tensor) -> Tensor:
        """``C h`` of all tokens."""
        return (self.C.unsqueeze(2) @ states[1:]).squeeze(2)

    def reverse(self, dy: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the states after every token, and of the state before the span."""
        found = dy.unsqueeze(2) * self.C.unsqueeze(3)
        after, decays = found.unbind(0), self.decays.unbind(0)
        after[-1].add_(dstate)
        for t in reversed(range(1, len(decays))):
            after[t - 1].addcmul_(decays[t], after[t])
        return found, decays[0] * after[0]


# --- the operator ---


def _before_gate(given: Inputs, span: Span, block: Block, states: Tensor) -> Tensor:
    y = span.outputs(states)
    return y if given.D is None else y + given.D[block.channels].to(y.dtype) * span.u


def forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor],
    z: Optional[Tensor], delta_bias: Optional[Tensor], initial_state: Optional[Tensor],
    first: Optional[Tensor], delta_softplus: bool, output_final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Some channels at a time, span after span."""
    sizes = StepSizes(delta_softplus)
    given = Inputs(u, delta, A, B, C, D, z, delta_bias, initial_state, first, sizes)
    y = u.new_empty(u.shape)
    shape = (u.shape[0], *A.shape) if output_final_state else (0,)
    final_state = u.new_empty(shape, dtype=given.kind)
    blocks, spans = _blocks(given)
    for block in blocks:
        state = given.states(block)
        for part in spans:
            span = Span(given, block, part)
            states = span.forward(state)
            made = _before_gate(given, span, block, states)
            made = gated(made, None if z is None else given.rows(z, block, part))
            y[block.batch, part, block.channels] = made.transpose(0, 1).to(y.dtype)
            state = states[-1]
        if output_final_state:
            final_state[block] = state.mT
    return y, final_state


class Gradients:
    """What backward fills span by span; sums over channels or tokens are in the wide dtype."""

    def __init__(self, given: Inputs, needs: dict[str, bool]) -> None:
        self.given = given
        self.made: dict[str, Tensor] = {}
        for name, needed in needs.items():
            x = getattr(given, name)
            if needed and x is not None:
                summed = name not in ("u", "delta", "z", "initial_state")
                self.made[name] = (
                    x.new_zeros(x.shape, dtype=given.kind) if summed else x.new_empty(x.shape)
                )

    def put(self, name: str, block: Block, part: slice, rows: Tensor) -> None:
        """Write rows of a gradient."""
        if name in self.made:
            room = self.made[name]
            room[block.batch, part, block.channels] = rows.transpose(0, 1).to(room.dtype)

    def add_span(
        self, block: Block, part: slice, state: Tensor, dy: Optional[Tensor], dstate: Tensor
    ) -> Tensor:
        """Add the gradients of a span; return that of the state before it."""
        given, made = self.given, self.made
        span = Span(given, block, part)
        states = span.forward(state)
        up = torch.zeros_like(span.u) if dy is None else given.rows(dy, block, part)
        if given.z is not None:
            z = given.rows(given.z, block, part)
            if "z" in made:
                y = _before_gate(given, span, block, states)
                self.put("z", block, part, gate_gradient(up, y, z))
            up = gated(up, z)
        after, dstate = span.reverse(up, dstate)
        for name, left, right in (("B", after, span.delta * span.u), ("C", states[1:], up)):
            if name in made:
                found = (left @ right.unsqueeze(3)).squeeze(3)
                made[name][block.batch, part] += found.transpose(0, 1)
        added = (span.B.unsqueeze(2) @ after).squeeze(2)  # gradient of delta u
        if "u" in made:
            skip = 0 if given.D is None else given.D[block.channels].to(up.dtype) * up
            self.put("u", block, part, span.delta * added + skip)
        if "D" in made:
            made["D"][block.channels] += (up * span.u).sum((0, 1))
        if not made.keys().isdisjoint(("A", "delta", "delta_bias")):
            self._add_decays(span, block, part, after.mul_(span.decays).mul_(states[:-1]), added)
        return dstate

    def _add_decays(
        self, span: Span, block: Block, part: slice, through: Tensor, added: Tensor
    ) -> None:
        """Gradients of A, delta and its bias.

        Args:
            span: The span.
            block: Its channels.
            part: Its tokens.
            through: Gradient of the logarithm of the decays; overwritten.
            added: Gradient of ``delta u``.
        """
        made = self.made
        if "delta" in made or "delta_bias" in made:
            dsteps = torch.addcmul((through * span.A).sum(2), span.u, added)
            raw = self.given.sizes.gradient(dsteps, span.raw)
            self.put("delta", block, part, raw)
            if "delta_bias" in made:
                made["delta_bias"][block.channels] += raw.sum((0, 1))
        if "A" in made:
            made["A"][block.channels] += through.mul_(span.delta.unsqueeze(2)).sum((0, 1)).mT

    def take(self, name: str) -> Tensor:
        """A gradient in the dtype of its tensor; empty where there is none."""
        x = getattr(self.given, name)
        if name in self.made:
            return self.made[name].to(x.dtype)
        return (self.given.u if x is None else x).new_empty(0)


def backward(
    dy: Optional[Tensor], dfinal_state: Optional[Tensor], u: Tensor, delta: Tensor, A: Tensor,
    B: Tensor, C: Tensor, D: Optional[Tensor], z: Optional[Tensor], delta_bias: Optional[Tensor],
    initial_state: Optional[Tensor], first: Optional[Tensor], delta_softplus: bool, needs_u: bool,
    needs_delta: bool, needs_A: bool, needs_B: bool, needs_C: bool, needs_D: bool, needs_z: bool,
    needs_delta_bias: bool, needs_initial_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Some channels at a time: forward for the states before spans, then the spans in reverse."""
    sizes = StepSizes(delta_softplus)
    given = Inputs(u, delta, A, B, C, D, z, delta_bias, initial_state, first, sizes)
    needs = {
        "u": needs_u, "delta": needs_delta, "A": needs_A, "B": needs_B, "C": needs_C, "D": needs_D,
        "z": needs_z, "delta_bias": needs_delta_bias, "initial_state": needs_initial_state,
    }  # fmt: skip
    total = Gradients(given, needs)
    blocks, spans = _blocks(given)
    for block in blocks:
        before = [given.states(block)]
        for part in spans[:-1]:
            before.append(Span(given, block, part).forward(before[-1])[-1].clone())
        dstate = torch.zeros_like(before[0])
        if dfinal_state is not None:
            dstate = dfinal_state[block].to(given.kind).mT
        for part in reversed(spans):
            dstate = total.add_span(block, part, before.pop(), dy, dstate)
        if "initial_state" in total.made:
            total.made["initial_state"][block] = dstate.mT.to(total.made["initial_state"].dtype)
    x_to_c = [total.take(name) for name in "u delta A B C".split()]
    rest = [total.take(name) for name in "D z delta_bias initial_state".split()]
    return x_to_c[0], x_to_c[1], x_to_c[2], x_to_c[3], x_to_c[4], rest[0], rest[1], rest[2], rest[3]
