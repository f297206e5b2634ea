"""What hyper-connections make of their logits: sigmoids, and Sinkhorn's iteration both ways."""

from typing import Optional, Protocol

import torch
from torch import Tensor

from liger_multi.reference import hyper_mixes


class Parts(Protocol):
    """What a backend supplies; logits are (rows, N (N + 2)), scaled and with bias."""

    def mixes(self, rows: Tensor, weight: Tensor, rms_eps: float) -> tuple[Tensor, Tensor]:
        """See :func:`liger_multi.reference.hyper_mixes.mixes`."""

    def mixes_gradients(
        self, rows: Tensor, weight: Tensor, d: Tensor, own: Tensor, needs_x: bool,
        needs_weight: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See :func:`liger_multi.reference.hyper_mixes.gradients`."""

    def values(
        self, z: Tensor, count: int, steps: int, eps: float, post_scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients pre, post and mix, (rows, N), (rows, N) and (rows, N, N)."""

    def gradient(
        self, z: Tensor, grads: tuple[Optional[Tensor], ...], count: int, steps: int, eps: float,
        post_scale: float,
    ) -> Tensor:  # fmt: skip
        """The gradient of the logits."""


def _sinkhorn(z: Tensor, steps: int, eps: float) -> list[tuple[Tensor, Tensor]]:
    """Every iterate, and the sums that it was divided by."""
    m = torch.softmax(z, -1) + eps
    found = [(m, m)]
    for step in range(2 * steps - 1):
        total = m.sum(-2 if step % 2 == 0 else -1, keepdim=True) + eps
        m = m / total
        found.append((m, total))
    return found


class ReferenceParts:
    """All of them in plain PyTorch."""

    mixes = staticmethod(hyper_mixes.mixes)
    mixes_gradients = staticmethod(hyper_mixes.gradients)

    @staticmethod
    def values(
        z: Tensor, count: int, steps: int, eps: float, post_scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sigmoids, and the last iterate."""
        a, b, c = z.split([count, count, count * count], -1)
        mix = _sinkhorn(c.unflatten(-1, (count, count)), steps, eps)[-1][0]
        return torch.sigmoid(a) + eps, post_scale * torch.sigmoid(b), mix

    @staticmethod
    def gradient(
        z: Tensor, grads: tuple[Optional[Tensor], ...], count: int, steps: int, eps: float,
        post_scale: float,
    ) -> Tensor:  # fmt: skip
        """Back through the iterates."""
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
