"""Clamped SwiGLU of one tensor that holds gate and up, in turn or as halves."""

from torch import Tensor

from liger_multi.reference.activations import gated


def forward(
    gate_up: Tensor, limit: float, alpha: float, up_offset: float, interleaved: bool
) -> Tensor:
    """(up + offset) * gate * sigmoid(alpha * gate) of clamped values."""
    return gated.packed_clamped_product(gate_up, (limit, alpha, up_offset), interleaved)


def backward(
    dy: Tensor, gate_up: Tensor, limit: float, alpha: float, up_offset: float, interleaved: bool
) -> Tensor:
    """Gradients of both, each in its place."""
    numbers = (limit, alpha, up_offset)
    return gated.packed_clamped_gradients(dy, gate_up, numbers, interleaved)
