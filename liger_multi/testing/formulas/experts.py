"""Mixture of experts, densely: every token through every expert."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_multi.testing.formulas.activations import gated, swiglu_clamped


def fused_moe(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
    up_offset: float = 1.0,
    interleaved: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Each token's chosen experts, added with its routing weights."""
    first, second = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    rows, chosen = x.reshape(-1, x.shape[-1]), index.reshape(-1, index.shape[-1])
    weights, y = routing.reshape(chosen.shape), torch.zeros_like(rows)
    for e in range(first.shape[0]):
        share = torch.where(chosen == e, weights, 0).sum(-1, keepdim=True)
        inner = rows @ first[e].T + (0 if gate_up_bias is None else gate_up_bias[e])
        gate, up = (inner[:, ::2], inner[:, 1::2]) if interleaved else inner.chunk(2, dim=-1)
        if activation == "swiglu_clamped":
            product = swiglu_clamped(gate, up, limit=limit, alpha=alpha, up_offset=up_offset)
        else:
            product = gated(gate, up, activation)
        y = y + share * (product @ second[e].T + (0 if down_bias is None else down_bias[e]))
    return y.view(x.shape)
