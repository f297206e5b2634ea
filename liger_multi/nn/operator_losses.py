"""Losses whose options and arguments are those of an operator.

Options are checked when the module is made, tensors when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.nn._shared import changed
from liger_multi.ops import _head as head
from liger_multi.ops._divergence import FORMS, REDUCTIONS
from liger_multi.ops._divergence_head import VOCABULARIES
from liger_multi.ops.cross_entropy import OUTPUTS as CROSS_ENTROPY_OUTPUTS
from liger_multi.ops.fused_linear_log_prob import OUTPUTS


def _above_zero(module: str, name: str, value: Any) -> None:
    checks.number(module, name, value, 0.0, above=True)


# by the name of an option; None passes where its type allows it
CHECKS: dict[str, Callable[[str, str, Any], object]] = {
    "accumulate": lambda module, _, value: head.accumulator(module, value),
    "beta": lambda module, name, value: checks.number(module, name, value, 0.0, 1.0),
    "chunk": lambda module, _, value: head.rows_and_budget(module, value),
    "class_weight": lambda module, name, value: checks.floating(module, **{name: value}),
    "compact": checks.boolean,
    "form": lambda module, name, value: checks.one_of(module, name, value, FORMS),
    "ignore_index": checks.integer,
    "label_smoothing": lambda module, name, value: checks.number(module, name, value, 0.0, 1.0),
    "logit_scale": checks.number,
    "reduction": lambda module, name, value: checks.one_of(module, name, value, REDUCTIONS),
    "softcap": _above_zero,
    "square_temperature": checks.boolean,
    "teacher_form": lambda module, name, value: checks.one_of(module, name, value, FORMS),
    "temperature": _above_zero,
    "validate": checks.boolean,
    "vocabulary": lambda module, name, value: checks.one_of(module, name, value, VOCABULARIES),
    "z_loss": lambda module, name, value: checks.number(module, name, value, 0.0),
}


class OperatorLoss(nn.Module):
    """A loss whose options are the arguments of its constructor.

    Attributes:
        _names: What ``outputs`` may name.
    """

    _names: ClassVar[tuple[str, ...]] = ()

    def _keep(self, *, optional: str = "", **options: Any) -> None:
        """Check options, and make them attributes; a tensor is a buffer.

        Args:
            optional: Names of the options that may be None.
            options: By name.
        """
        module = type(self).__name__
        for name, value in options.items():
            if name == "outputs":
                checks.names(module, value, self._names)
            elif value is not None or name not in optional.split():
                CHECKS[name](module, name, value)
            if name == "class_weight":
                self.register_buffer(name, value)
            else:
                setattr(self, name, tuple(value) if name == "outputs" else value)

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)


class KLDivLoss(OperatorLoss):
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

    form: str
    teacher_form: str
    temperature: float
    ignore_index: int
    reduction: str

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
        self._keep(
            form=form,
            teacher_form=teacher_form,
            temperature=temperature,
            ignore_index=ignore_index,
            reduction=reduction,
        )

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


class JSDLoss(OperatorLoss):
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

    beta: float
    form: str
    teacher_form: str | None
    temperature: float
    ignore_index: int
    reduction: str

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
        self._keep(
            beta=beta,
            form=form,
            teacher_form=teacher_form,
            temperature=temperature,
            ignore_index=ignore_index,
            reduction=reduction,
            optional="teacher_form",
        )

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


class TVDLoss(OperatorLoss):
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

    form: str
    teacher_form: str | None
    temperature: float
    ignore_index: int
    reduction: str

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
        self._keep(
            form=form,
            teacher_form=teacher_form,
            temperature=temperature,
            ignore_index=ignore_index,
            reduction=reduction,
            optional="teacher_form",
        )

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


class FusedLinearKLDivLoss(OperatorLoss):
    """KL divergence of two linear heads.

    Like:
        Two ``torch.nn.Linear`` and a divergence of their softmax; the heads' parameters are
        arguments of the call.

    Operator:
        fused_linear_kl_div

    Args:
        temperature: Logits of both are divided by it.
        square_temperature: Multiply the loss by its square.
        vocabulary: equal, or common to compare the first classes that both have.
        ignore_index: Rows with this target are dropped.
        reduction: mean (over rows), sum or none (a number a row).
        chunk: Rows of logits at a time, a byte budget such as "512MiB", auto, or lean: 128 MiB,
            and the gradient of the weight is summed in the dtype of the weight.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products; on a device, of more than 512 rows.
    """

    temperature: float
    square_temperature: bool
    vocabulary: str
    ignore_index: int
    reduction: str
    chunk: int | str
    accumulate: torch.dtype
    compact: bool

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        square_temperature: bool = False,
        vocabulary: str = "equal",
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk: int | str = "auto",
        accumulate: torch.dtype = torch.float32,
        compact: bool = True,
    ) -> None:
        super().__init__()
        self._keep(
            temperature=temperature,
            square_temperature=square_temperature,
            vocabulary=vocabulary,
            ignore_index=ignore_index,
            reduction=reduction,
            chunk=chunk,
            accumulate=accumulate,
            compact=compact,
        )

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        target: Tensor | None = None,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor:
        """The loss of the student's head against the teacher's."""
        return ops.fused_linear_kl_div(
            hidden,
            weight,
            teacher_hidden,
            teacher_weight,
            target,
            bias,
            teacher_bias,
            temperature=self.temperature,
            square_temperature=self.square_temperature,
            vocabulary=self.vocabulary,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            chunk=self.chunk,
            accumulate=self.accumulate,
            compact=self.compact,
        )


class FusedLinearJSDLoss(OperatorLoss):
    """Jensen-Shannon divergence of two linear heads.

    Like:
        Two ``torch.nn.Linear`` and a divergence of their softmax; the heads' parameters are
        arguments of the call.

    Operator:
        fused_linear_jsd

    Args:
        beta: Share of the teacher in the mixture; the ends are one-sided.
        temperature: Logits of both are divided by it.
        square_temperature: Multiply the loss by its square.
        vocabulary: equal, or common to compare the first classes that both have.
        ignore_index: Rows with this target are dropped.
        reduction: mean (over rows), sum or none (a number a row).
        chunk: Rows of logits at a time, a byte budget such as "512MiB", auto, or lean: 128 MiB,
            and the gradient of the weight is summed in the dtype of the weight.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products; on a device, of more than 512 rows.
    """

    beta: float
    temperature: float
    square_temperature: bool
    vocabulary: str
    ignore_index: int
    reduction: str
    chunk: int | str
    accumulate: torch.dtype
    compact: bool

    def __init__(
        self,
        beta: float = 0.5,
        *,
        temperature: float = 1.0,
        square_temperature: bool = False,
        vocabulary: str = "equal",
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk: int | str = "auto",
        accumulate: torch.dtype = torch.float32,
        compact: bool = True,
    ) -> None:
        super().__init__()
        self._keep(
            beta=beta,
            temperature=temperature,
            square_temperature=square_temperature,
            vocabulary=vocabulary,
            ignore_index=ignore_index,
            reduction=reduction,
            chunk=chunk,
            accumulate=accumulate,
            compact=compact,
        )

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        target: Tensor | None = None,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor:
        """The loss of the student's head against the teacher's."""
        return ops.fused_linear_jsd(
            hidden,
            weight,
            teacher_hidden,
            teacher_weight,
            target,
            bias,
            teacher_bias,
            beta=self.beta,
            temperature=self.temperature,
            square_temperature=self.square_temperature,
            vocabulary=self.vocabulary,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            chunk=self.chunk,
            accumulate=self.accumulate,
            compact=self.compact,
        )


class FusedLinearTVDLoss(OperatorLoss):
    """Total variation distance of two linear heads.

    Like:
        Two ``torch.nn.Linear`` and a divergence of their softmax; the heads' parameters are
        arguments of the call.

    Operator:
        fused_linear_tvd

    Args:
        temperature: Logits of both are divided by it.
        square_temperature: Multiply the loss by its square.
        vocabulary: equal, or common to compare the first classes that both have.
        ignore_index: Rows with this target are dropped.
        reduction: mean (over rows), sum or none (a number a row).
        chunk: Rows of logits at a time, a byte budget such as "512MiB", auto, or lean: 128 MiB,
            and the gradient of the weight is summed in the dtype of the weight.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products; on a device, of more than 512 rows.
    """

    temperature: float
    square_temperature: bool
    vocabulary: str
    ignore_index: int
    reduction: str
    chunk: int | str
    accumulate: torch.dtype
    compact: bool

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        square_temperature: bool = False,
        vocabulary: str = "equal",
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk: int | str = "auto",
        accumulate: torch.dtype = torch.float32,
        compact: bool = True,
    ) -> None:
        super().__init__()
        self._keep(
            temperature=temperature,
            square_temperature=square_temperature,
            vocabulary=vocabulary,
            ignore_index=ignore_index,
            reduction=reduction,
            chunk=chunk,
            accumulate=accumulate,
            compact=compact,
        )

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        target: Tensor | None = None,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor:
        """The loss of the student's head against the teacher's."""
        return ops.fused_linear_tvd(
            hidden,
            weight,
            teacher_hidden,
            teacher_weight,
            target,
            bias,
            teacher_bias,
            temperature=self.temperature,
            square_temperature=self.square_temperature,
            vocabulary=self.vocabulary,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            chunk=self.chunk,
            accumulate=self.accumulate,
            compact=self.compact,
        )


class FusedLinearCrossEntropyLoss(OperatorLoss):
    """Cross entropy of a linear head, without holding the logits of all rows.

    Like:
        ``torch.nn.Linear`` and ``torch.nn.CrossEntropyLoss`` behind it; the head's parameters are
        arguments of the call, ``loss(hidden, head.weight, target, head.bias)``.

    Operator:
        fused_linear_cross_entropy

    Args:
        class_weight: One factor a class.
        ignore_index: Targets that cost nothing.
        reduction: mean, sum or none.
        label_smoothing: Share of the target that is spread over all classes.
        z_loss: Factor of ``lse^2``.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        logit_scale: Factor of the logits, before the softcap.
        chunk: Rows of logits at a time, a byte budget such as "512MiB", auto, or lean: 128 MiB,
            and the gradient of the weight is summed in the dtype of the weight.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the product; on a device, of more than 512 rows.
        validate: Raise for targets out of range on a device too (a sync).
        outputs: Names of what to return with the loss, in a ``CrossEntropyOutput``.
    """

    _names = CROSS_ENTROPY_OUTPUTS
    class_weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    chunk: int | str
    accumulate: torch.dtype
    compact: bool
    validate: bool
    outputs: tuple[str, ...]

    def __init__(
        self,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        chunk: int | str = "auto",
        accumulate: torch.dtype = torch.float32,
        compact: bool = True,
        validate: bool = False,
        outputs: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self._keep(
            class_weight=class_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            chunk=chunk,
            accumulate=accumulate,
            compact=compact,
            validate=validate,
            outputs=outputs,
            optional="class_weight softcap",
        )

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor | ops.CrossEntropyOutput:
        """The loss of ``hidden @ weight.T + bias``."""
        options: dict[str, Any] = {
            "class_weight": self.class_weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "chunk": self.chunk,
            "accumulate": self.accumulate,
            "compact": self.compact,
            "validate": self.validate,
        }
        if self.outputs:
            options["outputs"] = self.outputs
            return ops.fused_linear_cross_entropy_with_outputs(
                hidden, weight, target, bias, **options
            )
        return ops.fused_linear_cross_entropy(hidden, weight, target, bias, **options)


class FusedLinearLogProb(OperatorLoss):
    """Log-probabilities of tokens under a linear head, and the entropy of its rows.

    Like:
        ``log_softmax`` and ``gather`` of the logits of ``torch.nn.Linear``; the head's parameters
        are arguments of the call.

    Operator:
        fused_linear_log_prob

    Args:
        temperature: Logits are divided by it, after the softcap.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        logit_scale: Factor of the logits, before the softcap.
        ignore_index: Targets whose rows are dropped.
        chunk: Rows of logits at a time, a byte budget such as "512MiB", auto, or lean: 128 MiB,
            and the gradient of the weight is summed in the dtype of the weight.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the product; on a device, of more than 512 rows.
        validate: Raise for targets out of range on a device too (a sync).
        outputs: Names of what to compute: log_prob, entropy, lse, argmax.
    """

    _names = OUTPUTS
    temperature: float
    softcap: float | None
    logit_scale: float
    ignore_index: int
    chunk: int | str
    accumulate: torch.dtype
    compact: bool
    validate: bool
    outputs: tuple[str, ...]

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        ignore_index: int = -100,
        chunk: int | str = "auto",
        accumulate: torch.dtype = torch.float32,
        compact: bool = True,
        validate: bool = False,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> None:
        super().__init__()
        self._keep(
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            ignore_index=ignore_index,
            chunk=chunk,
            accumulate=accumulate,
            compact=compact,
            validate=validate,
            outputs=outputs,
            optional="softcap",
        )

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
    ) -> ops.LogProbOutput:
        """Statistics of ``hidden @ weight.T + bias`` at the targets."""
        return ops.fused_linear_log_prob(
            hidden,
            weight,
            target,
            bias,
            temperature=self.temperature,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            ignore_index=self.ignore_index,
            chunk=self.chunk,
            accumulate=self.accumulate,
            compact=self.compact,
            validate=self.validate,
            outputs=self.outputs,
        )
