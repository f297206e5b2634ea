"""Losses of hidden states and a head, whose logits never exist as a whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks, losses, ops
from liger_multi.compat.liger_kernel import functional
from liger_multi.compat.liger_kernel.function_classes.losses import CrossEntropies
from liger_multi.compat.liger_kernel.function_classes.making import function_class
from liger_multi.nn.vocab_parallel import vocab_parallel_fused_linear_log_prob
from liger_multi.ops.fused_linear_log_prob import named, prepared
from liger_multi.ops.fused_linear_log_prob import op as of_head


@function_class
def LigerFusedLinearCrossEntropyFunction(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
    ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
    return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False, ce_impl: Any = None, ce_mode: Any = None,
    chunk_mem_const: int = 1,
) -> CrossEntropies:  # fmt: skip
    """:func:`liger_multi.ops.fused_linear_cross_entropy`; the z-loss has the dtype of the input."""
    found: Any = functional.liger_fused_linear_cross_entropy(
        _input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing,
        reduction, softcap, return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy,
        return_predicted_tokens,
    )  # fmt: skip
    if isinstance(found, Tensor):
        return found, None, None, None
    return found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens


def _scaled_outputs(found: ops.LogProbOutput, *more: Tensor) -> Any:
    """Costs, entropies where asked for, and what comes behind; one of them alone is no tuple."""
    assert found.log_prob is not None
    made = [-found.log_prob, *(() if found.entropy is None else (found.entropy,)), *more]
    return made[0] if len(made) == 1 else tuple(made)


def _selected_ids(ids: Tensor, weight: Tensor) -> Tensor:
    name = "LigerFusedLinearScaledCrossEntropyFunction"
    if ids.ndim != 1 or ids.is_floating_point():
        checks.refuse(name, "selected_token_ids must be integers of shape (K,)", ids)
    if torch.compiler.is_compiling() or ids.device.type != "cpu":
        return ids  # reading them would break the graph, or wait for the device
    if bool(((ids < 0) | (ids >= weight.shape[0])).any()):
        raise ValueError(
            f"{name}: selected_token_ids must lie in [0, {weight.shape[0]}), got {ids.tolist()}"
        )
    return ids


@function_class
def LigerFusedLinearScaledCrossEntropyFunction(
    _input: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0,
    ignore_index: int = -100, m_tiles_per_cluster: int = 1, return_entropy: bool = False,
    selected_token_ids: Tensor | None = None,
) -> Any:  # fmt: skip
    """:func:`liger_multi.ops.fused_linear_log_prob`: what every token costs, in fp32.

    With ``return_entropy`` a tuple that has the rows' entropy second. With ``selected_token_ids``
    ``(K,)`` its last entry is the log-probabilities ``(tokens, K)`` of these classes. Rows that are
    ignored are 0 in all of them.
    """
    few = None if selected_token_ids is None else _selected_ids(selected_token_ids, weight)
    arguments = prepared(
        _input, weight, target, None, temperature=temperature, ignore_index=ignore_index,
        outputs=("log_prob", *(("entropy",) if return_entropy else ())),
    )  # fmt: skip
    results = of_head(*arguments)
    found = named(results, target, arguments[-1])
    if few is None:
        return _scaled_outputs(found)
    lse, low = (results[i].view(*target.shape, 1) for i in (2, 4))
    logits = F.linear(_input, weight[few]).to(lse.dtype) / temperature
    valid = (target != ignore_index).unsqueeze(-1)
    return _scaled_outputs(found, torch.where(valid, logits - lse - low, 0))


@function_class
def LigerFusedLinearScaledCrossEntropyTPFunction(
    _input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0,
    ignore_index: int = -100, tiles_per_reduce: int = 1, return_entropy: bool = False,
) -> Any:  # fmt: skip
    """The same of a head whose classes are split evenly over the processes of a group."""
    found = vocab_parallel_fused_linear_log_prob(
        _input, weight, target, tp_group,
        vocabulary=weight.shape[0] * dist.get_world_size(tp_group), temperature=temperature,
        ignore_index=ignore_index,
        outputs=("log_prob", "entropy") if return_entropy else ("log_prob",),
    )  # fmt: skip
    return _scaled_outputs(found)


@function_class
def LigerFusedLinearJSDFunction(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100,
    temperature: float = 1.0, accum_dtype: torch.dtype | None = None, jsd_impl: Any = None,
    jsd_mode: Any = None,
) -> Tensor:  # fmt: skip
    """:func:`liger_multi.ops.fused_linear_jsd`; the teacher gets no gradient."""
    return functional.liger_fused_linear_jsd(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta,
        ignore_index, temperature, accum_dtype,
    )  # fmt: skip


_REDUCTIONS = ("batchmean", "mean", "sum")


def _counted(rows: torch.Size, shift_labels: Tensor | None, ignore_index: int, x: Tensor) -> Tensor:
    """Targets of which only ``ignore_index`` means something."""
    kept = int(ignore_index == 0)  # some class that is not ignored
    if shift_labels is None:
        return torch.full(rows, kept, device=x.device)
    return torch.where(shift_labels == ignore_index, ignore_index, kept)


@function_class
def LigerFusedLinearKLDivFunction(
    student_input: Tensor, student_weight: Tensor, target: Tensor,
    shift_labels: Tensor | None = None, reduction: str = "batchmean", ignore_index: int = -100,
    temperature: float = 1.0, eps: float = 1e-10, accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """KL divergence of a head's tokens from given distributions ``target`` ``(tokens, classes)``.

    ``batchmean`` divides by the tokens that count, ``mean`` by their elements.
    """
    checks.one_of("LigerFusedLinearKLDivFunction", "reduction", reduction, _REDUCTIONS)
    accumulate = torch.float32 if accum_dtype is None else accum_dtype
    head = losses.Head(
        student_input, student_weight, temperature=temperature, accumulate=accumulate
    )
    found, _ = losses.distillation_loss(
        head, losses.Logits(target.detach().clamp_min(eps).log()),
        _counted(target.shape[:-1], shift_labels, ignore_index, student_input),
        num_items=1.0 if reduction == "sum" else None, divergence="forward_kl",
        ignore_index=ignore_index,
    )  # fmt: skip
    return found / target.shape[-1] if reduction == "mean" else found
