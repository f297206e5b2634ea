"""Clamped SwiGLU of two tensors; the kernels stand in clamped.py."""

from __future__ import annotations

from torch import Tensor

from liger_multi.backends.triton.activations import clamped


def forward(gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float) -> Tensor:
    """(up + offset) * gate * sigmoid(alpha * gate) of clamped values."""
    return clamped.forward(gate, up, (limit, alpha, up_offset))


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float,
    needs_gate: bool, needs_up: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of gate and up; one that nobody needs is an empty tensor."""
    return clamped.backward(dy, gate, up, (limit, alpha, up_offset), needs_gate, needs_up)
