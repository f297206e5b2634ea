"""Log-probabilities of chosen classes; the gradient is recomputed from ``lse`` in backward."""

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import row_blocks, statistics_dtype
from liger_multi.reference.cross_entropy.reduction import check_targets


def _labels(index: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which count, which of those reach a class, and a class for all."""
    counted = index != ignore_index
    valid = counted & (index >= 0) & (index < classes)
    return counted, valid, torch.where(valid, index, 0)


def forward(
    logits: Tensor, index: Tensor, scale: float, ignore_index: int, validate: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and the normalizer of every row."""
    count, classes = logits.shape
    check_targets(index, classes, ignore_index, validate, "index")
    kind = statistics_dtype(logits.dtype)
    found, lse = logits.new_empty(index.shape, dtype=kind), logits.new_empty(count, dtype=kind)
    for block in row_blocks(count, classes * 8):
        z = logits[block].to(kind) * scale
        counted, valid, label = _labels(index[block], classes, ignore_index)
        lse[block] = torch.logsumexp(z, -1)
        own = torch.where(valid, z.gather(1, label) - lse[block].unsqueeze(1), float("nan"))
        found[block] = torch.where(counted, own, 0)
    return found, lse


def backward(
    dlog_prob: Tensor, logits: Tensor, index: Tensor, lse: Tensor, scale: float, ignore_index: int
) -> Tensor:
    """What arrives at the chosen classes, less the row's sum of it spread by probability."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for block in row_blocks(logits.shape[0], logits.shape[1] * 8):
        _, valid, label = _labels(index[block], logits.shape[1], ignore_index)
        d = torch.where(valid, dlog_prob[block], 0)
        p = torch.exp(logits[block].to(lse.dtype) * scale - lse[block].unsqueeze(1))
        dz = p.mul_(-d.sum(-1, keepdim=True)).scatter_add_(1, label, d)
        some = (d != 0).any(-1, keepdim=True)
        out[block] = torch.where(some, dz * scale, 0).to(out.dtype)
    return out
