"""The cross entropy of rows of logits, in plain PyTorch: statistics and gradients.

With ``z = cap * tanh(scale * raw / cap)``, ``p = softmax(z)`` and ``lse = logsumexp(z)``::

    ce = (1 - eps) w[t] (lse - z[t]) + eps / V * sum_j w[j] (lse - z[j])
    zl = z_loss_weight * lse^2
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype
from liger_multi.reference.cross_entropy.rows import Objective, RowStats, needs_argmax


def scaled(raw: Tensor, objective: Objective) -> Tensor:
    """Raw logits in the statistics dtype, scaled and capped."""
    z = raw.to(statistics_dtype(raw.dtype))
    if objective.logit_scale != 1.0:
        z = z * objective.logit_scale
    return z if objective.softcap is None else objective.softcap * torch.tanh(z / objective.softcap)


def _block_statistics(
    z: Tensor, target: Tensor, weight: Tensor | None, objective: Objective, outputs: str
) -> RowStats:
    valid = target != objective.ignore_index
    inside = valid & (target >= 0) & (target < z.shape[-1])
    label = torch.where(inside, target, 0).unsqueeze(1)
    lse = torch.logsumexp(z, -1)
    log_prob = z.gather(1, label).squeeze(1) - lse
    w = None if weight is None else weight.to(z.dtype)
    ce = -log_prob if w is None else -log_prob * w[label.squeeze(1)]
    if objective.label_smoothing:
        eps, v = objective.label_smoothing, z.shape[-1]
        spread = v * lse - z.sum(-1) if w is None else w.sum() * lse - z @ w
        ce = (1 - eps) * ce + eps / v * spread
    zl = objective.z_loss_weight * lse.square()
    poison = torch.where(valid & ~inside, float("nan"), 0.0)  # a target that reaches no class
    rows = [torch.where(valid, x, 0) for x in (ce + poison, zl, lse, log_prob + poison)]
    wanted = outputs.split(",")
    entropy = argmax = z.new_empty(0)
    if "entropy" in wanted:
        # log_softmax subtracts the maximum first, so that no large numbers cancel
        log_p = torch.log_softmax(z, -1)
        entropy = torch.where(
            valid, -torch.where(log_p.isneginf(), 0, log_p.exp() * log_p).sum(-1), 0
        )
    if needs_argmax(outputs):
        argmax = torch.where(valid, (z == z.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1), -1)
    return RowStats._make((*rows, entropy, argmax))


def statistics(
    raw: Tensor, target: Tensor, weight: Tensor | None, objective: Objective, outputs: str
) -> RowStats:
    """Statistics of rows of raw logits, in blocks."""
    rows = RowStats.empty(raw.shape[0], objective, outputs, raw)
    for block in row_blocks(raw.shape[0], raw.shape[1] * 8):
        z = scaled(raw[block], objective)
        rows.put(block, _block_statistics(z, target[block], weight, objective, outputs))
    return rows


def gradient_into(
    out: Tensor,
    raw: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    objective: Objective,
    scales: tuple[Tensor, Tensor],
) -> None:
    """Write the gradient of ``ce * scales[0] + zl * scales[1]`` by ``raw``; ``out`` may be ``raw``.

    Scales are scalars or one value a row. Ignored rows and rows with an impossible target get zero.
    """
    vocabulary, eps = raw.shape[-1], objective.label_smoothing
    everyone = torch.arange(raw.shape[0], device=raw.device)
    for block in row_blocks(raw.shape[0], vocabulary * 8):
        z = scaled(raw[block], objective)
        t, take = target[block], everyone[block] - block.start
        ce, zl = [s if s.ndim == 0 else s[block].unsqueeze(1) for s in scales]
        valid = (t != objective.ignore_index) & (t >= 0) & (t < vocabulary)
        label = torch.where(valid, t, 0)
        w = None if weight is None else weight.to(z.dtype)
        own = (1 - eps) * (z.new_ones(len(t)) if w is None else w[label]).unsqueeze(1)
        total = eps / vocabulary * (vocabulary if w is None else w.sum())
        rows_lse = lse[block].unsqueeze(1)
        dz = torch.exp(z - rows_lse) * (
            ce * (own + total) + zl * (2 * objective.z_loss_weight) * rows_lse
        )
        if eps:
            dz -= ce * (eps / vocabulary) * (1 if w is None else w)
        dz[take, label] -= (ce * own).expand(len(t), 1).squeeze(1)
        if objective.softcap is not None:
            dz *= 1 - (z / objective.softcap).square()
        out[block] = torch.where(valid.unsqueeze(1), dz * objective.logit_scale, 0).to(out.dtype)
