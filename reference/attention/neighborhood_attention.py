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
    by_line = padded.view(batch, tokens, dilation, heads, size).permute(0, 2, 3, 1, 4)
    return by_line.reshape(batch * dilation, heads, tokens, size)


def _unfolded(x: Tensor, dilation: int, length: int) -> Tensor:
    """The reverse, in memory (B, L, H, D)."""
    if dilation == 1:
        return x
    lines, heads, tokens, size = x.shape
    by_line = x.view(lines // dilation, dilation, heads, tokens, size).permute(0, 3, 1, 2, 4)
    rows = by_line.reshape(lines // dilation, tokens * dilation, heads, size)[:, :length]
    return rows.contiguous().transpose(1, 2)


def _neighbors(q: Tensor, length: int, reach: int, dilation: int) -> Tensor:
    """Ranges of keys, of one line for all where they are alike; no line sees its padding."""
    lines, tokens = q.shape[0], q.shape[2]
    token = torch.arange(tokens, device=q.device, dtype=torch.int32)
    if dilation == 1:
        begin, end = (token - reach).clamp_(min=0), (token + (reach + 1)).clamp_(max=length)
        return torch.stack([begin, end], -1)[None]
    remainder = torch.arange(lines, device=q.device) % dilation  # the remainder by d of this line
    last = (
        (length - remainder + dilation - 1)
        .div(dilation, rounding_mode="floor")
        .clamp(min=0)[:, None]
    )
    begin = torch.minimum((token - reach).clamp(min=0), last)
    end = torch.maximum(torch.minimum(token + reach + 1, last), begin)
    return torch.stack([begin.expand(lines, -1), end], -1).to(torch.int32)


def implement_neighborhood_attention(kernels: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of the contract over a backend's attention."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, reach: int, dilation: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        a, b, c = (_lines(x, dilation) for x in (q, k, v))
        ranges = _neighbors(a, q.shape[2], reach, dilation)
        y, lse = kernels.forward(a, b, c, None, ranges, False, scale, 0.0)
        flat = _unfolded(lse.unsqueeze(-1), dilation, q.shape[2]).squeeze(-1)
        return _unfolded(y, dilation, q.shape[2]), flat.contiguous()

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
            _unfolded(x, dilation, q.shape[2]) if is_needed else x
            for x, is_needed in zip(gradients, needs, strict=False)
        ]
        return grads[0], grads[1], grads[2]

    return forward, backward


forward, backward = implement_neighborhood_attention(attention)
