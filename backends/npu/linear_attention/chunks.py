"""Delta rules and Mamba-2 as batched matmuls of whole chunks, for the cube cores.

The formulas are those of the reference, :mod:`liger_multi.reference.linear_attention.chunks`. What
differs is how many launches they take, and which:

* All heads of all sequences are computed at once, and spans of chunks bound memory. The launches
  of a step over chunks are shared by the heads, so that their number grows with T / 64 alone.
* A delta rule's chunk maps the state linearly, S' = T S + U with T = z - (r K)' W and U = (r K)' A
  beta V. T and U of all chunks of a span are made at once, and the pass over states is one matmul
  per chunk: S' = U + T S. So is its gradient, dS = V + T' dS' with V = (e Q)' dy - W' P' dy.
* (I + L)^-1 of a unit triangular matrix grows from blocks of single rows: two blocks A and C of s
  rows with B below A have the inverse of 2 s rows with -C^-1 B A^-1 below A^-1. Where X holds the
  inverses of the blocks, and B the blocks below them, that is X - X B X: two matmuls of whole
  chunks per doubling, and no solver of triangular systems.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks
from liger_multi.reference.linear_attention.chunks import Heads, Inputs, Span

BUDGET = 2**30  # bytes of temporaries of a span; the chips have 32 GiB and more


def spans(length: int, chunk: int, rows: int, row_bytes: int) -> tuple[int, list[slice]]:
    """How many of ``rows`` to compute at once, and spans of tokens.

    All of them, if at least about as many chunks as there are spans fit then.

    Args:
        length: Tokens.
        chunk: Tokens of a chunk.
        rows: Heads of sequences, or sequences.
        row_bytes: What a chunk of one takes.
    """
    chunks = max(1, -(-length // chunk))
    least = max(1, math.isqrt(chunks))
    many = max(1, min(rows, BUDGET // (least * row_bytes)))
    steps = min(chunks, max(least, BUDGET // (many * row_bytes)))
    each = -(-chunks // -(-chunks // steps)) * chunk
    return many, [slice(t, min(length, t + each)) for t in range(0, length, each)]


def levels(chunk: int, device: torch.device) -> Tensor:
    """Pairs of rows whose blocks of 1, 2, 4 ... rows are neighbors, the later one first.

    Bool, (log2(chunk), chunk, chunk); together, every pair below the diagonal once.
    """
    sizes = 2 ** torch.arange(chunk.bit_length() - 1, device=device).unsqueeze(-1)
    half = torch.arange(chunk, device=device) // sizes
    pair = half // 2
    same: Tensor = pair.unsqueeze(-1) == pair.unsqueeze(-2)
    return same & (half.unsqueeze(-1) > half.unsqueeze(-2))


class Batched(Span):
    """A span of a delta rule with one matmul per chunk in each pass over states."""

    move: Tensor

    @classmethod
    def blocks(cls, given: Inputs) -> tuple[list[Heads], list[slice]]:
        """Blocks of as many heads as possible, then spans of chunks."""
        (batch, length, heads, size), (value, chunk) = (
            given.k.shape,
            (given.v.shape[3], given.chunk),
        )
        group = given.v.shape[2] // heads
        floats = cls.floats(chunk, size, value) + 3 * size * (size + value)
        each = given.kind.itemsize * group * floats
        many, parts = spans(length, chunk, batch * heads, each)
        blocks = [
            Heads(b, h, slice(h.start * group, h.stop * group))
            for b in row_blocks(batch, heads, many)
            for h in row_blocks(heads, b.stop - b.start, many)
        ]
        return blocks, parts

    @staticmethod
    def invert(lower: Tensor) -> Tensor:
        """``(I + lower)^-1``, by doubling blocks."""
        chunk = lower.shape[-1]
        below = lower.flatten(0, -3)
        found = torch.eye(chunk, dtype=lower.dtype, device=lower.device).expand_as(below)
        for i, mask in enumerate(levels(chunk, lower.device).unbind(0)):
            part = below * mask
            found = torch.baddbmm(found, found @ part, found, alpha=-1) if i else found - part
        return found.reshape(lower.shape)

    @staticmethod
    def _by_chunks(x: Tensor) -> Tensor:
        """``(batch, key heads, group, chunks, ...)`` as (chunks, heads, ...)."""
        return x.flatten(0, 2).transpose(0, 1).contiguous()

    def _by_heads(self, x: Tensor) -> Tensor:
        """Back to (batch, key heads, group, chunks, ...)."""
        made: Tensor = x.transpose(0, 1).unflatten(0, self.v.shape[:3])
        return made

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States before every chunk, corrected values N, and the state after the last one."""
        n, kept, first = self.inverse @ (self.beta * self.v), self.kept.mT, state.flatten(0, 2)
        eye = torch.eye(kept.shape[-2], dtype=n.dtype, device=n.device)
        self.move = self._by_chunks(self.z * eye - kept @ self.w)
        after, last = self._by_chunks(kept @ n), first
        for own, move in zip(after.unbind(0), self.move.unbind(0), strict=True):
            last = own.baddbmm_(move, last)
        states = self._by_heads(torch.cat([first.unsqueeze(0), after[:-1]]))
        return states, n - self.w @ states, last.clone().unflatten(0, n.shape[:3])

    def reverse(self, dy: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the states after every chunk, X, and that of the first state.

        Args:
            dy: Gradient of y, by chunks.
            dstate: Gradient of the state after the span.
        """
        dn, last = self.scores.mT @ dy, dstate.flatten(0, 2)
        own = self._by_chunks((self.e * self.q).mT @ dy - self.w.mT @ dn)
        before = last
        for mine, move in reversed(list(zip(own.unbind(0), self.move.unbind(0), strict=True))):
            before = mine.baddbmm_(move.mT, before)
        after = self._by_heads(torch.cat([own[1:], last.unsqueeze(0)]))
        solved = self.inverse.mT @ (dn + self.kept @ after)
        return after, solved, before.clone().unflatten(0, dn.shape[:3])
