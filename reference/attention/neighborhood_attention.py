"""Attention to neighbors on a line: to ranges of keys, one line for each dilated set.

With dilation d, tokens see only tokens of their own remainder by d: as many independent lines,
padded to one length, whose neighbors are adjacent.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_multi.reference.attention import attention


def _lines(x: Tensor, dilation: int) -> Tensor:
    """``(B, H, L, D)`` as (B * dilation, H, tokens, D), padded with zeros."""
    if dilation == 1:
        return x
    batch, heads, length, size = x.shape
    tokens = -(-length // dilation)
    padded = x.new_zeros(batch, tokens * dilation, heads, size)
    padded[:, :length] = x.transpose(1, 2)
    apart = padded.view(batch, tokens, dilation, heads, size).permute(0, 2, 3, 1, 4)
    return apart.reshape(batch * dilation, heads, tokens, size)


def _joined(x: Tensor, dilation: int, length: int) -> Tensor:
    """The reverse, in memory (B, L, H, D)."""
    if dilation == 1:
        return x
    lines, heads, tokens, size = x.shape
    apart = x.view(lines // dilation, dilation, heads, tokens, size).permute(0, 3, 1, 2, 4)
    whole = apart.reshape(lines // dilation, tokens * dilation, heads, size)[:, :length]
    return whole.contiguous().transpose(1, 2)


def _neighbors(q: Tensor, length: int, reach: int, dilation: int) -> Tensor:
    """Ranges of keys, of one line for all where they are alike; no line sees its padding."""
    lines, tokens = q.shape[0], q.shape[2]
    place = torch.arange(tokens, device=q.device, dtype=torch.int32)
    if dilation == 1:
        low, high = (place - reach).clamp_(min=0), (place + (reach + 1)).clamp_(max=length)
        return torch.stack([low, high], -1)[None]
    own = torch.arange(lines, device=q.device) % dilation  # the remainder by d of this line
    last = (length - own + dilation - 1).div(dilation, rounding_mode="floor").clamp(min=0)[:, None]
    low = torch.minimum((place - reach).clamp(min=0), last)
    high = torch.maximum(torch.minimum(place + reach + 1, last), low)
    return torch.stack([low.expand(lines, -1), high], -1).to(torch.int32)


def implement_neighborhood_attention(kernels: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's attention."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, reach: int, dilation: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        a, b, c = (_lines(x, dilation) for x in (q, k, v))
        ranges = _neighbors(a, q.shape[2], reach, dilation)
        y, lse = kernels.forward(a, b, c, None, ranges, False, scale, 0.0)
        flat = _joined(lse.unsqueeze(-1), dilation, q.shape[2]).squeeze(-1)
        return _joined(y, dilation, q.shape[2]), flat.contiguous()

    def backward(
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        y: Tensor,
        lse: Tensor,
        reach: int,
        dilation: int,
        scale: float,
        needs_q: bool,
        needs_k: bool,
        needs_v: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c, up, out = (_lines(x, dilation) for x in (q, k, v, dy, y))
        ends = _lines(lse.unsqueeze(-1), dilation).squeeze(-1)
        ranges = _neighbors(a, q.shape[2], reach, dilation)
        needs = (needs_q, needs_k, needs_v)
        gradients = kernels.backward(
            up, a, b, c, None, ranges, out, ends, False, scale, 0.0, *needs, False
        )
        grads = [
            _joined(x, dilation, q.shape[2]) if needed else x
            for x, needed in zip(gradients, needs, strict=False)
        ]
        return grads[0], grads[1], grads[2]

    return forward, backward


forward, backward = implement_neighborhood_attention(attention)
