"""Causal convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _runs(seq_idx: Tensor | None, cu_seqlens: Tensor | None, length: int) -> Tensor | None:
    """The number of the sequence of every token, (B, T)."""
    if cu_seqlens is not None:
        place = torch.arange(length, device=cu_seqlens.device)
        return (place[:, None] >= cu_seqlens).sum(-1)[None]
    if seq_idx is None:
        return None
    return F.pad((seq_idx[:, 1:] != seq_idx[:, :-1]).long(), (1, 0)).cumsum(-1)[:, :length]


def _convolved(
    z: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, runs: Tensor | None
) -> Tensor:
    """The convolution of channels-first z: PyTorch's own where nothing is packed."""
    reach, length = weight.shape[1] - 1, z.shape[-1]
    z = F.pad(z, (reach, 0)) if before is None else torch.cat([before.to(z.dtype), z], -1)
    if runs is None and length > 0:
        return F.conv1d(z.to(weight.dtype), weight[:, None], bias, groups=z.shape[1])
    runs = z.new_zeros(z.shape[0], length) if runs is None else runs
    runs = runs - runs[:, :1]  # tokens before the row are of its first sequence
    padded = F.pad(runs, (reach, 0))
    u = torch.zeros_like(z[..., :length]) + (0 if bias is None else bias[:, None])
    for k in range(reach + 1):
        same = (padded[:, k : k + length] == runs).unsqueeze(1)
        u = u + weight[:, k, None] * z[..., k : k + length] * same
    return u


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    channel_axis: int = -1,
) -> Tensor:
    """A depthwise convolution over the tokens before, and silu."""
    first = channel_axis == 1
    z, before = (x, initial_state) if first else (x.mT, initial_state)
    before = before.mT if before is not None and not first else before
    u = _convolved(z, weight, bias, before, _runs(seq_idx, cu_seqlens, z.shape[-1]))
    y = (F.silu(u) if activation == "silu" else u).to(x.dtype)
    return y if first else y.mT


def gated_short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """As transformers' ``Lfm2ShortConv`` computes between its projections."""
    b, c, v = x.mT.chunk(3, dim=-2)
    runs = _runs(seq_idx, cu_seqlens, x.shape[1])
    return (c * _convolved(b * v, weight, bias, None, runs)).mT.contiguous()
