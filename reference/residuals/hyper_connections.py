"""The coefficients of hyper-connections: an RMSNorm and a product, sigmoids, Sinkhorn's iteration.

:func:`implement_hyper_connections` makes forward and backward from a backend's parts: the product
that reads the streams, and what is made of the few numbers that it leaves of a row.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype


def mixes(rows: Tensor, weight: Tensor, rms_eps: float) -> tuple[Tensor, Tensor]:
    """``W v rstd`` and rstd of every row v of (rows, N C), in the dtype of statistics."""
    acc_dtype = statistics_dtype(rows.dtype)
    out, w = rows.new_empty(rows.shape[0], weight.shape[0], dtype=acc_dtype), weight.to(acc_dtype)
    rstd = rows.new_empty(rows.shape[0], dtype=acc_dtype)
    for block in row_blocks(rows.shape[0], 2 * rows.shape[1] * acc_dtype.itemsize):
        v = rows[block].to(acc_dtype)
        rstd[block] = torch.rsqrt(v.square().mean(-1) + rms_eps)
        out[block] = (v @ w.mT) * rstd[block].unsqueeze(-1)
    return out, rstd


def mixes_gradients(
    rows: Tensor, weight: Tensor, d: Tensor, row_scale: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """``dx = d W - row_scale v`` for every row v, ``dW`` = the sum of d' v; empty if not needed.

    d (rows, outputs) is the gradient of W v, own (rows, 1) what the norm takes back.
    """
    acc_dtype = d.dtype
    w, dx = weight.to(acc_dtype), rows.new_empty(rows.shape if needs_x else 0)
    dweight = torch.zeros_like(w) if needs_weight else w.new_empty(0)
    for block in row_blocks(rows.shape[0], 3 * rows.shape[1] * acc_dtype.itemsize):
        v = rows[block].to(acc_dtype)
        if needs_weight:
            dweight.addmm_(d[block].mT, v)
        if needs_x:
            dx[block] = torch.addmm(v * -row_scale[block], d[block], w).to(rows.dtype)
    return dx, dweight.to(weight.dtype)


# --- sigmoids, and Sinkhorn's iteration both ways ---


SinkhornOptions = tuple[int, int, float, float]  # streams, steps, eps, post_scale


class Parts(Protocol):
    """What a backend supplies. Logits are ``bias + m scale``, m of (rows, N (N + 2))."""

    def mixes(self, rows: Tensor, weight: Tensor, rms_eps: float) -> tuple[Tensor, Tensor]:
        """See :func:`mixes`."""

    def mixes_gradients(
        self,
        rows: Tensor,
        weight: Tensor,
        d: Tensor,
        row_scale: Tensor,
        needs_x: bool,
        needs_weight: bool,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`mixes_gradients`."""

    def values(
        self, m: Tensor, bias: Tensor, scale: Tensor, options: SinkhornOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients pre, post and mix, (rows, N), (rows, N) and (rows, N, N)."""

    def gradient(
        self,
        m: Tensor,
        bias: Tensor,
        scale: Tensor,
        rstd: Tensor,
        length: int,
        grads: tuple[Tensor | None, ...],
        options: SinkhornOptions,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What :meth:`mixes_gradients` wants, d and own, and gradients of bias and scale.

        ``length`` is the number of elements of a normalized row; ``needs``: of bias, of scale.
        """


def _spread(scale: Tensor, count: int, acc_dtype: torch.dtype) -> Tensor:
    """The scale of every logit."""
    sizes = (count, count, count * count)
    return torch.cat([s.expand(n) for s, n in zip(scale.to(acc_dtype), sizes, strict=True)])


def _sinkhorn(z: Tensor, steps: int, eps: float) -> list[tuple[Tensor, Tensor]]:
    """Every iterate, and the sums that it was divided by."""
    m = torch.softmax(z, -1) + eps
    iterates = [(m, m)]
    for step in range(2 * steps - 1):
        total = m.sum(-2 if step % 2 == 0 else -1, keepdim=True) + eps
        m = m / total
        iterates.append((m, total))
    return iterates


def _logits_gradient(
    z: Tensor, grads: tuple[Tensor | None, ...], options: SinkhornOptions
) -> Tensor:
    """Back through the iterates."""
    count, steps, eps, post_scale = options
    a, b, c = z.split([count, count, count * count], -1)
    dz = torch.zeros_like(z)
    for part, grad, factor, offset in ((a, grads[0], 1.0, 0), (b, grads[1], post_scale, count)):
        if grad is not None:
            p = torch.sigmoid(part)
            dz[:, offset : offset + count] = factor * grad * p * (1 - p)
    if grads[2] is not None:
        iterates = _sinkhorn(c.unflatten(-1, (count, count)), steps, eps)
        d = grads[2]
        for step in range(2 * steps - 2, -1, -1):
            m, total = iterates[step + 1]
            d = (d - (d * m).sum(-2 if step % 2 == 0 else -1, keepdim=True)) / total
        p = iterates[0][0] - eps
        dz[:, 2 * count :] = (p * (d - (d * p).sum(-1, keepdim=True))).flatten(1)
    return dz


class ReferenceParts:
    """All of them in plain PyTorch."""

    mixes = staticmethod(mixes)
    mixes_gradients = staticmethod(mixes_gradients)

    @staticmethod
    def values(
        m: Tensor, bias: Tensor, scale: Tensor, options: SinkhornOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sigmoids, and the last iterate."""
        count, steps, eps, post_scale = options
        z = torch.addcmul(bias.to(m.dtype), m, _spread(scale, count, m.dtype))
        a, b, c = z.split([count, count, count * count], -1)
        mix = _sinkhorn(c.unflatten(-1, (count, count)), steps, eps)[-1][0]
        return torch.sigmoid(a) + eps, post_scale * torch.sigmoid(b), mix

    @staticmethod
    def gradient(
        m: Tensor,
        bias: Tensor,
        scale: Tensor,
        rstd: Tensor,
        length: int,
        grads: tuple[Tensor | None, ...],
        options: SinkhornOptions,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The norm takes back what of the gradient points along the row."""
        count, r = options[0], rstd.unsqueeze(-1)
        spread = _spread(scale, count, m.dtype)
        dz = _logits_gradient(torch.addcmul(bias.to(m.dtype), m, spread), grads, options)
        dm = dz * spread
        row_scale = (dm * m).sum(-1, keepdim=True) * r.square() / length
        dbias, dscale = bias.new_empty(0), scale.new_empty(0)
        if needs[0]:
            dbias = dz.sum(0).to(bias.dtype)
        if needs[1]:
            sums = (dz * m).sum(0).split([count, count, count**2])
            dscale = torch.stack([t.sum() for t in sums]).to(scale.dtype)
        return dm * r, row_scale, dbias, dscale


# --- coefficients ---


def implement_hyper_connections(parts: Parts) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's parts."""

    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        scale: Tensor,
        iterations: int,
        rms_eps: float,
        eps: float,
        post_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        count, row_shape = x.shape[-2], x.shape[:-2]
        rows = x.reshape(row_shape.numel(), count * x.shape[-1])
        mixes, rstd = parts.mixes(rows, weight, rms_eps)
        options = (count, iterations, eps, post_scale)
        pre, post, mix = parts.values(mixes, bias, scale, options)
        return (
            pre.contiguous().view(*row_shape, count),
            post.contiguous().view(*row_shape, count),
            mix.contiguous().view(*row_shape, count, count),
            mixes.view(*row_shape, weight.shape[0]),
            rstd.view(row_shape),
        )

    def backward(
        dpre: Tensor | None,
        dpost: Tensor | None,
        dmix: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        scale: Tensor,
        mixes: Tensor,
        rstd: Tensor,
        iterations: int,
        eps: float,
        post_scale: float,
        needs_x: bool,
        needs_weight: bool,
        needs_bias: bool,
        needs_scale: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count, acc_dtype = x.shape[-2], mixes.dtype
        rows = x.reshape(x.shape[:-2].numel(), count * x.shape[-1])
        m, r = mixes.reshape(rows.shape[0], weight.shape[0]), rstd.reshape(-1)
        shapes = ((rows.shape[0], count),) * 2 + ((rows.shape[0], count, count),)
        pairs = zip((dpre, dpost, dmix), shapes, strict=True)
        grads = tuple(None if g is None else g.reshape(s).to(acc_dtype) for g, s in pairs)
        options = (count, iterations, eps, post_scale)
        d, row_scale, dbias, dscale = parts.gradient(
            m, bias, scale, r, rows.shape[1], grads, options, (needs_bias, needs_scale)
        )
        dx, dweight = parts.mixes_gradients(rows, weight, d, row_scale, needs_x, needs_weight)
        return dx.view(x.shape) if needs_x else dx, dweight, dbias, dscale

    return forward, backward


forward, backward = implement_hyper_connections(ReferenceParts())
