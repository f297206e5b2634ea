"""Divergences of two linear heads without rows x vocabulary in memory.

The student's logits of a chunk become their gradient, beside which a few of the teacher's rows
stand at a time. A scalar loss computes its gradients in the forward pass, as of the sum over rows,
and divides them in backward; ``none`` computes the logits once more there.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from liger_multi.reference.common.retry import retried
from liger_multi.reference.cross_entropy.fused_linear import ChunkSpec
from liger_multi.reference.cross_entropy.gradients import Accumulator, Gradients, scale_to
from liger_multi.reference.cross_entropy.log_prob import Upstream, within_range
from liger_multi.reference.cross_entropy.reduction import divide
from liger_multi.reference.divergences.fused_linear_pairs import Pairs
from liger_multi.reference.divergences.given_rows import reduced, valid_rows
from liger_multi.reference.divergences.row_stats import DivergenceKernels, DivergenceStats, spec_of

FP16_GAIN = 16.0  # probabilities of a class are small for fp16


def forward_and_backward(
    name: str, kernels: DivergenceKernels
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract ``name`` over a backend's row kernels."""

    @retried
    def forward(
        hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
        target: Optional[Tensor], bias: Optional[Tensor], teacher_bias: Optional[Tensor],
        beta: float, scale: float, ignore_index: int, reduction: str, chunk: int, budget: int,
        accumulate: torch.dtype, compute_dtype: Optional[torch.dtype], compact: bool,
        needs_hidden: bool, needs_weight: bool, needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        spec = spec_of(name, beta, "logits", "logits", scale, ignore_index)
        plan, rowwise = ChunkSpec(chunk, budget, compute_dtype, compact), reduction == "none"
        needs = tuple(n and not rowwise for n in (needs_hidden, needs_weight, needs_bias))
        teacher = (teacher_hidden, teacher_weight, teacher_bias)
        chunks = Pairs(hidden, weight, target, bias, teacher, spec, plan)
        loss = DivergenceStats.empty(hidden.shape[0], spec, chunks.buffer).loss.zero_()
        count = valid_rows(target, loss, ignore_index)
        gain = torch.full_like(count, FP16_GAIN if chunks.kind == torch.float16 else 1.0)
        into = Accumulator(chunks, hidden, weight, accumulate, needs)
        for place, where, h, t, raw in chunks:
            found = loss.new_empty(raw.shape[0])
            for part, student, other, marks in chunks.parts(where, t, raw):
                if any(needs):
                    each = kernels.loss_and_gradient_(student, other, marks, spec, gain)
                else:
                    each = kernels.statistics(student, other, marks, spec).loss
                found[part] = each
            loss[where] = found
            if any(needs):
                into.add(place, where, h, raw)
        by = count if reduction == "mean" else torch.ones_like(count)
        return reduced(loss, count, reduction), *into.gradients, by * gain

    @retried
    def backward(
        dloss: Tensor, hidden: Optional[Tensor], weight: Optional[Tensor],
        teacher_hidden: Optional[Tensor], teacher_weight: Optional[Tensor],
        target: Optional[Tensor], bias: Optional[Tensor], teacher_bias: Optional[Tensor],
        hidden_gradient: Tensor, weight_gradient: Tensor, bias_gradient: Tensor,
        denominator: Tensor, beta: float, scale: float, ignore_index: int, reduction: str,
        chunk: int, budget: int, accumulate: torch.dtype, compute_dtype: Optional[torch.dtype],
        compact: bool, needs_hidden: bool, needs_weight: bool, needs_bias: bool,
        hidden_dtype: torch.dtype, weight_dtype: torch.dtype, bias_dtype: Optional[torch.dtype],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        gradients = Gradients(hidden_gradient, weight_gradient, bias_gradient)
        factor: Tensor | None = divide(dloss, denominator) if reduction != "none" else None
        if hidden is not None and weight is not None:
            assert teacher_hidden is not None
            assert teacher_weight is not None
            spec = spec_of(name, beta, "logits", "logits", scale, ignore_index)
            plan = ChunkSpec(chunk, budget, compute_dtype, compact)
            teacher = (teacher_hidden, teacher_weight, teacher_bias)
            chunks = Pairs(hidden, weight, target, bias, teacher, spec, plan)
            needs = (needs_hidden, needs_weight, needs_bias)
            into = Accumulator(chunks, hidden, weight, accumulate, needs)
            # whatever arrives at an ignored row, NaN too, goes nowhere
            each = dloss if target is None else torch.where(target == ignore_index, 0, dloss)
            arrived = Upstream(each, each, None)
            upstream, factor = within_range(arrived, chunks.objective, chunks.kind)
            for place, where, h, t, raw in chunks:
                ups = upstream.grad_target[where].contiguous()
                for part, student, other, marks in chunks.parts(where, t, raw):
                    kernels.loss_and_gradient_(student, other, marks, spec, ups[part])
                into.add(place, where, h, raw)
            gradients = into.gradients
        kinds = (hidden_dtype, weight_dtype, bias_dtype or weight_dtype)
        return tuple(scale_to(g, factor, kind) for g, kind in zip(gradients, kinds, strict=True))  # type: ignore[return-value]

    return forward, backward
