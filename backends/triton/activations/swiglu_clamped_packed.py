"""Clamped SwiGLU of one tensor that holds gate and up, in turn (GPT-OSS) or as halves."""

from torch import Tensor

from liger_multi.backends.triton.activations import gated


def forward(
    gate_up: Tensor, limit: float, alpha: float, up_offset: float, interleaved: bool
) -> Tensor:
    """(up + offset) * gate * sigmoid(alpha * gate) of clamped values."""
    return gated.packed_clamped_forward(gate_up, (limit, alpha, up_offset), interleaved)


def backward(
    dy: Tensor, gate_up: Tensor, limit: float, alpha: float, up_offset: float, interleaved: bool
) -> Tensor:
    """Gradient of gate_up in one buffer."""
    return gated.packed_clamped_backward(dy, gate_up, (limit, alpha, up_offset), interleaved)
