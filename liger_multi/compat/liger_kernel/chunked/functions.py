"""The losses as ``LigerFusedLinear*Function.apply`` and ``liger_fused_linear_*``.

``apply`` calls the module of the loss, whose gradients are those of :mod:`liger_multi.losses`.
Hidden states come before the weight in all of them. A loss of one's own derives from a base class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_multi.compat.liger_kernel.chunked import distillation, policy, preference
from liger_multi.compat.liger_kernel.chunked.bases import (
    LigerFusedLinearDistillationBase,
    LigerFusedLinearPPOBase,
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
    Made,
)

_HOOKS = ("forward", "preference_loss_fn", "ppo_loss_fn", "distillation_loss_fn")


class _Sealed(torch.autograd.Function):
    """A loss whose ``apply`` would not call what a subclass writes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = cls.__module__ == __name__
        written = [name for name in _HOOKS if name in vars(cls)]
        if written and not known:
            base = next(b for b in cls.__mro__ if b.__name__.endswith("Base"))
            raise TypeError(
                f"{cls.__name__}: {', '.join(written)} of {cls.__bases__[0].__name__} would not be "
                f"called; derive from {base.__name__}"
            )


class LigerFusedLinearDPOFunction(_Sealed, LigerFusedLinearPreferenceBase):
    """:class:`LigerFusedLinearDPOLoss`."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, ignore_index: int = -100, beta: float = 0.1,
        compute_nll_loss: bool = False, compiled: bool = True, use_ref_model: bool = True,
        average_log_prob: bool = False, chunk_size: int = 1, loss_type: str = "sigmoid",
        label_smoothing: float = 0.0, discopop_tau: float = 0.05, alpha: float = 1.0,
    ) -> Made:  # fmt: skip
        """The loss, and what the module returns beside it."""
        loss = preference.LigerFusedLinearDPOLoss(
            ignore_index, beta, alpha, compute_nll_loss, compiled, use_ref_model, average_log_prob,
            chunk_size, loss_type, label_smoothing, discopop_tau,
        )  # fmt: skip
        return loss(weight, _input, target, bias, ref_input, ref_weight, ref_bias)  # type: ignore[no-any-return]


class LigerFusedLinearCPOFunction(_Sealed, LigerFusedLinearPreferenceBase):
    """:class:`LigerFusedLinearCPOLoss`."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0,
        label_smoothing: float = 0.0, compute_nll_loss: bool = True, compiled: bool = True,
        average_log_prob: bool = False, chunk_size: int = 1,
    ) -> Made:  # fmt: skip
        """The loss, and what the module returns beside it."""
        loss = preference.LigerFusedLinearCPOLoss(
            ignore_index, beta, alpha, label_smoothing, compute_nll_loss, compiled,
            average_log_prob, chunk_size,
        )  # fmt: skip
        return loss(weight, _input, target, bias)  # type: ignore[no-any-return]


class LigerFusedLinearSimPOFunction(_Sealed, LigerFusedLinearPreferenceBase):
    """:class:`LigerFusedLinearSimPOLoss`, by default without the NLL."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0,
        label_smoothing: float = 0.0, compute_nll_loss: bool = False, compiled: bool = True,
        gamma: float = 0.5, chunk_size: int = 1,
    ) -> Made:  # fmt: skip
        """The loss, and what the module returns beside it."""
        loss = preference.LigerFusedLinearSimPOLoss(
            ignore_index, beta, alpha, label_smoothing, compute_nll_loss, compiled, gamma,
            chunk_size,
        )  # fmt: skip
        return loss(weight, _input, target, bias)  # type: ignore[no-any-return]


class LigerFusedLinearORPOFunction(_Sealed, LigerFusedLinearPreferenceBase):
    """:class:`LigerFusedLinearORPOLoss`."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        ignore_index: int = -100, beta: float = 0.1, compute_nll_loss: bool = True,
        nll_target: Tensor | None = None, compiled: bool = True, chunk_size: int = 1,
    ) -> Made:  # fmt: skip
        """The loss, and what the module returns beside it."""
        loss = preference.LigerFusedLinearORPOLoss(
            ignore_index, beta, compute_nll_loss, compiled, chunk_size
        )
        return loss(weight, _input, target, bias, nll_target)  # type: ignore[no-any-return]


