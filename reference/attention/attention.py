"""Attention by blocks of queries and keys, with a running softmax; nothing is of size L x S."""

from typing import Optional

import torch
from torch import Tensor

from liger_multi.reference.attention.attention_blocks import (
    block_size,
    blocks,
    grouped,
    ordered,
    scores,
    seen_keys,
)
from liger_multi.reference.common.chunking import statistics_dtype


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor], ranges: Optional[Tensor],
    causal: bool, scale: float, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What is summed so far is rescaled where a block has a larger score; a sink comes first."""
    kind, (batch, heads, length, _), groups = statistics_dtype(q.dtype), q.shape, k.shape[1]
    y = ordered(q, q.dtype, heads, length, v.shape[3])
    lse, step = q.new_empty(q.shape[:3], dtype=kind), block_size(batch * heads, kind.itemsize)
    for rows in blocks(length if batch else 0, step):
        ours = grouped(q, groups, rows, kind)
        lead = (batch, groups, heads // groups, rows.stop - rows.start)
        top = ours.new_full((*lead, 1), -torch.inf)
        if sinks is not None:
            top = sinks.to(kind).view(1, groups, -1, 1, 1).expand_as(top)
        total, acc = torch.full_like(top, sinks is not None), ours.new_zeros(*lead, v.shape[3])
        for cols, seen in seen_keys(q, k, ranges, causal, rows, step):
            s = scores(ours, k[:, :, cols].to(kind), scale, softcap, lead[2])
            s = s if seen is None else s.masked_fill(~seen, -torch.inf)
            new = torch.maximum(top, s.amax(-1, keepdim=True))
            base = new.masked_fill(new == -torch.inf, 0)
            p, decay = torch.exp(s - base), torch.exp(top - base)
            total, top = total * decay + p.sum(-1, keepdim=True), new
            acc = acc * decay + (p.flatten(2, 3) @ v[:, :, cols].to(kind)).view(acc.shape)
        lse[:, :, rows] = (top + total.log()).view(batch, heads, -1)
        y[:, :, rows] = (acc / total.masked_fill(total == 0, 1)).flatten(1, 2).to(q.dtype)
    return y, lse


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor], ranges: Optional[Tensor],
    y: Tensor, lse: Tensor, causal: bool, scale: float, softcap: float, needs_q: bool,
    needs_k: bool, needs_v: bool, needs_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``ds = p (dy v' - sum(dy y))``; lse counts the sink, whose probability has no value."""
    kind, (batch, heads, length, _), groups = lse.dtype, q.shape, k.shape[1]
    dq, dk, dv = (
        ordered(x, d, *x.shape[1:]) if needed else x.new_empty(0)
        for x, d, needed in ((q, q.dtype, needs_q), (k, kind, needs_k), (v, kind, needs_v))
    )
    dsinks, step = lse.new_zeros(heads), block_size(batch * heads, kind.itemsize)
    for rows in blocks(length if batch else 0, step):
        ours, up = grouped(q, groups, rows, kind), grouped(dy, groups, rows, kind)
        inner, ends = (up * grouped(y, groups, rows, kind)).sum(-1, keepdim=True), lse[:, :, rows]
        total, normal = torch.zeros_like(ours), ends.reshape(batch, groups, heads // groups, -1, 1)
        if sinks is not None:
            share = torch.exp(sinks.to(kind)[:, None] - ends)
            dsinks -= (share * inner.view(ends.shape)).sum((0, 2))
        for cols, seen in seen_keys(q, k, ranges, causal, rows, step):
            theirs, values = k[:, :, cols].to(kind), v[:, :, cols].to(kind)
            s = scores(ours, theirs, scale, softcap, heads // groups)
            p = torch.exp(s - normal)
            p = (p if seen is None else p.masked_fill(~seen, 0)).flatten(2, 3)
            if needs_v:
                dv[:, :, cols] += p.mT @ up
            ds = p.mul_(up @ values.mT - inner)
            ds = ds if softcap == 0.0 else ds * (1 - (s.flatten(2, 3) / softcap).square())
            total += ds @ theirs
            if needs_k:
                dk[:, :, cols] += (ds.mT @ ours).mul_(scale)
        if needs_q:
            dq[:, :, rows] = (total * scale).view(batch, heads, -1, q.shape[3]).to(q.dtype)
    dsinks = q.new_empty(0) if sinks is None or not needs_sinks else dsinks.to(sinks.dtype)
    return dq, _rounded(dk, k.dtype), _rounded(dv, v.dtype), dsinks


def _rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    return total.to(dtype, memory_format=torch.preserve_format)
