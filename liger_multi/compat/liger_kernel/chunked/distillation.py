"""Losses of distillation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_multi import losses, ops
from liger_multi.compat.liger_kernel.chunked import bases
from liger_multi.compat.liger_kernel.losses import Options, defaults_of
from liger_multi.compat.liger_kernel.outputs import ArgumentError


class _Distilled(Options):
    divergence = "jsd"
    defaults = defaults_of(
        "weight_hard_loss weight_soft_loss beta ignore_index temperature compiled chunk_size "
        "return_soft_hard_loss",
        bases.LigerFusedLinearDistillationBase.forward,
    )

    @property
    def factor(self) -> float:
        """What the soft term is multiplied by, before its weight."""
        return 1.0

    def check(self) -> None:
        """Check that the options are known and consistent."""
        if not self.temperature:
            raise ArgumentError("Temperature cannot be 0.")
        losses.DistillationOptions(**self.loss_options)

    @property
    def loss_options(self) -> dict[str, Any]:
        """Options of :func:`liger_multi.losses.distillation_loss`."""
        options = {"beta": self.beta} if self.divergence == "jsd" else {}
        return {
            "divergence": self.divergence,
            "temperature": self.temperature,
            "soft_weight": self.factor * self.weight_soft_loss,
            "hard_weight": self.weight_hard_loss,
            "vocabulary": "common",
            **options,
        }

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The loss, and where asked for its soft and its hard term."""
        labels = true_labels.reshape(student_input.shape[:-1])
        loss, metrics = losses.distillation_loss(
            losses.Head(student_input, student_weight, student_bias),
            losses.Head(teacher_input, teacher_weight, teacher_bias),
            labels,
            ignore_index=self.ignore_index,
            **self.loss_options,
        )
        if not self.return_soft_hard_loss:
            return loss
        hard = metrics.hard
        if hard is None:  # its weight is 0, and it is asked for all the same
            with torch.no_grad():
                hard = ops.fused_linear_cross_entropy(
                    student_input,
                    student_weight,
                    labels,
                    student_bias,
                    ignore_index=self.ignore_index,
                )
        return loss, self.factor * metrics.soft, hard


class LigerFusedLinearJSDLoss(_Distilled):
    """:func:`liger_multi.losses.distillation_loss`; of two vocabularies the common part."""


class LigerFusedLinearCosineSimilarityLoss(_Distilled):
    """:func:`liger_multi.losses.distillation_loss` of the cosine; ``beta`` is its factor."""

    divergence = "cosine"

    @property
    def factor(self) -> float:
        """``beta``."""
        return self.beta  # type: ignore[no-any-return]
