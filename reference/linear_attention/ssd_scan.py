"""The scan of Mamba-2 (state space duality, arXiv:2405.21060) by chunks of tokens.

Of one head and chunk: S is the state before it, V = dt x are the rows that are added to the state,
and e, r and z the decays of :mod:`.chunks`, of the gates dt A. P are the products of C and B with
the decay between the two tokens:

    y = e C S + P V,  P_ij = (C_i . B_j) exp(G_i - G_j) for i >= j,  S' = z S + (r B)' V

B and C belong to groups of heads. So their products are made once for all heads of a group, and
the states of these heads stand side by side, (N, heads x P), in each product with B or C. Backward,
from the gradients dy and dS' (of the state after the chunk), where sums are over heads:

    dV = P' dy + r B dS',  dS = z dS' + C' (e dy),  dP = dy V'
    dC = (sum of dP D) B + sum of (e dy) S',  dB = (sum of dP D)' C + sum of (r V) dS'

Blocks of heads and spans of chunks bound memory, as in :mod:`.chunks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import BLOCK_BYTES, statistics_dtype
from liger_multi.reference.linear_attention.chunks import (
    CHUNK,
    HeadDecays,
    Heads,
    Sight,
    _chunked,
    _starts,
    _tokens,
    head_blocks,
    token_spans,
)
from liger_multi.reference.linear_attention.isolation import spread, where_true
from liger_multi.reference.linear_attention.state_space import (
    Gradients,
    Nine,
    StepSizes,
    gate_gradient,
    gated,
)


class Inputs(NamedTuple):
    """The tensors of a call, and its options."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    first: Tensor | None
    sizes: StepSizes
    most: int

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of all that is computed."""
        return statistics_dtype(self.x.dtype)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return max(1, min(self.most, CHUNK, self.x.shape[1]))

    def rows(self, x: Tensor, heads: Heads, part: slice) -> Tensor:
        """A block of a tensor with heads."""
        return x[heads.batch, part, heads.value].to(self.acc_dtype)

    def of_heads(self, x: Tensor, heads: Heads) -> Tensor:
        """What heads have of a parameter, to be combined with rows ``(..., heads, P)``."""
        entries = x[heads.value].to(self.acc_dtype)
        return entries.unsqueeze(-1) if entries.ndim == 1 else entries

    def raw(self, heads: Heads, part: slice) -> Tensor:
        """Step sizes with their bias, ``(batch, tokens, heads)``."""
        raw = self.rows(self.dt, heads, part)
        return raw if self.dt_bias is None else raw + self.dt_bias[heads.value].to(self.acc_dtype)

    def side_by_side(self, state: Tensor, heads: Heads) -> Tensor:
        """States of a block ``(batch, heads, P, N)`` as (batch, groups, N, heads of one x P)."""
        entries = state[heads.batch, heads.value].to(self.acc_dtype).transpose(-1, -2)
        states: Tensor = entries.unflatten(1, (_groups(heads), -1)).transpose(2, 3).flatten(3)
        return states

    def states(self, heads: Heads) -> Tensor:
        """The states before the first token, side by side."""
        if self.initial_state is not None:
            return self.side_by_side(self.initial_state, heads)
        heads_of_group = (heads.value.stop - heads.value.start) // _groups(heads)
        batch = heads.batch.stop - heads.batch.start
        shape = (batch, _groups(heads), self.B.shape[3], heads_of_group * self.x.shape[3])
        return self.x.new_zeros(shape, dtype=self.acc_dtype)

    def apart(self, state: Tensor) -> Tensor:
        """States of a block as (batch, heads, P, N)."""
        split: Tensor = state.unflatten(3, (-1, self.x.shape[3]))
        return split.permute(0, 1, 3, 4, 2).flatten(1, 2)


def _groups(heads: Heads) -> int:
    return int(heads.key.stop) - int(heads.key.start)


def _blocks(inputs: Inputs) -> tuple[list[Heads], list[slice]]:
    """Blocks of heads, and spans of chunks.

    A block has whole groups, or some heads of a group that is too large. A span has as many chunks
    as fit, and at least about as many as there are spans.
    """
    (batch, length, heads, value), (groups, size) = inputs.x.shape, inputs.B.shape[2:]
    group, chunk, itemsize = heads // groups, inputs.chunk, inputs.acc_dtype.itemsize
    head_bytes = itemsize * (chunk * (8 * value + 5 * chunk) + 4 * size * value)
    shared_bytes = itemsize * chunk * (4 * size + 3 * chunk)
    chunks = max(1, -(-length // chunk))
    fewest = min(chunks, max(8, math.isqrt(chunks)))
    width = min(group, max(1, (BLOCK_BYTES // fewest - shared_bytes) // head_bytes))
    unit = shared_bytes + width * head_bytes
    steps = min(chunks, max(fewest, BLOCK_BYTES // unit))
    spans = token_spans(length, chunk, steps)
    steps = max((-(-(span.stop - span.start) // chunk) for span in spans), default=1)
    group_bytes = steps * unit if width == group else BLOCK_BYTES
    return head_blocks(batch, groups, group, group_bytes, BLOCK_BYTES, width), spans


# --- a span of chunks ---


class Span:
    """The tensors of a span. Axes: batch, groups, heads of a group, chunks, rows."""

    @staticmethod
    def blocks(inputs: Inputs) -> tuple[list[Heads], list[slice]]:
        """Blocks of heads, and spans of chunks."""
        return _blocks(inputs)

    def __init__(self, inputs: Inputs, heads: Heads, part: slice) -> None:
        acc_dtype, self.chunk = inputs.acc_dtype, inputs.chunk
        self.length, self.groups = part.stop - part.start, _groups(heads)
        self.B, self.C = (
            _chunked(x[heads.batch, part, heads.key], self.chunk, acc_dtype)
            for x in (inputs.B, inputs.C)
        )
        self.raw = inputs.raw(heads, part)
        self.dt = self.chunked(inputs.sizes.of(self.raw))
        self.x = self.chunked(inputs.rows(inputs.x, heads, part))
        self.A = (
            inputs.A[heads.value].to(acc_dtype).unflatten(0, (self.groups, -1))[..., None, None]
        )
        self.values = (self.dt.unsqueeze(-1) * self.x).contiguous()
        starts = _starts(inputs.first, heads, part, self.chunk)
        self.sight = Sight(self.chunk, starts, self.x.device)
        self.gates = HeadDecays(self.dt * self.A, self.sight)
        self.e, self.r = self.gates.e.unsqueeze(-1), self.gates.r.unsqueeze(-1)
        z = self.gates.z.movedim(2, 3)  # a column of the states for every head
        self.z = z.repeat_interleave(self.x.shape[-1], 3).unsqueeze(-2)

    def chunked(self, rows: Tensor) -> Tensor:
        """``(batch, tokens, heads, ...)`` by groups and chunks."""
        chunks: Tensor = _chunked(rows, self.chunk, rows.dtype).unflatten(1, (self.groups, -1))
        return chunks

    def tokens(self, x: Tensor) -> Tensor:
        """Back to (batch, tokens, heads, ...)."""
        return _tokens(x.flatten(1, 2), self.length)

    def side_by_side(self, x: Tensor, decays: Tensor) -> Tensor:
        """Rows times decays, those of all heads of a group side by side."""
        batch, groups, heads, chunks, rows, size = x.shape
        out = x.new_empty(batch, groups, chunks, rows, heads, size)
        torch.mul(x, decays, out=out.movedim(4, 2))
        return out.flatten(-2)

    def split(self, x: Tensor) -> Tensor:
        """Rows of heads side by side as a view with an axis of heads."""
        by_head: Tensor = x.unflatten(-1, (self.x.shape[2], -1))
        return by_head.movedim(4, 2)

    def shared(self, x: Tensor, mask: Callable[[Tensor], Tensor]) -> Tensor:
        """What a mask of heads, by which they do not differ, leaves of a group's rows."""
        masked: Tensor = mask(x.unsqueeze(2)).squeeze(2)
        return masked

    def passing(self) -> list[tuple[Tensor, Tensor | None]]:
        """Of every chunk the decays of the states, and whether they pass."""
        passes = self.sight.whole  # (batch or 1, 1, 1, chunks)
        masks = [None] * self.z.shape[2] if passes is None else passes[:, 0].unbind(-1)
        decays = self.z.unbind(2)
        pairs = zip(decays, masks, strict=True)
        return [(z, None if m is None else m[..., None, None]) for z, m in pairs]

    def added(self) -> Tensor:
        """What every chunk adds to its state."""
        values = self.sight.of_last(self.values)
        return self.shared(self.B, self.sight.of_last).mT @ self.side_by_side(values, self.r)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """States before every chunk, and the state after the last one."""
        states = self.added()
        for i, (z, passes) in enumerate(self.passing()):
            state_after = states[:, :, i] + where_true(z * state, passes)
            states[:, :, i] = state
            state = state_after
        return states, state

    def products(self, pairs: Tensor) -> Tensor:
        """Products of C and B of pairs that see each other, with their decay."""
        products = (self.C @ self.B.mT).unsqueeze(2) * pairs
        return products.masked_fill_(~self.sight.visible, 0)

    def read(self, states: Tensor) -> Tensor:
        """What y has of the states, without the decay."""
        return self.sight.of_state(self.split(self.C @ states))

    def outputs(self, states: Tensor) -> Tensor:
        """Make y of all chunks, without skip and gate."""
        y = spread(self.products(self.gates.pairs()), self.values, self.sight.visible)
        return y.addcmul_(self.e, self.read(states))

    def reverse(self, dstates: Tensor, dstate: Tensor) -> Tensor:
        """From the gradients that states have by y to those of the states after every chunk.

        Returns the gradient of the first state.

        Args:
            dstates: What states before every chunk get through y; overwritten.
            dstate: Gradient of the state after the span.
        """
        for i, (z, passes) in reversed(list(enumerate(self.passing()))):
            dstate_before = dstates[:, :, i] + where_true(z * dstate, passes)
            dstates[:, :, i] = dstate
            dstate = dstate_before
        return dstate

    def gradients(
        self, dy: Tensor, states: Tensor, dstate: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of V, of the gates, of B and of C by chunks, and of the first state.

        Args:
            dy: Gradient of y without skip and gate, by chunks.
            states: The states before every chunk.
            dstate: Gradient of the state after the span.
        """
        pairs, sight, of_state = self.gates.pairs(), self.sight, self.sight.of_state
        visible = (
            sight.visible if sight.visible.ndim == 2 else sight.visible.squeeze(2)
        )  # of a group
        dvalues = spread(self.products(pairs).mT, dy, sight.visible.mT)
        dproducts = (dy @ self.values.mT).mul_(pairs).masked_fill_(~sight.visible, 0)
        shared = dproducts.sum(2)
        through = dproducts.mul_((self.C @ self.B.mT).unsqueeze(2)).masked_fill_(~sight.below, 0)
        decayed_dy = self.side_by_side(of_state(dy), self.e)
        dstates = self.shared(self.C, of_state).mT @ decayed_dy
        dstate = self.reverse(dstates, dstate)
        dc = spread(shared, self.B, visible).add_(self.shared(decayed_dy @ states.mT, of_state))
        added = self.side_by_side(self.values, self.r) @ dstates.mT
        db = spread(shared.mT, self.C, visible.mT).add_(self.shared(added, sight.of_last))
        kept_rows = sight.of_last(self.r * self.split(self.B @ dstates))
        dvalues += kept_rows
        de = of_state((dy * self.e).mul_(self.read(states))).sum(-1)
        dr = sight.of_last(kept_rows.mul_(self.values)).sum(-1)
        dg = self.gates.gradient(through, de, dr, self.of_passing(states * dstates))
        return dvalues, dg, db, dc, dstate

    def of_passing(self, through: Tensor) -> Tensor:
        """Sums for every head of what decays by z, (batch, groups, heads, chunks)."""
        mask = self.sight.whole
        passes = None if mask is None else mask[:, 0][..., None, None]
        through_sums = where_true(self.z * through, passes).sum(-2)
        sums: Tensor = through_sums.unflatten(-1, (self.x.shape[2], -1)).sum(-1).movedim(3, 2)
        return sums


# --- the operator ---


def _before_gate(inputs: Inputs, span: Span, heads: Heads, part: slice, states: Tensor) -> Tensor:
    y = span.tokens(span.outputs(states))
    if inputs.D is not None:
        y = y + inputs.of_heads(inputs.D, heads) * inputs.rows(inputs.x, heads, part)
    return y


def run_forward(
    rule: type[Span], inputs: Inputs, output_final_state: bool
) -> tuple[Tensor, Tensor]:
    """Some heads at a time, span after span."""
    x, z = inputs.x, inputs.z
    y, (batch, _, heads_count, value) = x.new_empty(x.shape), x.shape
    shape = (batch, heads_count, value, inputs.B.shape[3]) if output_final_state else (0,)
    final_state = x.new_empty(shape, dtype=inputs.acc_dtype)
    blocks, spans = rule.blocks(inputs)
    for heads in blocks:
        state = inputs.states(heads)
        for part in spans:
            span = rule(inputs, heads, part)
            states, state = span.forward(state)
            y_part = _before_gate(inputs, span, heads, part, states)
            gate = None if z is None else inputs.rows(z, heads, part)
            y[heads.batch, part, heads.value] = gated(y_part, gate).to(y.dtype)
        if output_final_state:
            final_state[heads.batch, heads.value] = inputs.apart(state)
    return y, final_state


def _add_span(
    rule: type[Span],
    total: Gradients,
    heads: Heads,
    part: slice,
    state: Tensor,
    dy: Tensor | None,
    dstate: Tensor,
) -> Tensor:
    """Add the gradients of a span; return that of the state before it."""
    inputs: Inputs = total.inputs
    span, rows = rule(inputs, heads, part), (heads.batch, part, heads.value)
    states, _ = span.forward(state)
    x = inputs.rows(inputs.x, heads, part)
    up = torch.zeros_like(x) if dy is None else inputs.rows(dy, heads, part)
    if inputs.z is not None:
        z = inputs.rows(inputs.z, heads, part)
        if total.any("z"):
            y = _before_gate(inputs, span, heads, part, states)
            total.put("z", rows, gate_gradient(up, y, z))
        up = gated(up, z)
    dvalues, dg, db, dc, dstate = span.gradients(span.chunked(up).contiguous(), states, dstate)
    for name, part_gradient in (("B", db), ("C", dc)):
        total.add(name, (heads.batch, part, heads.key), _tokens(part_gradient, span.length))
    total.add("A", heads.value, (span.dt * dg).sum((0, 3, 4)).flatten())
    if total.any("dt", "dt_bias"):
        dsteps = span.tokens((span.x * dvalues).sum(-1) + span.A * dg)
        raw = inputs.sizes.gradient(dsteps, span.raw)
        total.put("dt", rows, raw)
        total.add("dt_bias", heads.value, raw.sum((0, 1)))
    if total.any("x"):
        dx = span.tokens(dvalues.mul_(span.dt.unsqueeze(-1)))
        skip = 0 if inputs.D is None else inputs.of_heads(inputs.D, heads) * up
        total.put("x", rows, dx + skip)
    if inputs.D is not None and total.any("D"):
        part_gradient = (up * x).sum((0, 1))
        total.add("D", heads.value, part_gradient.sum(-1) if inputs.D.ndim == 1 else part_gradient)
    return dstate


def run_backward(
    rule: type[Span],
    inputs: Inputs,
    dy: Tensor | None,
    dfinal_state: Tensor | None,
    needs: dict[str, bool],
) -> Nine:
    """Some heads at a time: forward over the spans for their states, then the spans in reverse."""
    total = Gradients(inputs, needs, "x dt z initial_state")
    blocks, spans = rule.blocks(inputs)
    for heads in blocks:
        states_before = [inputs.states(heads)]
        for part in spans[:-1]:
            states_before.append(rule(inputs, heads, part).forward(states_before[-1])[1])
        dstate = torch.zeros_like(states_before[0])
        if dfinal_state is not None:
            dstate = inputs.side_by_side(dfinal_state, heads)
        for part in reversed(spans):
            dstate = _add_span(rule, total, heads, part, states_before.pop(), dy, dstate)
        total.put("initial_state", (heads.batch, heads.value), inputs.apart(dstate))
    grads: Nine = total.results()
    return grads


def implement(rule: type[Span]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the operator, by the spans of a backend."""

    def forward(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        initial_state: Tensor | None,
        first: Tensor | None,
        dt_softplus: bool,
        dt_min: float,
        dt_max: float,
        chunk: int,
        output_final_state: bool,
    ) -> tuple[Tensor, Tensor]:
        """Span after span."""
        inputs = Inputs(
            x, dt, A, B, C, D, z, dt_bias, initial_state=initial_state, first=first,
            sizes=StepSizes(dt_softplus, dt_min, dt_max), most=chunk,
        )  # fmt: skip
        return run_forward(rule, inputs, output_final_state)

    def backward(
        dy: Tensor | None,
        dfinal_state: Tensor | None,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        initial_state: Tensor | None,
        first: Tensor | None,
        dt_softplus: bool,
        dt_min: float,
        dt_max: float,
        chunk: int,
        needs_x: bool,
        needs_dt: bool,
        needs_A: bool,
        needs_B: bool,
        needs_C: bool,
        needs_D: bool,
        needs_z: bool,
        needs_dt_bias: bool,
        needs_initial_state: bool,
    ) -> Nine:
        """The spans in reverse."""
        inputs = Inputs(
            x, dt, A, B, C, D, z, dt_bias, initial_state=initial_state, first=first,
            sizes=StepSizes(dt_softplus, dt_min, dt_max), most=chunk,
        )  # fmt: skip
        needs = {
            "x": needs_x,
            "dt": needs_dt,
            "A": needs_A,
            "B": needs_B,
            "C": needs_C,
            "D": needs_D,
            "z": needs_z,
            "dt_bias": needs_dt_bias,
            "initial_state": needs_initial_state,
        }
        return run_backward(rule, inputs, dy, dfinal_state, needs)

    return forward, backward


forward, backward = implement(Span)
