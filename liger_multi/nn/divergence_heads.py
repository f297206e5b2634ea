"""Divergences of a student's linear head from a teacher's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_multi import checks, ops
from liger_multi.nn._shared import changed, divergence_options
from liger_multi.ops import _head as head
from liger_multi.ops._divergence_head import VOCABULARIES


class FusedLinearKLDivLoss(nn.Module):
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
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products.
    """

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
        name = type(self).__name__
        divergence_options(name, temperature, ignore_index, reduction)
        checks.one_of(name, "vocabulary", vocabulary, VOCABULARIES)
        head.rows_and_budget(name, chunk)
        head.accumulator(name, accumulate)
        checks.boolean(name, "square_temperature", square_temperature)
        checks.boolean(name, "compact", compact)
        self.temperature, self.square_temperature = temperature, square_temperature
        self.vocabulary, self.ignore_index, self.reduction = vocabulary, ignore_index, reduction
        self.chunk, self.accumulate, self.compact = chunk, accumulate, compact

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

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)


class FusedLinearJSDLoss(nn.Module):
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
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products.
    """

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
        name = type(self).__name__
        checks.number(name, "beta", beta, 0.0, 1.0)
        self.beta = beta
        divergence_options(name, temperature, ignore_index, reduction)
        checks.one_of(name, "vocabulary", vocabulary, VOCABULARIES)
        head.rows_and_budget(name, chunk)
        head.accumulator(name, accumulate)
        checks.boolean(name, "square_temperature", square_temperature)
        checks.boolean(name, "compact", compact)
        self.temperature, self.square_temperature = temperature, square_temperature
        self.vocabulary, self.ignore_index, self.reduction = vocabulary, ignore_index, reduction
        self.chunk, self.accumulate, self.compact = chunk, accumulate, compact

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

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)


class FusedLinearTVDLoss(nn.Module):
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
        chunk: Rows of logits at a time, a byte budget such as "512MiB", or auto.
        accumulate: Dtype in which the gradient of the weight is summed.
        compact: Drop ignored rows before the products.
    """

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
        name = type(self).__name__
        divergence_options(name, temperature, ignore_index, reduction)
        checks.one_of(name, "vocabulary", vocabulary, VOCABULARIES)
        head.rows_and_budget(name, chunk)
        head.accumulator(name, accumulate)
        checks.boolean(name, "square_temperature", square_temperature)
        checks.boolean(name, "compact", compact)
        self.temperature, self.square_temperature = temperature, square_temperature
        self.vocabulary, self.ignore_index, self.reduction = vocabulary, ignore_index, reduction
        self.chunk, self.accumulate, self.compact = chunk, accumulate, compact

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

    def extra_repr(self) -> str:
        """What was chosen."""
        return changed(self)
