"""SwiGLU, ``y = silu(gate) * up``; see :mod:`liger_multi.reference.gated`."""

from torch import Tensor

from liger_multi.reference import gated


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return gated.forward(gate, up, "silu")


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, needs_gate: bool, needs_up: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    return gated.backward(dy, gate, up, "silu", needs_gate, needs_up)
