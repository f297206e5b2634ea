"""GEGLU of two tensors: an Ascend kernel, since npu_geglu would need both in one."""

from torch import Tensor

from liger_multi.backends.npu.activations import gated_kernels
from liger_multi.reference.activations.gated import GELU


def forward(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """gelu(gate) * up."""
    return gated_kernels.forward(GELU[approximate], gate, up)


def backward(
    dy: Tensor, gate: Tensor, up: Tensor, approximate: str, needs_gate: bool, needs_up: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    return gated_kernels.backward(GELU[approximate], dy, gate, up, needs_gate, needs_up)
