"""Causal convolutions, and state space models token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_multi.testing.formulas.attention import TOKENS_AT_ONCE
from liger_multi.testing.formulas.norms import statistics_dtype


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


# --- state space models ---


def _tokens(
    dt: Tensor, a: Tensor, rows: Tensor, b: Tensor, c: Tensor, begins: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token after token; the state is 0 where a sequence begins."""
    outs = []
    for t in range(dt.shape[1]):
        decay = torch.exp(dt[:, t, :, None, None] * a)
        decay = torch.where(begins[:, t, None, None, None], 0, decay)
        state = decay * state + rows[:, t, :, :, None] * b[:, t, :, None]
        outs.append((state * c[:, t, :, None]).sum(-1))
    return torch.stack(outs, 1), state


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk: int = 256,
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence of one state for every head; A may have a number for each entry of it."""
    acc_dtype, (batch, length, heads, value) = statistics_dtype(x), x.shape
    dt = dt.to(acc_dtype) if dt_bias is None else dt.to(acc_dtype) + dt_bias.to(acc_dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    b, c = (t.to(acc_dtype).repeat_interleave(heads // t.shape[2], 2) for t in (B, C))
    a = A.to(acc_dtype) if A.ndim == 3 else A.to(acc_dtype)[:, None, None]
    begins = torch.zeros(batch, length, dtype=torch.bool, device=x.device)
    runs = _runs(seq_idx, cu_seqlens, length)
    if runs is not None:
        begins[:, 1:] = runs[:, 1:] != runs[:, :-1]
    rows, wide = dt.unsqueeze(-1) * x.to(acc_dtype), x.to(acc_dtype)
    state = rows.new_zeros(batch, heads, value, b.shape[3])
    state = state if initial_state is None else state + initial_state.to(acc_dtype)
    outs = [wide[:, :0]]
    for t in range(0, length, TOKENS_AT_ONCE):
        part = slice(t, t + TOKENS_AT_ONCE)
        args = (dt[:, part], a, *(v[:, part] for v in (rows, b, c, begins)), state)
        y, state = checkpoint(_tokens, *args, use_reentrant=False)
        outs.append(y)
    y = torch.cat(outs, 1)
    if D is not None:
        y = y + (D if D.ndim == 2 else D.unsqueeze(-1)).to(acc_dtype) * wide
    y = y if z is None else y * F.silu(z.to(acc_dtype))
    return (y.to(x.dtype), state) if output_final_state else y.to(x.dtype)


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence of heads with one channel, whose decays differ over the state."""
    outputs = ssd_scan(
        u.unsqueeze(-1),
        delta,
        A.unsqueeze(1),
        B.unsqueeze(2),
        C.unsqueeze(2),
        D=D,
        z=None if z is None else z.unsqueeze(-1),
        dt_bias=delta_bias,
        dt_softplus=delta_softplus,
        dt_limit=(-torch.inf, torch.inf),
        initial_state=None if initial_state is None else initial_state.unsqueeze(2),
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        seq_idx=seq_idx,
    )
    y, state = outputs[0].squeeze(-1), outputs[1].squeeze(2)
    return (y, state) if output_final_state else y
