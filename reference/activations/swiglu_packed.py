"""SwiGLU of one tensor that holds gate and up side by side in its last axis."""

from torch import Tensor

from liger_multi.reference.activations import gated


def forward(gate_up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    """silu(first half) * second half."""
    return gated.packed_forward(gate_up, "silu", (gate_multiplier, down_multiplier))


def backward(dy: Tensor, gate_up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    """Gradients of both halves, side by side."""
    return gated.packed_backward(dy, gate_up, "silu", (gate_multiplier, down_multiplier))
