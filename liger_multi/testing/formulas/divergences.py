"""Divergences of two distributions, from rows of numbers or from hidden states and heads.

Arguments that only say how an operator computes (``inplace``, ``chunk``, ``accumulate``,
``compact``) are taken and ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.testing.formulas._common import wide

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
