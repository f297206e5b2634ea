"""The gated delta rule (arXiv:2412.06464) by chunks, as :mod:`.chunks` has it, with gates per head.

Scores have the decay D_ij = exp(G_i - G_j) for i >= j of one segment, G the sum of the gates from
the first token of the chunk or segment on: P = (Q K') D, and B = (K K') D below the diagonal.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from liger_multi.reference.linear_attention.chunks import (
    Inputs,
    Span,
    _ends,
    _split,
    run_backward,
    run_forward,
)


class HeadSpan(Span):
    """A span whose gates are numbers."""

    @staticmethod
    def floats(chunk: int, size: int, value: int) -> int:
        """Rows of keys and of values, squares of a chunk, states."""
        return chunk * (6 * (size + value) + 10 * chunk) + 3 * size * value

    def decays(self, g: Tensor) -> None:
        """From differences of exact sums."""
        seen = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril()
        if self.starts is not None:
            seen = seen & (self.starts.unsqueeze(-1) <= torch.arange(g.shape[-1], device=g.device))
        self.sums = seen.to(g.dtype)  # of gates: from the first token of a segment on
        coarse, fine = ((self.sums @ x.unsqueeze(-1)).squeeze(-1) for x in _split(g))
        apart, rest = (x.unsqueeze(-1) - x.unsqueeze(-2) for x in (coarse, fine))
        self.decay = apart.add_(rest).masked_fill_(~seen, -math.inf).exp_()
        e = (coarse + fine).exp()
        r = ((coarse[..., -1:] - coarse) + (fine[..., -1:] - fine)).exp()
        z = e[..., -1]
        if self.starts is not None:
            carried, last, whole = _ends(self.starts)
            e, r, z = e * carried, r * last, z * whole
        self.e, self.r, self.z = e.unsqueeze(-1), r.unsqueeze(-1), z[..., None, None]
        self.scores = (self.q @ self.k.mT) * self.decay
        self.inner = ((self.k @ self.k.mT) * self.decay).tril_(-1)

    def through(
        self, dp: Tensor, db: Tensor, de: Tensor, dr: Tensor, dz: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the gates are sums of those of G, without what both sides of a pair have."""
        through = (dp * self.scores).tril_(-1).addcmul_(db, self.inner)
        kept = dr.sum(-1)
        dsums = through.sum(-1) - through.sum(-2) - kept + de.sum(-1)
        dsums[..., -1] += kept.sum(-1) + dz.sum(-1)
        dg = (self.sums.mT @ dsums.unsqueeze(-1)).squeeze(-1)
        dp, db = dp.mul_(self.decay), db.mul_(self.decay)
        return dp @ self.k, dp.mT @ self.q + (db + db.mT) @ self.k, dg


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Optional[Tensor],
    first: Optional[Tensor], scale: float, qk_l2norm: bool, output_final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Span after span."""
    given = Inputs(q, k, v, g, beta, initial_state, first, scale, qk_l2norm)
    return run_forward(HeadSpan, given, output_final_state)


def backward(
    dy: Optional[Tensor], dfinal_state: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor,
    g: Tensor, beta: Tensor, initial_state: Optional[Tensor], first: Optional[Tensor],
    scale: float, qk_l2norm: bool, needs_q: bool, needs_k: bool, needs_v: bool, needs_g: bool,
    needs_beta: bool, needs_initial_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The spans in reverse."""
    given = Inputs(q, k, v, g, beta, initial_state, first, scale, qk_l2norm)
    needs = (needs_q, needs_k, needs_v, needs_g, needs_beta, needs_initial_state)
    return run_backward(HeadSpan, given, dy, dfinal_state, needs)
