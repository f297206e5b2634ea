"""SwiGLU of one tensor that holds gate and up side by side in its last axis."""

from torch import Tensor

from liger_multi.reference import gated


def forward(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half."""
    return gated.packed_forward(gate_up, "silu")


def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradients of both halves, side by side."""
    return gated.packed_backward(dy, gate_up, "silu")
