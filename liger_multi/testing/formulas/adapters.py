"""Linear layers with low-rank adapters, added as PEFT does: in the adapter's dtype, and back."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from liger_multi.ops import LoraQKVOutput
from liger_multi.testing.formulas.activations import gated


def lora_update(base: Tensor, x: Tensor, a: Tensor, b: Tensor, *, scale: float = 1.0) -> Tensor:
    """``base + scale * (x @ a.T) @ b.T``."""
    low = F.linear(F.linear(x.to(a.dtype), a), b)
    return (base + low * scale).to(base.dtype)


def _layer(
    x: Tensor, weight: Tensor, a: Tensor | None, b: Tensor | None, bias: Tensor | None, scale: float
) -> Tensor:
    base = F.linear(x, weight, bias)
    return base if a is None or b is None else lora_update(base, x, a, b, scale=scale)


def lora_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_a: Tensor | None = None,
    gate_b: Tensor | None = None,
    up_a: Tensor | None = None,
    up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_scale: float = 1.0,
    up_scale: float = 1.0,
    down_scale: float = 1.0,
    activation: str = "silu",
) -> Tensor:
    """A gated MLP, each of whose layers may have an adapter."""
    gate = _layer(x, gate_weight, gate_a, gate_b, gate_bias, gate_scale)
    up = _layer(x, up_weight, up_a, up_b, up_bias, up_scale)
    inner = gated(gate, up, activation)
    return _layer(inner, down_weight, down_a, down_b, down_bias, down_scale)


def lora_qkv(
    x: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    q_a: Tensor | None = None,
    q_b: Tensor | None = None,
    k_a: Tensor | None = None,
    k_b: Tensor | None = None,
    v_a: Tensor | None = None,
    v_b: Tensor | None = None,
    *,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> LoraQKVOutput:
    """The projections of attention; None for one without a weight."""
    return LoraQKVOutput(
        None if q_weight is None else _layer(x, q_weight, q_a, q_b, q_bias, q_scale),
        None if k_weight is None else _layer(x, k_weight, k_a, k_b, k_bias, k_scale),
        None if v_weight is None else _layer(x, v_weight, v_a, v_b, v_bias, v_scale),
    )
