"""GEGLU of two tensors: an Ascend kernel, since npu_geglu would need both in one."""

from torch import Tensor

from liger_multi.backends.npu.activations.gated import gated, gated_gradients
from liger_multi.reference.activations.gated import GELU


def forward(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """gelu(gate) * up."""
    return gated(GELU[approximate], gate, up)


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, approximate: str, needs_gate: bool, needs_up: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    return gated_gradients(GELU[approximate], dy, gate, up, needs_gate, needs_up)
