"""Log-probabilities of tokens from their logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi.reference.cross_entropy.fused_linear_log_prob import LogProbKernels, ReferenceRows
from liger_multi.reference.cross_entropy.reduction import check_targets
from liger_multi.reference.cross_entropy.rows import LogSumExp, Objective, upstream_of


def implement_token_log_prob(
    kernels: LogProbKernels,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's row kernels."""

    def forward(
        logits: Tensor,
        target: Tensor,
        ignore_index: int,
        softcap: float | None,
        logit_scale: float,
        validate: bool,
        outputs: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        check_targets(target, logits.shape[1], ignore_index, validate)
        spec = Objective(ignore_index, 0.0, 0.0, softcap, logit_scale)
        wide = logits if logits.stride(1) == 1 else logits.contiguous()
        rows = kernels.statistics(wide, target, None, spec, outputs)
        requested, no = outputs.split(","), rows.lse.new_empty(0)
        log_prob = rows.log_prob if "log_prob" in requested else no
        return log_prob, rows.entropy, rows.lse, rows.argmax, rows.lse_low

    def backward(
        dlog_prob: Tensor | None,
        dentropy: Tensor | None,
        dlse: Tensor | None,
        logits: Tensor,
        target: Tensor,
        entropy: Tensor,
        lse: Tensor,
        lse_low: Tensor,
        ignore_index: int,
        softcap: float | None,
        logit_scale: float,
    ) -> Tensor:
        spec = Objective(ignore_index, 0.0, 0.0, softcap, logit_scale)
        upstream = upstream_of(
            dlog_prob,
            dentropy,
            dlse,
            entropies=entropy,
            target=target,
            vocabulary=logits.shape[1],
            objective=spec,
        )
        raw = logits if logits.stride(1) == 1 else logits.contiguous()
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        kernels.log_prob_gradient_(
            raw,
            target,
            LogSumExp(lse, lse_low).at(slice(None)),
            spec,
            upstream.at(slice(None)),
            dlogits,
        )
        return dlogits

    return forward, backward


forward, backward = implement_token_log_prob(ReferenceRows())
