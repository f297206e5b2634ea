"""Clamped SwiGLU of two tensors; the kernels stand in gated.py."""

from torch import Tensor

from liger_multi.backends.triton.activations import gated


def forward(gate: Tensor, up: Tensor, limit: float, alpha: float, up_offset: float) -> Tensor:
    """(up + offset) * gate * sigmoid(alpha * gate) of clamped values."""
    return gated.clamped_forward(gate, up, (limit, alpha, up_offset))


def backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    limit: float,
    alpha: float,
    up_offset: float,
    needs_gate: bool,
    needs_up: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; empty tensors if not needed."""
    return gated.clamped_backward(dy, gate, up, (limit, alpha, up_offset), needs_gate, needs_up)
