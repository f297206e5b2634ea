"""Formulas of attention over lists of keys, and of the indexer that makes them: dense, with masks.

Lists become a tensor of queries x keys that counts how often a key is listed.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_multi.testing.formulas.attention import MOST_SCORES, _documents
from liger_multi.testing.formulas.norms import statistics_dtype


def _counts(indices: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """How often every key is listed: ``(..., K)`` to (..., S)."""
    inside = (indices >= 0).to(dtype)
    counts = torch.zeros(*indices.shape[:-1], keys + 1, dtype=dtype, device=indices.device)
    return counts.scatter_add(-1, indices.long() % (keys + 1), inside)[..., :keys]


def _of_listed(x: Tensor, indices: Tensor, absent: float) -> Tensor:
    """Numbers of queries x keys at the listed keys."""
    wide = torch.cat([x, x.new_full((*x.shape[:-1], 1), absent)], -1)
    return wide.gather(-1, indices.long() % wide.shape[-1])


class SparseAttentionOutput(NamedTuple):
    """Output and weights."""

    y: Tensor
    weights: Tensor


def _of_heads(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs and probabilities of some heads, (B, H, L, S)."""
    empty = counts.sum(-1, keepdim=True) == 0
    s = (q @ k.mT * scale).to(statistics_dtype(q)) + counts.log().masked_fill(empty, 0)
    p = torch.softmax(s, -1).masked_fill(empty, 0)
    return p.to(v.dtype) @ v, p


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    *,
    value_dim: int | None = None,
    scale: float | None = None,
    output_weights: bool = False,
) -> Tensor | SparseAttentionOutput:
    """Attention with the scores of all keys; many of them are made a head at a time, twice."""
    v = k[..., :value_dim] if v is None else v
    lists = indices[:, None] if indices.ndim == 3 else indices
    by = q.shape[-1] ** -0.5 if scale is None else scale
    shared = q.shape[1] // k.shape[1]
    counts = _counts(lists, k.shape[2], statistics_dtype(q)).expand(-1, k.shape[1], -1, -1)
    if not q.is_meta and q.shape[:3].numel() * k.shape[2] > MOST_SCORES and not output_weights:
        heads = []
        for h in range(q.shape[1]):
            g = slice(h // shared, h // shared + 1)
            part = (q[:, h : h + 1], k[:, g], v[:, g], counts[:, g], by)
            heads.append(checkpoint(_of_heads, *part, use_reentrant=False)[0])
        return torch.cat(heads, 1)
    k, v, counts = (x.repeat_interleave(shared, 1) for x in (k, v, counts))
    y, p = _of_heads(q, k, v, counts, by)
    if not output_weights:
        return y
    once = (p / counts.clamp(min=1)).detach().unflatten(1, (lists.shape[1], -1)).mean(2)
    return SparseAttentionOutput(y, _of_listed(once, lists, 0.0).view(indices.shape))


def _head_score(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return torch.relu(q @ k.mT).to(w.dtype) * w[..., None]


def _scores(q: Tensor, k: Tensor, w: Tensor, scale: float | None) -> Tensor:
    """Scores of all keys, (B, L, S), head after head."""
    w = w.to(statistics_dtype(q))
    run = functools.partial(checkpoint, _head_score, use_reentrant=False)
    heads = [run(q[:, :, h], k, w[:, :, h]) for h in range(q.shape[2])]
    return torch.stack(heads).sum(0) * (q.shape[-1] ** -0.5 if scale is None else scale)


def indexer_scores(
    q: Tensor, k: Tensor, w: Tensor, indices: Tensor, *, scale: float | None = None
) -> Tensor:
    """Scores of all keys, of which the listed ones are taken."""
    return _of_listed(_scores(q, k, w, scale), indices, -torch.inf)


class IndexerTopkOutput(NamedTuple):
    """Selected keys and their scores."""

    indices: Tensor
    scores: Tensor


def indexer_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    topk: int,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ranges: Tensor | None = None,
    scale: float | None = None,
) -> IndexerTopkOutput:
    """A stable sort of the scores of all keys.

    Raises:
        NotImplementedError: ``ranges`` were given, which say what the other masks say.
    """
    if ranges is not None:
        raise NotImplementedError("the formula takes masks, not ranges")
    if cu_seqlens is not None:
        documents = _documents(cu_seqlens, k.shape[1])
    scores, (queries, keys) = _scores(q, k, w, scale), (q.shape[1], k.shape[1])
    place = torch.arange(keys, device=q.device)
    own = torch.arange(queries, device=q.device)[:, None] + (keys - queries)
    visible = ((place <= own) if causal else place >= 0 * own)[None]
    if documents is not None:
        change = torch.nn.functional.pad((documents[:, 1:] != documents[:, :-1]).cumsum(1), (1, 0))
        same = change[:, keys - queries :, None] == change[:, None]
        visible = visible & same & (documents >= 0)[:, None]
    masked = scores.detach().masked_fill(~visible, -torch.inf)
    best = masked.sort(stable=True, dim=-1, descending=True).indices[..., : min(topk, keys)]
    selected = torch.where(masked.gather(-1, best).isfinite(), best, keys).sort(-1).values
    selected = torch.where(selected < keys, selected, -1).to(torch.int32)
    return IndexerTopkOutput(selected, _of_listed(scores, selected, -torch.inf))
