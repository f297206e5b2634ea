"""Manifold-constrained hyper-connections: coefficients, and streams around a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_multi.ops.hyper_connections import HyperCoefficients
from liger_multi.testing.formulas._common import rms_normalized, wide


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
