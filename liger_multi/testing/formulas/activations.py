"""Gated activations, their packed forms, and an MLP of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}
"""The argument of GELU by the name of an MLP's activation."""


def swiglu(
    gate: Tensor, up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    """``silu(gate_multiplier * gate) * up * down_multiplier``."""
    if gate_multiplier == down_multiplier == 1.0:
        return F.silu(gate) * up
    return F.silu(gate * gate_multiplier) * up * down_multiplier


def swiglu_packed(
    gate_up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> Tensor:
    """SwiGLU of the first and the second half of the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    return swiglu(gate, up, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)


def swiglu_clamped(
    gate: Tensor, up: Tensor, *, limit: float = 7.0, alpha: float = 1.702, up_offset: float = 1.0
) -> Tensor:
    """``(up + up_offset) * gate * sigmoid(alpha * gate)`` of clamped inputs."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + up_offset) * (gate * torch.sigmoid(gate * alpha))


def swiglu_clamped_packed(
    gate_up: Tensor,
    *,
    limit: float = 7.0,
    alpha: float = 1.702,
    up_offset: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """The same of every second column, or of the two halves of the last axis."""
    pair = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    return swiglu_clamped(*pair, limit=limit, alpha=alpha, up_offset=up_offset)


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """``gelu(gate) * up``."""
    return F.gelu(gate, approximate=approximate) * up


def geglu_packed(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """GeGLU of the first and the second half of the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    return geglu(gate, up, approximate)


def relu_squared(x: Tensor) -> Tensor:
    """``relu(x)^2``."""
    return torch.square(F.relu(x))


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` by the name of an MLP's activation."""
    if activation in APPROXIMATIONS:
        return geglu(gate, up, APPROXIMATIONS[activation])
    return swiglu(gate, up)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """``down(activation(gate(x)) * up(x))``."""
    gate, up = F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias)
    return F.linear(gated(gate, up, activation), down_weight, down_bias)
