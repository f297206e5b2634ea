"""The scan of Mamba-2 (arXiv:2405.21060) on cube cores.

The formulas are those of the reference, and what differs is as in :mod:`.chunks`: all heads at
once, and one launch per chunk in each pass over states, S' = U + z S.
"""

import torch
from torch import Tensor

from liger_multi.backends.npu.linear_attention.chunks import spans
from liger_multi.reference.linear_attention.chunks import Heads, head_blocks
from liger_multi.reference.linear_attention.isolation import kept
from liger_multi.reference.linear_attention.ssd_scan import Inputs, Span, implement


def _passed(own: Tensor, state: Tensor, z: Tensor, whole: Tensor | None) -> Tensor:
    """Add ``z state`` to ``own`` in place, for chunks that the state passes."""
    return own.addcmul_(z, state) if whole is None else own.add_(kept(z * state, whole))


class BatchedSpan(Span):
    """A span with states by chunks."""

    @staticmethod
    def blocks(inputs: Inputs) -> tuple[list[Heads], list[slice]]:
        """Blocks of as many groups of heads as possible, then spans of chunks."""
        (batch, length, many, value), (groups, size) = inputs.x.shape, inputs.B.shape[2:]
        group, chunk = many // groups, inputs.chunk
        head = chunk * (8 * value + 5 * chunk) + 4 * size * value
        shared = chunk * (4 * size + 3 * chunk)
        each = inputs.acc_dtype.itemsize * (group * head + shared)
        rows, parts = spans(length, chunk, batch * groups, each)
        return head_blocks(batch, groups, group, 1, rows), parts

    @staticmethod
    def _by_chunks(x: Tensor) -> Tensor:
        """``(batch, groups, chunks, ...)`` as (chunks, batch, groups, ...)."""
        return x.movedim(2, 0).contiguous()

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """States before every chunk, and the state after the last one."""
        after, last = self._by_chunks(self.added()), state
        for own, passed in zip(after.unbind(0), self.passing(), strict=True):
            last = _passed(own, last, *passed)
        return torch.cat([state.unsqueeze(0), after[:-1]]).movedim(0, 2), last.clone()

    def reverse(self, own: Tensor, dstate: Tensor) -> Tensor:
        """From the gradients that states have by y to those of the states after every chunk.

        Returns the gradient of the first state.

        Args:
            own: What states before every chunk get through y; overwritten.
            dstate: Gradient of the state after the span.
        """
        before, last = self._by_chunks(own), dstate
        steps = list(zip(before.unbind(0), self.passing(), strict=True))
        for own_state, passed in reversed(steps):
            last = _passed(own_state, last, *passed)
        first = last.clone()  # one chunk leaves ``before`` in the memory of ``own``
        own.copy_(torch.cat([before[1:], dstate.unsqueeze(0)]).movedim(0, 2))
        return first


forward, backward = implement(BatchedSpan)
