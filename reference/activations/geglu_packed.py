"""GEGLU of one tensor that holds gate and up side by side in its last axis."""

from torch import Tensor

from liger_multi.reference.activations import gated
from liger_multi.reference.activations.gated import GELU


def forward(gate_up: Tensor, approximate: str) -> Tensor:
    """gelu(first half) * second half."""
    return gated.packed_forward(gate_up, GELU[approximate])


def backward(dy: Tensor, gate_up: Tensor, approximate: str) -> Tensor:
    """Gradients of both halves, side by side."""
    return gated.packed_backward(dy, gate_up, GELU[approximate])
