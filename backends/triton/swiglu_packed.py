"""SwiGLU of one tensor that holds gate and up side by side on its last axis (Phi-3's layout)."""

from __future__ import annotations

from torch import Tensor

from liger_multi.backends.triton import gated


def forward(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half."""
    return gated.packed_forward("swiglu_packed", "silu", gate_up)


def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of gate_up, both halves in one buffer."""
    return gated.packed_backward("swiglu_packed", "silu", dy, gate_up)
