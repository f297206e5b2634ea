"""GEGLU of two tensors: gelu(gate) * up; the kernels stand in gated.py."""

from torch import Tensor

from liger_multi.backends.triton.activations import gated
from liger_multi.backends.triton.activations.gated import GELU


def forward(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """gelu(gate) * up in the promoted dtype."""
    return gated.forward("geglu", GELU[approximate], gate, up)


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, approximate: str, needs_gate: bool, needs_up: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; empty tensors if not needed."""
    return gated.backward("geglu", GELU[approximate], dy, gate, up, needs_gate, needs_up)
