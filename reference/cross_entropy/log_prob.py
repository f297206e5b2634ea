"""The gradient of rows of logits by the log-probability of a token, the entropy and lse.

With ``z = cap * tanh(scale * raw / cap)``, ``p = softmax(z)`` and ``log p = z - lse``::

    d log_prob / dz[j] = [j = t] - p[j]
    d entropy  / dz[j] = -p[j] (log p[j] + entropy)
    d lse      / dz[j] = p[j]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks
from liger_multi.reference.cross_entropy.objective import scaled
from liger_multi.reference.cross_entropy.rows import Objective


class Upstream(NamedTuple):
    """What arrives at rows: ``p[j] (grad_lse - entropy log p[j]) + [j = t] grad_target`` is due to ``z[j]``.

    All are 0 for rows that get no gradient; ``entropy`` is None where nobody uses it.
    """

    grad_target: Tensor
    grad_lse: Tensor
    entropy: Tensor | None

    def at(self, where: Tensor | slice) -> Upstream:
        """Of the rows of a chunk."""
        parts = (None if part is None else part[where].contiguous() for part in self)
        return Upstream._make(parts)


def upstream_of(
    log_prob: Tensor | None, entropy: Tensor | None, lse: Tensor | None, *, entropies: Tensor,
    target: Tensor, vocabulary: int, objective: Objective,
) -> Upstream:  # fmt: skip
    """From the gradients of the outputs; those of unused outputs are None or empty."""
    valid = (target != objective.ignore_index) & (target >= 0) & (target < vocabulary)

    def used(d: Tensor | None) -> Tensor | None:
        # whatever arrives at a row without a valid target, NaN too, goes nowhere
        return torch.where(valid, d, 0) if d is not None and d.numel() else None

    grad_target, dentropy, grad_lse = used(log_prob), used(entropy), used(lse)
    zero = next(d for d in (grad_target, dentropy, grad_lse, target) if d is not None).new_zeros(())
    grad_target = zero.expand(target.shape) if grad_target is None else grad_target
    grad_lse = -grad_target if grad_lse is None else grad_lse - grad_target
    if dentropy is not None:
        grad_lse = grad_lse - dentropy * torch.where(valid, entropies, 0)
    return Upstream(grad_target, grad_lse, dentropy)


def within_range(
    upstream: Upstream, objective: Objective, dtype: torch.dtype
) -> tuple[Upstream, Tensor | None]:
    """Scale what arrives so that gradients of logits in float16 neither vanish nor overflow.

    Returns also by what the sums over those gradients must be multiplied: a power of two, one
    element, read by nobody on the host; None in dtypes whose range is wide.
    """
    if dtype != torch.float16 or not upstream.grad_target.numel():
        return upstream, None
    largest = torch.stack([part.abs().amax() for part in upstream if part is not None]).amax()
    largest = (largest * abs(objective.logit_scale)).clamp(min=2.0**-100)
    factor = torch.exp2(torch.log2(largest).floor() - 4)  # the largest becomes 16 to 32
    return Upstream._make(None if part is None else part / factor for part in upstream), factor


def gradient_(
    raw: Tensor, target: Tensor, lse: Tensor, objective: Objective, upstream: Upstream
) -> None:
    """Overwrite raw logits by their gradient."""
    vocabulary = raw.shape[-1]
    for block in row_blocks(raw.shape[0], vocabulary * 8):
        grad_target, grad_lse, entropy = upstream.at(block)
        z, t = scaled(raw[block], objective), target[block]
        log_p = z - lse[block].unsqueeze(1)
        p = torch.exp(log_p)
        factor = grad_lse.unsqueeze(1)
        some = (grad_target != 0) | (grad_lse != 0)
        if entropy is not None:
            # a class without probability adds nothing, though its logarithm is infinite
            factor = factor - entropy.unsqueeze(1) * torch.where(p == 0, 0, log_p)
            some |= entropy != 0
        dz = p * factor
        label = torch.where((t >= 0) & (t < vocabulary), t, 0).unsqueeze(1)
        dz.scatter_add_(1, label, grad_target.to(dz.dtype).unsqueeze(1))
        if objective.softcap is not None:
            dz *= 1 - (z / objective.softcap).square()
        raw[block] = torch.where(some.unsqueeze(1), dz * objective.logit_scale, 0).to(raw.dtype)