class LigerFusedLinearKTOFunction(_Sealed, LigerFusedLinearUnpairedPreferenceBase):
    """:class:`LigerFusedLinearKTOLoss`, by default with a reference."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor,
        bias: Tensor | None = None, ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
        kl: Tensor | float | None = None, ignore_index: int = -100, beta: float = 0.1,
        compiled: bool = True, use_ref_model: bool = True, average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> Made:  # fmt: skip
        """The loss, and what the module returns beside it."""
        loss = preference.LigerFusedLinearKTOLoss(
            ignore_index, beta, compiled, use_ref_model, average_log_prob, chunk_size
        )
        return loss(  # type: ignore[no-any-return]
            _input, weight, target, bias, preference_labels, ref_input, ref_weight, ref_bias, kl
        )


class LigerFusedLinearGRPOFunction(_Sealed, LigerFusedLinearPPOBase):
    """:class:`LigerFusedLinearGRPOLoss`."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, bias: Tensor | None = None, ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None, ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None, ref_bias: Tensor | None = None, beta: float = 0.04,
        epsilon_low: float = 0.2, epsilon_high: float = 0.2, loss_type: str = "dapo",
        max_completion_length: int | None = None, importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0, compiled: bool = True, use_ref_model: bool = True,
        chunk_size: int = 1, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
        use_bias_correction_kl: bool = False, vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Made:  # fmt: skip
        """The loss and its metrics."""
        loss = policy.FunctionalGRPOLoss(
            beta, compiled, use_ref_model, chunk_size, epsilon_low, epsilon_high, loss_type,
            max_completion_length, importance_sampling_level, sapo_temperature_pos,
            sapo_temperature_neg, float(temperature), delta, use_bias_correction_kl, vespo_k_pos,
            vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg,
        )  # fmt: skip
        return loss(  # type: ignore[no-any-return]
            _input, weight, selected_token_ids, attention_mask, advantages, bias,
            ref_per_token_logps, old_per_token_logps, ref_input, ref_weight, ref_bias,
            vllm_is_ratio, num_items_in_batch,
        )  # fmt: skip


class _Distillation(_Sealed, LigerFusedLinearDistillationBase):
    MODULE: Any = None

    @classmethod
    def apply(
        cls, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor,
        teacher_weight: Tensor, true_labels: Tensor, student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None, weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100,
        temperature: float = 1.0, compiled: bool = True, chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The loss, and where asked for its soft and its hard term."""
        loss = cls.MODULE(
            weight_hard_loss, weight_soft_loss, beta, ignore_index, temperature, compiled,
            chunk_size, return_soft_hard_loss,
        )  # fmt: skip
        return loss(  # type: ignore[no-any-return]
            student_input, student_weight, teacher_input, teacher_weight, true_labels,
            student_bias, teacher_bias,
        )  # fmt: skip


class LigerFusedLinearJSDFunction(_Distillation):
    """:class:`LigerFusedLinearJSDLoss`."""

    MODULE = distillation.LigerFusedLinearJSDLoss


class LigerFusedLinearCosineSimilarityFunction(_Distillation):
    """:class:`LigerFusedLinearCosineSimilarityLoss`."""

    MODULE = distillation.LigerFusedLinearCosineSimilarityLoss


liger_fused_linear_orpo = LigerFusedLinearORPOFunction.apply
liger_fused_linear_dpo = LigerFusedLinearDPOFunction.apply
liger_fused_linear_jsd = LigerFusedLinearJSDFunction.apply
liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply
liger_fused_linear_cpo = LigerFusedLinearCPOFunction.apply
liger_fused_linear_simpo = LigerFusedLinearSimPOFunction.apply
liger_fused_linear_kto = LigerFusedLinearKTOFunction.apply
liger_fused_linear_grpo = LigerFusedLinearGRPOFunction.apply
