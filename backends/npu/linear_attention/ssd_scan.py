"""The scan of Mamba-2 (arXiv:2405.21060) on cube cores.

The formulas are those of the reference, and what differs is as in :mod:`.chunks`: all heads at
once, and one launch per chunk in each pass over states, S' = U + z S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_multi.backends.npu.linear_attention.chunks import spans
from liger_multi.reference.common.chunking import row_blocks
from liger_multi.reference.linear_attention.chunks import Heads
from liger_multi.reference.linear_attention.ssd_scan import Inputs, Span, implement


class BatchedSpan(Span):
    """A span with states by chunks."""

    @staticmethod
    def blocks(given: Inputs) -> tuple[list[Heads], list[slice]]:
        """Blocks of as many groups of heads as possible, then spans of chunks."""
        (batch, length, many, value), (groups, size) = given.x.shape, given.B.shape[2:]
        group, chunk = many // groups, given.chunk
        head = chunk * (8 * value + 5 * chunk) + 4 * size * value
        shared = chunk * (4 * size + 3 * chunk)
        each = given.kind.itemsize * (group * head + shared)
        rows, parts = spans(length, chunk, batch * groups, each)
        blocks = [
            Heads(b, g, slice(g.start * group, g.stop * group))
            for b in row_blocks(batch, groups, rows)
            for g in row_blocks(groups, b.stop - b.start, rows)
        ]
        return blocks, parts

    @staticmethod
    def _by_chunks(x: Tensor) -> Tensor:
        """``(batch, groups, chunks, ...)`` as (chunks, batch, groups, ...)."""
        return x.movedim(2, 0).contiguous()

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """States before every chunk, and the state after the last one."""
        after = self._by_chunks(self.B.mT @ self.beside(self.values, self.r))
        last = state
        for own, z in zip(after.unbind(0), self._by_chunks(self.z).unbind(0), strict=True):
            last = own.addcmul_(z, last)
        return torch.cat([state.unsqueeze(0), after[:-1]]).movedim(0, 2), last.clone()

    def reverse(self, own: Tensor, dstate: Tensor) -> Tensor:
        """From the gradients that states have by y to those of the states after every chunk.

        Returns the gradient of the first state.

        Args:
            own: What states before every chunk get through y; overwritten.
            dstate: Gradient of the state after the span.
        """
        before, last = self._by_chunks(own), dstate
        pairs = zip(before.unbind(0), self._by_chunks(self.z).unbind(0), strict=True)
        for mine, z in reversed(list(pairs)):
            last = mine.addcmul_(z, last)
        first = last.clone()  # one chunk leaves ``before`` in the memory of ``own``
        own.copy_(torch.cat([before[1:], dstate.unsqueeze(0)]).movedim(0, 2))
        return first


forward, backward = implement(BatchedSpan)
