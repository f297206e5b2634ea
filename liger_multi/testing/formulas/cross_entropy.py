"""Losses and log-probabilities of classes, from logits or from hidden states and a head.

Arguments that only say how an operator computes (``inplace``, ``chunk``, ``accumulate``,
``compact``, ``validate``) are taken and ignored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.ops import CrossEntropyOutput, LogProbOutput


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    inplace: bool = False,
    validate: bool = False,
    outputs: tuple[str, ...] = (),
) -> Tensor | CrossEntropyOutput:
    """Cross entropy with a z-loss, and what may be reported beside it."""
    shape, z, target = target.shape, logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    valid = target != ignore_index
    rows = F.cross_entropy(
        z,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    lse = torch.logsumexp(z, -1)
    penalty = torch.where(valid, z_loss * lse**2, 0)
    count = valid.sum().clamp(min=1)
    if reduction == "none":
        loss, z_out = (rows + penalty).view(shape), penalty.view(shape)
    elif reduction == "sum":
        z_out = penalty.sum()
        loss = rows.sum() + z_out
    else:
        total = (valid if weight is None else weight[target.clamp(min=0)] * valid).sum()
        z_out = penalty.sum() / count
        loss = rows.sum() / torch.where(total == 0, 1, total) + z_out
    if not outputs:
        return loss
    label, log_p = target.clamp(min=0, max=max(z.shape[-1] - 1, 0)), torch.log_softmax(z, -1)
    hit = torch.where(valid, (z.argmax(-1) == target).to(z.dtype), 0)
    made = {
        "z_loss": z_out,
        "token_accuracy": hit.view(shape) if reduction == "none" else hit.sum() / count,
        "predicted_tokens": torch.where(valid, z.argmax(-1), -1).view(shape),
        "log_prob": torch.where(valid, log_p.gather(1, label[:, None])[:, 0], 0).view(shape),
        "entropy": torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0).view(shape),
        "lse": torch.where(valid, lse, 0).view(shape),
    }
    return CrossEntropyOutput(loss, **{name: made[name].detach() for name in outputs})


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    logit_scale: float = 1.0,
    chunk: int | str = "auto",
    accumulate: torch.dtype = torch.float32,
    compact: bool = True,
    validate: bool = False,
    outputs: tuple[str, ...] = (),
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of ``logit_scale * (hidden @ weight.T + bias)``."""
    return cross_entropy(
        F.linear(hidden, weight, bias) * logit_scale,
        target,
        class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
        outputs=outputs,
    )


def token_log_prob(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    validate: bool = False,
    outputs: tuple[str, ...] = LogProbOutput._fields,
) -> LogProbOutput:
    """Log-probability of each target, and statistics of its row."""
    z = logits * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    valid, log_p = target != ignore_index, torch.log_softmax(z, -1)
    made = {
        "log_prob": log_p.gather(-1, torch.where(valid, target, 0).unsqueeze(-1)).squeeze(-1),
        "entropy": torch.special.entr(log_p.exp()).sum(-1),
        "lse": torch.logsumexp(z, -1),
    }
    made = {name: torch.where(valid, x, 0) for name, x in made.items()}
    made["argmax"] = torch.where(valid, z.argmax(-1), -1)
    return LogProbOutput(**{name: made[name] for name in outputs})


def fused_linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    chunk: int | str = "auto",
    accumulate: torch.dtype = torch.float32,
    compact: bool = True,
    validate: bool = False,
    outputs: tuple[str, ...] = LogProbOutput._fields,
) -> LogProbOutput:
    """The same of ``hidden @ weight.T + bias``."""
    return token_log_prob(
        F.linear(hidden, weight, bias),
        target,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        outputs=outputs,
    )


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    validate: bool = False,
) -> Tensor:
    """Log-probabilities of one class or of several classes per row."""
    log_p = torch.log_softmax(logits / temperature, -1)
    several = index.ndim == logits.ndim
    places = index if several else index.unsqueeze(-1)
    valid = places != ignore_index
    found = torch.where(valid, log_p.gather(-1, torch.where(valid, places, 0)), 0)
    return found if several else found.squeeze(-1)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """``exp(x) / sum(exp(x))``."""
    return torch.softmax(x, dim)


def sparsemax(x: Tensor, dim: int = -1) -> Tensor:
    """The nearest point of the probability simplex."""
    x = x.movedim(dim, -1)
    descending = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, device=x.device)
    total = descending.cumsum(-1) - 1
    k = (descending * count > total).sum(-1, keepdim=True)
    total = total.gather(-1, k - 1)
    # an entry at the threshold is outside: a clamp would pass its gradient on
    return torch.where(x * k > total, x - total / k, 0).movedim(-1, dim)


def embedding(
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    *,
    scale: float = 1.0,
    validate: bool = False,
) -> Tensor:
    """Rows of a table, times a number in their dtype."""
    y = F.embedding(index, weight, padding_idx)
    return y if scale == 1.0 else y * torch.tensor(scale, dtype=y.dtype, device=y.device)
