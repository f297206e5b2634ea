"""Coefficients of hyper-connections: RMSNorm and a product, then sigmoids and Sinkhorn's iteration.

:func:`forward_and_backward` makes forward and backward from a backend's parts: the product
that reads the streams, and what is made of the few numbers that it leaves of a row.
"""

from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor

from liger_multi.reference.residuals.sinkhorn import Parts, ReferenceParts


def forward_and_backward(parts: Parts) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's parts."""

    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, iterations: int, rms_eps: float,
        eps: float, post_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        count, lead = x.shape[-2], x.shape[:-2]
        rows = x.reshape(lead.numel(), count * x.shape[-1])
        mixes, rstd = parts.mixes(rows, weight, rms_eps)
        how = (count, iterations, eps, post_scale)
        pre, post, mix = parts.values(mixes, bias, scale, how)
        return (
            pre.contiguous().view(*lead, count), post.contiguous().view(*lead, count),
            mix.contiguous().view(*lead, count, count), mixes.view(*lead, weight.shape[0]),
            rstd.view(lead),
        )  # fmt: skip

    def backward(
        dpre: Optional[Tensor], dpost: Optional[Tensor], dmix: Optional[Tensor], x: Tensor,
        weight: Tensor, bias: Tensor, scale: Tensor, mixes: Tensor, rstd: Tensor, iterations: int,
        eps: float, post_scale: float, needs_x: bool, needs_weight: bool, needs_bias: bool,
        needs_scale: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        count, kind = x.shape[-2], mixes.dtype
        rows = x.reshape(x.shape[:-2].numel(), count * x.shape[-1])
        m, r = mixes.reshape(rows.shape[0], weight.shape[0]), rstd.reshape(-1)
        shapes = ((rows.shape[0], count),) * 2 + ((rows.shape[0], count, count),)
        given = zip((dpre, dpost, dmix), shapes, strict=True)
        grads = tuple(None if g is None else g.reshape(s).to(kind) for g, s in given)
        how = (count, iterations, eps, post_scale)
        d, own, dbias, dscale = parts.gradient(
            m, bias, scale, r, rows.shape[1], grads, how, (needs_bias, needs_scale)
        )
        dx, dweight = parts.mixes_gradients(rows, weight, d, own, needs_x, needs_weight)
        return dx.view(x.shape) if needs_x else dx, dweight, dbias, dscale

    return forward, backward


forward, backward = forward_and_backward(ReferenceParts())
