"""SwiGLU of one tensor that holds gate and up side by side (Phi-3's layout)."""

from torch import Tensor

from liger_multi.backends.triton.activations import gated
from liger_multi.backends.triton.activations.gated import multipliers


def forward(gate_up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    """silu(first half) * second half."""
    factors = multipliers(gate_multiplier, down_multiplier)
    return gated.packed_forward("swiglu_packed", "silu", gate_up, factors)


def backward(dy: Tensor, gate_up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    """Gradient of gate_up, both halves in one buffer."""
    factors = multipliers(gate_multiplier, down_multiplier)
    return gated.packed_backward("swiglu_packed", "silu", dy, gate_up, factors)
