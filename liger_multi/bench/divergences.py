"""Plain formulas and peers of the divergences, for the table in formulas.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Formula = Callable[..., Any]


def _logs(x: Tensor, form: str) -> Tensor:
    if form == "logits":
        return torch.log_softmax(x.float(), -1)
    return x.float() if form == "log_prob" else x.float().log()


def _kl_rows(log_q: Tensor, log_p: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _jsd_rows(log_q: Tensor, log_p: Tensor, beta: float = 0.5) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    return (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)


def _tvd_rows(log_q: Tensor, log_p: Tensor) -> Tensor:
    return (log_q.exp() - log_p.exp()).abs().sum(-1) / 2


def _of_rows(rows: Formula) -> Formula:
    def call(
        student: Tensor, teacher: Tensor, *, form: str = "log_prob", teacher_form: str = "log_prob"
    ) -> Tensor:
        found: Tensor = rows(_logs(student, form), _logs(teacher, teacher_form)).mean()
        return found

    return call


def _kl_aten(
    student: Tensor, teacher: Tensor, *, form: str = "log_prob", teacher_form: str = "log_prob"
) -> Tensor:
    log_q = student.log_softmax(-1) if form == "logits" else student
    log_p = teacher.log_softmax(-1) if teacher_form == "logits" else teacher
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def _of_heads(rows: Formula) -> Formula:
    def call(
        hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
        target: Tensor,
    ) -> Tensor:  # fmt: skip
        log_q = torch.log_softmax(F.linear(hidden, weight).float(), -1)
        log_p = torch.log_softmax(F.linear(teacher_hidden, teacher_weight).float(), -1)
        valid = target != -100
        each = torch.where(valid, rows(log_q, log_p), 0)
        return each.sum() / valid.sum()

    return call


class _Products(torch.autograd.Function):
    """The four matrix products of a divergence of two heads and nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, other: Tensor, head: Tensor) -> Tensor:
        """Both logits; the student's are kept as if they were their own gradient."""
        logits = hidden @ weight.mT
        _ = other @ head.mT
        ctx.save_for_backward(hidden, weight, logits)
        return logits.new_ones((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Products with the shapes of both gradients."""
        hidden, weight, logits = ctx.saved_tensors
        return logits @ weight, logits.mT @ hidden, None, None


def _products(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, target: Tensor
) -> Tensor:
    apply: Any = _Products.apply
    found: Tensor = apply(hidden, weight, teacher_hidden, teacher_weight)
    return found


TABLE: dict[str, dict[str, Formula]] = {
    "kl_div": {"torch": _of_rows(_kl_rows), "aten": _kl_aten},
    "jsd": {"torch": _of_rows(_jsd_rows)},
    "tvd": {"torch": _of_rows(_tvd_rows)},
    "kl_div_inplace": {"torch": _of_rows(_kl_rows), "aten": _kl_aten},
    "jsd_inplace": {"torch": _of_rows(_jsd_rows)},
    "tvd_inplace": {"torch": _of_rows(_tvd_rows)},
    "fused_linear_kl_div": {"torch": _of_heads(_kl_rows), "products": _products},
    "fused_linear_jsd": {"torch": _of_heads(_jsd_rows), "products": _products},
    "fused_linear_tvd": {"torch": _of_heads(_tvd_rows), "products": _products},
}


# --- Liger's, which takes log-probabilities (of tvd: probabilities) ---


def _given(loss: Formula, prepare: Formula) -> Formula:
    def call(
        student: Tensor, teacher: Tensor, *, form: str = "log_prob", teacher_form: str = "log_prob"
    ) -> Tensor:
        found: Tensor = loss(prepare(student, form), prepare(teacher, teacher_form))
        return found

    return call


def _given_logs(x: Tensor, form: str) -> Tensor:
    return x.log_softmax(-1) if form == "logits" else x


def _given_probabilities(x: Tensor, form: str) -> Tensor:
    return x.softmax(-1) if form == "logits" else x.exp()


LIGER: dict[str, tuple[str, Callable[[Formula], Formula]]] = {
    "kl_div": (
        "liger_kl_div",
        lambda f: _given(lambda q, p: f(q, p, reduction="batchmean", log_target=True), _given_logs),
    ),
    "jsd": ("liger_jsd", lambda f: _given(lambda q, p: f(q, p), _given_logs)),
    "tvd": (
        "liger_tvd",
        lambda f: _given(lambda q, p: f(q, p, reduction="batchmean"), _given_probabilities),
    ),
    "fused_linear_jsd": (
        "liger_fused_linear_jsd",
        lambda f: (
            lambda hidden, weight, teacher_hidden, teacher_weight, target: f(
                hidden, weight, teacher_hidden, teacher_weight, target
            )
        ),
    ),
}
LIGER |= {f"{name}_inplace": LIGER[name] for name in ("kl_div", "jsd", "tvd")}
