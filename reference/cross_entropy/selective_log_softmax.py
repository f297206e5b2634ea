"""Log-probabilities of chosen classes; backward computes the probabilities again.

At most one chosen class is nearly certain. What it gets is what all the others lose: its own
gradient times ``1 - p`` of it, and that of the other choices times its ``p``.
"""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype
from liger_multi.reference.cross_entropy.reduction import check_targets
from liger_multi.reference.cross_entropy.rows import LogSumExp, log_sum_exp


def _labels(index: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of choices that count and of those in range, and a valid class id for all."""
    is_counted = index != ignore_index
    valid = is_counted & (index >= 0) & (index < classes)
    return is_counted, valid, torch.where(valid, index, 0)


def forward(
    logits: Tensor, index: Tensor, scale: float, ignore_index: int, validate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, and the log-sum-exp of every row in two numbers."""
    count, classes = logits.shape
    check_targets(index, classes, ignore_index, validate, "index")
    acc_dtype = statistics_dtype(logits.dtype)
    out = logits.new_empty(index.shape, dtype=acc_dtype)
    lse, lse_low = (logits.new_empty(count, dtype=acc_dtype) for _ in range(2))
    for block in row_blocks(count, classes * 8):
        z = logits[block].to(acc_dtype) * scale
        is_counted, valid, label = _labels(index[block], classes, ignore_index)
        normalizer = log_sum_exp(z)
        lse[block], lse_low[block] = normalizer
        log_prob = torch.where(valid, normalizer.below(z.gather(1, label)), float("nan"))
        out[block] = torch.where(is_counted, log_prob, 0)
    return out, lse, lse_low


def backward(
    dlog_prob: Tensor,
    logits: Tensor,
    index: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    scale: float,
    ignore_index: int,
) -> Tensor:
    """The upstream gradient at the chosen classes, minus p times its sum over the row."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    normalizer = LogSumExp(lse, lse_low)
    for block in row_blocks(logits.shape[0], logits.shape[1] * 16):
        z, rows_lse = logits[block].to(lse.dtype) * scale, normalizer.at(block)
        _, valid, label = _labels(index[block], logits.shape[1], ignore_index)
        d = torch.where(valid, dlog_prob[block], 0)
        total, log_p = d.sum(-1, keepdim=True), rows_lse.below(z.gather(1, label))
        arrived = torch.zeros_like(z).scatter_add_(1, label, d).gather(1, label)
        chosen = -arrived * torch.expm1(log_p) - (total - arrived) * torch.exp(log_p)
        dz = rows_lse.below(z).exp_().mul_(-total).scatter_(1, label, chosen)
        has_gradient = (d != 0).any(-1, keepdim=True)
        out[block] = torch.where(has_gradient, dz * scale, 0).to(out.dtype)
    return out
