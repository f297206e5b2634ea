"""The keys with the highest scores of a lightning indexer, by blocks of queries."""

import torch
from torch import Tensor

from liger_multi.reference.attention.indexer_scores import backward
from liger_multi.reference.common.chunking import row_blocks, statistics_dtype

__all__ = ["backward", "forward", "selected"]


def selected(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Places of the ``count`` highest scores of rows, in order, then -1; of equal ones the first.

    NaN is above all numbers, so that it cannot go unnoticed.
    """
    lowest = torch.finfo(scores.dtype).min
    ranking = torch.where(scores.isnan(), torch.inf, scores.clamp(min=lowest))
    ranking = ranking.masked_fill(~visible, -torch.inf)
    threshold = ranking.topk(count, -1).values[..., -1:]
    higher, equal = ranking > threshold, (ranking == threshold) & visible
    missing = count - higher.sum(-1, keepdim=True)
    chosen = higher | (equal & (equal.cumsum(-1) <= missing))
    rank = torch.where(chosen, chosen.cumsum(-1) - 1, count)  # an extra column collects the others
    position = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.int32)
    out = torch.full((*scores.shape[:-1], count + 1), -1, dtype=torch.int32, device=scores.device)
    return out.scatter_(-1, rank, position.expand_as(rank))[..., :count]


def forward(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    ranges: Tensor | None,
    topk: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Head after head, so that scores of one head and their sum are all that exists."""
    acc_dtype, (batch, queries, heads, _), keys = statistics_dtype(q.dtype), q.shape, k.shape[1]
    count = min(topk, keys)
    indices = q.new_full((batch, queries, count), -1, dtype=torch.int32)
    scores = q.new_full(indices.shape, -torch.inf, dtype=acc_dtype)
    if not indices.numel():
        return indices, scores
    position, keys_t = torch.arange(keys, device=q.device), k.to(acc_dtype).mT
    for rows in row_blocks(queries, 6 * batch * keys * acc_dtype.itemsize):
        total = q.new_zeros(batch, rows.stop - rows.start, keys, dtype=acc_dtype)
        for head in range(heads):
            product = (q[:, rows, head].to(acc_dtype) @ keys_t).relu_()
            total += product.mul_(w[:, rows, head, None].to(acc_dtype))
        visible = torch.ones_like(total, dtype=torch.bool)
        if ranges is not None:
            visible = (position >= ranges[:, rows, :1]) & (position < ranges[:, rows, 1:])
            visible = visible.expand_as(total)
        elif causal:
            last = torch.arange(rows.start, rows.stop, device=q.device) + (keys - queries)
            visible = (position <= last[:, None]).expand_as(total)
        chosen = selected(total.mul_(scale), visible, count)
        indices[:, rows] = chosen
        values = total.gather(-1, chosen.clamp(min=0).long())
        scores[:, rows] = values.masked_fill(chosen < 0, -torch.inf)
    return indices, scores
