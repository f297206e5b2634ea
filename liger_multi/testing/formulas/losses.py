"""Losses and log-probabilities of classes, and divergences of two distributions.

They come from logits, from rows of numbers, or from hidden states and heads. Arguments that only
say how an operator computes (``inplace``, ``chunk``, ``accumulate``, ``compact``, ``validate``) are
taken and ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.ops import CrossEntropyOutput, LogProbOutput
from liger_multi.testing.formulas.norms import wide

# --- classes ---


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
    reports = {
        "z_loss": z_out,
        "token_accuracy": hit.view(shape) if reduction == "none" else hit.sum() / count,
        "predicted_tokens": torch.where(valid, z.argmax(-1), -1).view(shape),
        "log_prob": torch.where(valid, log_p.gather(1, label[:, None])[:, 0], 0).view(shape),
        "entropy": torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0).view(shape),
        "lse": torch.where(valid, lse, 0).view(shape),
    }
    return CrossEntropyOutput(loss, **{name: reports[name].detach() for name in outputs})


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
    reports = {
        "log_prob": log_p.gather(-1, torch.where(valid, target, 0).unsqueeze(-1)).squeeze(-1),
        "entropy": torch.special.entr(log_p.exp()).sum(-1),
        "lse": torch.logsumexp(z, -1),
    }
    reports = {name: torch.where(valid, x, 0) for name, x in reports.items()}
    reports["argmax"] = torch.where(valid, z.argmax(-1), -1)
    return LogProbOutput(**{name: reports[name] for name in outputs})


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
    log_prob = torch.where(valid, log_p.gather(-1, torch.where(valid, places, 0)), 0)
    return log_prob if several else log_prob.squeeze(-1)


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


# --- divergences of two distributions ---

Rows = Callable[[Tensor, Tensor], Tensor]
"""The divergence of each row from the logarithms of the student and of the teacher."""


def kl_rows(log_q: Tensor, log_p: Tensor) -> Tensor:
    """``sum p (log p - log q)``."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def jsd_rows(beta: float) -> Rows:
    """``beta KL(p | m) + (1 - beta) KL(q | m)`` of ``m = beta p + (1 - beta) q``."""
    if beta == 0.0:
        return kl_rows
    if beta == 1.0:
        return lambda log_q, log_p: kl_rows(log_p, log_q)

    def rows(log_q: Tensor, log_p: Tensor) -> Tensor:
        p, q = log_p.exp(), log_q.exp()
        log_m = (beta * p + (1 - beta) * q).log()
        return (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)

    return rows


def tvd_rows(log_q: Tensor, log_p: Tensor) -> Tensor:
    """``sum |q - p| / 2``."""
    return (log_q.exp() - log_p.exp()).abs().sum(-1) / 2


def _logarithms(x: Tensor, form: str, temperature: float) -> Tensor:
    x = wide(x)
    if form == "logits":
        return torch.log_softmax(x if temperature == 1.0 else x / temperature, -1)
    return x if form == "log_prob" else x.log()


def _reduced(rows: Tensor, target: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    """The rows that count: their mean, their sum, or all with 0 for the others."""
    if target is None:
        mean = reduction == "mean" and rows.numel() > 0
        return rows if reduction == "none" else rows.mean() if mean else rows.sum()
    valid = target != ignore_index
    rows = torch.where(valid, rows, 0)
    if reduction == "none":
        return rows
    return rows.sum() / valid.sum().clamp(min=1) if reduction == "mean" else rows.sum()


def kl_div(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    form: str = "log_prob",
    teacher_form: str = "prob",
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """KL divergence of the student from the teacher."""
    log_q = _logarithms(student, form, temperature)
    log_p = _logarithms(teacher, teacher_form, temperature)
    return _reduced(kl_rows(log_q, log_p), target, ignore_index, reduction)


def jsd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    form: str = "log_prob",
    teacher_form: str | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """Generalized Jensen-Shannon divergence."""
    log_q = _logarithms(student, form, temperature)
    log_p = _logarithms(teacher, teacher_form or form, temperature)
    return _reduced(jsd_rows(beta)(log_q, log_p), target, ignore_index, reduction)


def tvd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    form: str = "prob",
    teacher_form: str | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """Total variation distance."""
    log_q = _logarithms(student, form, temperature)
    log_p = _logarithms(teacher, teacher_form or form, temperature)
    return _reduced(tvd_rows(log_q, log_p), target, ignore_index, reduction)


def rows_of_heads(
    rows: Rows,
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Divergence of each row over the classes that both heads have."""
    common = min(weight.shape[0], teacher_weight.shape[0])

    def logarithms(x: Tensor, head: Tensor, head_bias: Tensor | None) -> Tensor:
        logits = F.linear(x, head, head_bias)
        logits = logits if head.shape[0] == common else logits[..., :common]
        return _logarithms(logits, "logits", temperature)

    log_q = logarithms(hidden, weight, bias)
    return rows(log_q, logarithms(teacher_hidden, teacher_weight, teacher_bias))


def fused_linear_kl_div(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    square_temperature: bool = False,
    vocabulary: str = "equal",
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk: int | str = "auto",
    accumulate: torch.dtype = torch.float32,
    compact: bool = True,
) -> Tensor:
    """KL divergence of two heads' distributions."""
    states = (hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias)
    rows = rows_of_heads(kl_rows, *states, temperature=temperature)
    loss = _reduced(rows, target, ignore_index, reduction)
    return loss * temperature**2 if square_temperature else loss


def fused_linear_jsd(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    square_temperature: bool = False,
    vocabulary: str = "equal",
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk: int | str = "auto",
    accumulate: torch.dtype = torch.float32,
    compact: bool = True,
) -> Tensor:
    """Jensen-Shannon divergence of two heads' distributions."""
    states = (hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias)
    rows = rows_of_heads(jsd_rows(beta), *states, temperature=temperature)
    loss = _reduced(rows, target, ignore_index, reduction)
    return loss * temperature**2 if square_temperature else loss


def fused_linear_tvd(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    square_temperature: bool = False,
    vocabulary: str = "equal",
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk: int | str = "auto",
    accumulate: torch.dtype = torch.float32,
    compact: bool = True,
) -> Tensor:
    """Total variation distance of two heads' distributions."""
    states = (hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias)
    rows = rows_of_heads(tvd_rows, *states, temperature=temperature)
    loss = _reduced(rows, target, ignore_index, reduction)
    return loss * temperature**2 if square_temperature else loss
