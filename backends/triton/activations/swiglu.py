"""SwiGLU of two tensors: silu(gate) * up; the kernels stand in gated.py."""

from torch import Tensor

from liger_multi.backends.triton.activations import gated
from liger_multi.backends.triton.activations.gated import multipliers


def forward(gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    """silu(gate) * up in the promoted dtype."""
    factors = multipliers(gate_multiplier, down_multiplier)
    return gated.forward("swiglu", "silu", gate, up, factors)


def backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_multiplier: float,
    down_multiplier: float,
    needs_gate: bool,
    needs_up: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; empty tensors if not needed."""
    factors = multipliers(gate_multiplier, down_multiplier)
    return gated.backward("swiglu", "silu", dy, gate, up, needs_gate, needs_up, factors)
