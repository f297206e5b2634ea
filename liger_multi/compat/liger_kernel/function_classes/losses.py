"""Losses of logits and of distributions."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from liger_multi import checks, ops
from liger_multi.compat.liger_kernel import functional
from liger_multi.compat.liger_kernel.function_classes.making import function_class
from liger_multi.nn.vocab_parallel import vocab_parallel_cross_entropy

CrossEntropies = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""The loss, the z-loss, the share of right tokens and the likeliest tokens; None: not asked for."""

FORMULAS = {"pytorch": "torch", "megatron": "megatron"}
MODES = {"global": "vocabulary", "partition": "part"}


def validate_formula_and_mode(label_smoothing_formula: str, label_smoothing_mode: str) -> None:
    """Both are known.

    Raises:
        ValueError: One is not.
    """
    name = "LigerVocabParallelCEFunction"
    checks.one_of(name, "label_smoothing_formula", label_smoothing_formula, FORMULAS)
    checks.one_of(name, "label_smoothing_mode", label_smoothing_mode, MODES)


def _replaceable(logits: Tensor) -> bool:
    """Whether logits may be overwritten by their gradient: they come from an operation."""
    base = logits._base
    of_leaf = base is not None and base.is_leaf and base.requires_grad
    return not logits.is_leaf and not of_leaf and logits.is_contiguous()


@function_class
def LigerCrossEntropyFunction(
    _input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> CrossEntropies:  # fmt: skip
    """:func:`liger_multi.ops.cross_entropy`; losses have the dtype of the logits."""
    found = functional.cross_entropy(
        _input, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing,
        z_loss=lse_square_scale, softcap=softcap, reduction=reduction,
        inplace=_replaceable(_input),
        outputs=functional.beside({
            "return_z_loss": return_z_loss, "return_token_accuracy": return_token_accuracy,
            "return_predicted_tokens": return_predicted_tokens,
        }),
    )  # fmt: skip
    if isinstance(found, Tensor):
        return found, None, None, None
    return found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens


@function_class
def LigerVocabParallelCEFunction(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any, ignore_index: int,
    label_smoothing: float, label_smoothing_formula: str, label_smoothing_mode: str,
) -> Tensor:  # fmt: skip
    """The loss of every token in fp32, of logits whose classes are split over processes."""
    validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
    smoothing = FORMULAS[label_smoothing_formula]
    local = vocab_parallel_logits.shape[-1]
    if tp_group is None or dist.get_world_size(tp_group) == 1:
        share = label_smoothing * (local / max(1, local - 1) if smoothing == "megatron" else 1.0)
        return ops.cross_entropy(
            vocab_parallel_logits, target, ignore_index=ignore_index, label_smoothing=share,
            reduction="none",
        )  # fmt: skip
    return vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, tp_group, vocabulary=local * dist.get_world_size(tp_group),
        ignore_index=ignore_index, label_smoothing=label_smoothing, smoothing=smoothing,
        smoothed=MODES[label_smoothing_mode], reduction="none",
    )  # fmt: skip


@function_class
def LigerJSDFunction(
    _input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5,
    ignore_index: int = -100, jsd_impl: Any = None, jsd_mode: Any = None,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.jsd` of log-probabilities, in their dtype."""
    return functional.liger_jsd(_input, target, shift_labels, beta, ignore_index)


@function_class
def LigerKLDivLossFunction(
    y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.kl_div` of log-probabilities; the teacher gets no gradient."""
    return functional.liger_kl_div(
        y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps
    )


@function_class
def LigerTVDLossFunction(
    p: Tensor, q: Tensor, shift_labels: Tensor | None = None, reduction: str = "batchmean",
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.tvd` of probabilities; the teacher q gets no gradient."""
    return functional.liger_tvd(p, q, shift_labels, reduction, ignore_index)


@function_class
def LigerFusedCETVDFunction(
    student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Cross entropy and total variation distance of every token, in fp32."""
    cross = ops.cross_entropy(student_logits, target, ignore_index=ignore_index, reduction="none")
    distance = ops.tvd(
        student_logits, teacher_logits.detach(), target, form="logits",
        ignore_index=ignore_index, reduction="none",
    )  # fmt: skip
    return cross, distance
