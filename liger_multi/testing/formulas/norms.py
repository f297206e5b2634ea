"""Norms over the last axis, group norm, and manifold-constrained hyper-connections.

``casting`` says where 16-bit dtypes round. It changes nothing in fp64, so formulas ignore it and
round as Llama does.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.ops import FusedAddRMSNormOutput, QuantizedAddRMSNormOutput
from liger_multi.ops._float8 import OUTPUTS, QuantizedOutput
from liger_multi.ops.hyper_connections import HyperCoefficients
from liger_multi.testing.formulas.float8 import coded, either

# --- what formulas share ---


def wide(x: Tensor) -> Tensor:
    """At least fp32, in which Hugging Face computes statistics; fp64 stays fp64."""
    return x if x.dtype is torch.float64 else x.float()


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype of :func:`wide`."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def rms_normalized(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis, in the dtype of x."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def weighted(x: Tensor, weight: Tensor | None, offset: float = 0.0) -> Tensor:
    """``x * (weight + offset)``; x where there is no weight."""
    if weight is None:
        return x
    return (weight + offset if offset else weight) * x


# --- norms ---


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    quantize: str | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
) -> Tensor | QuantizedOutput:
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)``."""
    return either(_rms(x, weight, eps, offset), quantize, outputs)


def _rms(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    return weighted(rms_normalized(wide(x), eps).to(x.dtype), weight, offset)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
    quantize: str | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
) -> FusedAddRMSNormOutput | QuantizedAddRMSNormOutput:
    """The norm of ``x + residual``, and that sum."""
    total = x + residual
    y = _rms(total, weight, eps, offset)
    if quantize is None:
        return FusedAddRMSNormOutput(y, total)
    first, rows = coded(y, outputs)
    return QuantizedAddRMSNormOutput(first, total, rows)


def fused_scaled_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    x_scale: float = 1.0,
    residual_scale: float = 1.0,
    offset: float = 0.0,
    casting: str = "llama",
) -> FusedAddRMSNormOutput:
    """The norm of ``x_scale * x + residual_scale * residual``, and that sum."""
    kept = residual if residual_scale == 1.0 else residual * residual_scale
    total = kept + x * x_scale
    y = _rms(total, weight, eps, offset)
    return FusedAddRMSNormOutput(y, total)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    quantize: str | None = None,
    outputs: tuple[str, ...] = OUTPUTS,
) -> Tensor | QuantizedOutput:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``."""
    centered = wide(x) - wide(x).mean(-1, keepdim=True)
    y = rms_normalized(centered, eps)
    y = y if weight is None else y * weight
    return either((y if bias is None else y + bias).to(x.dtype), quantize, outputs)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor:
    """RMSNorm of groups of columns, times an activation of the gate before or after it."""
    u, act = wide(x), None
    if gate is not None:
        act = torch.sigmoid(wide(gate)) if activation == "sigmoid" else F.silu(wide(gate))
    if act is not None and not norm_before_gate:
        u = u * act
    groups = u.unflatten(-1, (-1, group_size or max(x.shape[-1], 1)))
    y = weighted(rms_normalized(groups, eps).flatten(-2).to(x.dtype), weight, offset)
    return (y * act).to(x.dtype) if act is not None and norm_before_gate else y


def modulated_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor:
    """``rms_norm(x) * (1 + scale) + shift``; a row of scale serves equally many rows of x."""
    scale = _per_row(x, scale)
    y = _rms(x, weight, eps, offset) * (1 + scale)
    return y if shift is None else y + _per_row(x, shift)


def _per_row(x: Tensor, by: Tensor) -> Tensor:
    """A modulation that broadcasts over x: by the leading axes that both have, or row by row."""
    lead = list(by.shape[:-1])
    while lead and lead[-1] == 1:
        lead.pop()
    if lead != [*x.shape[: len(lead)]]:
        return by.repeat_interleave(x.shape[0] // lead[0], 0)
    shape = (*lead, *[1] * (x.ndim - 1 - len(lead)), by.shape[-1])
    return by if by.shape == shape else by.reshape(shape)


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``w0 * norm(x^3) + w1 * norm(x^2) + w2 * norm(x) + bias``."""
    u = wide(x)
    y = weight[0] * rms_normalized(u**3, eps) + weight[1] * rms_normalized(u**2, eps)
    y = y + weight[2] * rms_normalized(u, eps)
    return (y if bias is None else y + bias).to(x.dtype)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm of groups of channels, with a weight and a bias per channel."""
    size = math.prod(x.shape[1:]) // num_groups
    groups = wide(x).reshape(x.shape[0], num_groups, size)
    n = rms_normalized(groups - groups.mean(-1, keepdim=True), eps).view(x.shape)
    channels = (-1, *[1] * (x.ndim - 2))
    n = n if weight is None else n * weight.view(channels)
    return (n if bias is None else n + bias.view(channels)).to(x.dtype)


def dyt(
    x: Tensor, alpha: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """``weight * tanh(alpha * x) + bias``."""
    y = torch.tanh(alpha * x)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


# --- hyper-connections: coefficients, and streams around a layer ---


def hyper_connections(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: Tensor,
    *,
    iterations: int = 20,
    rms_eps: float = 1e-6,
    eps: float = 1e-6,
    post_scale: float = 2.0,
) -> HyperCoefficients:
    """Coefficients of n streams; those that mix are made doubly stochastic by Sinkhorn steps."""
    n = x.shape[-2]
    m = F.linear(rms_normalized(wide(x.flatten(-2)), rms_eps), wide(weight))
    (a, b, c), (p, q, r) = (t.split([n, n, n * n], -1) for t in (m, wide(bias)))
    mix = torch.softmax((c * scale[2] + r).unflatten(-1, (n, n)), -1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    pre, post = torch.sigmoid(a * scale[0] + p) + eps, torch.sigmoid(b * scale[1] + q)
    return HyperCoefficients(pre, post_scale * post, mix)


def hyper_connections_pre(x: Tensor, pre: Tensor) -> Tensor:
    """The input of a layer: a weighted sum of the streams."""
    return (pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


def hyper_connections_post(x: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """The streams after a layer: its output to each of them, and the mixed streams."""
    return post.to(x.dtype).unsqueeze(-1) * out.unsqueeze(-2) + mix.to(x.dtype) @ x
