"""GEGLU, ``y = gelu(gate) * up``; see :mod:`liger_multi.reference.activations.gated`."""

from torch import Tensor

from liger_multi.reference.activations import gated
from liger_multi.reference.activations.gated import GELU


def forward(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """gelu(gate) * up."""
    return gated.forward(gate, up, GELU[approximate])


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, approximate: str, needs_gate: bool, needs_up: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    return gated.backward(dy, gate, up, GELU[approximate], needs_gate, needs_up)
