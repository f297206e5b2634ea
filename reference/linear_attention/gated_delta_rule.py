"""The gated delta rule (arXiv:2412.06464) by chunks of tokens (arXiv:2406.06484).

Of one head and chunk, S the state before it, D_ij = exp(G_i - G_j) for i >= j of one segment, G the
sum of the gates from the first token of the chunk or segment on, e = exp(G), r = exp(G_last - G)
and z = exp(G_last), where Q is scaled:

    L = beta_i (k_i . k_j) D_ij below the diagonal,  N = (I + L)^-1 beta (V - e K S)
    y = e Q S + ((Q K') D) N,                        S' = z S + (r K)' N

e is 0 outside of the segment that S belongs to, r outside of the last token's segment, and z where
the chunk has a boundary. So segments cost nothing, whatever their lengths.

Blocks of heads and spans of chunks bound memory. Backward keeps the state before every span, and
computes the others again. What depends on no state is computed for all chunks of a span at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from liger_multi.reference.linear_attention.chunks import (
    NORM_EPS,
    Heads,
    Inputs,
    _blocks,
    _chunked,
    _split,
    _tokens,
    heads_of,
)

# --- a span of chunks ---


class Span:
    """What of a span depends on no state. Axes: batch, key heads, group, chunks, then rows."""

    def __init__(self, given: Inputs, heads: Heads, part: slice) -> None:
        kind, chunk = given.kind, given.chunk
        self.heads, self.part, self.scale, self.normed = heads, part, given.scale, given.qk_l2norm
        count = heads.key.stop - heads.key.start
        self.group = (count, -1)
        (self.q, self.q_rstd), (self.k, self.k_rstd) = (
            self._rows(_chunked(x[heads.batch, part, heads.key], chunk, kind).unsqueeze(2))
            for x in (given.q, given.k)
        )
        self.q = self.q * given.scale
        v, g, beta = (
            _chunked(x[heads.batch, part, heads.value], chunk, kind).unflatten(1, self.group)
            for x in (given.v, given.g, given.beta)
        )
        self.v, self.beta = v, beta.unsqueeze(-1)
        seen, carried, last, whole = self._masks(given, chunk)
        self.sums = seen.to(kind)  # of gates: from the first token of a segment on
        coarse, fine = ((self.sums @ x.unsqueeze(-1)).squeeze(-1) for x in _split(g))
        total = coarse + fine
        apart, rest = (x.unsqueeze(-1) - x.unsqueeze(-2) for x in (coarse, fine))
        self.decay = apart.add_(rest).masked_fill_(~seen, -math.inf).exp_()
        self.e = (total.exp() * carried).unsqueeze(-1)
        rest = (coarse[..., -1:] - coarse) + (fine[..., -1:] - fine)
        self.r = (rest.exp() * last).unsqueeze(-1)
        self.z = (total[..., -1].exp() * whole)[..., None, None]
        self.inner = (self.k @ self.k.mT) * self.decay
        self.lower = (self.inner * self.beta).tril(-1)
        self.scores = (self.q @ self.k.mT) * self.decay

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
        return (x * rstd, rstd) if self.normed else (x, rstd)

    def _masks(self, given: Inputs, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pairs of one segment; rows of the state's segment, of the last row's; whether of both."""
        ones = given.q.new_ones(chunk, chunk, dtype=torch.bool).tril()
        if given.first is None:
            return ones, ones[-1], ones[-1], ones[-1, -1]
        begins = given.first[heads_of(given.first, self.heads), self.part]
        if more := -begins.shape[1] % chunk:
            begins = torch.cat([begins, begins[:, -1:].expand(-1, more)], 1)
        begins = begins.unflatten(1, (-1, chunk))[:, None, None]
        at = torch.arange(begins.shape[3], device=begins.device)[:, None] * chunk + self.part.start
        carried = begins < at.clamp(min=1)
        place = at + torch.arange(chunk, device=begins.device)
        seen = ones & (begins.unsqueeze(-1) <= place.unsqueeze(-2))
        return seen, carried, begins == begins[..., -1:], carried[..., -1]

    def chunks(self, backwards: bool = False) -> Iterator[int]:
        """Numbers of the chunks."""
        order = range(self.v.shape[3])
        return iter(reversed(order) if backwards else order)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States before every chunk, corrected values N, and the state after the last one."""
        states, values = self.v.new_empty(*self.v.shape[:4], *state.shape[-2:]), self.v.new_empty(
            self.v.shape
        )  # fmt: skip
        for i in self.chunks():
            k, e, beta = self.k[:, :, :, i], self.e[..., i, :, :], self.beta[..., i, :, :]
            states[..., i, :, :] = state
            right = beta * (self.v[..., i, :, :] - e * (k @ state))
            n = torch.linalg.solve_triangular(
                self.lower[..., i, :, :], right, upper=False, unitriangular=True
            )
            values[..., i, :, :] = n
            state = self.z[..., i, :, :] * state + k.mT @ (self.r[..., i, :, :] * n)
        return states, values, state

    def outputs(self, states: Tensor, values: Tensor) -> Tensor:
        """Make y of all chunks."""
        return torch.addcmul(self.scores @ values, self.e, self.q @ states)

    def reverse(self, dy: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the states after every chunk, of beta (V - e K S), and of the first state.

        Args:
            dy: Gradient of y, by chunks.
            dstate: Gradient of the state after the span.
        """
        after, solved = dstate.new_empty(*dy.shape[:4], *dstate.shape[-2:]), torch.empty_like(dy)
        local, upper, own = self.scores.mT @ dy, self.lower.mT, self.e * dy
        for i in self.chunks(backwards=True):
            k, e, beta = self.k[:, :, :, i], self.e[..., i, :, :], self.beta[..., i, :, :]
            after[..., i, :, :] = dstate
            dn = local[..., i, :, :] + self.r[..., i, :, :] * (k @ dstate)
            y = torch.linalg.solve_triangular(
                upper[..., i, :, :], dn, upper=True, unitriangular=True
            )
            solved[..., i, :, :] = y
            dstate = self.z[..., i, :, :] * dstate + self.q[:, :, :, i].mT @ own[..., i, :, :]
            dstate = dstate - k.mT @ (beta * e * y)
        return after, solved, dstate

    def gradients(
        self, dy: Tensor, states: Tensor, values: Tensor, after: Tensor, solved: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, g and beta by chunks, from what the two passes over states left."""
        dp = dy @ values.mT
        dlower = -(solved @ values.mT).tril(-1)
        pairs = dp * self.decay
        mixed = dlower * self.decay * self.beta
        from_state, back = dy @ states.mT, solved @ states.mT
        to_state = values @ after.mT
        dq = pairs @ self.k + self.e * from_state
        dk = pairs.mT @ self.q + self.r * to_state + (mixed + mixed.mT) @ self.k
        dk -= self.beta * self.e * back
        read = self.e * (self.k * back).sum(-1, keepdim=True)
        dbeta = (solved * self.v).sum(-1, keepdim=True) - read
        dbeta += (dlower * self.inner).sum(-1, keepdim=True)
        through = (dp * self.scores).tril(-1) + dlower * self.lower
        kept = (self.r * (self.k * to_state).sum(-1, keepdim=True)).squeeze(-1)
        dsums = through.sum(-1) - through.sum(-2) - kept
        dsums += (self.e * (self.q * from_state).sum(-1, keepdim=True)).squeeze(-1)
        dsums -= (self.beta * read).squeeze(-1)
        dsums[..., -1] += kept.sum(-1) + self.z[..., 0, 0] * (states * after).sum((-2, -1))
        dg = (self.sums.mT @ dsums.unsqueeze(-1)).squeeze(-1)
        dq, dk = dq.sum(2, keepdim=True) * self.scale, dk.sum(2, keepdim=True)
        if self.normed:
            dq = self._norm_gradient(dq, self.q / self.scale, self.q_rstd)
            dk = self._norm_gradient(dk, self.k, self.k_rstd)
        return dq.squeeze(2), dk.squeeze(2), self.beta * solved, dg, dbeta.squeeze(-1)

    @staticmethod
    def _norm_gradient(dy: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
        return rstd * (dy - y * (y * dy).sum(-1, keepdim=True))


# --- the operator ---


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Optional[Tensor],
    first: Optional[Tensor], scale: float, qk_l2norm: bool, output_final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Some heads at a time, span after span."""
    given = Inputs(q, k, v, g, beta, initial_state, first, scale, qk_l2norm)
    y = v.new_empty(v.shape)
    batch, _, heads, value = v.shape
    shape = (batch, heads, k.shape[3], value) if output_final_state else (0,)
    final_state = v.new_empty(shape, dtype=given.kind)
    blocks, spans = _blocks(given)
    for block in blocks:
        state = given.states(block)
        for part in spans:
            span = Span(given, block, part)
            states, values, state = span.forward(state)
            made = span.outputs(states, values).flatten(1, 2)
            y[block.batch, part, block.value] = _tokens(made, part.stop - part.start).to(y.dtype)
        if output_final_state:
            final_state[block.batch, block.value] = state.flatten(1, 2)
    return y, final_state


def backward(
    dy: Optional[Tensor], dfinal_state: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor,
    g: Tensor, beta: Tensor, initial_state: Optional[Tensor], first: Optional[Tensor],
    scale: float, qk_l2norm: bool, needs_q: bool, needs_k: bool, needs_v: bool, needs_g: bool,
    needs_beta: bool, needs_initial_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Some heads at a time: forward over the spans for their states, then the spans in reverse."""
    given = Inputs(q, k, v, g, beta, initial_state, first, scale, qk_l2norm)
    needs = (needs_q, needs_k, needs_v, needs_g, needs_beta)
    inputs = zip((q, k, v, g, beta), needs, strict=True)
    made = [x.new_empty(x.shape if needed else 0) for x, needed in inputs]
    dinitial = q.new_empty(0)
    if initial_state is not None:
        dinitial = initial_state.new_empty(initial_state.shape if needs_initial_state else 0)
    blocks, spans = _blocks(given)
    for block in blocks:
        before = [given.states(block)]
        for part in spans[:-1]:
            before.append(Span(given, block, part).forward(before[-1])[2])
        dstate = torch.zeros_like(before[0])
        if dfinal_state is not None:
            mine = dfinal_state[block.batch, block.value].to(given.kind)
            dstate = mine.unflatten(1, (block.key.stop - block.key.start, -1))
        for part in reversed(spans):
            dstate = _span_backward(given, block, part, before.pop(), dy, dstate, made)
        if initial_state is not None and needs_initial_state:
            dinitial[block.batch, block.value] = dstate.flatten(1, 2).to(dinitial.dtype)
    return made[0], made[1], made[2], made[3], made[4], dinitial


def _span_backward(
    given: Inputs, block: Heads, part: slice, state: Tensor, dy: Optional[Tensor], dstate: Tensor,
    made: list[Tensor],
) -> Tensor:  # fmt: skip
    """Write the gradients of a span into ``made``; return that of the state before it."""
    span, length = Span(given, block, part), part.stop - part.start
    states, values, _ = span.forward(state)
    up = torch.zeros_like(span.v)
    if dy is not None:
        mine = _chunked(dy[block.batch, part, block.value], given.chunk, given.kind)
        up = mine.unflatten(1, span.group)
    after, solved, dstate = span.reverse(up, dstate)
    found = span.gradients(up, states, values, after, solved)
    for i, (gradient, room) in enumerate(zip(found, made, strict=True)):
        if room.numel():
            where = block.key if i < 2 else block.value
            whole = gradient if i < 2 else gradient.flatten(1, 2)
            room[block.batch, part, where] = _tokens(whole, length).to(room.dtype)
    return dstate
