"""Delta rules by chunks of tokens (arXiv:2406.06484), with gates per head or per channel.

Of one value head and chunk: S is the state before it, G the sum of the gates from the chunk's first
token on, e = exp(G), r = exp(G_last - G) and z = exp(G_last), each with an entry for every channel
of a key, or for all of them. P are the scores of the scaled queries and the keys, B those of the
keys alone below the diagonal, both with the decay between the two tokens:

    A = (I + beta B)^-1,  W = A beta (e K),  N = A beta V - W S
    y = (e Q) S + P N,    S' = z S + (r K)' N

e is 0 outside of the segment that S belongs to, r outside of the last token's segment, z where the
chunk has a boundary, and P and B between segments. So segments cost nothing, whatever their
lengths. Masks replace what they hide (:mod:`.isolation`), and do not multiply it: a NaN or inf
reaches the later tokens of its own segment. Backward, from the gradients dy and dS' (of the state
after the chunk):

    dN = P' dy + (r K) dS',    dS = z dS' + (e Q)' dy - W' dN,    X = A' dN
    dP = dy N',  dB = -beta X N' below the diagonal,  dV = beta X

Blocks of heads and spans of chunks bound memory. Backward keeps the state before every span, and
computes the others again. What depends on no state is computed for all chunks of a span at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.reference.common.chunking import BLOCK_BYTES, row_blocks, statistics_dtype
from liger_multi.reference.linear_attention.isolation import (
    solved,
    spread,
    spread_vector,
    where_true,
)

CHUNK = 64  # a power of two
NORM_EPS = 1e-6  # of the l2 norm
GONE = {torch.float32: -110.0, torch.float64: -800.0}  # gates below have an exponential of 0
STEP = 2.0**-10  # of a chunk's gates above ``GONE``, multiples of it have exact sums in fp32


# --- parts of the tensors ---


class Heads(NamedTuple):
    """A block of sequences and of key heads with their value heads."""

    batch: slice
    key: slice
    value: slice


class Inputs(NamedTuple):
    """The tensors of a call, and its options."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    first: Tensor | None
    scale: float
    qk_l2norm: bool

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of all that is computed."""
        return statistics_dtype(self.q.dtype)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk, a power of two."""
        return min(CHUNK, 1 << max(0, self.q.shape[1] - 1).bit_length())

    def states(self, heads: Heads) -> Tensor:
        """The states before the first token, ``(batch, key heads, group, K, V)``."""
        state, v = self.initial_state, self.v[heads.batch, :, heads.value]
        count = heads.key.stop - heads.key.start
        if state is None:
            shape = (v.shape[0], count, v.shape[2] // count, self.k.shape[3], v.shape[3])
            return v.new_zeros(shape, dtype=self.acc_dtype)
        initial: Tensor = (
            state[heads.batch, heads.value].to(self.acc_dtype).unflatten(1, (count, -1))
        )
        return initial


def head_blocks(
    batch: int, heads: int, group: int, head_bytes: int, limit: int, width: int = 0
) -> list[Heads]:
    """Blocks of sequences and heads of at most ``limit`` bytes.

    Args:
        batch: Sequences.
        heads: Key heads.
        group: Value heads of each.
        head_bytes: What a key head takes.
        limit: Of a block.
        width: Value heads that a block takes of each of its key heads; all by default.
    """
    width = width or group
    return [
        Heads(b, h, slice(v, min(v + width * (h.stop - h.start), h.stop * group)))
        for b in row_blocks(batch, heads * head_bytes, limit)
        for h in row_blocks(heads, (b.stop - b.start) * head_bytes, limit)
        for v in range(h.start * group, h.stop * group, width * (h.stop - h.start))
    ]


def token_spans(length: int, chunk: int, steps: int) -> list[slice]:
    """Spans of about as many tokens, ``steps`` chunks at most."""
    chunks = max(1, -(-length // chunk))
    span = -(-chunks // -(-chunks // steps)) * chunk
    return [slice(t, min(length, t + span)) for t in range(0, length, span)]


def _blocks(inputs: Inputs, floats: int) -> tuple[list[Heads], list[slice]]:
    """Blocks of heads, and spans of chunks.

    A span has as many chunks as fit for one head, and at least about as many as there are spans.

    Args:
        inputs: The tensors.
        floats: What a chunk of a value head takes in memory, in numbers.
    """
    batch, length, heads, _ = inputs.k.shape
    group, chunk = inputs.v.shape[2] // heads, inputs.chunk
    chunks, unit = max(1, -(-length // chunk)), inputs.acc_dtype.itemsize * group * floats
    spans = token_spans(length, chunk, min(chunks, max(8, math.isqrt(chunks), BLOCK_BYTES // unit)))
    steps = max((-(-(span.stop - span.start) // chunk) for span in spans), default=1)
    return head_blocks(batch, heads, group, steps * unit, BLOCK_BYTES), spans


def _chunked(x: Tensor, chunk: int, acc_dtype: torch.dtype) -> Tensor:
    """``(batch, tokens, heads, ...)`` as (batch, heads, chunks, chunk, ...), zeros at the end."""
    wide = x.to(acc_dtype)
    if padding := -x.shape[1] % chunk:
        wide = F.pad(wide, (0, 0) * (x.ndim - 2) + (0, padding))
    return wide.reshape(wide.shape[0], -1, chunk, *wide.shape[2:]).movedim(3, 1)


def _split(g: Tensor) -> tuple[Tensor, Tensor]:
    """Gates as multiples of ``STEP``, whose sums are exact, and small rests.

    So the difference of two sums is as accurate as the gates between them, however strong those
    before.
    """
    g = g.clamp(min=GONE[g.dtype])
    coarse = (g / STEP).floor() * STEP
    return coarse, g - coarse


def _tokens(x: Tensor, length: int) -> Tensor:
    """Back to (batch, tokens, heads, ...)."""
    return x.movedim(1, 3).flatten(1, 2)[:, :length]


def heads_of(first: Tensor, heads: Heads) -> slice:
    """The sequences of a block; segments may be those of all."""
    return slice(None) if first.shape[0] == 1 else heads.batch


def _starts(first: Tensor | None, heads: Heads, part: slice, chunk: int) -> Tensor | None:
    """In which row of its chunk the segment of each row begins, -1 if before the chunk.

    Of shape (batch or 1, 1, 1, chunks, chunk). The segment of the first token of all has the
    initial state, and counts as one that began before.
    """
    if first is None:
        return None
    begins = first[heads_of(first, heads), part]
    if padding := -begins.shape[1] % chunk:
        begins = torch.cat([begins, begins[:, -1:].expand(-1, padding)], 1)
    begins = begins.unflatten(1, (-1, chunk))[:, None, None]
    chunk_start = torch.arange(begins.shape[3], device=begins.device)[:, None] * chunk + part.start
    starts: Tensor = (begins - chunk_start).masked_fill(begins == 0, -1).clamp(min=-1)
    return starts


class Sight:
    """Which rows of a chunk see which, and who belongs to the states around it.

    Attributes:
        visible: Bool (..., i, j): row i sees row j, which is not after it and of its segment.
        below: The same without the diagonal.
        same: Rows of one segment.
        carried: Rows of the segment of the state before the chunk; None for all of them.
        last: Rows of the last row's segment; None for all.
        whole: Whether the chunk is of one segment, that of the state before it; None if all are.
    """

    def __init__(self, chunk: int, starts: Tensor | None, device: torch.device) -> None:
        row = torch.arange(chunk, device=device)
        self.visible: Tensor = row.unsqueeze(-1) >= row
        self.carried: Tensor | None = None
        self.last: Tensor | None = None
        self.whole: Tensor | None = None
        if starts is not None:
            self.visible = self.visible & (starts.unsqueeze(-1) <= row)
            self.carried, self.last = starts < 0, starts == starts[..., -1:]
            self.whole = starts[..., -1] < 0
        self.below = self.visible.tril(-1)
        self.same = self.visible | self.visible.mT

    def of_state(self, rows: Tensor) -> Tensor:
        """Rows (..., chunk, columns) of the segment of the state before."""
        return where_true(rows, None if self.carried is None else self.carried.unsqueeze(-1))

    def of_last(self, rows: Tensor) -> Tensor:
        """Rows of the segment of the state after."""
        return where_true(rows, None if self.last is None else self.last.unsqueeze(-1))

    def by_chunks(
        self, shape: torch.Size
    ) -> list[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Of every chunk what masks the rows of both states, and what passes.

        Args:
            shape: The leading axes, of which those before chunks become one.
        """
        if self.carried is None or self.last is None or self.whole is None:
            return [(None, None, None)] * shape[-1]
        masks = (self.carried[..., None], self.last[..., None], self.whole[..., None, None])
        parts = (m.expand(*shape, *m.shape[len(shape) :]).flatten(0, len(shape) - 2) for m in masks)
        return list(zip(*(part.unbind(1) for part in parts), strict=True))

    def over(self, x: Tensor) -> Tensor:
        """What has two axes for a chunk, of chunks that a state passes."""
        return where_true(x, None if self.whole is None else self.whole[..., None, None])


class HeadDecays:
    """Decays of gates that are numbers, from differences of exact sums.

    Attributes:
        e: From before the chunk to each row, 0 outside of the segment of the state there.
        r: From each row to the last one, 0 outside of its segment.
        z: Over the chunk, 0 if there is a boundary in it.
    """

    def __init__(self, g: Tensor, sight: Sight) -> None:
        self.sight, self.sums = sight, sight.visible.to(g.dtype)  # from a segment's first token on
        coarse, fine = (spread_vector(self.sums, x, sight.visible) for x in _split(g))
        self.coarse, self.fine = coarse, fine
        e = (coarse + fine).exp()
        to_end = (coarse[..., -1:] - coarse) + (fine[..., -1:] - fine)
        if sight.last is not None:
            # from a row of another segment it may be anything, and its exponential infinite
            to_end = to_end.masked_fill(~sight.last, -math.inf)
        self.e, self.z, self.r = (
            where_true(e, sight.carried),
            where_true(e[..., -1], sight.whole),
            to_end.exp(),
        )

    def pairs(self) -> Tensor:
        """From row j to a row i that is not before it, 0 between segments."""
        coarse, fine = (x.unsqueeze(-1) - x.unsqueeze(-2) for x in (self.coarse, self.fine))
        return coarse.add_(fine).masked_fill_(~self.sight.visible, -math.inf).exp_()

    def gradient(self, through: Tensor, de: Tensor, dr: Tensor, dz: Tensor) -> Tensor:
        """Gradients of the gates, each a sum of what decays by it: no sums are subtracted.

        A gate is in the decay from tokens before it to itself and to those after it.

        Args:
            through: Gradient of the logarithm of the pairs' decay, below the diagonal.
            de: Gradient of the logarithm of e.
            dr: The same of r.
            dz: The same of z.
        """
        suffix_sums, visible = self.sums.mT, self.sight.visible.mT
        dg: Tensor = spread(suffix_sums, through, visible).tril_(-1).sum(-1)
        dg += spread_vector(suffix_sums, de, visible) + dz.unsqueeze(-1)
        return dg.add_(F.pad(dr[..., :-1], (1, 0)).cumsum(-1))


# --- a span of chunks ---


class Span:
    """The tensors of a span. Axes: batch, key heads, group, chunks, then rows.

    A delta rule says how its gates become decays: :meth:`decays` and :meth:`through`.
    """

    e: Tensor
    r: Tensor
    z: Tensor
    scores: Tensor
    inner: Tensor

    def __init__(self, inputs: Inputs, heads: Heads, part: slice) -> None:
        acc_dtype, chunk = inputs.acc_dtype, inputs.chunk
        self.scale, self.normed = inputs.scale, inputs.qk_l2norm
        self.group = (heads.key.stop - heads.key.start, -1)
        (self.q, self.q_rstd), (self.k, self.k_rstd) = (
            self._rows(_chunked(x[heads.batch, part, heads.key], chunk, acc_dtype).unsqueeze(2))
            for x in (inputs.q, inputs.k)
        )
        self.rows, self.q = self.q, self.q * inputs.scale
        self.v, g, beta = (
            _chunked(x[heads.batch, part, heads.value], chunk, acc_dtype).unflatten(1, self.group)
            for x in (inputs.v, inputs.g, inputs.beta)
        )
        self.beta = beta.unsqueeze(-1)
        self.starts = _starts(inputs.first, heads, part, chunk)
        self.sight = Sight(chunk, self.starts, self.v.device)
        self.decays(g)
        self.inverse = self.invert(self.inner * self.beta, self.sight.visible)
        decayed_keys = self.sight.of_state(self.beta * self.e * self.k)
        self.w = self.sight.of_state(spread(self.inverse, decayed_keys, self.sight.visible))
        self.kept = self.sight.of_last(self.r * self.k)

    @staticmethod
    def floats(chunk: int, size: int, value: int) -> int:
        """What a chunk of a head takes in memory, in numbers."""
        raise NotImplementedError

    @classmethod
    def blocks(cls, inputs: Inputs) -> tuple[list[Heads], list[slice]]:
        """Blocks of heads, and spans of chunks."""
        return _blocks(inputs, cls.floats(inputs.chunk, inputs.k.shape[3], inputs.v.shape[3]))

    @staticmethod
    def invert(lower: Tensor, visible: Tensor) -> Tensor:
        """``(I + lower)^-1`` of what is 0 on and above the diagonal."""
        return solved(lower, visible)

    def decays(self, g: Tensor) -> None:
        """Set e, r and z, P as ``scores`` and B as ``inner``, from the gates."""
        raise NotImplementedError

    def through(
        self, dp: Tensor, db: Tensor, de: Tensor, dr: Tensor, dz: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What q and k get through P and B, and the gradient of the gates.

        Args:
            dp: Gradient of P.
            db: Gradient of B.
            de: Gradient of the logarithm of e for every channel.
            dr: The same of r.
            dz: The same of z.
        """
        raise NotImplementedError

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
        return (x * rstd, rstd) if self.normed else (x, rstd)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States before every chunk, corrected values N, and the state after the last one."""
        n = spread(self.inverse, self.beta * self.v, self.sight.visible)
        values, w, rows, z, state = (x.flatten(0, 2) for x in (n, self.w, self.kept, self.z, state))
        states = n.new_empty(state.shape[0], n.shape[3], *state.shape[1:])
        for i, (reads_state, last, passes) in enumerate(self.sight.by_chunks(n.shape[:4])):
            states[:, i], corrected = state, values[:, i]
            corrected.sub_(where_true(w[:, i] @ state, reads_state))
            state = torch.baddbmm(
                where_true(z[:, i] * state, passes), rows[:, i].mT, where_true(corrected, last)
            )
        return states.unflatten(0, n.shape[:3]), n, state.unflatten(0, n.shape[:3])

    def outputs(self, states: Tensor, values: Tensor) -> Tensor:
        """Make y of all chunks."""
        y = spread(self.scores, values, self.sight.visible)
        return y.add_(self.sight.of_state((self.e * self.q) @ states))

    def to_state(self, dy: Tensor) -> Tensor:
        """What the states before every chunk get through y."""
        return self.sight.of_state(self.e * self.q).mT @ self.sight.of_state(dy)

    def reverse(self, dy: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the states after every chunk, X, and that of the first state.

        Args:
            dy: Gradient of y, by chunks.
            dstate: Gradient of the state after the span.
        """
        columns = self.sight.visible.mT
        dn, dstate_by_y = spread(self.scores.mT, dy, columns), self.to_state(dy)
        values, dstate_by_y, w, rows, z, dstate = (
            x.flatten(0, 2) for x in (dn, dstate_by_y, self.w, self.kept, self.z, dstate)
        )
        dstates = torch.empty_like(dstate_by_y)
        masks = list(enumerate(self.sight.by_chunks(dn.shape[:4])))
        for i, (reads_state, last, passes) in reversed(masks):
            dstates[:, i], dvalues = dstate, values[:, i]
            dvalues.add_(where_true(rows[:, i] @ dstate, last))
            dstate = dstate_by_y[:, i] + where_true(z[:, i] * dstate, passes)
            dstate.baddbmm_(w[:, i].mT, where_true(dvalues, reads_state), alpha=-1)
        shape = dn.shape[:3]
        corrections = spread(self.inverse.mT, dn, columns)
        return dstates.unflatten(0, shape), corrections, dstate.unflatten(0, shape)

    def gradients(
        self, dy: Tensor, states: Tensor, values: Tensor, dstates: Tensor, solved: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, g and beta by chunks, from what the two passes over states left."""
        sight = self.sight
        dlower = -(solved @ values.mT).masked_fill_(~sight.below, 0)
        dq = sight.of_state(self.e * (dy @ states.mT))
        dk = sight.of_last(self.r * (values @ dstates.mT))
        dkeys = sight.of_state(self.e * (solved @ states.mT))
        dbeta = (solved * self.v).sum(-1, keepdim=True) - (self.k * dkeys).sum(-1, keepdim=True)
        dbeta += (dlower * self.inner).sum(-1, keepdim=True)
        dkeys *= self.beta
        dz = sight.over(self.z * states * dstates).sum(-1)
        more_q, more_k, dg = self.through(
            (dy @ values.mT).masked_fill_(~sight.visible, 0),
            dlower.mul_(self.beta).masked_fill_(~sight.below, 0),
            sight.of_state(self.q * dq - self.k * dkeys),
            sight.of_last(self.k * dk),
            dz,
        )
        dq, dk = dq.add_(more_q), dk.add_(more_k).sub_(dkeys)
        dq, dk = dq.sum(2, keepdim=True) * self.scale, dk.sum(2, keepdim=True)
        if self.normed:
            dq = self._norm_gradient(dq, self.rows, self.q_rstd)
            dk = self._norm_gradient(dk, self.k, self.k_rstd)
        return dq.squeeze(2), dk.squeeze(2), self.beta * solved, dg, dbeta.squeeze(-1)

    @staticmethod
    def _norm_gradient(dy: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
        return rstd * (dy - y * (y * dy).sum(-1, keepdim=True))


# --- an operator ---


def run_forward(
    rule: type[Span], inputs: Inputs, output_final_state: bool
) -> tuple[Tensor, Tensor]:
    """Some heads at a time, span after span."""
    v, size = inputs.v, inputs.k.shape[3]
    y, (batch, _, heads, value) = v.new_empty(v.shape), v.shape
    shape = (batch, heads, size, value) if output_final_state else (0,)
    final_state = v.new_empty(shape, dtype=inputs.acc_dtype)
    blocks, spans = rule.blocks(inputs)
    for block in blocks:
        state = inputs.states(block)
        for part in spans:
            span = rule(inputs, block, part)
            states, values, state = span.forward(state)
            y_part = span.outputs(states, values).flatten(1, 2)
            y[block.batch, part, block.value] = _tokens(y_part, part.stop - part.start).to(y.dtype)
        if output_final_state:
            final_state[block.batch, block.value] = state.flatten(1, 2)
    return y, final_state


def run_backward(
    rule: type[Span],
    inputs: Inputs,
    dy: Tensor | None,
    dfinal_state: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Some heads at a time: forward over the spans for their states, then the spans in reverse.

    Args:
        rule: The spans of the operator.
        inputs: The tensors.
        dy: Gradient of y.
        dfinal_state: Gradient of the final state.
        needs: Whether q, k, v, g, beta and the initial state need gradients.
    """
    gradients = [
        x.new_empty(x.shape if n else 0) for x, n in zip(inputs[:5], needs[:5], strict=True)
    ]
    initial = inputs.initial_state
    dinitial = inputs.q.new_empty(0)
    if initial is not None:
        dinitial = initial.new_empty(initial.shape if needs[5] else 0)
    blocks, spans = rule.blocks(inputs)
    for block in blocks:
        states_before = [inputs.states(block)]
        for part in spans[:-1]:
            states_before.append(rule(inputs, block, part).forward(states_before[-1])[2])
        dstate = torch.zeros_like(states_before[0])
        if dfinal_state is not None:
            dstate = dfinal_state[block.batch, block.value].to(inputs.acc_dtype)
            dstate = dstate.unflatten(1, (block.key.stop - block.key.start, -1))
        for part in reversed(spans):
            span = rule(inputs, block, part)
            dstate = _span_backward(span, block, part, states_before.pop(), dy, dstate, gradients)
        if initial is not None and needs[5]:
            dinitial[block.batch, block.value] = dstate.flatten(1, 2).to(dinitial.dtype)
    return gradients[0], gradients[1], gradients[2], gradients[3], gradients[4], dinitial


def _span_backward(
    span: Span,
    block: Heads,
    part: slice,
    state: Tensor,
    dy: Tensor | None,
    dstate: Tensor,
    out: list[Tensor],
) -> Tensor:
    """Write the gradients of a span into ``out``; return that of the state before it."""
    length = part.stop - part.start
    states, values, _ = span.forward(state)
    up = torch.zeros_like(span.v)
    if dy is not None:
        up = _chunked(dy[block.batch, part, block.value], span.v.shape[4], span.v.dtype)
        up = up.unflatten(1, span.group)
    dstates, solved, dstate = span.reverse(up, dstate)
    parts = span.gradients(up, states, values, dstates, solved)
    for i, (gradient, buffer) in enumerate(zip(parts, out, strict=True)):
        if buffer.numel():
            heads_of_block = block.key if i < 2 else block.value
            heads_gradient = gradient if i < 2 else gradient.flatten(1, 2)
            buffer[block.batch, part, heads_of_block] = _tokens(heads_gradient, length).to(
                buffer.dtype
            )
    return dstate


def implement(rule: type[Span]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of a delta rule."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        first: Tensor | None,
        scale: float,
        qk_l2norm: bool,
        output_final_state: bool,
    ) -> tuple[Tensor, Tensor]:
        """Span after span."""
        inputs = Inputs(q, k, v, g, beta, initial_state, first, scale=scale, qk_l2norm=qk_l2norm)
        return run_forward(rule, inputs, output_final_state)

    def backward(
        dy: Tensor | None,
        dfinal_state: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        first: Tensor | None,
        scale: float,
        qk_l2norm: bool,
        needs_q: bool,
        needs_k: bool,
        needs_v: bool,
        needs_g: bool,
        needs_beta: bool,
        needs_initial_state: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The spans in reverse."""
        inputs = Inputs(q, k, v, g, beta, initial_state, first, scale=scale, qk_l2norm=qk_l2norm)
        needs = (needs_q, needs_k, needs_v, needs_g, needs_beta, needs_initial_state)
        return run_backward(rule, inputs, dy, dfinal_state, needs)

    return forward, backward
