"""Kimi delta attention (arXiv:2510.26692) on cube cores, as :mod:`.chunks` has it.

As in the reference, a pair of tokens in neighboring blocks of s rows has the decay between them as
a product of two factors of at most 1, from the earlier one to its block's end, and from there to
the later one. There the matmuls are of s rows, down to one. Here each s has one matmul of whole
chunks, of which the pairs of such blocks are taken:

    W_s = exp(T_s g),  P + B = sum over s of M_s ([Q W_s; K W_s] (K W_s)'),  s = 1, 2, 4 ...

Row i of the 0-1 matrix T_s adds the gates from the beginning of its block to i if the block is a
later one, and those after i to the block's end otherwise; M_s are the pairs. All sums of gates are
one matmul, and so is their gradient: no difference of sums is formed.
"""

import torch
from torch import Tensor

from liger_multi.backends.npu.linear_attention.chunks import Batched
from liger_multi.reference.linear_attention.chunks import GONE, implement
from liger_multi.reference.linear_attention.isolation import levels, spread, where_true
from liger_multi.reference.linear_attention.kimi_delta_attention import ChannelSpan


def ranges(chunk: int, device: torch.device) -> Tensor:
    """Which gates the factors of rows add, bool (levels + 2, chunk, chunk).

    First those T_s, then those of e, from the chunk's beginning, and r, to its end.
    """
    position = torch.arange(chunk, device=device)
    sizes = 2 ** torch.arange(chunk.bit_length() - 1, device=device)[:, None, None]
    row, gate = position.unsqueeze(-1), position
    same_block = row // sizes == gate // sizes
    is_upper = (row // sizes) % 2 == 1
    inner = same_block & torch.where(is_upper, gate <= row, gate > row)
    ends = torch.stack([gate <= row, gate > row])
    return torch.cat([inner, ends])


class BatchedChannelSpan(Batched, ChannelSpan):
    """A span whose gates are vectors."""

    @staticmethod
    def floats(chunk: int, size: int, value: int) -> int:
        """Rows of keys, nine for every level, rows of values, and squares of a chunk."""
        steps = chunk.bit_length() - 1
        return chunk * ((14 + 9 * steps) * size + 5 * value + (8 + 4 * steps) * chunk)

    def decays(self, g: Tensor) -> None:
        """All levels at once."""
        chunk = g.shape[-2]
        self.ranges = ranges(chunk, g.device).flatten(0, 1)
        self.sums, meeting = self.ranges.to(g.dtype), None
        self.pairs = levels(chunk, g.device).unsqueeze(-3)
        if self.starts is not None:
            self.pairs = self.pairs & self.sight.visible[..., None, None, :, :]
            meeting = (self.pairs.any(-1) | self.pairs.any(-2)).unsqueeze(-1)
        gates = spread(self.sums, g.clamp(min=GONE[g.dtype]), self.ranges)
        factors = gates.exp_().unflatten(-2, (-1, chunk))
        *_, e, r = factors.unbind(-3)
        self.e, self.r = self.sight.of_state(e), self.sight.of_last(r)
        self.z = self.sight.over(e[..., -1, :].unsqueeze(-1))
        self.factors = where_true(factors[..., :-2, :, :].unsqueeze(-3), meeting)
        rows = torch.stack([self.q, self.k.expand_as(self.q)], -3).unsqueeze(-4)
        self.scaled = where_true(rows * self.factors, meeting)
        pairs = (self.scaled @ self.scaled[..., 1:, :, :].mT).masked_fill_(~self.pairs, 0).sum(-4)
        self.scores, self.inner = pairs.unbind(-3)
        self.scores.diagonal(dim1=-2, dim2=-1).copy_((self.q * self.k).sum(-1))

    def through(
        self, dp: Tensor, db: Tensor, de: Tensor, dr: Tensor, dz: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All levels at once."""
        upstream = where_true(torch.stack([dp, db], -3).unsqueeze(-4), self.pairs)
        columns = self.scaled[..., 1:, :, :]
        to_rows = spread(upstream, columns, self.pairs)
        to_columns = spread(upstream.mT, self.scaled, self.pairs.mT).sum(-3)
        logs = (to_rows * self.scaled).sum(-3).addcmul_(to_columns, columns.squeeze(-3))
        to_rows[..., 1, :, :] += to_columns
        dq, dk = (to_rows * self.factors).sum(-4).unbind(-3)
        diagonal = dp.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        de[..., -1, :] += dz
        gradients = torch.cat([logs, torch.stack([de, dr], -3)], -3).flatten(-3, -2)
        return (
            dq + diagonal * self.k,
            dk + diagonal * self.q,
            spread(self.sums.mT, gradients, self.ranges.mT),
        )


forward, backward = implement(BatchedChannelSpan)
