"""SwiGLU, ``y = silu(gate) * up``; see :mod:`liger_multi.reference.activations.gated`."""

from torch import Tensor

from liger_multi.reference.activations import gated


def forward(gate: Tensor, up: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    """silu(gate) * up."""
    return gated.forward(gate, up, "silu", (gate_multiplier, down_multiplier))


def backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_multiplier: float,
    down_multiplier: float,
    needs_gate: bool,
    needs_up: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    multipliers = (gate_multiplier, down_multiplier)
    return gated.backward(dy, gate, up, "silu", needs_gate, needs_up, multipliers)
