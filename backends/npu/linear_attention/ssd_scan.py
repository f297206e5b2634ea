"""The scan of Mamba-2 (arXiv:2405.21060) on cube cores.

The formulas are those of the reference, and what differs is as in :mod:`.chunks`: all heads at
once, and one launch per chunk in each pass over states, S' = U + z S.
"""

import torch
from torch import Tensor

from liger_multi.backends.npu.linear_attention.chunks import spans
from liger_multi.reference.linear_attention.chunks import Heads, head_blocks
from liger_multi.reference.linear_attention.isolation import where_true
from liger_multi.reference.linear_attention.ssd_scan import Inputs, Span, implement


def _add_passed_state(added: Tensor, state: Tensor, z: Tensor, passes: Tensor | None) -> Tensor:
    """Add ``z state`` to ``added`` in place, for chunks that the state passes."""
    return added.addcmul_(z, state) if passes is None else added.add_(where_true(z * state, passes))


class BatchedSpan(Span):
    """A span with states by chunks."""

    @staticmethod
    def blocks(inputs: Inputs) -> tuple[list[Heads], list[slice]]:
        """Blocks of as many groups of heads as possible, then spans of chunks."""
        (batch, length, heads, value), (groups, size) = inputs.x.shape, inputs.B.shape[2:]
        group, chunk = heads // groups, inputs.chunk
        head = chunk * (8 * value + 5 * chunk) + 4 * size * value
        shared = chunk * (4 * size + 3 * chunk)
        group_bytes = inputs.acc_dtype.itemsize * (group * head + shared)
        rows, parts = spans(length, chunk, batch * groups, group_bytes)
        return head_blocks(batch, groups, group, 1, rows), parts

    @staticmethod
    def _by_chunks(x: Tensor) -> Tensor:
        """``(batch, groups, chunks, ...)`` as (chunks, batch, groups, ...)."""
        return x.movedim(2, 0).contiguous()

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """States before every chunk, and the state after the last one."""
        states_after, last = self._by_chunks(self.added()), state
        for added, step in zip(states_after.unbind(0), self.passing(), strict=True):
            last = _add_passed_state(added, last, *step)
        return torch.cat([state.unsqueeze(0), states_after[:-1]]).movedim(0, 2), last.clone()

    def reverse(self, dstates: Tensor, dstate: Tensor) -> Tensor:
        """From the gradients that states have by y to those of the states after every chunk.

        Returns the gradient of the first state.

        Args:
            dstates: What states before every chunk get through y; overwritten.
            dstate: Gradient of the state after the span.
        """
        by_chunks, last = self._by_chunks(dstates), dstate
        steps = list(zip(by_chunks.unbind(0), self.passing(), strict=True))
        for own_state, step in reversed(steps):
            last = _add_passed_state(own_state, last, *step)
        first = last.clone()  # one chunk leaves ``by_chunks`` in the memory of ``dstates``
        dstates.copy_(torch.cat([by_chunks[1:], dstate.unsqueeze(0)]).movedim(0, 2))
        return first


forward, backward = implement(BatchedSpan)
