"""Log-probabilities of tokens under ``hidden @ weight.T + bias``, their entropy and normalizer.

Where one chunk holds the logits of all rows, forward keeps it and backward overwrites it by its
gradient. Otherwise forward keeps numbers of rows only, and backward computes the logits again, a
chunk at a time. :func:`implement_fused_linear_log_prob` makes forward and backward from a backend's
row kernels.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from liger_multi._torch_private import may_overwrite
from liger_multi.reference.common.retry import retried
from liger_multi.reference.cross_entropy import rows as rows_of
from liger_multi.reference.cross_entropy.float8 import PLAIN, Rounding
from liger_multi.reference.cross_entropy.fused_linear import (
    Accumulator,
    Chunks,
    ChunkSpec,
    Collected,
    scale_to,
)
from liger_multi.reference.cross_entropy.reduction import check_targets
from liger_multi.reference.cross_entropy.rows import (
    LogSumExp,
    Objective,
    RowStats,
    Upstream,
    gradient_,
    upstream_of,
    within_range,
)


class LogProbKernels(Protocol):
    """What a backend's row kernels do with a chunk of raw logits."""

    rounding: Rounding

    def statistics(
        self, raw: Tensor, target: Tensor, weight: Tensor | None, objective: Objective, outputs: str
    ) -> RowStats:
        """Statistics of every row; ``raw`` is left alone."""

    def log_prob_gradient_(
        self,
        raw: Tensor,
        target: Tensor,
        lse: LogSumExp,
        objective: Objective,
        upstream: Upstream,
        out: Tensor | None = None,
    ) -> None:
        """Write the gradient of ``raw``: over it where no ``out`` is given."""

    def scale(self, gradient: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """A gradient times a factor of one element (None: one), rounded once to ``dtype``."""


class ReferenceRows:
    """Row kernels in plain PyTorch."""

    scale = staticmethod(scale_to)
    rounding: Rounding = PLAIN
    statistics = staticmethod(rows_of.statistics)

    @staticmethod
    def log_prob_gradient_(
        raw: Tensor,
        target: Tensor,
        lse: LogSumExp,
        objective: Objective,
        upstream: Upstream,
        out: Tensor | None = None,
    ) -> None:
        """Write the gradient of ``raw``: over it where no ``out`` is given."""
        gradient_(raw if out is None else out.copy_(raw), target, lse, objective, upstream)


def _forward_of(kernels: LogProbKernels) -> Callable[..., Any]:
    """The forward pass of the contract, as a function of tensors."""

    @retried
    def forward(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        ignore_index: int,
        softcap: float | None,
        logit_scale: float,
        chunk: int,
        budget: int,
        accumulate: torch.dtype,
        compute_dtype: torch.dtype | None,
        compact: bool,
        validate: bool,
        keep: bool,
        outputs: str,
        needs_hidden: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        check_targets(target, weight.shape[0], ignore_index, validate)
        spec = Objective(ignore_index, 0.0, 0.0, softcap, logit_scale)
        chunk_spec = ChunkSpec(chunk, budget, compute_dtype, compact)
        chunks = Chunks(hidden, weight, target, bias, spec, chunk_spec, kernels.rounding)
        collected = Collected(chunks, spec, outputs, loss=False)
        logits = chunks.like.new_empty(0, weight.shape[0])
        keeps_logits = keep and (needs_hidden or needs_weight or needs_bias) and chunks.keeps()
        if keeps_logits:  # as many rows as a compiler was told
            logits = chunks.buffer = chunks.like.new_empty(target.numel(), weight.shape[0])
        for _, rows_of_chunk, _, t, raw in chunks:
            collected.put(rows_of_chunk, kernels.statistics(raw, t, None, spec, outputs))
        if keeps_logits:
            logits[chunks.rows :] = 0  # in place of dropped rows: nothing reads them
        rows = collected.rows
        return rows.log_prob, rows.entropy, rows.lse, rows.argmax, rows.lse_low, logits

    forward.kernels = kernels  # type: ignore[attr-defined]  # for losses of one pass
    return forward


def _backward_of(kernels: LogProbKernels) -> Callable[..., Any]:
    """The backward pass of the contract, as a function of tensors."""

    @retried
    def backward(
        dlog_prob: Tensor | None,
        dentropy: Tensor | None,
        dlse: Tensor | None,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        entropy: Tensor,
        lse: Tensor,
        lse_low: Tensor,
        logits: Tensor,
        ignore_index: int,
        softcap: float | None,
        logit_scale: float,
        chunk: int,
        budget: int,
        accumulate: torch.dtype,
        compute_dtype: torch.dtype | None,
        compact: bool,
        needs_hidden: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec = Objective(ignore_index, 0.0, 0.0, softcap, logit_scale)
        chunk_spec = ChunkSpec(chunk, budget, compute_dtype, compact)
        needs = (needs_hidden, needs_weight, needs_bias)
        chunks = Chunks(
            hidden, weight, target, bias, spec, chunk_spec, kernels.rounding, needs_hidden
        )
        accumulator = Accumulator(chunks, hidden, weight, accumulate, needs)
        arrived = upstream_of(
            dlog_prob,
            dentropy,
            dlse,
            entropies=entropy,
            target=target,
            vocabulary=weight.shape[0],
            objective=spec,
        )
        upstream, factor = within_range(arrived, spec, chunks.dtype)
        normalizer, needs_buffer = LogSumExp(lse, lse_low), False
        if chunks.one_chunk and logits.numel():
            chunks.buffer, chunks.ready = logits, True
            needs_buffer = not may_overwrite()  # a second backward pass reads the logits once more
        for chunk_slice, rows_of_chunk, h, t, raw in chunks:
            out = torch.empty_like(raw) if needs_buffer else raw
            options = (normalizer.at(rows_of_chunk), spec, upstream.at(rows_of_chunk))
            kernels.log_prob_gradient_(raw, t, *options, out if needs_buffer else None)
            accumulator.add(chunk_slice, rows_of_chunk, h, out)
        dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        scale = kernels.scale
        return tuple(
            scale(g, factor, k) for g, k in zip(accumulator.gradients, dtypes, strict=True)
        )  # type: ignore[return-value]

    return backward


def implement_fused_linear_log_prob(
    kernels: LogProbKernels,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's row kernels."""
    return _forward_of(kernels), _backward_of(kernels)


forward, backward = implement_fused_linear_log_prob(ReferenceRows())
