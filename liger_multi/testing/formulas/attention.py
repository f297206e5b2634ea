"""Attention and its variants, from whole scores."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_multi.testing.formulas._common import statistics_dtype
from liger_multi.testing.formulas.cross_entropy import sparsemax

Window = int | tuple[int, int] | None
MOST_SCORES = 2**27
"""Scores of all heads that stand in memory at once."""


def _visible(
    q: Tensor, k: Tensor, causal: bool, window: Window, global_tokens: int, documents: Tensor | None
) -> Tensor:
    """Which keys each query sees, pair by pair."""
    i = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (-1, -1)
    right = 0 if causal else right
    begin: Tensor | int = 0
    same = None
    if documents is not None:
        edges = (documents[:, 1:] != documents[:, :-1]).cumsum(-1)
        run = torch.cat([torch.zeros_like(edges[:, :1]), edges], -1)
        begin = (run[:, None] < run[:, :, None]).sum(-1)[:, -q.shape[2] :, None]
        same = (run[:, -q.shape[2] :, None] == run[:, None]) & (documents >= 0)[:, None]
    seen = ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))
    if window is not None:
        seen = seen | (j < begin + global_tokens) | (i < begin + global_tokens)
    seen = seen & (j <= i) if causal else seen
    return seen if same is None else (seen & same)[:, None]


def _documents(cu_seqlens: Tensor, length: int) -> Tensor:
    """Ids of documents from where they begin; what follows the last end is padding."""
    place = torch.arange(length, device=cu_seqlens.device)
    ids = (place[:, None] >= cu_seqlens[None]).sum(-1) - 1
    return torch.where(place < cu_seqlens[-1], ids, -1)[None]


def of_all_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    global_tokens: int = 0,
    documents: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention with the scores of all heads in memory."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if softcap is None else torch.tanh(s / softcap) * softcap
    seen = _visible(q, k, causal, window, global_tokens, documents)
    s = s.masked_fill(~seen, torch.finfo(s.dtype).min)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1, dtype=statistics_dtype(s))
    p = p[..., : k.shape[2]].to(v.dtype)
    if documents is not None or q.shape[2] > k.shape[2]:  # queries that see nothing
        p = p.masked_fill(~seen, 0)
    return p @ v


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    global_tokens: int = 0,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ranges: Tensor | None = None,
) -> Tensor:
    """``softmax(q @ k.T * scale + mask) @ v``; many scores are made a head at a time, twice.

    Raises:
        NotImplementedError: ``ranges`` were given, which say what the other masks say.
    """
    if ranges is not None:
        raise NotImplementedError("the formula takes masks, not ranges")
    if cu_seqlens is not None:
        documents = _documents(cu_seqlens, k.shape[2])
    run = functools.partial(
        of_all_heads, causal=causal, window=window, global_tokens=global_tokens,
        documents=documents, softcap=softcap, scale=scale,
    )  # fmt: skip
    if q.is_meta or q.shape[:3].numel() * k.shape[2] <= MOST_SCORES:
        return run(q, k, v, sinks)
    shared = q.shape[1] // k.shape[1]
    heads = []
    for h in range(q.shape[1]):
        one, group = slice(h, h + 1), slice(h // shared, h // shared + 1)
        part = (q[:, one], k[:, group], v[:, group], None if sinks is None else sinks[one])
        heads.append(checkpoint(run, *part, use_reentrant=False))
    return torch.cat(heads, 1)


def neighborhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
) -> Tensor:
    """Attention to the ``kernel_size`` positions around each query, ``dilation`` apart."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    place = torch.arange(q.shape[2], device=q.device)
    steps = (torch.arange(kernel_size, device=q.device) - kernel_size // 2) * dilation
    near = place[:, None] + steps
    inside = (near >= 0) & (near < q.shape[2])
    near = near.clamp(0, max(0, q.shape[2] - 1))
    s = torch.einsum("bhld,bhlnd->bhln", q, k[:, :, near])
    s = s * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = torch.softmax(s.masked_fill(~inside, -torch.inf), -1)
    return torch.einsum("bhln,bhlnd->bhld", p, v[:, :, near])


def attention_residuals(
    blocks: Tensor | Sequence[Tensor],
    query: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """A mixture of the outputs of all blocks, by a query to their norms."""
    stacked = blocks if isinstance(blocks, Tensor) else torch.stack([*blocks])
    normed = F.rms_norm(stacked, stacked.shape[-1:], weight, eps)
    scores = (normed * query).sum(-1, dtype=statistics_dtype(stacked))
    p = torch.softmax(scores, 0).to(stacked.dtype)
    return torch.einsum("n...,n...d->...d", p, stacked)


def multi_token_attention(
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    sparse: bool = False,
) -> Tensor:
    """A convolution over causal probabilities, of which the causal part stays."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    if sparse:
        p = sparsemax(scores.masked_fill(hidden, -1e30)).masked_fill(hidden, 0)
    else:
        p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    return F.conv2d(p, weight, bias, stride, padding, dilation, groups).tril()
