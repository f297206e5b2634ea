"""Operators of given logits beside the cross entropy.

The cross entropy that overwrites the logits by their gradient, which takes no second tensor of
their size; log-probabilities of chosen classes and of tokens; softmax and sparsemax.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype
from liger_multi.reference.common.implementation import Implementation
from liger_multi.reference.cross_entropy import rows as rows_of
from liger_multi.reference.cross_entropy.cross_entropy import overwriting, scale_
from liger_multi.reference.cross_entropy.fused_linear_log_prob import LogProbKernels, ReferenceRows
from liger_multi.reference.cross_entropy.reduction import check_targets
from liger_multi.reference.cross_entropy.rows import LogSumExp, Objective, log_sum_exp, upstream_of

cross_entropy_inplace = Implementation(overwriting(rows_of), scale_)


def _labels(index: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which count, which of those reach a class, and a class for all."""
    counted = index != ignore_index
    valid = counted & (index >= 0) & (index < classes)
    return counted, valid, torch.where(valid, index, 0)


class SelectiveLogSoftmax:
    """Log-probabilities of chosen classes; backward computes the probabilities again.

    At most one chosen class is nearly certain. What it gets is what all the others lose: its own
    gradient times ``1 - p`` of it, and that of the other choices times its ``p``.
    """

    @staticmethod
    def forward(
        logits: Tensor, index: Tensor, scale: float, ignore_index: int, validate: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and the normalizer of every row, in two numbers."""
        count, classes = logits.shape
        check_targets(index, classes, ignore_index, validate, "index")
        kind = statistics_dtype(logits.dtype)
        found = logits.new_empty(index.shape, dtype=kind)
        lse, lse_low = (logits.new_empty(count, dtype=kind) for _ in range(2))
        for block in row_blocks(count, classes * 8):
            z = logits[block].to(kind) * scale
            counted, valid, label = _labels(index[block], classes, ignore_index)
            normalizer = log_sum_exp(z)
            lse[block], lse_low[block] = normalizer
            own = torch.where(valid, normalizer.below(z.gather(1, label)), float("nan"))
            found[block] = torch.where(counted, own, 0)
        return found, lse, lse_low

    @staticmethod
    def backward(
        dlog_prob: Tensor, logits: Tensor, index: Tensor, lse: Tensor, lse_low: Tensor,
        scale: float, ignore_index: int,
    ) -> Tensor:  # fmt: skip
        """What arrives at the chosen classes, less the row's sum of it spread by probability."""
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        normalizer = LogSumExp(lse, lse_low)
        for block in row_blocks(logits.shape[0], logits.shape[1] * 16):
            z, each = logits[block].to(lse.dtype) * scale, normalizer.at(block)
            _, valid, label = _labels(index[block], logits.shape[1], ignore_index)
            d = torch.where(valid, dlog_prob[block], 0)
            total, log_p = d.sum(-1, keepdim=True), each.below(z.gather(1, label))
            arrived = torch.zeros_like(z).scatter_add_(1, label, d).gather(1, label)
            chosen = -arrived * torch.expm1(log_p) - (total - arrived) * torch.exp(log_p)
            dz = each.below(z).exp_().mul_(-total).scatter_(1, label, chosen)
            some = (d != 0).any(-1, keepdim=True)
            out[block] = torch.where(some, dz * scale, 0).to(out.dtype)
        return out


def implement_token_log_prob(
    kernels: LogProbKernels,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's row kernels."""

    def forward(
        logits: Tensor, target: Tensor, ignore_index: int, softcap: Optional[float],
        logit_scale: float, validate: bool, outputs: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        check_targets(target, logits.shape[1], ignore_index, validate)
        spec = Objective(ignore_index, 0.0, 0.0, softcap, logit_scale)
        wide = logits if logits.stride(1) == 1 else logits.contiguous()
        rows = kernels.statistics(wide, target, None, spec, outputs)
        wanted, no = outputs.split(","), rows.lse.new_empty(0)
        own = rows.log_prob if "log_prob" in wanted else no
        return own, rows.entropy, rows.lse, rows.argmax, rows.lse_low

    def backward(
        dlog_prob: Optional[Tensor], dentropy: Optional[Tensor], dlse: Optional[Tensor],
        logits: Tensor, target: Tensor, entropy: Tensor, lse: Tensor, lse_low: Tensor,
        ignore_index: int, softcap: Optional[float], logit_scale: float,
    ) -> Tensor:  # fmt: skip
        spec = Objective(ignore_index, 0.0, 0.0, softcap, logit_scale)
        upstream = upstream_of(
            dlog_prob, dentropy, dlse, entropies=entropy, target=target,
            vocabulary=logits.shape[1], objective=spec,
        )  # fmt: skip
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


token_log_prob = Implementation(*implement_token_log_prob(ReferenceRows()))


class Softmax:
    """Softmax of the last axis, in blocks of rows."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """PyTorch's, in fp32 at least."""
        rows, y = as_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out = as_rows(y)
        for block in row_blocks(rows.shape[0], rows.shape[1] * 8):
            out[block] = torch.softmax(rows[block].to(statistics_dtype(x.dtype)), -1).to(x.dtype)
        return y

    @staticmethod
    def backward(dy: Tensor, y: Tensor) -> Tensor:
        """``y (dy - sum y dy)``."""
        dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
        upstream, given, out = as_rows(dy), as_rows(y), as_rows(dx)
        for block in row_blocks(out.shape[0], out.shape[1] * 16):
            p = given[block].to(statistics_dtype(y.dtype))
            weighted = p * upstream[block]
            out[block] = (weighted - p * weighted.sum(-1, keepdim=True)).to(dx.dtype)
        return dx


class Sparsemax:
    """Sparsemax of the last axis, in blocks of rows.

    Of the values in falling order, the first k belong to the support for the largest k with
    ``1 + k x[k] > x[1] + ... + x[k]``; then ``tau = (x[1] + ... + x[k] - 1) / k``.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """By sorting; relative to the maximum, so that no large numbers cancel."""
        rows, y = as_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out, cols = as_rows(y), x.shape[-1]
        count = torch.arange(1, cols + 1, dtype=statistics_dtype(x.dtype), device=x.device)
        for block in row_blocks(rows.shape[0], cols * 32):
            z = rows[block].to(count.dtype)
            z = z - z.amax(-1, keepdim=True)
            fallen = z.sort(-1, descending=True).values
            total = fallen.cumsum(-1) - 1
            k = (fallen * count > total).sum(-1, keepdim=True).clamp(min=1)
            out[block] = (z - total.gather(-1, k - 1) / k).clamp(min=0).to(x.dtype)
        return y

    @staticmethod
    def backward(dy: Tensor, y: Tensor) -> Tensor:
        """On the support, less the mean over it."""
        dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
        upstream, given, out = as_rows(dy), as_rows(y), as_rows(dx)
        for block in row_blocks(out.shape[0], out.shape[1] * 16):
            support = given[block] > 0
            d = torch.where(support, upstream[block].to(statistics_dtype(dy.dtype)), 0)
            mean = d.sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
            out[block] = torch.where(support, d - mean, 0).to(dx.dtype)
        return dx


OPERATORS = {
    "cross_entropy_inplace": cross_entropy_inplace,
    "selective_log_softmax": SelectiveLogSoftmax,
    "token_log_prob": token_log_prob,
    "softmax": Softmax,
    "sparsemax": Sparsemax,
}
