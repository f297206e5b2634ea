"""Formulas and peers of experts and of hyper-connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Formula = Callable[..., Any]


def _grouped_moe(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, index: Tensor, routing: Tensor
) -> Tensor:
    """PyTorch's grouped products between gathered rows, as Hugging Face composes them."""
    experts, top_k = gate_up_weight.shape[0], index.shape[-1]
    flat = index.view(-1)
    ids, order = torch.sort(flat)
    every = torch.arange(experts, device=x.device, dtype=ids.dtype)
    offsets = torch.searchsorted(ids, every, right=True, out_int32=True)
    gate_up = torch._grouped_mm(x[order // top_k], gate_up_weight.mT, offs=offsets)
    gate, up = gate_up.chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, down_weight.mT, offs=offsets)
    rows = rows * routing.view(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(flat.shape[0], device=x.device)
    return rows[inverse].view(*index.shape, -1).sum(-2).to(x.dtype)


def _liger_moe(moe: Formula) -> Formula:
    def call(
        x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, index: Tensor, routing: Tensor
    ) -> Tensor:
        found: Tensor = moe(x, gate_up_weight, down_weight, index.to(torch.int32), routing)
        return found

    return call


def _coefficients(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Any:
    n, v = x.shape[-2], x.flatten(-2).float()
    m = F.linear(v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6), weight.float())
    (a, b, c), (p, q, r) = (t.split([n, n, n * n], -1) for t in (m, bias.float()))
    mix = torch.softmax((c * scale[2] + r).unflatten(-1, (n, n)), -1) + 1e-6
    mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        mix = mix / (mix.sum(-1, keepdim=True) + 1e-6)
        mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
    return torch.sigmoid(a * scale[0] + p) + 1e-6, 2 * torch.sigmoid(b * scale[1] + q), mix


def _pre(x: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


def _post(x: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    kind = x.dtype
    return post.to(kind).unsqueeze(-1) * out.unsqueeze(-2) + mix.to(kind) @ x


TABLE: dict[str, dict[str, Formula]] = {
    "fused_moe": {"torch": _grouped_moe},
    "hyper_connections": {"torch": _coefficients},
    "hyper_connections_pre": {"torch": _pre},
    "hyper_connections_post": {"torch": _post},
}
LIGER: dict[str, tuple[str, Callable[[Formula], Formula]]] = {
    "fused_moe": ("liger_kernel.ops:LigerFusedMoEFunction.apply", _liger_moe),
    "hyper_connections": (
        "liger_kernel.ops:LigerMHCCoeffsFunction.apply",
        lambda f: (
            lambda x, weight, bias, scale: f(
                x,
                weight.mT.contiguous(),
                bias,
                scale[0],
                scale[1],
                scale[2],
                True,
                20,
                1e-6,
                0.0,
                1e-6,
                2.0,
            )
        ),
    ),
    "hyper_connections_pre": (
        "liger_kernel.ops:LigerMHCPreFunction.apply",
        lambda f: lambda x, pre: f(x, pre),
    ),
    "hyper_connections_post": (
        "liger_kernel.ops:LigerMHCPostResFunction.apply",
        lambda f: lambda x, out, post, mix: f(x, out, post, mix),
    ),
}
