"""What hyper-connections make of their logits: sigmoids, and Sinkhorn's iteration both ways."""

from typing import Optional, Protocol

import torch
from torch import Tensor

from liger_multi.reference.residuals import hyper_mixes

How = tuple[int, int, float, float]  # streams, steps, eps, post_scale


class Parts(Protocol):
    """What a backend supplies. Logits are ``bias + m scale``, m of (rows, N (N + 2))."""

    def mixes(self, rows: Tensor, weight: Tensor, rms_eps: float) -> tuple[Tensor, Tensor]:
        """See :func:`liger_multi.reference.residuals.hyper_mixes.mixes`."""

    def mixes_gradients(
        self, rows: Tensor, weight: Tensor, d: Tensor, own: Tensor, needs_x: bool,
        needs_weight: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See :func:`liger_multi.reference.residuals.hyper_mixes.gradients`."""

    def values(
        self, m: Tensor, bias: Tensor, scale: Tensor, how: How
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients pre, post and mix, (rows, N), (rows, N) and (rows, N, N)."""

    def gradient(
        self, m: Tensor, bias: Tensor, scale: Tensor, rstd: Tensor, length: int,
        grads: tuple[Optional[Tensor], ...], how: How, needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """What :meth:`mixes_gradients` wants, d and own, and gradients of bias and scale.

        ``length`` is the number of elements of a normalized row; ``needs``: of bias, of scale.
        """


def _spread(scale: Tensor, count: int, kind: torch.dtype) -> Tensor:
    """The scale of every logit."""
    sizes = (count, count, count * count)
    return torch.cat([s.expand(n) for s, n in zip(scale.to(kind), sizes, strict=True)])


def _sinkhorn(z: Tensor, steps: int, eps: float) -> list[tuple[Tensor, Tensor]]:
    """Every iterate, and the sums that it was divided by."""
    m = torch.softmax(z, -1) + eps
    found = [(m, m)]
    for step in range(2 * steps - 1):
        total = m.sum(-2 if step % 2 == 0 else -1, keepdim=True) + eps
        m = m / total
        found.append((m, total))
    return found


def _logits_gradient(z: Tensor, grads: tuple[Optional[Tensor], ...], how: How) -> Tensor:
    """Back through the iterates."""
    count, steps, eps, post_scale = how
    a, b, c = z.split([count, count, count * count], -1)
    dz = torch.zeros_like(z)
    for part, grad, by, at in ((a, grads[0], 1.0, 0), (b, grads[1], post_scale, count)):
        if grad is not None:
            p = torch.sigmoid(part)
            dz[:, at : at + count] = by * grad * p * (1 - p)
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

    mixes = staticmethod(hyper_mixes.mixes)
    mixes_gradients = staticmethod(hyper_mixes.gradients)

    @staticmethod
    def values(m: Tensor, bias: Tensor, scale: Tensor, how: How) -> tuple[Tensor, Tensor, Tensor]:
        """Sigmoids, and the last iterate."""
        count, steps, eps, post_scale = how
        z = torch.addcmul(bias.to(m.dtype), m, _spread(scale, count, m.dtype))
        a, b, c = z.split([count, count, count * count], -1)
        mix = _sinkhorn(c.unflatten(-1, (count, count)), steps, eps)[-1][0]
        return torch.sigmoid(a) + eps, post_scale * torch.sigmoid(b), mix

    @staticmethod
    def gradient(
        m: Tensor, bias: Tensor, scale: Tensor, rstd: Tensor, length: int,
        grads: tuple[Optional[Tensor], ...], how: How, needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """The norm takes back what of the gradient points along the row."""
        count, r = how[0], rstd.unsqueeze(-1)
        spread = _spread(scale, count, m.dtype)
        dz = _logits_gradient(torch.addcmul(bias.to(m.dtype), m, spread), grads, how)
        dm = dz * spread
        own = (dm * m).sum(-1, keepdim=True) * r.square() / length
        dbias, dscale = bias.new_empty(0), scale.new_empty(0)
        if needs[0]:
            dbias = dz.sum(0).to(bias.dtype)
        if needs[1]:
            sums = (dz * m).sum(0).split([count, count, count**2])
            dscale = torch.stack([t.sum() for t in sums]).to(scale.dtype)
        return dm * r, own, dbias, dscale
