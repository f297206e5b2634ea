"""Delta rules and Mamba-2 as batched matmuls of whole chunks, for the cube cores.

The formulas are those of the reference, :mod:`liger_multi.reference.linear_attention.chunks`. What
differs is how many launches they take, and which:

* All heads of all sequences are computed at once, and spans of chunks bound memory. The launches
  of a step over chunks are shared by the heads, so that their number grows with T / 64 alone.
* A delta rule's chunk maps the state linearly, S' = T S + U with T = z - (r K)' W and U = (r K)' A
  beta V. T and U of all chunks of a span are made at once, and the pass over states is one matmul
  per chunk: S' = U + T S. So is its gradient, dS = V + T' dS' with V = (e Q)' dy - W' P' dy.
* (I + L)^-1 of a unit triangular matrix grows from blocks of single rows, two matmuls of whole
  chunks per doubling, and no solver of triangular systems.
"""

import math

import torch
from torch import Tensor

from liger_multi.reference.linear_attention.chunks import (
    Heads,
    Inputs,
    Span,
    head_blocks,
    token_spans,
)
from liger_multi.reference.linear_attention.isolation import doubled, spread, where_true

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
    fewest = max(1, math.isqrt(chunks))
    count = max(1, min(rows, BUDGET // (fewest * row_bytes)))
    steps = min(chunks, max(fewest, BUDGET // (count * row_bytes)))
    return count, token_spans(length, chunk, steps)


def _add_passed_state(added: Tensor, move: Tensor, state: Tensor, passes: Tensor | None) -> Tensor:
    """Add ``move @ state`` to ``added`` in place, for chunks that the state passes."""
    if passes is None:
        return added.baddbmm_(move, state)
    return added.add_(where_true(move @ state, passes))


class Batched(Span):
    """A span of a delta rule with one matmul per chunk in each pass over states."""

    move: Tensor

    @classmethod
    def blocks(cls, inputs: Inputs) -> tuple[list[Heads], list[slice]]:
        """Blocks of as many heads as possible, then spans of chunks."""
        (batch, length, heads, size), (value, chunk) = (
            inputs.k.shape,
            (inputs.v.shape[3], inputs.chunk),
        )
        group = inputs.v.shape[2] // heads
        floats = cls.floats(chunk, size, value) + 3 * size * (size + value)
        head_bytes = inputs.acc_dtype.itemsize * group * floats
        count, parts = spans(length, chunk, batch * heads, head_bytes)
        return head_blocks(batch, heads, group, 1, count), parts

    @staticmethod
    def invert(lower: Tensor, visible: Tensor) -> Tensor:
        """``(I + lower)^-1``, by doubling blocks."""
        return doubled(lower, visible)

    @staticmethod
    def _by_chunks(x: Tensor) -> Tensor:
        """``(batch, key heads, group, chunks, ...)`` as (chunks, heads, ...)."""
        return x.flatten(0, 2).transpose(0, 1).contiguous()

    def _by_heads(self, x: Tensor) -> Tensor:
        """The inverse of :func:`_by_chunks`: (batch, key heads, group, chunks, ...)."""
        heads: Tensor = x.transpose(0, 1).unflatten(0, self.v.shape[:3])
        return heads

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States before every chunk, corrected values N, and the state after the last one."""
        sight, rows, first = self.sight, self.kept.mT, state.flatten(0, 2)
        n = spread(self.inverse, self.beta * self.v, sight.visible)
        eye = torch.eye(rows.shape[-2], dtype=n.dtype, device=n.device)
        self.move = self._by_chunks(sight.over(self.z * eye - rows @ sight.of_last(self.w)))
        states_after, last = self._by_chunks(rows @ sight.of_last(n)), first
        for added, move, passes in zip(
            states_after.unbind(0), self.move.unbind(0), self._whole(), strict=True
        ):
            last = _add_passed_state(added, move, last, passes)
        states = self._by_heads(torch.cat([first.unsqueeze(0), states_after[:-1]]))
        n = n - sight.of_state(self.w @ states)
        return states, n, last.clone().unflatten(0, n.shape[:3])

    def _whole(self) -> list[Tensor | None]:
        """Whether the state passes each chunk, broadcast over all heads."""
        masks = self.sight.by_chunks(self.v.shape[:4])
        return [passes for _, _, passes in masks]

    def reverse(self, dy: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the states after every chunk, X, and that of the first state.

        Args:
            dy: Gradient of y, by chunks.
            dstate: Gradient of the state after the span.
        """
        sight, columns = self.sight, self.sight.visible.mT
        dn, last = spread(self.scores.mT, dy, columns), dstate.flatten(0, 2)
        dstates_by_chunk = self._by_chunks(self.to_state(dy) - self.w.mT @ sight.of_state(dn))
        first = last
        steps = zip(dstates_by_chunk.unbind(0), self.move.unbind(0), self._whole(), strict=True)
        for own_state, move, passes in reversed(list(steps)):
            first = _add_passed_state(own_state, move.mT, first, passes)
        dstates = self._by_heads(torch.cat([dstates_by_chunk[1:], last.unsqueeze(0)]))
        solved = spread(self.inverse.mT, dn + sight.of_last(self.kept @ dstates), columns)
        return dstates, solved, first.clone().unflatten(0, dn.shape[:3])
