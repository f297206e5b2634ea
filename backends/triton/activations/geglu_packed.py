"""GEGLU of one tensor that holds gate and up side by side on its last axis (as ModernBERT)."""

from torch import Tensor

from liger_multi.backends.triton.activations import gated
from liger_multi.backends.triton.activations.gated import GELU


def forward(gate_up: Tensor, approximate: str) -> Tensor:
    """gelu(first half) * second half."""
    return gated.packed_forward("geglu_packed", GELU[approximate], gate_up)


def backward(dy: Tensor, gate_up: Tensor, approximate: str) -> Tensor:
    """Gradient of gate_up, both halves in one buffer."""
    return gated.packed_backward("geglu_packed", GELU[approximate], dy, gate_up)
