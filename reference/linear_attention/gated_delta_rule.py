"""The gated delta rule (arXiv:2412.06464) by chunks, as :mod:`.chunks` has it, with gates per head.

Scores have the decay D_ij = exp(G_i - G_j) for i >= j of one segment, G the sum of the gates from
the first token of the chunk or segment on: P = (Q K') D, and B = (K K') D below the diagonal.
"""

from torch import Tensor

from liger_multi.reference.linear_attention.chunks import HeadDecays, Span, implement
from liger_multi.reference.linear_attention.isolation import spread


class HeadSpan(Span):
    """A span whose gates are numbers."""

    @staticmethod
    def floats(chunk: int, size: int, value: int) -> int:
        """Rows of keys and of values, squares of a chunk, states."""
        return chunk * (6 * (size + value) + 10 * chunk) + 3 * size * value

    def decays(self, g: Tensor) -> None:
        """By pairs of rows."""
        gates, sight = HeadDecays(g, self.sight), self.sight
        self.gates, self.decay = gates, gates.pairs()
        self.e, self.r = gates.e.unsqueeze(-1), gates.r.unsqueeze(-1)
        self.z = gates.z[..., None, None]
        self.scores = (self.q @ self.k.mT * self.decay).masked_fill_(~sight.visible, 0)
        self.inner = (self.k @ self.k.mT * self.decay).masked_fill_(~sight.below, 0)

    def through(
        self, dp: Tensor, db: Tensor, de: Tensor, dr: Tensor, dz: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What P and B have of their decays is the product of both with their gradients."""
        through = (dp * self.scores).tril_(-1).addcmul_(db, self.inner)
        dg = self.gates.gradient(through, de.sum(-1), dr.sum(-1), dz.sum(-1))
        dp, db = dp.mul_(self.decay), db.mul_(self.decay)
        visible, same_segment = self.sight.visible, self.sight.same
        dk = spread(dp.mT, self.q, visible.mT) + spread(db + db.mT, self.k, same_segment)
        return spread(dp, self.k, visible), dk, dg


forward, backward = implement(HeadSpan)
