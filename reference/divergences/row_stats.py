"""Rows of two distributions: which divergence, statistics, and what a backend's kernels do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from liger_multi.reference.common.chunking import statistics_dtype

FORMS = ("logits", "log_prob", "prob")


@dataclass(frozen=True)
class DivergenceSpec:
    """Which divergence, of what: logits are multiplied by ``scale`` (1 / temperature)."""

    kind: str
    beta: float = 0.0
    form: str = "logits"
    teacher_form: str = "logits"
    scale: float = 1.0
    ignore_index: int = -100


def spec_of(
    name: str, beta: float, form: str, teacher_form: str, scale: float, ignore_index: int
) -> DivergenceSpec:
    """The goal of an operator; the ends of the Jensen-Shannon divergence's are the KL divergence's."""
    kind = {"kl_div": "forward", "tvd": "tvd", "jsd": "jensen"}[name]
    if kind == "jensen":
        kind = {0.0: "forward", 1.0: "reverse"}.get(beta, kind)
    return DivergenceSpec(kind, beta, form, teacher_form, scale, ignore_index)


class DivergenceStats(NamedTuple):
    """Loss of every row and, of logits, what backward wants: 0 for ignored rows."""

    loss: Tensor
    lse: Tensor
    teacher_lse: Tensor
    slope: Tensor

    @staticmethod
    def empty(rows: int, spec: DivergenceSpec, like: Tensor) -> DivergenceStats:
        """Room beside ``like``; empty where the form is not logits."""
        kind, student = statistics_dtype(like.dtype), spec.form == "logits"
        keep = (True, student, spec.teacher_form == "logits", student)
        return DivergenceStats._make(
            like.new_empty(rows if kept else 0, dtype=kind) for kept in keep
        )


class DivergenceKernels(Protocol):
    """What a backend's row kernels do with rows of a student and a teacher."""

    def statistics(
        self, student: Tensor, teacher: Tensor, target: Tensor | None, spec: DivergenceSpec
    ) -> DivergenceStats:
        """Losses and residuals of rows; rows whose target is ignored are 0."""

    def gradient_into(
        self, out: Tensor, student: Tensor, teacher: Tensor, target: Tensor | None, rows: DivergenceStats,
        spec: DivergenceSpec, factor: Tensor,
    ) -> None:  # fmt: skip
        """Write the gradient times ``factor`` (a number, or one a row); ``out`` may be student."""

    def loss_and_gradient_(
        self,
        student: Tensor,
        teacher: Tensor,
        target: Tensor | None,
        spec: DivergenceSpec,
        factor: Tensor,
    ) -> Tensor:
        """Losses of rows; the student becomes its gradient times ``factor``."""
