"""Cross entropy of ``hidden @ weight.T + bias`` without rows x vocabulary in memory.

A scalar loss computes its gradients in the forward pass and divides them in backward. In forward
they are unnormalized: those of the sum over rows, with class weights scaled to a mean of one, so
that fp16 does not underflow before the loss scale arrives. ``none`` keeps only the log-sum-exp, and
computes the logits once more when the upstream gradient of every row is known.
:func:`implement_fused_linear_cross_entropy` makes forward and backward from a backend's row
kernels.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_multi._torch_private import may_overwrite
from liger_multi.reference.common.retry import retried
from liger_multi.reference.common.strict import by_rows
from liger_multi.reference.cross_entropy import reduction as reduction_of, rows as rows_of
from liger_multi.reference.cross_entropy.float8 import PLAIN, Rounding
from liger_multi.reference.cross_entropy.fused_linear import (
    Accumulator,
    Chunks,
    ChunkSpec,
    Collected,
    Gradients,
    scale_to,
)
from liger_multi.reference.cross_entropy.rows import LogSumExp, Objective, RowKernels, RowStats


class ReferenceRows:
    """Row kernels in plain PyTorch."""

    statistics = staticmethod(rows_of.statistics)
    results = staticmethod(reduction_of.results)
    scale = staticmethod(scale_to)
    rounding: ClassVar[Rounding] = PLAIN

    @staticmethod
    def statistics_and_gradient_(
        raw: Tensor,
        target: Tensor,
        weight: Tensor | None,
        objective: Objective,
        scales: Tensor | None,
        outputs: str,
    ) -> RowStats:
        """Statistics of a chunk; ``raw`` becomes its gradient."""
        rows = rows_of.statistics(raw, target, weight, objective, outputs)
        factors = rows_of.pair(scales, rows.lse)
        rows_of.gradient_into(raw, raw, target, weight, rows.normalizer, objective, factors)
        return rows

    @staticmethod
    def gradient_(
        raw: Tensor,
        target: Tensor,
        weight: Tensor | None,
        lse: LogSumExp,
        objective: Objective,
        dloss: Tensor,
    ) -> None:
        """``raw`` becomes its gradient for one upstream gradient a row."""
        rows_of.gradient_into(raw, raw, target, weight, lse, objective, (dloss, dloss))


def _forward_of(
    kernels: RowKernels,
) -> Callable[..., Any]:
    """The forward pass of the contract, as a function of tensors."""

    @retried
    def forward(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        z_loss_weight: float,
        softcap: float | None,
        reduction: str,
        logit_scale: float,
        chunk: int,
        budget: int,
        accumulate: torch.dtype,
        compute_dtype: torch.dtype | None,
        compact: bool,
        validate: bool,
        outputs: str,
        needs_hidden: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
    ]:
        reduction_of.check_targets(target, weight.shape[0], ignore_index, validate)
        spec = Objective(ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale)
        chunk_spec = ChunkSpec(chunk, budget, compute_dtype, compact)
        needs = (needs_hidden, needs_weight, needs_bias)
        if reduction == "none":
            needs = (False, False, False)
        chunks = Chunks(hidden, weight, target, bias, spec, chunk_spec, kernels.rounding, needs[0])
        scales = None
        if class_weight is not None and reduction == "mean":  # scaled to a mean of one
            denominators = reduction_of.denominators(
                target, class_weight, ignore_index, reduction, chunks.dtype
            )
            scales = torch.stack(
                (
                    reduction_of.divide(denominators[1], denominators[0]),
                    torch.ones_like(denominators[1]),
                )
            )
        collected = Collected(chunks, spec, outputs)
        accumulator = Accumulator(chunks, hidden, weight, accumulate, needs)
        for chunk_slice, rows_of_chunk, h, t, raw in chunks:
            if any(needs):
                stats = kernels.statistics_and_gradient_(
                    raw, t, class_weight, spec, scales, outputs
                )
                accumulator.add(chunk_slice, rows_of_chunk, h, raw)
            else:
                stats = kernels.statistics(raw, t, class_weight, spec, outputs)
            collected.put(rows_of_chunk, stats)
        *results, denominators = kernels.results(
            collected.rows, target, class_weight, spec, reduction, outputs
        )
        # a scalar loss needs no more: its gradients are computed
        lse_low = collected.rows.lse_low if reduction == "none" else denominators.new_empty(0)
        return (*results, lse_low, *accumulator.gradients, denominators)  # type: ignore[return-value]

    return forward


def _backward_of(
    kernels: RowKernels,
) -> Callable[..., Any]:
    """The backward pass of the contract, as a function of tensors."""

    @retried
    def backward(
        dloss: Tensor,
        hidden: Tensor | None,
        weight: Tensor | None,
        target: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
        lse: Tensor,
        lse_low: Tensor,
        hidden_gradient: Tensor,
        weight_gradient: Tensor,
        bias_gradient: Tensor,
        denominators: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss_weight: float,
        softcap: float | None,
        reduction: str,
        logit_scale: float,
        chunk: int,
        budget: int,
        accumulate: torch.dtype,
        compute_dtype: torch.dtype | None,
        compact: bool,
        needs_hidden: bool,
        needs_weight: bool,
        needs_bias: bool,
        hidden_dtype: torch.dtype,
        weight_dtype: torch.dtype,
        bias_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = Gradients(hidden_gradient, weight_gradient, bias_gradient)
        factor: Tensor | None = None
        if hidden is not None and weight is not None:
            spec = Objective(ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale)
            chunk_spec = ChunkSpec(chunk, budget, compute_dtype, compact)
            needs = (needs_hidden, needs_weight, needs_bias)
            chunks = Chunks(
                hidden, weight, target, bias, spec, chunk_spec, kernels.rounding, needs[0]
            )
            accumulator = Accumulator(chunks, hidden, weight, accumulate, needs)
            normalizer = LogSumExp(lse, lse_low)
            for chunk_slice, rows_of_chunk, h, t, raw in chunks:
                kernels.gradient_(
                    raw,
                    t,
                    class_weight,
                    normalizer.at(rows_of_chunk),
                    spec,
                    dloss[rows_of_chunk].contiguous(),
                )
                accumulator.add(chunk_slice, rows_of_chunk, h, raw)
            gradients = accumulator.gradients
        else:
            factor = dloss
        dtypes = (hidden_dtype, weight_dtype, bias_dtype or weight_dtype)
        # a second backward pass, or one per row, would scale them again
        overwrite = may_overwrite() and not by_rows()
        return tuple(
            kernels.scale(g, factor, dtype, denominators, overwrite)
            for g, dtype in zip(gradients, dtypes, strict=True)
        )  # type: ignore[return-value]

    return backward


def implement_fused_linear_cross_entropy(
    kernels: RowKernels,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's row kernels."""
    return _forward_of(kernels), _backward_of(kernels)


forward, backward = implement_fused_linear_cross_entropy(ReferenceRows)
