"""Divergences of a student from a teacher, of given rows."""

from __future__ import annotations

from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.nn._shared import changed, divergence_options
from liger_multi.ops._divergence import FORMS


class KLDivLoss(nn.Module):
    """KL divergence.

    Like:
        ``torch.nn.KLDivLoss``: its ``batchmean`` is ``mean`` here, its ``log_target`` a form.

    Operator:
        kl_div

    Args:
        form: What the student's rows are: log_prob, prob or logits.
        teacher_form: What the teacher's are.
        temperature: Logits are divided by it.
        ignore_index: Rows with this target cost nothing.
        reduction: mean (over rows), sum or none (a number a row).
    """

    def __init__(
        self,
        *,
        form: str = "log_prob",
        teacher_form: str = "prob",
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        divergence_options(name, temperature, ignore_index, reduction)
        checks.one_of(name, "form", form, FORMS)
        checks.one_of(name, "teacher_form", teacher_form, FORMS)
        self.form, self.teacher_form, self.temperature = form, teacher_form, temperature
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, student: Tensor, teacher: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of rows of the student against the teacher's."""
        return ops.kl_div(
            student,
            teacher,
            target,
            form=self.form,
            teacher_form=self.teacher_form,
            temperature=self.temperature,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)


class JSDLoss(nn.Module):
    """Jensen-Shannon divergence, of weight ``beta``.

    Like:
        The generalized divergence of knowledge distillation (arXiv:2306.13649).

    Operator:
        jsd

    Args:
        beta: Share of the teacher in the mixture; the ends are one-sided.
        form: What the student's rows are: log_prob, prob or logits.
        teacher_form: What the teacher's are; None: the same.
        temperature: Logits are divided by it.
        ignore_index: Rows with this target cost nothing.
        reduction: mean (over rows), sum or none (a number a row).
    """

    def __init__(
        self,
        beta: float = 0.5,
        *,
        form: str = "log_prob",
        teacher_form: str | None = None,
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        checks.number(name, "beta", beta, 0.0, 1.0)
        self.beta = beta
        divergence_options(name, temperature, ignore_index, reduction)
        checks.one_of(name, "form", form, FORMS)
        checks.one_of(name, "teacher_form", form if teacher_form is None else teacher_form, FORMS)
        self.form, self.teacher_form, self.temperature = form, teacher_form, temperature
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, student: Tensor, teacher: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of rows of the student against the teacher's."""
        return ops.jsd(
            student,
            teacher,
            target,
            beta=self.beta,
            form=self.form,
            teacher_form=self.teacher_form,
            temperature=self.temperature,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)


class TVDLoss(nn.Module):
    """Total variation distance.

    Like:
        Half of ``torch.nn.L1Loss`` with sums over classes.

    Operator:
        tvd

    Args:
        form: What the student's rows are: log_prob, prob or logits.
        teacher_form: What the teacher's are; None: the same.
        temperature: Logits are divided by it.
        ignore_index: Rows with this target cost nothing.
        reduction: mean (over rows), sum or none (a number a row).
    """

    def __init__(
        self,
        *,
        form: str = "prob",
        teacher_form: str | None = None,
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        divergence_options(name, temperature, ignore_index, reduction)
        checks.one_of(name, "form", form, FORMS)
        checks.one_of(name, "teacher_form", form if teacher_form is None else teacher_form, FORMS)
        self.form, self.teacher_form, self.temperature = form, teacher_form, temperature
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, student: Tensor, teacher: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of rows of the student against the teacher's."""
        return ops.tvd(
            student,
            teacher,
            target,
            form=self.form,
            teacher_form=self.teacher_form,
            temperature=self.temperature,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)
