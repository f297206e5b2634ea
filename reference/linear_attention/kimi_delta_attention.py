"""Kimi delta attention (arXiv:2510.26692) by chunks, as :mod:`.chunks` has it, gates per channel.

Scores have the decay between two tokens inside of the product over channels:

    P_ij = sum_c Q_ic K_jc exp(G_ic - G_jc) for i >= j,  B_ij = sum_c K_ic K_jc exp(G_ic - G_jc)

exp(-G_j) alone leaves the range of numbers. So each block of rows is halved, and halved again, down
to single rows. Tokens j of the upper half and i of the lower half have the last row a of the upper
half between them, and their scores are a product of matrices whose factors are at most 1:

    P_ij = sum_c (Q_ic exp(G_ic - G_ac)) (K_jc exp(G_ac - G_jc))

Both exponents are sums of gates from or to the ends of the halves, and grow with the blocks by sums
of neighbors. No difference of two sums is formed, so that gates lose no digit to stronger gates of
other tokens; nor by their gradients, which go back through the same tree of sums.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_multi.reference.linear_attention.chunks import Span, implement
from liger_multi.reference.linear_attention.isolation import where_true


def _halved(x: Tensor, size: int) -> Tensor:
    """Rows ``(..., C, K)`` as a view ``(..., blocks, 2, size, K)``."""
    halves: Tensor = x.unflatten(-2, (-1, 2, size))
    return halves


def _squares(pairs: Tensor, size: int) -> Tensor:
    """The pairs of a lower with its upper half: (..., 2, C, C) as a view (..., blocks, 2, s, s)."""
    halves = pairs.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))
    squares: Tensor = halves[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -4)
    return squares


class Level(NamedTuple):
    """What a level multiplies rows of lower and of upper halves by, and which of them meet.

    Those of the segment of the row between them; None for all.
    """

    lower: Tensor
    upper: Tensor
    later: Tensor | None
    earlier: Tensor | None


class ChannelSpan(Span):
    """A span whose gates are vectors."""

    @staticmethod
    def floats(chunk: int, size: int, value: int) -> int:
        """Rows of keys, with decays of every level, and of values, squares of a chunk, states."""
        levels = chunk.bit_length() - 1
        return chunk * ((14 + levels) * size + 5 * value + 8 * chunk) + 3 * size * value

    def decays(self, g: Tensor) -> None:
        """Level by level, from blocks of single rows to the chunk."""
        chunk, g = g.shape[-2], g.clone()
        gates_after = torch.zeros_like(g)  # gates from the next row on to the end of the block
        pairs = g.new_zeros(*g.shape[:-2], 2, chunk, chunk)
        self.levels: list[Level] = []
        size = 1
        while size < chunk:
            from_begin, to_end = (
                _halved(g, size),
                _halved(gates_after, size),
            )  # g: from the block's first row
            level = Level(
                from_begin[..., 1, :, :].exp(),
                to_end[..., 0, :, :].exp(),
                *self._meeting(chunk, size),
            )
            self.levels.append(level)
            rows, columns = self._factors(level)
            _squares(pairs, size).copy_((rows @ columns.mT).unflatten(-2, (2, size)))
            to_end[..., 0, :, :] += from_begin[..., 1, -1:, :]
            from_begin[..., 1, :, :] += from_begin[..., 0, -1:, :]
            size *= 2
        self.scores, self.inner = where_true(pairs, self._visible_pairs()).unbind(-3)
        self.scores.diagonal(dim1=-2, dim2=-1).copy_((self.q * self.k).sum(-1))
        self.z = g[..., -1, :].exp().unsqueeze(-1)
        self.e, self.r = self.sight.of_state(g.exp_()), self.sight.of_last(gates_after.exp_())
        self.z = self.sight.over(self.z)

    def _visible_pairs(self) -> Tensor | None:
        """Pairs of one segment, where there are several."""
        return None if self.starts is None else self.sight.visible.unsqueeze(-3)

    def _meeting(self, chunk: int, size: int) -> tuple[Tensor | None, Tensor | None]:
        """Rows of lower and of upper halves of the segment of the upper half's last row."""
        if self.starts is None:
            return None, None
        begins = self.starts.unflatten(-1, (-1, 2, size)).unsqueeze(-1)
        last_row = torch.arange(size - 1, chunk, 2 * size, device=begins.device)[:, None, None]
        upper = begins[..., 0, :, :]
        return begins[..., 1, :, :] <= last_row, upper == upper[..., -1:, :]

    def _factors(self, level: Level) -> tuple[Tensor, Tensor]:
        """Queries above keys of the lower halves, and keys of the upper halves."""
        lower, size = level.lower, level.lower.shape[-2]
        rows = lower.new_empty(*lower.shape[:-2], 2, *lower.shape[-2:])
        for i, x in enumerate((self.q, self.k)):
            torch.mul(_halved(x, size)[..., 1, :, :], lower, out=rows[..., i, :, :])
        if level.later is not None:
            rows.masked_fill_(~level.later.unsqueeze(-3), 0)
        columns = where_true(_halved(self.k, size)[..., 0, :, :] * level.upper, level.earlier)
        return rows.flatten(-3, -2), columns

    def through(
        self, dp: Tensor, db: Tensor, de: Tensor, dr: Tensor, dz: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Level by level, from the chunk to blocks of single rows."""
        pairs, diagonal = torch.stack([dp, db], -3), dp.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dq, dk = diagonal * self.k, diagonal * self.q
        de[..., -1, :] += dz
        for level in reversed(self.levels):
            size = level.lower.shape[-2]
            from_begin, to_end, to_q, to_k, q, k = (
                _halved(x, size) for x in (de, dr, dq, dk, self.q, self.k)
            )
            from_begin[..., 0, -1, :] += from_begin[..., 1, :, :].sum(-2)
            from_begin[..., 1, -1, :] += to_end[..., 0, :, :].sum(-2)
            rows, columns = self._factors(level)
            square = _squares(pairs, size).flatten(-3, -2)
            by_rows = (square @ columns).unflatten(-2, (2, size)) * level.lower.unsqueeze(-3)
            by_columns = where_true((square.mT @ rows) * level.upper, level.earlier)
            of_q, of_k = (where_true(x, level.later) for x in by_rows.unbind(-3))
            to_q[..., 1, :, :] += of_q
            to_k[..., 1, :, :] += of_k
            to_k[..., 0, :, :] += by_columns
            from_begin[..., 1, :, :] += where_true(
                q[..., 1, :, :] * of_q + k[..., 1, :, :] * of_k, level.later
            )
            to_end[..., 0, :, :] += where_true(k[..., 0, :, :] * by_columns, level.earlier)
        return dq, dk, de


forward, backward = implement(ChannelSpan)
