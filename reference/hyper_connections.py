"""Coefficients of hyper-connections: RMSNorm and a product, then sigmoids and Sinkhorn's iteration.

:func:`halves` makes both halves of the contract from a backend's second part, whose rows have a few
numbers; the first part reads the streams, block by block.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from liger_multi.reference.chunking import row_blocks, statistics_dtype
from liger_multi.reference.sinkhorn import ReferenceSquash, Squash


def _spread(scale: Tensor, count: int, kind: torch.dtype) -> Tensor:
    sizes = torch.tensor([count, count, count * count], device=scale.device)
    return scale.to(kind).repeat_interleave(sizes, output_size=count * (count + 2))


def halves(kernels: Squash) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's second part."""

    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, iterations: int, rms_eps: float,
        eps: float, post_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        kind, count, lead = statistics_dtype(x.dtype), x.shape[-2], x.shape[:-2]
        rows = x.reshape(lead.numel(), count * x.shape[-1])
        mixes, w = rows.new_empty(rows.shape[0], weight.shape[0], dtype=kind), weight.to(kind)
        rstd = rows.new_empty(rows.shape[0], dtype=kind)
        for block in row_blocks(rows.shape[0], 2 * rows.shape[1] * kind.itemsize):
            v = rows[block].to(kind)
            rstd[block] = torch.rsqrt(v.square().mean(-1) + rms_eps)
            mixes[block] = (v @ w.mT) * rstd[block].unsqueeze(-1)
        z = mixes * _spread(scale, count, kind) + bias.to(kind)
        pre, post, mix = kernels.values(z, count, iterations, eps, post_scale)
        return (
            pre.contiguous().view(*lead, count), post.contiguous().view(*lead, count),
            mix.contiguous().view(*lead, count, count), mixes.view(*lead, -1) if lead.numel() else
            mixes.view(*lead, weight.shape[0]), rstd.view(lead),
        )  # fmt: skip

    def backward(
        dpre: Optional[Tensor], dpost: Optional[Tensor], dmix: Optional[Tensor], x: Tensor,
        weight: Tensor, bias: Tensor, scale: Tensor, mixes: Tensor, rstd: Tensor, iterations: int,
        eps: float, post_scale: float, needs_x: bool, needs_weight: bool, needs_bias: bool,
        needs_scale: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        count, kind = x.shape[-2], mixes.dtype
        rows = x.reshape(x.shape[:-2].numel(), count * x.shape[-1])
        m, r = mixes.reshape(rows.shape[0], weight.shape[0]), rstd.reshape(-1, 1)
        spread = _spread(scale, count, kind)
        shapes = ((rows.shape[0], count),) * 2 + ((rows.shape[0], count, count),)
        given = zip((dpre, dpost, dmix), shapes, strict=True)
        grads = tuple(None if g is None else g.reshape(s).to(kind) for g, s in given)
        dz = kernels.gradient(m * spread + bias.to(kind), grads, count, iterations, eps, post_scale)
        dscale = torch.stack([t.sum() for t in (dz * m).split([count, count, count**2], -1)])
        dm, w = dz * spread, weight.to(kind)
        dx = x.new_empty(rows.shape if needs_x else 0)
        dweight = torch.zeros_like(w)
        for block in row_blocks(rows.shape[0], 3 * rows.shape[1] * kind.itemsize):
            v, d = rows[block].to(kind), dm[block] * r[block]
            if needs_weight:
                dweight.addmm_(d.mT, v)
            if needs_x:
                own = (dm[block] * m[block]).sum(-1, keepdim=True) * r[block].square()
                dx[block] = torch.addmm(v * (-own / rows.shape[1]), d, w).to(x.dtype)
        return (
            dx.view(x.shape) if needs_x else dx,
            dweight.to(weight.dtype) if needs_weight else weight.new_empty(0),
            dz.sum(0).to(bias.dtype) if needs_bias else bias.new_empty(0),
            dscale.to(scale.dtype) if needs_scale else scale.new_empty(0),
        )

    return forward, backward


forward, backward = halves(ReferenceSquash())
